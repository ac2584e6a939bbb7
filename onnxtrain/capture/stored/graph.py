"""The graph of a capture as an ONNX file, and what such a file cannot hold as JSON beside it.

A file holds a node's floats in single precision, and not what our builder knows of a value: the exact number of a
constant, the sizes that a vector holds. What is read back is compared with the graph before it is kept.
"""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.capture.key.fingerprint import NotStorableError
from onnxtrain.capture.stored.containers import plain_from_json, plain_to_json
from onnxtrain.graph import sizes, traversal

_FLOATS = (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS)
_KNOWN = ("scalar", "sizes")  # what `meta` of a value may hold
_REMADE = frozenset({"call"})  # what an ATen node finds out again


def to_bytes(model: ir.Model) -> tuple[bytes, Any]:
    """The ONNX file, and the JSON beside it.

    Raises:
        NotStorableError: the graph holds a Python object, or would not come back as it is.
    """
    for node in model.graph.all_nodes():
        if node.op_type.startswith("PythonOp"):
            raise NotStorableError("the graph holds a Python function: a custom autograd function, or a hook")
        if "gradient" in node.meta:
            raise NotStorableError(f"the gradient of {node.name} was traced in this process")
        if unknown := node.meta.keys() - _REMADE:
            raise NotStorableError(f"the node {node.name} holds a Python object ({min(unknown)})")
    data = ir.to_proto(model).SerializeToString(deterministic=True)
    beside = {"floats": _floats(model), "known": _known(model), "sizes": _size_values(model)}
    if (lost := _difference(_facts(model), _facts(from_bytes(data, beside)))) is not None:
        raise NotStorableError(f"a file does not hold {lost}")
    return data, beside


def from_bytes(data: bytes, beside: Any) -> ir.Model:
    """The graph.

    Raises:
        Exception: it cannot be read; any, as the readers of other packages raise it.
    """
    model: ir.Model = ir.from_proto(onnx.ModelProto.FromString(data))
    for node, found in zip(model.graph.all_nodes(), beside["floats"], strict=True):
        for name, value in found.items():
            exact = plain_from_json(value)
            node.attributes[name] = (
                ir.AttrFloat32(name, exact) if type(exact) is float else ir.AttrFloat32s(name, exact)
            )
    values = {value.name: value for value in _values(model)}
    for name, found in beside["known"].items():
        values[name].meta.update({key: plain_from_json(value) for key, value in found.items()})
    if beside["sizes"]:
        model.graph.meta["size_values"] = {size: values[name] for size, name in beside["sizes"].items()}
    return model


def _floats(model: ir.Model) -> list[Any]:
    found = []
    for node in model.graph.all_nodes():
        floats = [a for a in node.attributes.values() if a.type in _FLOATS]
        found.append({a.name: plain_to_json(_as_floats(a.value)) for a in floats})
    return found


def _as_floats(value: Any) -> Any:
    return float(value) if isinstance(value, int | float) else [*map(float, value)]


def _known(model: ir.Model) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for value in _values(model):
        if unknown := value.meta.keys() - {*_KNOWN}:
            raise NotStorableError(f"the value {value.name} holds a Python object ({min(unknown)})")
        if value.meta:
            if value.name in found:
                raise NotStorableError(f"two values have the name {value.name}")
            found[str(value.name)] = {key: plain_to_json(known) for key, known in value.meta.items()}
    return found


def _size_values(model: ir.Model) -> dict[str, str]:
    known: dict[str, ir.Value] = model.graph.meta.get("size_values", {})
    return {size: str(value.name) for size, value in known.items() if value.graph is model.graph}


def _values(model: ir.Model) -> list[ir.Value]:
    inner = (graph for node in model.graph.all_nodes() for graph in traversal.subgraphs(node))
    graphs = [model.graph, *inner]
    found = [v for graph in graphs for v in (*graph.inputs, *graph.initializers.values())]
    return [*dict.fromkeys(found), *(v for node in model.graph.all_nodes() for v in node.outputs)]


def _facts(model: ir.Model) -> list[Any]:
    """All that the stages after a capture may read of its graph."""
    graph = model.graph
    found: list[Any] = [graph.name, model.ir_version, dict(graph.opset_imports), dict(graph.metadata_props)]
    for value in _values(model):
        const = value.const_value
        data = None if const is None else (const.dtype, const.tobytes())
        shape = None if value.shape is None else sizes.dims_of(value)
        meta = {key: (type(known), repr(known)) for key, known in value.meta.items()}
        found.append((value.name, value.dtype, type(value.type), shape, data, meta, dict(value.metadata_props)))
    for node in graph.all_nodes():
        attributes = {a.name: (a.type, _attribute(a)) for a in node.attributes.values()}
        inputs, outputs = [v and v.name for v in node.inputs], [v.name for v in node.outputs]
        identity = (node.op_identifier(), node.name, node.doc_string or "", dict(node.metadata_props))
        found.append((identity, inputs, outputs, attributes))
    found.append(([v.name for v in graph.inputs], [v.name for v in graph.outputs], _size_values(model)))
    return found


def _attribute(attribute: ir.Attr) -> Any:
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        return tensor.dtype, tuple(tensor.shape), tensor.tobytes()
    if attribute.type == ir.AttributeType.GRAPH:
        return [v.name for v in attribute.as_graph().inputs], [v.name for v in attribute.as_graph().outputs]
    value = attribute.value
    return repr(_as_floats(value) if attribute.type in _FLOATS else list(value) if isinstance(value, tuple) else value)


def _difference(before: list[Any], after: list[Any]) -> str | None:
    for one, other in zip(before, after, strict=False):
        if one != other:
            return f"{one}: it would be {other}"[:500]
    return None if len(before) == len(after) else "all of the graph"
