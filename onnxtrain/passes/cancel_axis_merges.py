"""Cancel merges of axes that are split again later.

    before   Reshape(Transpose(Reshape(x[s, b, h*e] -> [s, b*h, e])) -> [b*h, s, e]) -> [b, h, s, e]
    after    Transpose(Reshape(x[s, b, h*e] -> [s, b, h, e])) -> [b, h, s, e]

    before   Reshape(Linear(Reshape(x[s, b, h, e] -> [s*b, h*e])) -> [s*b, n]) -> [s, b, n]
    after    Linear(Reshape(x[s, b, h, e] -> [s, b, h*e])) -> [s, b, n]

`nn.MultiheadAttention` merges axes in both ways. Without the merges there are fewer views, and later passes can follow
each axis by axis maps.
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
from onnxtrain.ops.body_parts import reshaped
from onnxtrain.ops.reshape.dims import TRANSPOSE, perm_of
from onnxtrain.ops.reshape.shape import RESHAPE, factored
from onnxtrain.passes.changes import Changes, counted
from onnxtrain.passes.rewriting import nodes_before, only_user


class _Step(NamedTuple):
    """A node that the merged axis passes through, with the index of its input that has it and the axis there."""

    node: ir.Node
    input: int
    axis: int


class _MergedAxis(NamedTuple):
    """An axis that the Reshape `first` merges, that passes `steps`, and that `last` splits into `parts` again.

    Attributes:
        axis: its index in the result of `first`.
    """

    first: ir.Node
    axis: int
    steps: list[_Step]
    last: ir.Node
    parts: Sizes


def cancel_axis_merges(graph: ir.Graph, changes: Changes) -> None:
    """Cancel pairs of Reshapes of `graph` that merge and split the same axes; a module output remains a view."""
    op = builder(graph)
    cancelled = 0
    for node in list(graph):
        if view(node).definition is RESHAPE and not node.outputs[0].is_graph_output():
            merged = next(_merged_axes(node), None)
            if merged is not None:
                _unmerge(op, merged)
                cancelled += 1
    if cancelled:
        changes.applied.append(f"cancelled {counted(cancelled, 'merge')} of axes that were split again")


def _merged_axes(last: ir.Node) -> Iterator[_MergedAxis]:
    """Yield the axes that a Reshape splits into the parts from which another Reshape merged them."""
    value, result = view(last).x, last.outputs[0]
    left, right = factored(sizes.dims_of(value), sizes.dims_of(result))
    for axis, names in enumerate(map(_names, left)):
        if len(names) > 1:
            parts = tuple(size for size, name in zip(sizes.dims_of(result), right, strict=True) if name in names)
            merged = _walk_to_merge(last, value, axis, parts)
            if merged is not None:
                yield merged


def _names(factor: str) -> list[str]:
    return factor.strip("()").split()


def _walk_to_merge(last: ir.Node, value: ir.Value, axis: int, parts: Sizes) -> _MergedAxis | None:
    steps: list[_Step] = []
    user = last
    while only_user(value) is user:
        node = value.producer()
        if node is None:
            return None
        if view(node).definition is RESHAPE:
            source, merged = sizes.dims_of(view(node).x), sizes.dims_of(value)
            keeps_parts = _keeps_axes(source, _with_parts(merged, axis, parts), axis, len(parts))
            if not keeps_parts or _keeps_axes(source, merged, axis):
                return None
            return _MergedAxis(node, axis, steps[::-1], last, parts)
        step = _step_through(node, axis)
        if step is None:
            return None
        steps.append(step)
        before = node.inputs[step.input]
        assert before is not None
        user, value, axis = node, before, step.axis
    return None


def _keeps_axes(source: Sizes, target: Sizes, axis: int, count: int = 1) -> bool:
    """Return whether each of `count` axes of a Reshape's result is an axis of its input, or a part of one."""
    left, right = factored(source, target)
    factors = {name for factor in left if factor != "1" for name in _names(factor)}
    return factors.issuperset(right[axis : axis + count])


def _with_parts(shape: Sizes, axis: int, parts: Sizes) -> Sizes:
    return (*shape[:axis], *parts, *shape[axis + 1 :])


def _step_through(node: ir.Node, axis: int) -> _Step | None:
    """Return where an axis of the only result comes from, if the node also accepts several axes in its place."""
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
    steps = [
        _Step(node, index, names.index(name))
        for index, (value, operand) in enumerate(zip(node.inputs, axis_map.inputs, strict=True))
        if value is not None and operand is not None and name in (names := operand.axis_factors(rank_of(value)))
    ]
    return steps[0] if len(steps) == 1 else None


def _unmerge(op: Builder, merged: _MergedAxis) -> None:
    first, last, count = merged.first, merged.last, len(merged.parts)
    result = first.outputs[0]
    # Before any type changes: perm_of compares a permutation with the rank of its input.
    perms = {
        step.node: _expand_axis(perm_of(view(step.node)), step.axis, count)
        for step in merged.steps
        if view(step.node).definition is TRANSPOSE
    }
    with nodes_before(op, first):
        value = reshaped(op, view(first).x, _with_parts(sizes.dims_of(result), merged.axis, merged.parts))
    for node, index, _ in merged.steps:
        if node in perms:
            node.attributes["perm"] = ir.AttrInt64s("perm", perms[node])
        node.replace_input_with(index, value)
        value = node.outputs[0]
        for output, type_ in zip(node.outputs, definition_of(node).output_types(node), strict=True):
            set_type(output, type_)
    with nodes_before(op, last):
        value = reshaped(op, value, sizes.dims_of(last.outputs[0]))
    last.outputs[0].replace_all_uses_with(value)
    op.graph.remove(last, safe=True)
    op.graph.remove(first, safe=True)


def _expand_axis(perm: tuple[int, ...], axis: int, count: int) -> list[int]:
    """Return the permutation with `count` axes in place of input axis `axis`."""
    expanded = {p: [p if p < axis else p + count - 1] for p in perm}
    expanded[axis] = list(range(axis, axis + count))
    return [new for p in perm for new in expanded[p]]
