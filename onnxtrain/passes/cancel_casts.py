"""Lets tensors be moved in the narrower of two types, as autocast does not.

    before   Cast(Reshape(Cast(x, float32)), bfloat16)                    of x in bfloat16
    after    Reshape(x)
    before   a, b = Split(Cast(x, float32));  Cast(a, bfloat16);  Cast(b, bfloat16)
    after    a, b = Split(x)
    before   Cast(Concat(a, b), bfloat16)                                 of a and b in float32
    after    Concat(Cast(a, bfloat16), Cast(b, bfloat16))                 half of the bytes are copied
    before   Concat(Cast(a, float32), Cast(b, float32))
    after    Cast(Concat(a, b), float32)

Nothing is rounded otherwise than before, forward or backward: the ops between move elements and compute none, give each
at most once (`moves` of their definitions), and nobody else reads the wide tensors, whose gradients are no sums then.
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
from onnxtrain.passes.rewriting import leaves, nodes_before, only_user


def cancel_casts(graph: ir.Graph, changes: Changes) -> None:
    """Removes casts of `graph` that others take back, and moves those that are cheaper elsewhere."""
    op = builder(graph)
    removed = moved = 0
    waiting = deque(graph)
    while waiting:
        node = waiting.popleft()
        if node.graph is not graph:
            continue
        if not _narrows(node) or leaves(node.outputs[0]):
            moved += _moved_down(op, node)
        elif (between := _between(node)) is not None:
            removed += between.retype(graph)
        else:
            casts = _moved_up(op, node)
            waiting += casts
            moved += bool(casts)
    if removed:
        changes.applied.append(f"removed {counted(removed, 'cast')}, which rounded nothing")
    if moved:
        changes.applied.append(f"moved {counted(moved, 'cast')}, so that fewer bytes are copied")


# Casts that are taken back


@dataclass
class _Between:
    """Nodes that move elements in a wide type, between casts from and to the type `narrow`."""

    narrow: ir.DataType
    movers: dict[ir.Node, None] = field(default_factory=dict)
    casts: dict[ir.Node, None] = field(default_factory=dict)

    def retype(self, graph: ir.Graph) -> int:
        """Lets all of them move the narrow type; returns how many casts went."""
        _retype(self.movers, self.narrow)
        for gone in self.casts:
            _remove(graph, gone)
        return len(self.casts)


def _between(narrowing: ir.Node) -> _Between | None:
    """All that lies between this cast and those that it takes back; None where it rounds."""
    found = _Between(dtype_of(narrowing.outputs[0]))
    waiting, seen = [narrowing.inputs[0]], set[ir.Value]()
    while waiting:
        value = waiting.pop()
        if value is None or value in seen:
            continue
        seen.add(value)
        producer = value.producer()
        if producer is None or value.is_graph_output() or len(value.uses()) > 1:
            return None
        if moved := _moved_by(producer):
            found.movers[producer] = None
            waiting += [*moved, *producer.outputs]
        elif _widens(producer) and dtype_of(_source(producer)) == found.narrow:
            found.casts[producer] = None
        else:
            return None
        for use in value.uses():
            if _narrows(use.node) and dtype_of(use.node.outputs[0]) == found.narrow and not leaves(use.node.outputs[0]):
                found.casts[use.node] = None
            elif value in _moved_by(use.node):
                waiting += use.node.outputs
            else:
                return None
    return found


# Casts that are cheaper elsewhere


def _moved_up(op: Builder, node: ir.Node) -> list[ir.Node]:
    """Narrows what a copy is made of, instead of the copy; returns the casts that do."""
    narrow, (copy, views) = dtype_of(node.outputs[0]), _behind_views(_source(node), node)
    if copy is None or not _copies(copy):
        return []
    moved = set(_moved_by(copy))
    with nodes_before(op, copy):  # one for each input: a value that is copied twice has two gradients to sum
        casts = {i: op.Cast(v, to=narrow) for i, v in enumerate(copy.inputs) if v in moved}
    for index, value in casts.items():
        copy.replace_input_with(index, value)
    _retype([copy, *views], narrow)
    _remove(op.graph, node)
    return [value.producer() for value in casts.values()]


def _moved_down(op: Builder, copy: ir.Node) -> bool:
    """Widens a copy, instead of what it is made of."""
    if not _copies(copy) or leaves(copy.outputs[0]) or not copy.outputs[0].uses():
        return False
    found = [_behind_views(value, copy) for value in _moved_by(copy)]
    casts = [node for node, _ in found if node is not None and _widens(node)]
    narrow = {dtype_of(_source(node)) for node in casts}
    if len(casts) < len(found) or len(narrow) != 1:
        return False
    result = copy.outputs[0]
    wide, readers = dtype_of(result), list(result.uses())
    for node in casts:
        _remove(op.graph, node)
    _retype([copy, *(view for _, views in found for view in views)], narrow.pop())
    with nodes_before(op, readers[0].node):
        widened = op.Cast(result, to=wide)
    for use in readers:
        use.node.replace_input_with(use.idx, widened)
    return True


def _behind_views(value: ir.Value, reader: ir.Node) -> tuple[ir.Node | None, list[ir.Node]]:
    """The node that gives `value`, but for views of it, and these; None where it has other readers than `reader`."""
    views: list[ir.Node] = []
    while len(value.uses()) == 1 and only_user(value) is reader:
        node = value.producer()
        if node is None or view_source(node, 0, definition_of(node)) is None:
            return node, views
        if len(node.outputs) > 1 or len(_moved_by(node)) != 1:
            return None, []
        views.append(node)
        (value,), reader = _moved_by(node), node
    return None, []


# What nodes do


def _moved_by(node: ir.Node) -> list[ir.Value]:
    """The tensors whose elements a node gives again; none where it computes."""
    definition = definition_of(node)
    return [v for i, v in enumerate(node.inputs) if v is not None and definition.input_name(i) in definition.moves]


def _retype(nodes: Iterable[ir.Node], dtype: ir.DataType) -> None:
    for node in nodes:
        for value in node.outputs:
            set_type(value, TensorType(dtype, sizes.dims_of(value)))


def _remove(graph: ir.Graph, node: ir.Node) -> None:
    """Lets what a cast reads take the place of its result."""
    node.outputs[0].replace_all_uses_with(_source(node))
    graph.remove(node, safe=True)


def _copies(node: ir.Node) -> bool:
    """Whether a node moves elements to one new tensor."""
    return bool(_moved_by(node)) and len(node.outputs) == 1 and 0 not in definition_of(node).aliases


def _source(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    assert value is not None
    return value


def _bytes(node: ir.Node) -> int:
    """By how many bytes a cast of floating numbers makes an element longer; 0 for any other node."""
    if definition_of(node) is not CAST:
        return 0
    source, result = dtype_of(_source(node)), dtype_of(node.outputs[0])
    return int(result.itemsize - source.itemsize) if is_float(source) and is_float(result) else 0


def _widens(node: ir.Node) -> bool:
    return _bytes(node) > 0


def _narrows(node: ir.Node) -> bool:
    return _bytes(node) < 0
