"""Convert the graph of a capture to an ONNX file, and to JSON for what such a file cannot hold.

An ONNX file stores a node's float attributes in single precision. It does not store the builder's metadata of a value:
the exact value of a constant, the sizes in a vector. Before a file is stored, it is loaded and compared with the graph.
"""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.capture.key.fingerprint import NotStorableError
from onnxtrain.capture.stored.containers import value_from_json, value_to_json
from onnxtrain.graph import sizes, traversal
from onnxtrain.ops import Effects, definition_of

_FLOATS = (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS)
_VALUE_METADATA = ("scalar", "sizes")  # keys of a value's `meta` that are stored
_RECOMPUTED = frozenset({"call"})  # keys of an ATen node's `meta` that are recomputed


def to_bytes(model: ir.Model) -> tuple[bytes, Any]:
    """Return the ONNX file, and the JSON.

    Raises:
        NotStorableError: the graph holds a Python object, or the loaded file would differ from it.
    """
    for node in model.graph.all_nodes():
        if Effects.PYTHON in definition_of(node).effects:
            raise NotStorableError("the graph holds a Python function: a custom autograd function, or a hook")
        if Effects.COLLECTIVE in definition_of(node).effects:
            raise NotStorableError(f"{node.name} communicates in a process group of this process")
        if "gradient" in node.meta:
            raise NotStorableError(f"the gradient of {node.name} was traced in this process")
        if unsupported := node.meta.keys() - _RECOMPUTED:
            raise NotStorableError(f"the node {node.name} holds a Python object ({min(unsupported)})")
    data = ir.to_proto(model).SerializeToString(deterministic=True)
    extra = {"floats": _floats(model), "metadata": _metadata(model), "sizes": _size_values(model)}
    if (difference := _difference(_facts(model), _facts(from_bytes(data, extra)))) is not None:
        raise NotStorableError(f"a file does not hold {difference}")
    return data, extra


def from_bytes(data: bytes, extra: Any) -> ir.Model:
    """Load the graph.

    Args:
        data: the ONNX file.
        extra: the JSON.

    Raises:
        Exception: the file or the JSON is malformed; of any type that a parser raises.
    """
    model: ir.Model = ir.from_proto(onnx.ModelProto.FromString(data))
    for node, floats in zip(model.graph.all_nodes(), extra["floats"], strict=True):
        for name, value in floats.items():
            exact = value_from_json(value)
            node.attributes[name] = (
                ir.AttrFloat32(name, exact) if type(exact) is float else ir.AttrFloat32s(name, exact)
            )
    values = {value.name: value for value in _values(model)}
    for name, metadata in extra["metadata"].items():
        values[name].meta.update({key: value_from_json(value) for key, value in metadata.items()})
    if extra["sizes"]:
        model.graph.meta["size_values"] = {size: values[name] for size, name in extra["sizes"].items()}
    return model


def _floats(model: ir.Model) -> list[Any]:
    """Return the exact float attributes of each node."""
    by_node = []
    for node in model.graph.all_nodes():
        floats = [a for a in node.attributes.values() if a.type in _FLOATS]
        by_node.append({a.name: value_to_json(_as_floats(a.value)) for a in floats})
    return by_node


def _as_floats(value: Any) -> Any:
    return float(value) if isinstance(value, int | float) else [*map(float, value)]


def _metadata(model: ir.Model) -> dict[str, Any]:
    """Return the metadata of each value that has some."""
    metadata: dict[str, Any] = {}
    for value in _values(model):
        if unsupported := value.meta.keys() - {*_VALUE_METADATA}:
            raise NotStorableError(f"the value {value.name} holds a Python object ({min(unsupported)})")
        if value.meta:
            if value.name in metadata:
                raise NotStorableError(f"two values have the name {value.name}")
            metadata[str(value.name)] = {key: value_to_json(item) for key, item in value.meta.items()}
    return metadata


def _size_values(model: ir.Model) -> dict[str, str]:
    """Return the name of the value that holds each size."""
    values: dict[str, ir.Value] = model.graph.meta.get("size_values", {})
    return {size: str(value.name) for size, value in values.items() if value.graph is model.graph}


def _values(model: ir.Model) -> list[ir.Value]:
    subgraphs = (graph for node in model.graph.all_nodes() for graph in traversal.subgraphs(node))
    graphs = [model.graph, *subgraphs]
    sources = [v for graph in graphs for v in (*graph.inputs, *graph.initializers.values())]
    return [*dict.fromkeys(sources), *(v for node in model.graph.all_nodes() for v in node.outputs)]


def _facts(model: ir.Model) -> list[Any]:
    """Return everything that the stages after a capture may read of its graph."""
    graph = model.graph
    facts: list[Any] = [graph.name, model.ir_version, dict(graph.opset_imports), dict(graph.metadata_props)]
    for value in _values(model):
        const = value.const_value
        data = None if const is None else (const.dtype, const.tobytes())
        shape = None if value.shape is None else sizes.dims_of(value)
        meta = {key: (type(item), repr(item)) for key, item in value.meta.items()}
        facts.append((value.name, value.dtype, type(value.type), shape, data, meta, dict(value.metadata_props)))
    for node in graph.all_nodes():
        attributes = {a.name: (a.type, _attribute(a)) for a in node.attributes.values()}
        inputs, outputs = [v and v.name for v in node.inputs], [v.name for v in node.outputs]
        identity = (node.op_identifier(), node.name, node.doc_string or "", dict(node.metadata_props))
        facts.append((identity, inputs, outputs, attributes))
    facts.append(([v.name for v in graph.inputs], [v.name for v in graph.outputs], _size_values(model)))
    return facts


def _attribute(attribute: ir.Attr) -> Any:
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        return tensor.dtype, tuple(tensor.shape), tensor.tobytes()
    if attribute.type == ir.AttributeType.GRAPH:
        return [v.name for v in attribute.as_graph().inputs], [v.name for v in attribute.as_graph().outputs]
    value = attribute.value
    return repr(_as_floats(value) if attribute.type in _FLOATS else list(value) if isinstance(value, tuple) else value)


def _difference(graph: list[Any], loaded: list[Any]) -> str | None:
    for expected, got in zip(graph, loaded, strict=False):
        if expected != got:
            return f"{expected}: it would be loaded as {got}"[:500]
    return None if len(graph) == len(loaded) else f"{len(graph)} values and nodes, but {len(loaded)}"
