"""Find the Q/DQ pairs of a quantized model, or the reason why it cannot be trained."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxtrain.errors import ArtifactError
from onnxtrain.graph import traversal
from onnxtrain.graph.values import MICROSOFT, ONNX

# The minimum and maximum level of each dtype.
LIMITS: Mapping[ir.DataType, tuple[int, int]] = {
    ir.DataType.INT4: (-8, 7),
    ir.DataType.UINT4: (0, 15),
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT16: (-32768, 32767),
    ir.DataType.UINT16: (0, 65535),
    ir.DataType.INT32: (-(2**31), 2**31 - 1),
}
ScaleFactors: TypeAlias = dict[ir.Value, tuple[ir.Value, ir.Value]]  # a bias's scale is the product of these two
_DYNAMIC = frozenset(
    {"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "MatMulInteger", "ConvInteger"}
)
_ON_INTEGERS = re.compile(r"QLinear\w+|QGemm|QAttention|QMoE|QEmbedLayerNormalization|MatMulIntegerToFloat|MatMulNBits")
_STATIC = "quantize it again with onnxruntime.quantization.quantize_static(..., quant_format=QuantFormat.QDQ)"


@dataclass(frozen=True)
class Rounding:
    """A DequantizeLinear and its inputs.

    Attributes:
        dequantize: the node.
        quantize: the QuantizeLinear before it; None if the integers are an initializer.
        source: the value that is rounded, or the initializer with the integers.
        scale: an initializer of one element, or of one per slice of `source` along `axis`.
        zero_point: its values, in the shape of `scale`.
        dtype: the integers' dtype.
        axis: the quantization axis, not negative; 0 if there is a single scale.
    """

    dequantize: ir.Node
    quantize: ir.Node | None
    source: ir.Value
    scale: ir.Value
    zero_point: npt.NDArray[np.int64]
    dtype: ir.DataType
    axis: int

    @property
    def is_parameter(self) -> bool:
        """Whether it rounds a weight or bias rather than an activation."""
        return self.source.is_initializer()

    @property
    def is_bias(self) -> bool:
        """Whether it is an int32 bias."""
        return self.dtype == ir.DataType.INT32

    def broadcast(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Reshape scales or zero points to broadcast with `source`."""
        if values.size == 1:
            return values.reshape(())
        return values.reshape([-1 if i == self.axis else 1 for i in range(rank(self.source))])


def read(model: onnx.ModelProto | str | os.PathLike[str]) -> ir.Model:
    """Load or copy the model into memory.

    Raises:
        ArtifactError: the file does not exist or is not an ONNX model.
    """
    if isinstance(model, onnx.ModelProto):
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        return ir.from_proto(copy)
    path = Path(model)
    if not path.is_file():
        raise ArtifactError("The model file does not exist.", str(path), todo="pass the path of an .onnx file")
    try:
        loaded = ir.load(path)
    except Exception as error:  # protobuf's exceptions differ between its versions
        raise ArtifactError("The file is not an ONNX model.", str(path), got=str(error)) from error
    return ir.external_data.load_to_model(loaded)


def roundings(model: ir.Model) -> Sequence[Rounding]:
    """Find all roundings of the model, in graph order, and convert scales in Constant nodes to initializers.

    Raises:
        ArtifactError: the model is not quantized, or not in QDQ format.
    """
    for node in _all_nodes(model):
        _refuse_other_formats(node, in_main_graph=node.graph is model.graph)
    all_roundings = [_rounding(node, model.graph) for node in list(model.graph) if _is(node, "DequantizeLinear")]
    for node in model.graph:
        if _is(node, "QuantizeLinear"):
            _check_readers(node)
    if not all_roundings:
        raise ArtifactError("The model is not quantized.", expected="QuantizeLinear and DequantizeLinear", todo=_STATIC)
    _check_one_scale(all_roundings)
    return all_roundings


def bias_scale_factors(all_roundings: Sequence[Rounding]) -> ScaleFactors:
    """Find int32 biases whose scale is the input's scale times the weight's, as integer kernels expect."""
    by_output = {rounding.dequantize.outputs[0]: rounding for rounding in all_roundings}
    factors: ScaleFactors = {}
    for rounding in all_roundings:
        for node, index in rounding.dequantize.outputs[0].uses():
            if not rounding.is_bias or index != 2:
                continue
            first, second = (None if v is None else by_output.get(v) for v in node.inputs[:2])
            if first is None or second is None:
                continue
            expected = array(first.scale).reshape(-1) * array(second.scale).reshape(-1)
            own = array(rounding.scale).reshape(-1)
            if own.size == expected.size and np.allclose(own, expected, rtol=1e-5, atol=0):
                factors[rounding.scale] = first.scale, second.scale
    return factors


def rank(value: ir.Value) -> int:
    """Return the rank of an initializer."""
    return len(array(value).shape)


def array(value: ir.Value) -> npt.NDArray[Any]:
    """Return the values of an initializer."""
    assert value.const_value is not None
    return value.const_value.numpy()


def _is(node: ir.Node | None, op_type: str) -> bool:
    return node is not None and node.op_type == op_type and node.domain in (ONNX, "ai.onnx", MICROSOFT)


def _all_nodes(model: ir.Model) -> list[ir.Node]:
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    return [node for graph in graphs for node in graph.all_nodes()]


def _refuse(node: ir.Node, why: str, todo: str, got: object = None) -> NoReturn:
    raise ArtifactError(f"{traversal.describe(node)} {why}", traversal.origin(node), got=got, todo=todo)


def _refuse_other_formats(node: ir.Node, *, in_main_graph: bool) -> None:
    if node.op_type in _DYNAMIC:
        why = "computes its scale from each batch (dynamic quantization), but training needs static scales."
        _refuse(node, why, _STATIC)
    if _ON_INTEGERS.fullmatch(node.op_type):
        _refuse(node, "computes on integers (QOperator format), which have no gradient.", _STATIC)
    if not in_main_graph and (_is(node, "QuantizeLinear") or _is(node, "DequantizeLinear")):
        todo = (
            "inline functions (onnx.inliner.inline_local_functions), or quantize the model without branches and loops"
        )
        _refuse(node, "is inside a function, branch or loop.", todo)


def _rounding(node: ir.Node, graph: ir.Graph) -> Rounding:
    integers = node.inputs[0]
    assert integers is not None  # required by ONNX
    quantize = integers.producer()
    if not integers.is_initializer() and not _is(quantize, "QuantizeLinear"):
        kind = "an input of the model" if quantize is None else traversal.describe(quantize)
        why = f"reads integers from {kind}; training needs a QuantizeLinear or an initializer directly before it."
        _refuse(node, why, _STATIC)
    source = integers
    if quantize is not None:
        assert quantize.inputs[0] is not None
        source = quantize.inputs[0]
        _check_parameters_match(quantize, node, graph)
    scale, zero_point, dtype = _parameters(node, graph)
    return Rounding(node, quantize, source, scale, zero_point, dtype, _axis(node, source, array(scale).size))


def _parameters(node: ir.Node, graph: ir.Graph) -> tuple[ir.Value, npt.NDArray[np.int64], ir.DataType]:
    """Return (scale, zero point in the scale's shape, dtype of the integers).

    The dtype is the zero point's; without a zero point it is `output_dtype`, or ONNX's default, uint8.
    """
    if (block := node.attributes.get("block_size")) is not None and block.as_int():
        _refuse(
            node,
            "has scales per block, which training does not support.",
            "quantize per tensor or per channel",
            f"block_size={block.as_int()}",
        )
    scale = _as_initializer(node, 1, graph)
    values = array(scale)
    if values.dtype != np.float32:
        _refuse(node, "has a scale that is not float32.", "quantize the float32 model", str(values.dtype))
    if not (np.isfinite(values) & (values > 0)).all():
        why = "has a scale that is not positive and finite."
        _refuse(
            node,
            why,
            "calibrate with data that reaches this value, or exclude the node from quantization",
            f"{scale.name}={values}",
        )
    integers = node.inputs[0] if _is(node, "DequantizeLinear") else node.outputs[0]
    dtype = None if integers is None else integers.dtype
    zero_point = np.zeros(values.shape, np.int64)
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        zero = _as_initializer(node, 2, graph)
        assert zero.const_value is not None
        dtype, zero_point = zero.const_value.dtype, array(zero).astype(np.int64).reshape(values.shape)
    elif integers is not None and integers.is_initializer():
        assert integers.const_value is not None
        dtype = integers.const_value.dtype
    elif (output_dtype := node.attributes.get("output_dtype")) is not None and output_dtype.as_int():
        dtype = ir.DataType(output_dtype.as_int())
    dtype = dtype or ir.DataType.UINT8
    if dtype not in LIMITS:
        expected = ", ".join(supported.name for supported in LIMITS)
        raise ArtifactError(
            f"{traversal.describe(node)} rounds to an unsupported integer type.",
            traversal.origin(node),
            expected,
            dtype,
        )
    return scale, zero_point, dtype


def _as_initializer(node: ir.Node, index: int, graph: ir.Graph) -> ir.Value:
    """Return an input as an initializer; convert it if it is in a Constant node."""
    value = node.inputs[index]
    assert value is not None
    if value.is_initializer() and value.const_value is not None:
        return value
    producer = value.producer()
    tensor = None if producer is None else producer.attributes.get("value")
    if producer is None or producer.op_type != "Constant" or tensor is None:
        why = "has a computed scale or zero point (dynamic quantization), but training needs static ones."
        _refuse(node, why, _STATIC, value.name)
    initializer = ir.Value(
        name=f"{value.name}_initializer", const_value=tensor.as_tensor(), type=value.type, shape=value.shape
    )
    graph.register_initializer(initializer)
    value.replace_all_uses_with(initializer)
    return initializer


def _axis(node: ir.Node, source: ir.Value, scales: int) -> int:
    if scales == 1:
        return 0
    if not source.is_initializer():
        why = "has a scale per channel for a computed value, which training does not support."
        _refuse(node, why, "quantize activations per tensor (per_channel is for weights)", source.name)
    attribute = node.attributes.get("axis")
    axis, dims = 1 if attribute is None else attribute.as_int(), array(source).shape
    if not -len(dims) <= axis < len(dims) or dims[axis] != scales:
        raise ArtifactError(
            f"{traversal.describe(node)} has a number of scales that does not match its input.",
            traversal.origin(node),
            f"one, or one for each slice along axis {axis} of {list(dims)}",
            scales,
        )
    return axis % len(dims)


def _check_parameters_match(quantize: ir.Node, node: ir.Node, graph: ir.Graph) -> None:
    (scale, zero, dtype), (own_scale, own_zero, own_dtype) = (_parameters(n, graph) for n in (quantize, node))
    equal = np.array_equal(array(scale), array(own_scale)) and np.array_equal(zero, own_zero) and dtype == own_dtype
    axes = [n.attributes["axis"].as_int() if "axis" in n.attributes else 1 for n in (quantize, node)]
    if not equal or (zero.size > 1 and axes[0] != axes[1]):
        why = f"differs from {traversal.describe(quantize)} in scale, zero point, type or axis."
        _refuse(node, why, _STATIC)


def _check_readers(node: ir.Node) -> None:
    """Check that all readers are DequantizeLinear: only a complete Q/DQ pair has a gradient."""
    value = node.outputs[0]
    other_readers = [traversal.describe(reader) for reader, _ in value.uses() if not _is(reader, "DequantizeLinear")]
    if value.is_graph_output():
        other_readers.append("an output of the model")
    if other_readers or not value.uses():
        why = "must be read by DequantizeLinear only: integer computations have no gradient."
        _refuse(node, why, _STATIC, ", ".join(other_readers) or "no reader")


def _check_one_scale(all_roundings: Sequence[Rounding]) -> None:
    """Check that all readers of an integer initializer use one scale: then it is one parameter."""
    first: dict[ir.Value, Rounding] = {}
    for rounding in all_roundings:
        if rounding.quantize is not None:
            continue
        other = first.setdefault(rounding.source, rounding)
        equal = np.array_equal(array(other.scale), array(rounding.scale)) and other.axis == rounding.axis
        if not equal or not np.array_equal(other.zero_point, rounding.zero_point):
            why = f"reads the integers {rounding.source.name!r} with a different scale from {other.dequantize.name!r}."
            _refuse(rounding.dequantize, why, "give each node its own initializer")
        for reader, _ in rounding.source.uses():
            if not _is(reader, "DequantizeLinear"):
                _refuse(reader, "computes on quantized weights, which have no gradient.", _STATIC)
