"""The custom ops of a shared library: onnxruntime alone knows their types (F93)."""

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
    """Gives the outputs of custom ops the types that onnxruntime infers with the library, in place.

    Many libraries tell element types and no ranks: then the model has to.

    Raises:
        ArtifactError: onnxruntime is not installed, or the library does not load.
    """
    asked: set[ir.Node] = set()
    while True:
        common.ShapeInferencePass()(model)
        waiting = [node for node in model.graph if _lacks_types(node, model) and node not in asked]
        ready = [node for node in waiting if all(v is None or _is_typed(v) for v in node.inputs)]
        if not ready:
            return  # the conversion says which value has no type
        for node in ready:
            _declare(node, model, library)
        asked.update(ready)


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
        import onnxruntime  # noqa: PLC0415  not a core dependency
    except ImportError as error:
        todo = "pip install onnxruntime, or declare the types of their outputs in the model"
        raise ArtifactError("Types of custom ops are found by onnxruntime.", str(node.name), todo=todo) from error
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        settings.register_custom_ops_library(str(library))
        session = onnxruntime.InferenceSession(_alone(node, model), settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own, which share no base
        raise ArtifactError(
            f"onnxruntime does not take {traversal.describe(node)} with the library {library.name}.", got=str(error)
        ) from error
    for value, found in zip(node.outputs, session.get_outputs(), strict=True):
        name = found.type.removeprefix("tensor(").removesuffix(")").upper()
        value.type = ir.TensorType(ir.DataType[name])
        if found.shape:  # it is empty for a scalar, and where the library tells no rank
            value.shape = ir.Shape(found.shape)


def _alone(node: ir.Node, model: ir.Model) -> bytes:
    """A model of this node only."""
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
