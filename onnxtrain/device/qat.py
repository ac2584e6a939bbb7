"""Quantization-aware training: make a quantized model trainable, and convert trained values back to integers.

    fake_quantize(model) -> FakeQuantized        floating-point weights, each Q/DQ pair a FakeQuant
    quantize_trained(model, state)               the original Q/DQ model with trained values as integers

Rounding has the straight-through gradient: 1 inside the range, 0 where it clips (Bengio et al. 2013,
https://arxiv.org/abs/1308.3432). A learned scale is `scale · exp(<scale>.log_factor)`, after Jain et al. 2019
(https://arxiv.org/abs/1903.08066): it stays positive, one learning rate suits scales of all magnitudes, and weight
decay pulls it towards its initial value.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.device.checkpoint_state import CheckpointState
from onnxtrain.device.qat_pairs import LIMITS, Rounding, ScaleFactors, array, bias_scale_factors, read, roundings
from onnxtrain.errors import ArtifactError
from onnxtrain.graph.values import MICROSOFT, ONNX

_SUFFIX = "_quantized"  # onnxruntime.quantization appends it to weight names
_UNREACHED_LEVEL = 2**30  # rounding without clipping


@dataclass(frozen=True)
class FakeQuantized:
    """A model for `generate_artifacts`.

    Attributes:
        model: has a FakeQuant for each Q/DQ pair, and floating-point weights.
        parameters: the names of its weights and biases: all floating-point initializers of at least one dimension,
            except scales and the statistics of BatchNormalization.
        scales: the names of the learned scale factors; empty if scales are frozen.
    """

    model: onnx.ModelProto
    parameters: tuple[str, ...]
    scales: tuple[str, ...]


def fake_quantize(model: onnx.ModelProto | str | os.PathLike[str], *, learn_scales: bool = False) -> FakeQuantized:
    """Make a quantized model trainable.

    Args:
        model: a model in QDQ format, as onnxruntime.quantization.quantize_static writes it, or its path. Supported are
            4, 8 and 16 bits, weights per tensor or per channel, and float32 scales.
        learn_scales: whether scales get trainable factors. Zero points stay fixed.

    Returns:
        The model with the names of its parameters. Integer weights `<p>_quantized` become float32 parameters `<p>`.

    Raises:
        ArtifactError: the model is not quantized, or not in this format (dynamic, QOperator or blockwise).
    """
    source = read(model)
    all_roundings = roundings(source)
    names = _parameter_names(all_roundings, source.graph)
    writer = _Writer(source.graph, names, bias_scale_factors(all_roundings), learn_scales=learn_scales)
    for rounding in all_roundings:
        writer.replace(rounding)
    common.RemoveUnusedNodesPass()(source)
    source.graph.opset_imports.setdefault(MICROSOFT, 1)
    return FakeQuantized(ir.to_proto(source), _parameters(source.graph, writer.scales), tuple(writer.factors))


def with_fake_quant(
    model: onnx.ModelProto | ir.Model | str | os.PathLike[str],
) -> onnx.ModelProto | ir.Model | str | os.PathLike[str]:
    """Return the model with each Q/DQ pair replaced by a FakeQuant, or the model itself if it has no pairs."""
    if isinstance(model, str | os.PathLike):
        try:
            nodes = onnx.load(model, load_external_data=False).graph.node
        except Exception:  # noqa: BLE001  the caller loads the file too and reports the error
            return model
    else:
        nodes = model.graph.node if isinstance(model, onnx.ModelProto) else model.graph
    if not {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in nodes}:
        return model
    return fake_quantize(ir.to_proto(model) if isinstance(model, ir.Model) else model).model


def quantize_trained(
    model: onnx.ModelProto | str | os.PathLike[str], state: CheckpointState | str | os.PathLike[str]
) -> onnx.ModelProto:
    """Write trained values as integers to the quantized model that was passed to `fake_quantize`.

    Weights are rounded as in the training graph. If scales were learned, an int32 bias whose scale was the product of
    the input's and the weight's scale gets the product of the learned scales.

    Args:
        model: that quantized model, or its path.
        state: the trained state, or the path of its checkpoint. Values that it lacks keep the model's values.

    Returns:
        The quantized model, with QuantizeLinear for activations only.

    Raises:
        ArtifactError: the state belongs to another model or has a non-finite value, or a bias exceeds 32 bits.
        CheckpointError: the checkpoint cannot be read.
    """
    target = read(model)
    all_roundings = roundings(target)
    trained = state if isinstance(state, CheckpointState) else CheckpointState.load_checkpoint(state)
    values = {name: parameter.data for name, parameter in trained.parameters}
    reader = _Integers(target.graph, _parameter_names(all_roundings, target.graph), values)
    reader.set_scales(all_roundings, bias_scale_factors(all_roundings))
    for rounding in all_roundings:
        reader.round(rounding)
    reader.set_floats()
    common.RemoveUnusedNodesPass()(target)
    return ir.to_proto(target)


def _parameters(graph: ir.Graph, scales: set[ir.Value]) -> tuple[str, ...]:
    statistics = {v for node in graph for v in node.inputs[3:5] if node.op_type == "BatchNormalization"}
    return tuple(
        name
        for name, value in graph.initializers.items()
        if value not in scales | statistics and array(value).ndim and np.issubdtype(array(value).dtype, np.floating)
    )


def _parameter_names(all_roundings: Sequence[Rounding], graph: ir.Graph) -> dict[ir.Value, str]:
    """Return the name of each integer weight's floating-point parameter; `quantize_trained` derives the same names."""
    used_names: dict[str | None, ir.Node | None] = {value.name: None for value in graph.inputs}
    used_names |= dict.fromkeys(graph.initializers)
    used_names |= {value.name: node for node in graph for value in node.outputs}
    names = {}
    for rounding in all_roundings:
        if rounding.quantize is None:
            base = str(rounding.source.name).removesuffix(_SUFFIX)
            dequantized = rounding.dequantize.outputs[0]
            replaces_dequantized = used_names.get(base) is rounding.dequantize and not dequantized.is_graph_output()
            is_free = base not in used_names or replaces_dequantized
            names[rounding.source] = base if is_free else f"{rounding.source.name}_float"
    return names


def _factor_name(scale: ir.Value) -> str:
    return f"{scale.name}.log_factor"


def _real(rounding: Rounding, integers: npt.NDArray[Any], scale: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    levels = integers.astype(np.int64) - rounding.broadcast(rounding.zero_point)
    return levels.astype(np.float32) * rounding.broadcast(scale)


class _Writer:
    """Replace Q/DQ pairs in a graph."""

    def __init__(
        self, graph: ir.Graph, names: Mapping[ir.Value, str], scale_factors: ScaleFactors, *, learn_scales: bool
    ) -> None:
        self.scales: set[ir.Value] = set()  # and added constants: not parameters
        self.factors: list[str] = []
        self._graph = graph
        self._names = names
        self._scale_factors = scale_factors
        self._learn = learn_scales
        self._factors: dict[ir.Value, ir.Value] = {}
        self._floats: dict[ir.Value, ir.Value] = {}

    def replace(self, rounding: Rounding) -> None:
        """Replace a pair by a FakeQuant; the output keeps its name."""
        old = rounding.dequantize.outputs[0]
        self.scales.add(rounding.scale)
        x = self._float_parameter(rounding) if rounding.quantize is None else rounding.source
        new = self._rounded(rounding, x)
        name = old.name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        self._graph.remove(rounding.dequantize, safe=True)
        new.name = f"{name}_rounded" if name == x.name else name
        new.type, new.shape = ir.TensorType(ir.DataType.FLOAT), old.shape

    def _float_parameter(self, rounding: Rounding) -> ir.Value:
        """Return the floating-point parameter that replaces an integer initializer."""
        integers = rounding.source
        if integers not in self._floats:
            real = _real(rounding, array(integers), array(rounding.scale))
            self._floats[integers] = self._initializer(self._names[integers], real)
        return self._floats[integers]

    def _rounded(self, rounding: Rounding, x: ir.Value) -> ir.Value:
        low, high = LIMITS[rounding.dtype]
        stem = str(rounding.dequantize.outputs[0].name)
        zero = rounding.zero_point.astype(np.float32)
        if not self._learn:
            scale = rounding.scale if zero.size == 1 else self._broadcast_scale(rounding)
            zero_point = self._constant(f"{stem}/zero_point", rounding.broadcast(zero))
            return self._fake_quant(rounding, x, scale, zero_point, low, high)
        # round(x / s) · s has PyTorch's gradient for x, and a gradient for a learned scale s.
        scale = self._broadcast_scale(rounding)
        levels = self._node(rounding, ONNX, "Div", x, scale)
        one = self._constant(f"{stem}/one", np.float32(1))
        if (zero == zero.flat[0]).all():
            zero_point = self._constant(f"{stem}/zero_point", zero.flat[0])
            rounded = self._fake_quant(rounding, levels, one, zero_point, low, high)
        else:
            lowest, highest = rounding.broadcast(low - zero), rounding.broadcast(high - zero)
            rounded = self._rounded_per_channel(rounding, levels, one, lowest, highest)
        return self._node(rounding, ONNX, "Mul", rounded, scale)

    def _rounded_per_channel(
        self, rounding: Rounding, x: ir.Value, one: ir.Value, low: npt.NDArray[Any], high: npt.NDArray[Any]
    ) -> ir.Value:
        """Round and clip to limits per channel; the gradient is 0 where a value is clipped."""
        stem = str(rounding.dequantize.outputs[0].name)
        zero = self._constant(f"{stem}/zero", np.float32(0))
        rounded = self._fake_quant(rounding, x, one, zero, -_UNREACHED_LEVEL, _UNREACHED_LEVEL)
        lowest = self._constant(f"{stem}/lowest", low)
        highest = self._constant(f"{stem}/highest", high)
        under, over = (
            self._node(rounding, ONNX, op_type, rounded, limit)
            for op_type, limit in (("Less", lowest), ("Greater", highest))
        )
        return self._node(rounding, ONNX, "Where", under, lowest, self._where(rounding, over, highest, rounded))

    def _where(self, rounding: Rounding, condition: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
        return self._node(rounding, ONNX, "Where", condition, x, y)

    def _broadcast_scale(self, rounding: Rounding) -> ir.Value:
        """Return the scale, learned or fixed, reshaped to broadcast with the rounded value."""
        scale = self._learned_scale(rounding, rounding.scale) if self._learn else rounding.scale
        values = array(rounding.scale)
        shape = rounding.broadcast(values).shape
        if values.shape == shape:
            return scale
        stem = str(rounding.dequantize.outputs[0].name)
        target = self._initializer(f"{stem}/scale_shape", np.array(shape, np.int64))
        return self._node(rounding, ONNX, "Reshape", scale, target)

    def _learned_scale(self, rounding: Rounding, scale: ir.Value) -> ir.Value:
        """Return the scale times its learned factor; a bias has the product of its input's and weight's scales."""
        if scale in self._scale_factors:
            factors = (self._learned_scale(rounding, factor) for factor in self._scale_factors[scale])
            return self._node(rounding, ONNX, "Mul", *factors)
        if rounding.is_bias and scale is rounding.scale:
            return scale
        if scale not in self._factors:
            self._factors[scale] = self._constant(_factor_name(scale), np.zeros(array(scale).shape, np.float32))
            self.factors.append(_factor_name(scale))
        return self._node(rounding, ONNX, "Mul", scale, self._node(rounding, ONNX, "Exp", self._factors[scale]))

    def _fake_quant(
        self, rounding: Rounding, x: ir.Value, scale: ir.Value, zero_point: ir.Value, low: int, high: int
    ) -> ir.Value:
        values = {"quant_min": low, "quant_max": high, "divide": 1}  # divide: as QuantizeLinear does
        attributes = [ir.AttrInt64(name, value) for name, value in values.items()]
        return self._node(rounding, MICROSOFT, "FakeQuant", x, scale, zero_point, attributes=attributes)

    def _node(
        self, rounding: Rounding, domain: str, op_type: str, *inputs: ir.Value, attributes: Sequence[ir.Attr] = ()
    ) -> ir.Value:
        node = ir.Node(domain, op_type, inputs, attributes, name=f"{rounding.dequantize.name}/{op_type}")
        self._graph.insert_before(rounding.dequantize, node)
        return node.outputs[0]

    def _constant(self, name: str, values: Any) -> ir.Value:
        value = self._initializer(name, np.asarray(values, np.float32))
        self.scales.add(value)
        return value

    def _initializer(self, name: str, values: npt.NDArray[Any]) -> ir.Value:
        tensor = ir.tensor(values, name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(values.shape), const_value=tensor)
        self._graph.register_initializer(value)
        return value


class _Integers:
    """Write trained values to a quantized graph."""

    def __init__(self, graph: ir.Graph, names: Mapping[ir.Value, str], values: Mapping[str, npt.NDArray[Any]]) -> None:
        self._graph = graph
        self._names = names
        self._values = values
        self._used: set[str] = set()
        self._quantized: set[ir.Value] = set()

    def set_scales(self, all_roundings: Sequence[Rounding], scale_factors: ScaleFactors) -> None:
        """Multiply scales by their learned factors, then recompute the scales of biases."""
        changed = set()
        for scale in {id(r.scale): r.scale for r in all_roundings}.values():
            factor = self._take(_factor_name(scale), array(scale).shape)
            if factor is not None:
                with np.errstate(over="ignore"):
                    changed_scale = array(scale) * np.exp(factor)
                self._set(scale, changed_scale)
                changed.add(scale)
                if not (np.isfinite(changed_scale) & (changed_scale > 0)).all():
                    todo = "train with a lower learning rate"
                    raise ArtifactError(
                        "A learned scale overflowed or underflowed float32.", str(scale.name), todo=todo
                    )
        for scale, (first, second) in scale_factors.items():
            if changed & {first, second}:
                bias_scale = array(first).reshape(-1) * array(second).reshape(-1)
                self._set(scale, bias_scale.reshape(array(scale).shape))

    def round(self, rounding: Rounding) -> None:
        """Round a trained weight or bias to integers."""
        if not rounding.is_parameter:
            return
        source = rounding.source
        if rounding.quantize is None:
            value = self._take(self._names[source], array(source).shape)
            if value is not None and source not in self._quantized:
                self._set(source, self._levels(rounding, value), rounding.dtype)
                self._quantized.add(source)
            return
        value = self._take(str(source.name), array(source).shape)
        old = rounding.quantize.outputs[0]
        levels = self._levels(rounding, array(source) if value is None else value)
        tensor = ir.tensor(levels, dtype=rounding.dtype, name=f"{source.name}{_SUFFIX}")
        quantized = ir.Value(name=old.name, type=ir.TensorType(rounding.dtype), shape=source.shape, const_value=tensor)
        old.name = None
        old.replace_all_uses_with(quantized)
        self._graph.register_initializer(quantized)

    def set_floats(self) -> None:
        """Write parameters that are not quantized; raise ArtifactError if the model lacks any."""
        for name in list(self._values):
            if name in self._graph.initializers and name not in self._used:
                initializer = self._graph.initializers[name]
                value = self._take(name, array(initializer).shape)
                self._set(initializer, value)
        if unknown := sorted(set(self._values) - self._used):
            todo = "pass the quantized model that was passed to fake_quantize"
            raise ArtifactError("The state has parameters that the model lacks.", got=", ".join(unknown), todo=todo)

    def _take(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any] | None:
        value = self._values.get(name)
        if value is None:
            return None
        if value.shape != shape:
            raise ArtifactError("A parameter's shape differs from the model's.", name, shape, value.shape)
        if not np.isfinite(value).all():
            raise ArtifactError("A trained parameter is not finite.", name, todo="train with a lower learning rate")
        self._used.add(name)
        return value

    def _levels(self, rounding: Rounding, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        low, high = LIMITS[rounding.dtype]
        scale = rounding.broadcast(array(rounding.scale))
        zero = rounding.broadcast(rounding.zero_point)
        if rounding.is_bias:
            levels = np.round(value.astype(np.float64) / scale) + zero
            if ((levels < low) | (levels > high)).any():
                todo = "quantize the model without integer biases: extra_options={'QuantizeBias': False}"
                raise ArtifactError("A bias does not fit into 32 bits.", str(rounding.source.name), todo=todo)
        else:
            levels = np.clip(np.round(value / scale) + zero, low, high)
        return levels.astype(rounding.dtype.numpy())

    def _set(self, initializer: ir.Value, values: Any, dtype: ir.DataType | None = None) -> None:
        initializer.const_value = ir.tensor(values, dtype=dtype, name=initializer.name)
