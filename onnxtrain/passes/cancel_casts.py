"""Cancel casts around data movement, and move tensors in the narrower of two types.

    before   Cast(Reshape(Cast(x, float32)), bfloat16)                    of x in bfloat16
    after    Reshape(x)
    before   a, b = Split(Cast(x, float32));  Cast(a, bfloat16);  Cast(b, bfloat16)
    after    a, b = Split(x)
    before   Cast(Concat(a, b), bfloat16)                                 of a and b in float32
    after    Concat(Cast(a, bfloat16), Cast(b, bfloat16))                 copies half of the bytes
    before   Concat(Cast(a, float32), Cast(b, float32))
    after    Cast(Concat(a, b), float32)

Autocast leaves such casts. Rounding does not change, forward or backward: the ops in between only move elements, each
at most once (`moved_inputs`), and the wide tensors have no other users, so that their gradients are not sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.alias import view_source
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, dtype_of, is_float, set_type
from onnxtrain.ops import builder, definition_of
from onnxtrain.ops.elementwise.copies import CAST
from onnxtrain.passes.changes import Changes, counted
from onnxtrain.passes.rewriting import nodes_before, only_user, reaches_output


def cancel_casts(graph: ir.Graph, changes: Changes) -> None:
    """Remove casts of `graph` that cancel, and move those that are cheaper elsewhere."""
    op = builder(graph)
    removed = moved = 0
    worklist = deque(graph)
    while worklist:
        node = worklist.popleft()
        if node.graph is not graph:
            continue
        if not _narrows(node) or reaches_output(node.outputs[0]):
            moved += _sink_widening_casts(op, node)
        elif (region := _wide_region(node)) is not None:
            removed += region.narrow_down(graph)
        else:
            casts = _hoist_narrowing_cast(op, node)
            worklist += casts
            moved += bool(casts)
    if removed:
        changes.applied.append(f"removed {counted(removed, 'cast')} without effect on rounding")
    if moved:
        changes.applied.append(f"moved {counted(moved, 'cast')} to copy fewer bytes")


# Casts that cancel


@dataclass
class _WideRegion:
    """Nodes that move elements in a wide type, between casts from and to the type `narrow`."""

    narrow: ir.DataType
    movers: dict[ir.Node, None] = field(default_factory=dict)
    casts: dict[ir.Node, None] = field(default_factory=dict)

    def narrow_down(self, graph: ir.Graph) -> int:
        """Retype the nodes to the narrow type, remove the casts and return their number."""
        _retype(self.movers, self.narrow)
        for cast in self.casts:
            _remove(graph, cast)
        return len(self.casts)


def _wide_region(narrowing: ir.Node) -> _WideRegion | None:
    """Return the region between this cast and the widening casts that it cancels; None if the cast rounds."""
    region = _WideRegion(dtype_of(narrowing.outputs[0]))
    worklist, visited = [narrowing.inputs[0]], set[ir.Value]()
    while worklist:
        value = worklist.pop()
        if value is None or value in visited:
            continue
        visited.add(value)
        producer = value.producer()
        if producer is None or value.is_graph_output() or len(value.uses()) > 1:
            return None
        if moved := _moved_inputs(producer):
            region.movers[producer] = None
            worklist += [*moved, *producer.outputs]
        elif _widens(producer) and dtype_of(_source(producer)) == region.narrow:
            region.casts[producer] = None
        else:
            return None
        for use in value.uses():
            if (
                _narrows(use.node)
                and dtype_of(use.node.outputs[0]) == region.narrow
                and not reaches_output(use.node.outputs[0])
            ):
                region.casts[use.node] = None
            elif value in _moved_inputs(use.node):
                worklist += use.node.outputs
            else:
                return None
    return region


# Casts that are cheaper elsewhere


def _hoist_narrowing_cast(op: Builder, node: ir.Node) -> list[ir.Node]:
    """Narrow the inputs of a copy instead of its result, and return the new casts."""
    narrow, (copy, views) = dtype_of(node.outputs[0]), _before_views(_source(node), node)
    if copy is None or not _copies(copy):
        return []
    moved = set(_moved_inputs(copy))
    with nodes_before(op, copy):  # a cast per input: a value that is copied twice has two gradients to accumulate
        casts = {i: op.Cast(v, to=narrow) for i, v in enumerate(copy.inputs) if v in moved}
    for index, value in casts.items():
        copy.replace_input_with(index, value)
    _retype([copy, *views], narrow)
    _remove(op.graph, node)
    return [value.producer() for value in casts.values()]


def _sink_widening_casts(op: Builder, copy: ir.Node) -> bool:
    """Widen the result of a copy instead of its inputs; return whether that was possible."""
    if not _copies(copy) or reaches_output(copy.outputs[0]) or not copy.outputs[0].uses():
        return False
    sources = [_before_views(value, copy) for value in _moved_inputs(copy)]
    casts = [node for node, _ in sources if node is not None and _widens(node)]
    narrow = {dtype_of(_source(node)) for node in casts}
    if len(casts) < len(sources) or len(narrow) != 1:
        return False
    result = copy.outputs[0]
    wide, uses = dtype_of(result), list(result.uses())
    for node in casts:
        _remove(op.graph, node)
    _retype([copy, *(view for _, views in sources for view in views)], narrow.pop())
    with nodes_before(op, uses[0].node):
        widened = op.Cast(result, to=wide)
    for use in uses:
        use.node.replace_input_with(use.idx, widened)
    return True


def _before_views(value: ir.Value, user: ir.Node) -> tuple[ir.Node | None, list[ir.Node]]:
    """Return the producer of `value` before a chain of views, and the views; None if a value has another user."""
    views: list[ir.Node] = []
    while len(value.uses()) == 1 and only_user(value) is user:
        node = value.producer()
        if node is None or view_source(node, 0, definition_of(node)) is None:
            return node, views
        if len(node.outputs) > 1 or len(_moved_inputs(node)) != 1:
            return None, []
        views.append(node)
        (value,), user = _moved_inputs(node), node
    return None, []


# Properties of nodes


def _moved_inputs(node: ir.Node) -> list[ir.Value]:
    """Return the inputs whose elements the node only moves; none if it computes."""
    definition = definition_of(node)
    return [
        v for i, v in enumerate(node.inputs) if v is not None and definition.input_name(i) in definition.moved_inputs
    ]


def _retype(nodes: Iterable[ir.Node], dtype: ir.DataType) -> None:
    for node in nodes:
        for value in node.outputs:
            set_type(value, TensorType(dtype, sizes.dims_of(value)))


def _remove(graph: ir.Graph, node: ir.Node) -> None:
    """Replace the result of a cast by its input."""
    node.outputs[0].replace_all_uses_with(_source(node))
    graph.remove(node, safe=True)


def _copies(node: ir.Node) -> bool:
    """Return whether a node moves elements to one new tensor."""
    return bool(_moved_inputs(node)) and len(node.outputs) == 1 and 0 not in definition_of(node).aliases


def _source(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    assert value is not None
    return value


def _widening(node: ir.Node) -> int:
    """Return by how many bytes a floating-point cast widens each element; 0 for any other node."""
    if definition_of(node) is not CAST:
        return 0
    source, result = dtype_of(_source(node)), dtype_of(node.outputs[0])
    return int(result.itemsize - source.itemsize) if is_float(source) and is_float(result) else 0


def _widens(node: ir.Node) -> bool:
    return _widening(node) > 0


def _narrows(node: ir.Node) -> bool:
    return _widening(node) < 0
