"""Slice: part of a tensor; its gradient SliceGrad; SliceScatter, which writes part of a tensor; Flip.

    Slice(x, starts, ends, axes, steps) -> y               x[.., start:end:step, ..] along each of `axes`
    Flip(x, axes) -> y                                     x backwards along `axes`
    SliceGrad(dy, shape, starts, ends, axes, steps) -> dx  zeros of `shape`, dy where y was taken from
    SliceScatter(x, updates, starts, ends, axes, steps)    x, with `updates` where Slice would read

A bound below 0 counts from the end, bounds outside the axis are clamped to it; with a negative step the slice runs
backwards. Flip is such a slice of whole axes: an op of its own, because it copies where a forward slice is a view. A
symbolic bound is a position: PyTorch's guards say that it is not negative, unless it is provably so.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import MICROSOFT, OWN, TensorType, dtype_of, rank_of
from onnxtrain.ops.body_parts import cast, int64_vector
from onnxtrain.ops.constructors import same_as
from onnxtrain.ops.definition import REQUIRED, Call, NodeView
from onnxtrain.ops.reshape.dims import expanded, squeezed, swapped, unsqueezed
from onnxtrain.ops.reshape.movement import axis_names, checked_axis, constant_ints, define_movement, format_axis_map
from onnxtrain.ops.reshape.rows import arange, scatter_rows, zeros
from onnxtrain.ops.symbolic_ints import required_ints

_LAST = 2**63 - 1  # as an end: to the last element
_BEFORE_FIRST = -(2**63)  # as an end of a backward slice: to the first element
_BACKWARDS = (-1, _BEFORE_FIRST, -1)  # all of an axis


def _axes(n: NodeView, rank: int) -> tuple[int, ...]:
    if n.axes is None:
        return tuple(range(len(required_ints(n.starts, "the starts of Slice"))))
    return tuple(checked_axis(a, rank, "an axis of Slice") for a in constant_ints(n.axes, "the axes of Slice"))


def _steps(n: NodeView, count: int) -> tuple[int, ...]:
    steps = (1,) * count if n.steps is None else constant_ints(n.steps, "the steps of Slice")
    if 0 in steps:
        raise GraphError("Slice by steps of 0")
    return steps


def _bounds(n: NodeView, rank: int) -> list[tuple[int, Size, Size, int]]:
    """(axis, start, end, step) of each sliced axis."""
    axes = _axes(n, rank)
    starts, ends = required_ints(n.starts, "the starts of Slice"), required_ints(n.ends, "the ends of Slice")
    return list(zip(axes, starts, ends, _steps(n, len(axes)), strict=True))


def _position(bound: Size, total: Size) -> Size:
    """A bound as a position in [0, total]."""
    if _from_the_end(bound):
        return sizes.maximum(0, sizes.add(bound, total))
    return sizes.minimum(bound, total)


def _from_the_end(bound: Size) -> bool:
    return bound != 0 and bool(sizes.parse(bound).is_nonpositive)


def _length(total: Size, start: Size, end: Size, step: int) -> Size:
    """How many elements of an axis of `total` elements a slice takes."""
    if isinstance(total, int) and isinstance(start, int) and isinstance(end, int):
        return len(range(total)[start:end:step])
    if (start, end, step) == _BACKWARDS:
        return total
    if step < 0:
        raise GraphError("a backward slice of a size that changes takes the whole axis", got=f"{start}:{end}:{step}")
    first = _position(start, total)
    span = sizes.subtract(total if end == _LAST else _position(end, total), first)
    return sizes.maximum(0, sizes.floor_divide(sizes.add(span, step - 1), step))


def _sliced_type(n: NodeView) -> Sequence[TensorType]:
    shape = list(sizes.dims_of(n.x))
    for axis, start, end, step in _bounds(n, len(shape)):
        shape[axis] = _length(shape[axis], start, end, step)
    return (TensorType(dtype_of(n.x), tuple(shape)),)


def _subscript(axes: Sequence[int], starts: Any, ends: Any, steps: Sequence[int]) -> tuple[slice, ...]:
    subscript = [slice(None)] * (max(axes, default=-1) + 1)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        whole = isinstance(end, int) and end == _LAST
        subscript[axis] = slice(start, None if whole else end, None if step == 1 else step)
    return tuple(subscript)


def _slice_backward(
    x: torch.Tensor, axes: Sequence[int], starts: Sequence[int], ends: Sequence[int], steps: Sequence[int]
) -> torch.Tensor:
    """A slice with negative steps, which torch's slices do not take: the same elements forwards, then flipped."""
    flipped = []
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        taken = range(x.size(axis))[start:end:step]
        low = min(taken, default=0)
        x = x[(slice(None),) * axis + (slice(low, low + 1 + abs(step) * (len(taken) - 1), abs(step)),)]
        if step < 0:
            flipped.append(axis)
    return torch.flip(x, flipped)


def _lower_slice(n: NodeView, x: Any, starts: Any, ends: Any, axes: Any, steps: Any) -> Call:
    bounds = _bounds(n, rank_of(n.x))
    places, by = [b[0] for b in bounds], [b[3] for b in bounds]
    if all(step > 0 for step in by):
        return Call(operator.getitem, x, _subscript(places, starts, ends, by))
    return Call(_slice_backward, x, places, starts, ends, by)


def _slice_gradient(op: Builder, n: NodeView, dy: ir.Value) -> Sequence[ir.Value | None]:
    dx = op.ms.SliceGrad(dy, op.shape_of(n.x), n.starts, n.ends, n.axes, n.steps)
    return [dx, *[None] * (len(n.node.inputs) - 1)]


def _slice_axes(n: NodeView) -> str:
    cut = {bound[0] for bound in _bounds(n, rank_of(n.x))}
    words = axis_names("a", rank_of(n.x))
    inputs = [words, *[None] * (len(n.node.inputs) - 1)]
    return format_axis_map(inputs, [f"y{i}" if i in cut else word for i, word in enumerate(words)])


def _slice_on_host(n: NodeView, x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    if not all(isinstance(bound, int) for bound in (*starts, *ends)):
        raise GraphError("part of a shape is taken by numbers that change", got=f"{starts}:{ends}")
    return x[starts[0] : ends[0] : steps[0] if steps else 1] if starts else x


def sliced(op: Builder, x: ir.Value, axis: int, start: Size, end: Size, step: int = 1) -> ir.Value:
    """x[.., start:end:step, ..] along one axis."""
    result: ir.Value = op.Slice(x, *_how(op, axis, start, end, step))
    return result


def _how(op: Builder, axis: int, start: Size, end: Size, step: int) -> tuple[ir.Value, ...]:
    return op.sizes([start]), op.sizes([end]), int64_vector(op, [axis]), int64_vector(op, [step])


def _capture_slice(
    op: Builder, x: ir.Value, dim: int = 0, start: Size | None = None, end: Size | None = None, step: Any = 1
) -> ir.Value:
    """PyTorch's guards decide how long the result is, so its own sizes are taken."""
    axis = checked_axis(dim, rank_of(x), "the axis of a slice")
    _known_step(step)
    if op.out[0].shape == sizes.dims_of(x) and step == 1:
        return x  # as long as x: all of it
    how = _how(op, axis, 0 if start is None else start, _LAST if end is None else end, step)
    return op.node("", "Slice", (x, *how), {}, types=[op.out[0]]).outputs[0]


def _capture_narrow(op: Builder, x: ir.Value, dim: int, start: Size, length: Size) -> ir.Value:
    axis = checked_axis(dim, rank_of(x), "the axis of narrow")
    total = sizes.dims_of(x)[axis]
    first = sizes.add(total, start) if _from_the_end(start) else start
    how = _how(op, axis, first, sizes.add(first, length), 1)
    return op.node("", "Slice", (x, *how), {}, types=[op.out[0]]).outputs[0]


def _capture_select(op: Builder, x: ir.Value, dim: int, index: Size) -> ir.Value:
    """Slice and Squeeze: both are views, and a slice can move through other ops without changing the rank."""
    axis = checked_axis(dim, rank_of(x), "the axis of select")
    shape = sizes.dims_of(x)
    row = TensorType(dtype_of(x), (*shape[:axis], 1, *shape[axis + 1 :]))  # where there is none, PyTorch raises
    how = _how(op, axis, *_one_row(x, axis, index), 1)
    return squeezed(op, op.node("", "Slice", (x, *how), {}, types=[row]).outputs[0], axis)


def _one_row(x: ir.Value, axis: int, index: Size) -> tuple[Size, Size]:
    """The bounds of the slice that is this row."""
    if isinstance(index, str) and _from_the_end(index):
        index = sizes.add(sizes.dims_of(x)[axis], index)
    # -1 : 0 would be empty: the end of the last row is the end of the axis.
    return index, _LAST if index == -1 else sizes.add(index, 1)


SLICE = define_movement(
    "Slice",
    ("x", "starts", "ends", "axes?", "steps?"),
    _sliced_type,
    _lower_slice,
    _slice_gradient,
    takes_ints=frozenset({1, 2, 3, 4}),
    since_version=13,
    from_torch={
        "aten.slice.Tensor": _capture_slice,
        "aten.slice_copy.Tensor": _capture_slice,
        "aten.narrow.default": _capture_narrow,
        "aten.narrow_copy.default": _capture_narrow,
        "aten.select.int": _capture_select,
        "aten.select_copy.int": _capture_select,
    },
    axes=_slice_axes,
    view=True,
    host_eval=_slice_on_host,
    nondiff_inputs=frozenset({"starts", "ends", "axes", "steps"}),
    moved_inputs=frozenset({"x"}),
)


class Piece(NamedTuple):
    """Neighbouring rows of a tensor: `length` of them from `start` on, along `axis`."""

    axis: int
    start: Size
    length: Size


def piece_of(n: NodeView) -> Piece | None:
    """What a Slice takes, where that is neighbours along one axis."""
    bounds = _bounds(n, rank_of(n.x))
    if len(bounds) != 1 or bounds[0][3] != 1:
        return None
    axis, start, *_ = bounds[0]
    return Piece(axis, _position(start, sizes.dims_of(n.x)[axis]), sizes.dims_of(n.node.outputs[0])[axis])


# SliceGrad and SliceScatter: `updates` written into the part of a tensor that a slice reads.


def _write(
    target: torch.Tensor, updates: torch.Tensor, axes: Any, starts: Any, ends: Any, steps: Sequence[int]
) -> torch.Tensor:
    """Writes into `target`, which is fresh."""
    if all(step > 0 for step in steps):
        target[_subscript(axes, starts, ends, steps)] = updates
        return target
    backwards = [axis for axis, step in zip(axes, steps, strict=True) if step < 0]
    forwards = [slice(None)] * target.dim()
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        taken = range(target.size(axis))[start:end:step]
        low = min(taken, default=0)
        forwards[axis] = slice(low, low + 1 + abs(step) * (len(taken) - 1), abs(step))
    target[tuple(forwards)] = torch.flip(updates, backwards)
    return target


def _slice_grad(dy: torch.Tensor, shape: Any, axes: Any, starts: Any, ends: Any, steps: Any) -> torch.Tensor:
    return _write(dy.new_zeros(shape), dy, axes, starts, ends, steps)


def _slice_scatter(
    x: torch.Tensor, updates: torch.Tensor, axes: Any, starts: Any, ends: Any, steps: Any
) -> torch.Tensor:
    return _write(x.clone(), updates, axes, starts, ends, steps)


def _written_body(op: Builder, n: NodeView, base: ir.Value, updates: ir.Value) -> ir.Value:
    """From the last axis to the first: the rows that the slice takes of 0, 1, 2, … are written.

    With several axes, what is written along the first is a whole of zeros or of x with the others already written.
    """
    bounds = _bounds(n, rank_of(base))
    for depth in range(len(bounds), 0, -1):
        inner = base
        for axis, start, end, step in bounds[: depth - 1]:
            inner = sliced(op, inner, axis, start, end, step)
        axis, start, end, step = bounds[depth - 1]
        rows = sliced(op, arange(op, sizes.dims_of(base)[axis]), 0, start, end, step)
        updates = scatter_rows(op, inner, rows, updates, axis)
    return updates


def _slice_grad_body(op: Builder, n: NodeView) -> ir.Value:
    return _written_body(op, n, zeros(op, sizes.dims_of(n.dx), dtype_of(n.dy)), n.dy)


def _written_axes(n: NodeView, rank: int, inputs: list[bool]) -> str:
    cut = {bound[0] for bound in _bounds(n, rank)}
    whole = [f"[y{i}]" if i in cut else f"a{i}" for i in range(rank)]
    part = [f"[u{i}]" if i in cut else f"a{i}" for i in range(rank)]
    others = [None] * (len(n.node.inputs) - len(inputs))
    return format_axis_map([*(whole if is_whole else part for is_whole in inputs), *others], whole)


def _plain(n: NodeView, rank: int) -> tuple[list[int], list[int]]:
    bounds = _bounds(n, rank)
    return [b[0] for b in bounds], [b[3] for b in bounds]


def _lower_slice_grad(n: NodeView, dy: Any, shape: Any, starts: Any, ends: Any, axes: Any, steps: Any) -> Call:
    places, by = _plain(n, len(sizes.dims_of(n.dx)))
    return Call(_slice_grad, dy, shape, places, starts, ends, by)


SLICE_GRAD = define_movement(
    "SliceGrad",
    ("dy", "shape", "starts", "ends", "axes?", "steps?"),
    lambda n: (TensorType(dtype_of(n.dy), required_ints(n.shape, "the shape that SliceGrad gives")),),
    _lower_slice_grad,
    None,
    takes_ints=frozenset({1, 2, 3, 4, 5}),
    domain=MICROSOFT,
    outputs=("dx",),
    body=_slice_grad_body,
    axes=lambda n: _written_axes(n, len(sizes.dims_of(n.dx)), [False]),
    nondiff_inputs=frozenset({"shape", "starts", "ends", "axes", "steps"}),
)


def _lower_slice_scatter(n: NodeView, x: Any, updates: Any, starts: Any, ends: Any, axes: Any, steps: Any) -> Call:
    places, by = _plain(n, rank_of(n.x))
    return Call(_slice_scatter, x, updates, places, starts, ends, by)


def _slice_scatter_gradient(op: Builder, n: NodeView, dy: ir.Value) -> Sequence[ir.Value | None]:
    how = (n.starts, n.ends, n.axes, n.steps)
    dx = dupdates = None
    if n.wants("x"):
        nothing = op.Expand(op.scalar(0.0, like=dy), op.shape_of(n.updates))
        dx = op.own.SliceScatter(dy, nothing, *how)
    if n.wants("updates"):
        dupdates = op.Slice(dy, *how)
    return [dx, dupdates, *[None] * (len(n.node.inputs) - 2)]


def _capture_slice_scatter(
    op: Builder,
    x: ir.Value,
    src: ir.Value,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: Any = 1,
) -> ir.Value:
    axis = checked_axis(dim, rank_of(x), "the axis of slice_scatter")
    _known_step(step)
    src = cast(op, src, dtype_of(x))
    if sizes.dims_of(src) == sizes.dims_of(x) and step == 1:
        return src  # all of x is written
    how = _how(op, axis, 0 if start is None else start, _LAST if end is None else end, step)
    result: ir.Value = op.own.SliceScatter(x, src, *how)
    return result


def _capture_select_scatter(op: Builder, x: ir.Value, src: ir.Value, dim: int, index: Size) -> ir.Value:
    axis = checked_axis(dim, rank_of(x), "the axis of select_scatter")
    row = unsqueezed(op, cast(op, src, dtype_of(x)), axis)
    result: ir.Value = op.own.SliceScatter(x, row, *_how(op, axis, *_one_row(x, axis, index), 1))
    return result


def _known_step(step: Any) -> None:
    if not isinstance(step, int):
        raise GraphError("the step of a slice must be a number", got=str(step))


SLICE_SCATTER = define_movement(
    "SliceScatter",
    ("x", "updates", "starts", "ends", "axes?", "steps?"),
    lambda n: (TensorType(dtype_of(n.x), sizes.dims_of(n.x)),),
    _lower_slice_scatter,
    _slice_scatter_gradient,
    takes_ints=frozenset({2, 3, 4, 5}),
    domain=OWN,
    from_torch={
        "aten.slice_scatter.default": _capture_slice_scatter,
        "aten.select_scatter.default": _capture_select_scatter,
    },
    body=lambda op, n: _written_body(op, n, n.x, n.updates),
    axes=lambda n: _written_axes(n, rank_of(n.x), [True, False]),
    nondiff_inputs=frozenset({"starts", "ends", "axes", "steps"}),
)


# Flip: the axes `along` from their last element to their first


def _flip_body(op: Builder, n: NodeView) -> ir.Value:
    count = len(n.along)
    start, end, step = (int64_vector(op, [bound] * count) for bound in _BACKWARDS)
    result: ir.Value = op.Slice(n.x, start, end, int64_vector(op, n.along), step)
    return result


def _flip_axes(n: NodeView) -> str:
    words = axis_names("a", rank_of(n.x))
    return format_axis_map([words], [f"y{i}" if i in n.along else word for i, word in enumerate(words)])


def flipped(op: Builder, x: ir.Value, *axes: int) -> ir.Value:
    """Turns x around along its axes; gives x itself where there are none."""
    along = [checked_axis(a, rank_of(x), "an axis of flip") for a in axes]
    result: ir.Value = op.own.Flip(x, along=along) if along else x
    return result


def _capture_rot90(op: Builder, x: ir.Value, k: int = 1, dims: Sequence[int] = (0, 1)) -> ir.Value:
    """Quarter turns from the first axis towards the second."""
    first, second = (checked_axis(d, rank_of(x), "an axis of rot90") for d in dims)
    if k % 4 == 2:
        return flipped(op, x, first, second)
    if k % 4 == 1:
        return swapped(op, flipped(op, x, second), first, second)
    return flipped(op, swapped(op, x, first, second), second) if k % 4 else x


FLIP = define_movement(
    "Flip",
    ("x",),
    same_as("x"),
    lambda n, x: Call(torch.flip, x, n.along),
    lambda op, n, dy: op.own.Flip(dy, along=n.along),
    domain=OWN,
    attributes={"along": REQUIRED},
    from_torch={
        "aten.flip.default": lambda op, x, dims: flipped(op, x, *dims),
        "aten.fliplr.default": lambda op, x: flipped(op, x, 1),
        "aten.flipud.default": lambda op, x: flipped(op, x, 0),
        "aten.rot90.default": _capture_rot90,
    },
    body=_flip_body,
    axes=_flip_axes,
    moved_inputs=frozenset({"x"}),
)


def rolled(op: Builder, x: ir.Value, shift: Size, axis: int) -> ir.Value:
    """The elements of x moved forward by `shift` along an axis, the last ones to the front."""
    total = sizes.dims_of(x)[axis]
    # The size may be 0, where nothing is divided by it.
    at_least_one = sizes.maximum(1, total)
    forward = sizes.from_sympy(sizes.parse(shift) % sizes.parse(at_least_one))
    start = sizes.subtract(total, forward)
    result: ir.Value = op.Concat(sliced(op, x, axis, start, _LAST), sliced(op, x, axis, 0, start), axis=axis)
    return result


def repeated_rows(op: Builder, x: ir.Value, axis: int, count: Size) -> ir.Value:
    """Each row along `axis` `count` times, one after the other, under an axis of its own."""
    shape = sizes.dims_of(x)
    return expanded(op, unsqueezed(op, x, axis + 1), (*shape[: axis + 1], count, *shape[axis + 1 :]))
