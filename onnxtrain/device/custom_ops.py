"""The custom ops of a shared library, whose output types only onnxruntime can infer."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.errors import ArtifactError
from onnxtrain.graph import traversal
from onnxtrain.graph.values import ONNX
from onnxtrain.ops import OPS

_STANDARD = frozenset({ONNX, "ai.onnx", "ai.onnx.ml"})


def declare_types(model: ir.Model, library: Path) -> None:
    """Set the output types of custom ops to those that onnxruntime infers with the library, in place.

    Many libraries infer element types but no ranks; the model must declare those.

    Raises:
        ArtifactError: onnxruntime is not installed, or the library does not load.
    """
    declared: set[ir.Node] = set()
    while True:
        common.ShapeInferencePass()(model)
        pending = [node for node in model.graph if _lacks_types(node, model) and node not in declared]
        ready = [node for node in pending if all(v is None or _is_typed(v) for v in node.inputs)]
        if not ready:
            return  # the conversion reports values without type
        for node in ready:
            _declare(node, model, library)
        declared.update(ready)


def _is_typed(value: ir.Value) -> bool:
    return value.dtype is not None and value.shape is not None


def _lacks_types(node: ir.Node, model: ir.Model) -> bool:
    custom = (
        node.domain not in _STANDARD
        and (node.domain, node.op_type) not in OPS
        and node.op_identifier() not in model.functions
    )
    return custom and not all(map(_is_typed, node.outputs))


def _declare(node: ir.Node, model: ir.Model, library: Path) -> None:
    try:
        import onnxruntime  # noqa: PLC0415  an extra
    except ImportError as error:
        todo = "pip install onnxruntime, or declare the types of their outputs in the model"
        raise ArtifactError(
            "onnxruntime is needed to infer the types of custom ops, and is not installed.", str(node.name), todo=todo
        ) from error
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        settings.register_custom_ops_library(str(library))
        session = onnxruntime.InferenceSession(
            _single_node_model(node, model), settings, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ArtifactError(
            f"onnxruntime cannot load {traversal.describe(node)} with the library {library.name}.", got=str(error)
        ) from error
    for value, output in zip(node.outputs, session.get_outputs(), strict=True):
        name = output.type.removeprefix("tensor(").removesuffix(")").upper()
        value.type = ir.TensorType(ir.DataType[name])
        if output.shape:  # empty for scalars and for unknown ranks
            value.shape = ir.Shape(output.shape)


def _single_node_model(node: ir.Node, model: ir.Model) -> bytes:
    """Return a model with this node only."""
    inputs = [
        onnx.helper.make_tensor_value_info(str(v.name), int(v.dtype), [_size(d) for d in v.shape])
        for v in dict.fromkeys(node.inputs)
        if v is not None and v.dtype is not None and v.shape is not None
    ]
    outputs = [onnx.ValueInfoProto(name=str(v.name)) for v in node.outputs]
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.graph.opset_imports.items()]
    graph = onnx.helper.make_graph([ir.to_proto(node)], "alone", inputs, outputs)
    proto = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)
    return bytes(proto.SerializeToString())


def _size(dim: int | ir.SymbolicDim) -> int | str | None:
    return dim if isinstance(dim, int) else dim.value
