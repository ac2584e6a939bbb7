"""Leaves axes apart that are merged only to be split again.

    before   Reshape(Transpose(Reshape(x[s, b, h*e] -> [s, b*h, e])) -> [b*h, s, e]) -> [b, h, s, e]
    after    Transpose(Reshape(x[s, b, h*e] -> [s, b, h, e])) -> [b, h, s, e]

    before   Reshape(Linear(Reshape(x[s, b, h, e] -> [s*b, h*e])) -> [s*b, n]) -> [s, b, n]
    after    Linear(Reshape(x[s, b, h, e] -> [s, b, h*e])) -> [s, b, n]

`nn.MultiheadAttention` merges in both ways. Apart, each axis is found by the passes behind that ask what becomes of it,
and there are fewer views.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Sizes
from onnxtrain.graph.values import rank_of, set_type
from onnxtrain.ops import builder, definition_of, view
from onnxtrain.ops.reshape.dims import TRANSPOSE, perm_of
from onnxtrain.ops.reshape.shape import RESHAPE, factored, reshaped
from onnxtrain.passes.changes import Changes, counted
from onnxtrain.passes.rewriting import nodes_before, only_user


class _Step(NamedTuple):
    """A node that the merged axis passes: the one of its inputs that has it, and where it stands there."""

    node: ir.Node
    input: int
    axis: int


class _Merged(NamedTuple):
    """An axis that `first` merges, that passes `steps`, and that `last` splits into `parts` again.

    Attributes:
        axis: where it stands in the result of `first`.
    """

    first: ir.Node
    axis: int
    steps: list[_Step]
    last: ir.Node
    parts: Sizes


def cancel_axis_merges(graph: ir.Graph, changes: Changes) -> None:
    """Leaves axes of `graph` apart that a Reshape merges and another splits; a result of the module stays a view."""
    op = builder(graph)
    done = 0
    for node in list(graph):
        if view(node).definition is RESHAPE and not node.outputs[0].is_graph_output():
            found = next(_merged_before(node), None)
            if found is not None:
                _leave_apart(op, found)
                done += 1
    if done:
        changes.applied.append(f"left axes apart at {counted(done, 'place')} where they were merged and split again")


def _merged_before(last: ir.Node) -> Iterator[_Merged]:
    """The axes that a Reshape splits, and that another one merged of the same parts."""
    value, result = view(last).x, last.outputs[0]
    left, right = factored(sizes.dims_of(value), sizes.dims_of(result))
    for axis, names in enumerate(map(_names, left)):
        if len(names) > 1:
            parts = tuple(size for size, name in zip(sizes.dims_of(result), right, strict=True) if name in names)
            found = _walk(last, value, axis, parts)
            if found is not None:
                yield found


def _names(factor: str) -> list[str]:
    return factor.strip("()").split()


def _walk(last: ir.Node, value: ir.Value, axis: int, parts: Sizes) -> _Merged | None:
    steps: list[_Step] = []
    reader = last
    while only_user(value) is reader:
        node = value.producer()
        if node is None:
            return None
        if view(node).definition is RESHAPE:
            source, merged = sizes.dims_of(view(node).x), sizes.dims_of(value)
            apart = _keeps(source, _with_parts(merged, axis, parts), axis, len(parts))
            return _Merged(node, axis, steps[::-1], last, parts) if apart and not _keeps(source, merged, axis) else None
        step = _passed(node, axis)
        if step is None:
            return None
        steps.append(step)
        before = node.inputs[step.input]
        assert before is not None
        reader, value, axis = node, before, step.axis
    return None


def _keeps(source: Sizes, target: Sizes, axis: int, count: int = 1) -> bool:
    """Whether each of `count` axes of a Reshape's result is an axis of its input, or a part of one."""
    left, right = factored(source, target)
    known = {name for factor in left if factor != "1" for name in _names(factor)}
    return known.issuperset(right[axis : axis + count])


def _with_parts(shape: Sizes, axis: int, parts: Sizes) -> Sizes:
    return (*shape[:axis], *parts, *shape[axis + 1 :])


def _passed(node: ir.Node, axis: int) -> _Step | None:
    """Where an axis of the only result comes from, if the node takes any axes in its place."""
    n = view(node)
    if n.definition is TRANSPOSE:
        return _Step(node, 0, perm_of(n)[axis])
    axis_map = n.definition.axis_map(node)
    if axis_map is None or n.definition.effects or len(node.outputs) != 1 or "axis" in n.definition.attributes:
        return None
    output = axis_map.outputs[0]
    name = None if output is None else output.axis_factors(rank_of(node.outputs[0]))[axis]
    if name is None or len(name) != 1 or not name[0].startswith("..."):
        return None
    found = [
        _Step(node, index, names.index(name))
        for index, (value, operand) in enumerate(zip(node.inputs, axis_map.inputs, strict=True))
        if value is not None and operand is not None and name in (names := operand.axis_factors(rank_of(value)))
    ]
    return found[0] if len(found) == 1 else None


def _leave_apart(op: Builder, merged: _Merged) -> None:
    first, last, count = merged.first, merged.last, len(merged.parts)
    result = first.outputs[0]
    with nodes_before(op, first):
        value = reshaped(op, view(first).x, _with_parts(sizes.dims_of(result), merged.axis, merged.parts))
    for node, at, axis in merged.steps:
        if view(node).definition is TRANSPOSE:
            node.attributes["perm"] = ir.AttrInt64s("perm", _widened(perm_of(view(node)), axis, count))
        node.replace_input_with(at, value)
        value = node.outputs[0]
        for output, type_ in zip(node.outputs, definition_of(node).output_types(node), strict=True):
            set_type(output, type_)
    with nodes_before(op, last):
        value = reshaped(op, value, sizes.dims_of(last.outputs[0]))
    last.outputs[0].replace_all_uses_with(value)
    op.graph.remove(last, safe=True)
    op.graph.remove(first, safe=True)


def _widened(perm: tuple[int, ...], axis: int, count: int) -> list[int]:
    """The permutation where `count` axes stand in the place of one of its input."""
    places = {p: [p if p < axis else p + count - 1] for p in perm}
    places[axis] = list(range(axis, axis + count))
    return [place for p in perm for place in places[p]]
