"""Convert a graph to another ai.onnx opset, node by node, with ONNX's version converter.

Only nodes whose op differs between the two opsets are converted, one at a time: ONNX's converter does not support
functions and other domains, and an error can then name the node. An op that the target opset lacks (Gelu before 20) is
first expanded to its ONNX function body, if it has one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx.version_converter
import onnx_ir as ir

from onnxtrain.errors import GraphError, OptionError
from onnxtrain.graph import traversal
from onnxtrain.graph.values import ONNX
from onnxtrain.graph.verify import verify_standard

NEWEST = onnx.defs.onnx_opset_version()


def convert_opset(graph: ir.Graph, opset: int) -> None:
    """Convert the typed graph in place.

    Raises:
        OptionError: the opset does not exist, or a node cannot be expressed in it.
    """
    present = graph.opset_imports[ONNX]
    if opset == present:
        return
    if not 1 <= opset <= NEWEST:
        raise OptionError("unknown ONNX opset", "the requested opset", f"1 to {NEWEST}", opset)
    for node in list(graph):
        if node.domain != ONNX:
            continue
        for inner in traversal.subgraphs(node):
            inner.opset_imports.setdefault(ONNX, present)
            convert_opset(inner, opset)
        if not _same_meaning(node.op_type, present, opset):
            _convert(graph, node, opset)
        elif _since(node.op_type, present) != _since(node.op_type, opset):
            _check_unchanged(node, opset)
    graph.opset_imports[ONNX] = opset


def _check_unchanged(node: ir.Node, opset: int) -> None:
    """Check that the node is valid in `opset` without changes."""
    try:
        verify_standard(node, opset)
    except GraphError as error:
        raise _not_convertible(node, opset, str(error)) from error


@functools.lru_cache(maxsize=4096)
def _schema(op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    """Return the op's schema in `opset`, or None if the opset lacks the op."""
    try:
        return onnx.defs.get_schema(op_type, opset, ONNX)
    except onnx.defs.SchemaError:
        return None


def _since(op_type: str, opset: int) -> int:
    schema = _schema(op_type, opset)
    return 0 if schema is None else schema.since_version


@functools.lru_cache(maxsize=4096)
def _same_meaning(op_type: str, a: int, b: int) -> bool:
    """Return whether the op differs between two opsets in its allowed element types only.

    ONNX's converter has no adapter for many of these pairs (ConstantOfShape 20 to 19), and calling it is slower.
    """
    one, other = _schema(op_type, a), _schema(op_type, b)
    return one is not None and other is not None and _meaning(one) == _meaning(other)


def _meaning(schema: onnx.defs.OpSchema) -> tuple[Any, ...]:
    return schema.doc, _attributes(schema), _formals(schema.inputs), _formals(schema.outputs)


def _attributes(schema: onnx.defs.OpSchema) -> dict[str, tuple[Any, ...]]:
    return {
        name: (str(a.type), a.required, a.default_value.SerializeToString()) for name, a in schema.attributes.items()
    }


def _formals(formals: Sequence[onnx.defs.OpSchema.FormalParameter]) -> list[tuple[Any, ...]]:
    return [(f.name, str(f.option), f.is_homogeneous, f.type_str) for f in formals]


def _uses_nothing_new(node: ir.Node, new: onnx.defs.OpSchema | None, old: onnx.defs.OpSchema | None) -> bool:
    """Return whether the op only gained inputs and attributes that this node does not use (Split 18, Pad 18)."""
    if new is None or old is None:
        return False
    gained, lost = _attributes(new), _attributes(old)
    count = len(node.inputs)
    return (
        node.attributes.keys() <= lost.keys() <= gained.keys()
        and all(gained[name] == lost[name] for name in lost)
        and count <= len(old.inputs)
        and _formals(new.inputs)[:count] == _formals(old.inputs)[:count]
        and _formals(new.outputs) == _formals(old.outputs)
    )


def _convert(graph: ir.Graph, node: ir.Node, opset: int) -> None:
    if any(traversal.subgraphs(node)):
        raise _not_convertible(node, opset, "nodes with subgraphs are not supported")
    if node.op_type == "Pad":
        _pad_all_axes(graph, node)
    present = graph.opset_imports[ONNX]
    proto = ir.to_proto(_single_node_model(node, present))
    try:
        if _schema(node.op_type, opset) is None:
            proto = onnx.inliner.inline_selected_functions(proto, [(ONNX, node.op_type)], inline_schema_functions=True)
        proto = onnx.version_converter.convert_version(proto, opset)
    except RuntimeError as error:
        no_adapter = "No Adapter" in str(error)
        if no_adapter and _uses_nothing_new(node, _schema(node.op_type, present), _schema(node.op_type, opset)):
            return _check_unchanged(node, opset)
        raise _not_convertible(node, opset, str(error).rpartition("failed: ")[2]) from error
    return _splice(graph, node, ir.from_proto(proto).graph)


def _pad_all_axes(graph: ir.Graph, node: ir.Node) -> None:
    """Rewrite Pad with an `axes` input (opset 18) as Pad of all axes with zero widths; `pads` may be dynamic."""
    x, pads = node.inputs[:2]
    axes_input = node.inputs[3] if len(node.inputs) > 3 else None
    axes = None if axes_input is None else _constant(axes_input, "axes")
    if axes is None or x is None or x.shape is None or pads is None:
        return
    rank, count = len(x.shape), axes.size
    indices = [2 * count] * (2 * rank)  # into pads with a 0 appended
    for position, axis in enumerate(axes.numpy().reshape(-1).tolist()):
        indices[axis % rank], indices[axis % rank + rank] = position, position + count
    zero, index = (
        _constant_node(np.array(c, np.int64), f"{node.name}/{n}") for c, n in (([0], "zero"), (indices, "indices"))
    )
    concat = ir.Node(ONNX, "Concat", [pads, zero.outputs[0]], [ir.AttrInt64("axis", 0)], name=f"{node.name}/Concat")
    gather = ir.Node(ONNX, "Gather", [concat.outputs[0], index.outputs[0]], name=f"{node.name}/pads")
    for new, size in ((concat, 2 * count + 1), (gather, 2 * rank)):
        value = new.outputs[0]
        value.name, value.type, value.shape = new.name, pads.type, ir.Shape([size])
        new.metadata_props.update(node.metadata_props)
    graph.insert_before(node, [zero, index, concat, gather])
    node.replace_input_with(1, gather.outputs[0])
    node.resize_inputs(3)


def _constant_node(array: np.ndarray[Any, Any], name: str) -> ir.Node:
    node = ir.Node(ONNX, "Constant", (), [ir.AttrTensor("value", ir.Tensor(array, name=name))], name=name)
    value = node.outputs[0]
    value.name, value.type, value.shape = (
        name,
        ir.TensorType(ir.DataType.from_numpy(array.dtype)),
        ir.Shape(array.shape),
    )
    return node


def _not_convertible(node: ir.Node, opset: int, reason: str) -> OptionError:
    return OptionError(
        f"cannot convert {traversal.describe(node)} to opset {opset}: {reason}",
        traversal.origin(node),
        todo=f"request a newer opset, up to {NEWEST} (ORTMODULE_ONNX_OPSET_VERSION)",
    )


def _single_node_model(node: ir.Node, opset: int) -> ir.Model:
    """Return a model of this node alone, with inputs `i0`, `i1`, ... by position and outputs `o0`, `o1`, ...

    Small constant inputs become initializers.
    """
    inputs: list[ir.Value | None] = []
    for index, value in enumerate(node.inputs):
        copied = None if value is None else ir.Value(name=f"i{index}", type=value.type, shape=value.shape)
        if copied is not None and value is not None:
            copied.const_value = _constant(value, f"i{index}")
        inputs.append(copied)
    copy = ir.Node(ONNX, node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs))
    for index, (old, new) in enumerate(zip(node.outputs, copy.outputs, strict=True)):
        new.name, new.type, new.shape = f"o{index}", old.type, old.shape
    present = [value for value in inputs if value is not None]
    graph = ir.Graph(
        [value for value in present if value.const_value is None],
        copy.outputs,
        nodes=[copy],
        initializers=[value for value in present if value.const_value is not None],
        opset_imports={ONNX: opset},
        name="single_node",
    )
    return ir.Model(graph, ir_version=10)


def _constant(value: ir.Value, name: str) -> ir.TensorProtocol | None:
    """Return the data of an initializer or Constant output of at most 64 elements: the converter may need axes."""
    tensor = value.const_value
    producer = value.producer()
    if producer is not None and producer.op_type == "Constant" and "value" in producer.attributes:
        tensor = producer.attributes["value"].as_tensor()
    if tensor is None or tensor.size > 64:
        return None
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)


def _splice(graph: ir.Graph, node: ir.Node, converted: ir.Graph) -> None:
    """Replace `node` by the nodes of `converted`."""
    values: dict[ir.Value, ir.Value] = {}
    added = list(_map_inputs(converted, node, values))
    for number, inner in enumerate(converted):
        copy = traversal.clone_node(inner, values)
        copy.name = node.name if len(converted) == 1 else f"{node.name}/{inner.op_type}_{number}"
        copy.metadata_props.update(node.metadata_props)
        copy.doc_string = node.doc_string
        for output in copy.outputs:
            output.name = f"{node.name}/{output.name}"
        added.append(copy)
    graph.insert_before(node, added)
    for old, new in zip(node.outputs, converted.outputs, strict=True):
        result = values[new]
        result.type, result.shape, name = old.type, old.shape, old.name
        traversal.replace(graph, old, result)
        result.name = name
    graph.remove(node, safe=True)


def _map_inputs(converted: ir.Graph, node: ir.Node, values: traversal.ValueMap) -> Iterator[ir.Node]:
    """Map the inputs of `converted` to those of `node`; yield Constant nodes for initializers the converter added."""
    for value in (*converted.inputs, *converted.initializers.values()):
        name = str(value.name)
        original = node.inputs[int(name[1:])] if name[:1] == "i" and name[1:].isdigit() else None
        if original is None:
            assert value.const_value is not None
            constant = _constant_node(value.const_value.numpy(), f"{node.name}/{name}")
            original = constant.outputs[0]
            yield constant
        values[value] = original
