"""Rewrites a graph for another opset of ai.onnx, node by node, with ONNX's own converter.

Only nodes whose op differs between the two opsets are touched. A node at a time, because ONNX's converter knows nothing
of functions and of other domains, and because a node that cannot be converted can then be named. An op that the other
opset lacks (Gelu before 20) is first written out by ONNX's own definition of it, where it has one.
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
    """Rewrites the graph in place. It must be typed.

    Raises:
        OptionError: there is no such opset, or a node has no form in it.
    """
    present = graph.opset_imports[ONNX]
    if opset == present:
        return
    if not 1 <= opset <= NEWEST:
        raise OptionError("There is no such opset.", "the opset asked for", f"1 to {NEWEST}", opset)
    for node in list(graph):
        if node.domain != ONNX:
            continue
        for inner in traversal.subgraphs(node):
            inner.opset_imports.setdefault(ONNX, present)
            convert_opset(inner, opset)
        if not _same_meaning(node.op_type, present, opset):
            _convert(graph, node, opset)
        elif _since(node.op_type, present) != _since(node.op_type, opset):
            _stays(node, opset)
    graph.opset_imports[ONNX] = opset


def _stays(node: ir.Node, opset: int) -> None:
    """Checks that the node is valid in `opset` as it is."""
    try:
        verify_standard(node, opset)
    except GraphError as error:
        raise _impossible(node, opset, str(error)) from error


@functools.lru_cache(maxsize=4096)
def _schema(op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    """The op as it is in `opset`; None where there is no such op."""
    try:
        return onnx.defs.get_schema(op_type, opset, ONNX)
    except onnx.defs.SchemaError:
        return None


def _since(op_type: str, opset: int) -> int:
    schema = _schema(op_type, opset)
    return 0 if schema is None else schema.since_version


@functools.lru_cache(maxsize=4096)
def _same_meaning(op_type: str, a: int, b: int) -> bool:
    """Whether the op differs between two opsets in nothing but the element types that it takes.

    ONNX's converter lacks many of these pairs (ConstantOfShape 20 to 19), and to ask it takes longer.
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
    """Whether the op only gained inputs and attributes that this node does not use (Split 18, Pad 18)."""
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
        raise _impossible(node, opset, "it holds graphs")
    if node.op_type == "Pad":
        _pad_all_axes(graph, node)
    present = graph.opset_imports[ONNX]
    proto = ir.to_proto(_alone(node, present))
    try:
        if _schema(node.op_type, opset) is None:
            proto = onnx.inliner.inline_selected_functions(proto, [(ONNX, node.op_type)], inline_schema_functions=True)
        proto = onnx.version_converter.convert_version(proto, opset)
    except RuntimeError as error:
        unknown = "No Adapter" in str(error)
        if unknown and _uses_nothing_new(node, _schema(node.op_type, present), _schema(node.op_type, opset)):
            return _stays(node, opset)
        raise _impossible(node, opset, str(error).rpartition("failed: ")[2]) from error
    return _splice(graph, node, ir.from_proto(proto).graph)


def _pad_all_axes(graph: ir.Graph, node: ir.Node) -> None:
    """Writes Pad of some axes (18) as Pad of all: widths of 0 at the others. `pads` may be computed."""
    x, pads = node.inputs[:2]
    given = node.inputs[3] if len(node.inputs) > 3 else None
    axes = None if given is None else _constant(given, "axes")
    if axes is None or x is None or x.shape is None or pads is None:
        return
    rank, count = len(x.shape), axes.size
    places = [2 * count] * (2 * rank)  # of each width in pads and a 0 after them
    for place, axis in enumerate(axes.numpy().reshape(-1).tolist()):
        places[axis % rank], places[axis % rank + rank] = place, place + count
    zero, index = (
        _constant_node(np.array(c, np.int64), f"{node.name}/{n}") for c, n in (([0], "zero"), (places, "at"))
    )
    joined = ir.Node(ONNX, "Concat", [pads, zero.outputs[0]], [ir.AttrInt64("axis", 0)], name=f"{node.name}/Concat")
    picked = ir.Node(ONNX, "Gather", [joined.outputs[0], index.outputs[0]], name=f"{node.name}/pads")
    for new, size in ((joined, 2 * count + 1), (picked, 2 * rank)):
        value = new.outputs[0]
        value.name, value.type, value.shape = new.name, pads.type, ir.Shape([size])
        new.metadata_props.update(node.metadata_props)
    graph.insert_before(node, [zero, index, joined, picked])
    node.replace_input_with(1, picked.outputs[0])
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


def _impossible(node: ir.Node, opset: int, reason: str) -> OptionError:
    return OptionError(
        f"{traversal.describe(node)} cannot be written in opset {opset}: {reason}",
        traversal.origin(node),
        todo=f"ask for a newer opset, at most {NEWEST} (ORTMODULE_ONNX_OPSET_VERSION)",
    )


def _alone(node: ir.Node, opset: int) -> ir.Model:
    """A model of this node only: inputs `i0`, `i1`, ... by position, outputs `o0`, `o1`, ...; constants are known."""
    inputs: list[ir.Value | None] = []
    for index, value in enumerate(node.inputs):
        alone = None if value is None else ir.Value(name=f"i{index}", type=value.type, shape=value.shape)
        if alone is not None and value is not None:
            alone.const_value = _constant(value, f"i{index}")
        inputs.append(alone)
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
        name="alone",
    )
    return ir.Model(graph, ir_version=10)


def _constant(value: ir.Value, name: str) -> ir.TensorProtocol | None:
    """The elements of an initializer or of a Constant node's output, where they are few: a converter may need axes."""
    tensor = value.const_value
    producer = value.producer()
    if producer is not None and producer.op_type == "Constant" and "value" in producer.attributes:
        tensor = producer.attributes["value"].as_tensor()
    if tensor is None or tensor.size > 64:
        return None
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)


def _splice(graph: ir.Graph, node: ir.Node, converted: ir.Graph) -> None:
    """Puts the nodes of `converted` in the place of `node`."""
    values: dict[ir.Value, ir.Value] = {}
    added = list(_constants(converted, node, values))
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


def _constants(converted: ir.Graph, node: ir.Node, values: traversal.ValueMap) -> Iterator[ir.Node]:
    """Maps the inputs of `converted` to those of `node`, and yields Constant nodes for what the converter added."""
    for value in (*converted.inputs, *converted.initializers.values()):
        name = str(value.name)
        original = node.inputs[int(name[1:])] if name[:1] == "i" and name[1:].isdigit() else None
        if original is None:
            assert value.const_value is not None
            constant = _constant_node(value.const_value.numpy(), f"{node.name}/{name}")
            original = constant.outputs[0]
            yield constant
        values[value] = original
