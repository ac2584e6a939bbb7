"""Slice, its gradient SliceGrad, SliceScatter and Flip.

    Slice(x, starts, ends, axes, steps) -> y               x[.., start:end:step, ..] along each of `axes`
    Flip(x, axes) -> y                                     x reversed along `axes`
    SliceGrad(dy, shape, starts, ends, axes, steps) -> dx  zeros of `shape`, with dy where Slice read
    SliceScatter(x, updates, starts, ends, axes, steps)    x, with `updates` where Slice would read

A negative bound counts from the end, and bounds outside the axis are clamped to it; a negative step slices backwards.
Flip is such a slice of whole axes. It is an op of its own because it copies, while a forward slice is a view. PyTorch's
guards ensure that a symbolic bound is not negative, unless it provably is.
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
from onnxtrain.ops.interfaces.element_formulas import ELEMENT_FORMULAS, Formula, FormulaOf, affine, integers
from onnxtrain.ops.reshape.dims import expanded, squeezed, swapped, unsqueezed
from onnxtrain.ops.reshape.movement import axis_names, checked_axis, constant_ints, define_movement, format_axis_map
from onnxtrain.ops.reshape.rows import arange, scatter_rows, zeros
from onnxtrain.ops.symbolic_ints import required_ints

_TO_LAST = 2**63 - 1  # as an end: including the last element
_TO_FIRST = -(2**63)  # as the end of a backward slice: including the first element
_WHOLE_BACKWARDS = (-1, _TO_FIRST, -1)  # start, end and step


def _axes(n: NodeView, rank: int) -> tuple[int, ...]:
    if n.axes is None:
        return tuple(range(len(required_ints(n.starts, "the starts of Slice"))))
    return tuple(checked_axis(a, rank, "an axis of Slice") for a in constant_ints(n.axes, "the axes of Slice"))


def _steps(n: NodeView, count: int) -> tuple[int, ...]:
    steps = (1,) * count if n.steps is None else constant_ints(n.steps, "the steps of Slice")
    if 0 in steps:
        raise GraphError("Slice: the step must not be 0", expected="positive or negative steps", got=str(steps))
    return steps


def _bounds(n: NodeView, rank: int) -> list[tuple[int, Size, Size, int]]:
    """Return (axis, start, end, step) of each sliced axis."""
    axes = _axes(n, rank)
    starts, ends = required_ints(n.starts, "the starts of Slice"), required_ints(n.ends, "the ends of Slice")
    return list(zip(axes, starts, ends, _steps(n, len(axes)), strict=True))


def _clamped(bound: Size, total: Size) -> Size:
    """Return a bound as an index in [0, total]."""
    if _counts_from_end(bound):
        return sizes.maximum(0, sizes.add(bound, total))
    return sizes.minimum(bound, total)


def _counts_from_end(bound: Size) -> bool:
    return bound != 0 and bool(sizes.parse(bound).is_nonpositive)


def _length(total: Size, start: Size, end: Size, step: int) -> Size:
    """Return the number of elements that a slice takes of `total`."""
    if isinstance(total, int) and isinstance(start, int) and isinstance(end, int):
        return len(range(total)[start:end:step])
    if (start, end, step) == _WHOLE_BACKWARDS:
        return total
    if step < 0:
        raise GraphError(
            "Slice: part of a dynamic dimension cannot be sliced backwards",
            expected="a step of -1 over the whole axis",
            got=f"{start}:{end}:{step}",
            todo="slice forwards, then flip",
        )
    first = _clamped(start, total)
    span = sizes.subtract(total if end == _TO_LAST else _clamped(end, total), first)
    return sizes.maximum(0, sizes.floor_divide(sizes.add(span, step - 1), step))


def _sliced_type(n: NodeView) -> Sequence[TensorType]:
    shape = list(sizes.dims_of(n.x))
    for axis, start, end, step in _bounds(n, len(shape)):
        shape[axis] = _length(shape[axis], start, end, step)
    return (TensorType(dtype_of(n.x), tuple(shape)),)


def _subscript(axes: Sequence[int], starts: Any, ends: Any, steps: Sequence[int]) -> tuple[slice, ...]:
    subscript = [slice(None)] * (max(axes, default=-1) + 1)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        to_last = isinstance(end, int) and end == _TO_LAST
        subscript[axis] = slice(start, None if to_last else end, None if step == 1 else step)
    return tuple(subscript)


def _slice_and_flip(
    x: torch.Tensor, axes: Sequence[int], starts: Sequence[int], ends: Sequence[int], steps: Sequence[int]
) -> torch.Tensor:
    """Slice with negative steps, which torch's slices do not support: slice forwards, then flip."""
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        x = x[(slice(None),) * axis + (_forward_slice(x.size(axis), start, end, step),)]
    return torch.flip(x, [axis for axis, step in zip(axes, steps, strict=True) if step < 0])


def _forward_slice(total: int, start: int, end: int, step: int) -> slice:
    """Return the slice with a positive step that takes the same elements."""
    indices = range(total)[start:end:step]
    first = min(indices, default=0)
    return slice(first, first + 1 + abs(step) * (len(indices) - 1), abs(step))


def _lower_slice(n: NodeView, x: Any, starts: Any, ends: Any, axes: Any, steps: Any) -> Call:
    bounds = _bounds(n, rank_of(n.x))
    axis_list, step_list = [b[0] for b in bounds], [b[3] for b in bounds]
    if all(step > 0 for step in step_list):
        return Call(operator.getitem, x, _subscript(axis_list, starts, ends, step_list))
    return Call(_slice_and_flip, x, axis_list, starts, ends, step_list)


def _slice_gradient(op: Builder, n: NodeView, dy: ir.Value) -> Sequence[ir.Value | None]:
    dx = op.ms.SliceGrad(dy, op.shape_of(n.x), n.starts, n.ends, n.axes, n.steps)
    return [dx, *[None] * (len(n.node.inputs) - 1)]


def _slice_axes(n: NodeView) -> str:
    sliced_axes = {bound[0] for bound in _bounds(n, rank_of(n.x))}
    names = axis_names("a", rank_of(n.x))
    inputs = [names, *[None] * (len(n.node.inputs) - 1)]
    return format_axis_map(inputs, [f"y{i}" if i in sliced_axes else name for i, name in enumerate(names)])


def _slice_on_host(n: NodeView, x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    if not all(isinstance(bound, int) for bound in (*starts, *ends)):
        raise GraphError(
            "Slice: part of a shape must be taken with constant bounds", expected="integers", got=f"{starts}:{ends}"
        )
    return x[starts[0] : ends[0] : steps[0] if steps else 1] if starts else x


def sliced(op: Builder, x: ir.Value, axis: int, start: Size, end: Size, step: int = 1) -> ir.Value:
    """Return x[.., start:end:step, ..], sliced along one axis."""
    return op.Slice(x, *_slice_inputs(op, axis, start, end, step))


def _slice_inputs(op: Builder, axis: int, start: Size, end: Size, step: int) -> tuple[ir.Value, ...]:
    return op.sizes([start]), op.sizes([end]), int64_vector(op, [axis]), int64_vector(op, [step])


def _capture_slice(
    op: Builder, x: ir.Value, dim: int = 0, start: Size | None = None, end: Size | None = None, step: Any = 1
) -> ir.Value:
    """Capture a slice with PyTorch's output type: its guards decide how long the result is."""
    axis = checked_axis(dim, rank_of(x), "the axis of a slice")
    _check_step(step)
    if op.out[0].shape == sizes.dims_of(x) and step == 1:
        return x  # as long as x: the whole axis
    slice_inputs = _slice_inputs(op, axis, 0 if start is None else start, _TO_LAST if end is None else end, step)
    return op.node("", "Slice", (x, *slice_inputs), {}, types=[op.out[0]]).outputs[0]


def _capture_narrow(op: Builder, x: ir.Value, dim: int, start: Size, length: Size) -> ir.Value:
    axis = checked_axis(dim, rank_of(x), "the axis of narrow")
    total = sizes.dims_of(x)[axis]
    first = sizes.add(total, start) if _counts_from_end(start) else start
    slice_inputs = _slice_inputs(op, axis, first, sizes.add(first, length), 1)
    return op.node("", "Slice", (x, *slice_inputs), {}, types=[op.out[0]]).outputs[0]


def _capture_select(op: Builder, x: ir.Value, dim: int, index: Size) -> ir.Value:
    """Capture a Slice and a Squeeze: both are views, and a Slice moves through other ops, as it keeps the rank."""
    axis = checked_axis(dim, rank_of(x), "the axis of select")
    shape = sizes.dims_of(x)
    row = TensorType(dtype_of(x), (*shape[:axis], 1, *shape[axis + 1 :]))  # PyTorch raises if there is none
    slice_inputs = _slice_inputs(op, axis, *_row_bounds(x, axis, index), 1)
    return squeezed(op, op.node("", "Slice", (x, *slice_inputs), {}, types=[row]).outputs[0], axis)


def _row_bounds(x: ir.Value, axis: int, index: Size) -> tuple[Size, Size]:
    """Return start and end of the slice of one row."""
    if isinstance(index, str) and _counts_from_end(index):
        index = sizes.add(sizes.dims_of(x)[axis], index)
    # -1 : 0 would be empty: the last row ends at the end of the axis.
    return index, _TO_LAST if index == -1 else sizes.add(index, 1)


SLICE = define_movement(
    "Slice",
    ("x", "starts", "ends", "axes?", "steps?"),
    _sliced_type,
    _lower_slice,
    _slice_gradient,
    host_inputs=frozenset({1, 2, 3, 4}),
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


@ELEMENT_FORMULAS.implements(SLICE)
def _slice_formula(n: NodeView, formula_of: FormulaOf) -> Formula | None:
    formula, starts, axes = affine(formula_of, n.x), integers(n.starts), integers(n.axes)
    has_steps = n.steps is not None and set(integers(n.steps) or ()) != {1}
    if formula is None or starts is None or axes is None or min(starts) < 0 or has_steps:
        return None
    lengths = [sizes.dims_of(n.x)[axis] for axis in axes]
    if any(isinstance(length, int) and start > length for start, length in zip(starts, lengths, strict=True)):
        return None  # it is clamped
    shift = sum(start * formula.coefficients[axis] for start, axis in zip(starts, axes, strict=True))
    return formula.shifted(shift)


class RowRange(NamedTuple):
    """Adjacent rows of a tensor along `axis`: `length` rows from `start` on."""

    axis: int
    start: Size
    length: Size


def row_range_of(n: NodeView) -> RowRange | None:
    """Return the rows that a Slice takes; None if they are not adjacent rows along one axis."""
    bounds = _bounds(n, rank_of(n.x))
    if len(bounds) != 1 or bounds[0][3] != 1:
        return None
    axis, start, *_ = bounds[0]
    return RowRange(axis, _clamped(start, sizes.dims_of(n.x)[axis]), sizes.dims_of(n.node.outputs[0])[axis])


# SliceGrad and SliceScatter write `updates` into the part of a tensor that a Slice would read.


def _write_slice(
    target: torch.Tensor, updates: torch.Tensor, axes: Any, starts: Any, ends: Any, steps: Sequence[int]
) -> torch.Tensor:
    """Write into `target` in place."""
    if all(step > 0 for step in steps):
        target[_subscript(axes, starts, ends, steps)] = updates
        return target
    subscript = [slice(None)] * target.dim()
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        subscript[axis] = _forward_slice(target.size(axis), start, end, step)
    backward_axes = [axis for axis, step in zip(axes, steps, strict=True) if step < 0]
    target[tuple(subscript)] = torch.flip(updates, backward_axes)
    return target


def _slice_grad(dy: torch.Tensor, shape: Any, axes: Any, starts: Any, ends: Any, steps: Any) -> torch.Tensor:
    return _write_slice(dy.new_zeros(shape), dy, axes, starts, ends, steps)


def _slice_scatter(
    x: torch.Tensor, updates: torch.Tensor, axes: Any, starts: Any, ends: Any, steps: Any
) -> torch.Tensor:
    return _write_slice(x.clone(), updates, axes, starts, ends, steps)


def _scatter_body(op: Builder, n: NodeView, base: ir.Value, updates: ir.Value) -> ir.Value:
    """Scatter the rows of each sliced axis, from the last axis to the first.

    The slice of 0, 1, 2, … lists the rows of an axis. Along each axis the rows are written to `base`, sliced along the
    axes before it.
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
    return _scatter_body(op, n, zeros(op, sizes.dims_of(n.dx), dtype_of(n.dy)), n.dy)


def _scatter_axes(n: NodeView, rank: int, inputs_are_whole: list[bool]) -> str:
    """Return the axis map, given which of the first inputs have the output's sizes; the others are sliced."""
    sliced_axes = {bound[0] for bound in _bounds(n, rank)}
    data_axes = [f"[y{i}]" if i in sliced_axes else f"a{i}" for i in range(rank)]
    part = [f"[u{i}]" if i in sliced_axes else f"a{i}" for i in range(rank)]
    others = [None] * (len(n.node.inputs) - len(inputs_are_whole))
    return format_axis_map([*(data_axes if is_whole else part for is_whole in inputs_are_whole), *others], data_axes)


def _axes_and_steps(n: NodeView, rank: int) -> tuple[list[int], list[int]]:
    bounds = _bounds(n, rank)
    return [b[0] for b in bounds], [b[3] for b in bounds]


def _lower_slice_grad(n: NodeView, dy: Any, shape: Any, starts: Any, ends: Any, axes: Any, steps: Any) -> Call:
    axis_list, step_list = _axes_and_steps(n, len(sizes.dims_of(n.dx)))
    return Call(_slice_grad, dy, shape, axis_list, starts, ends, step_list)


SLICE_GRAD = define_movement(
    "SliceGrad",
    ("dy", "shape", "starts", "ends", "axes?", "steps?"),
    lambda n: (TensorType(dtype_of(n.dy), required_ints(n.shape, "the output shape of SliceGrad")),),
    _lower_slice_grad,
    None,
    host_inputs=frozenset({1, 2, 3, 4, 5}),
    domain=MICROSOFT,
    outputs=("dx",),
    body=_slice_grad_body,
    axes=lambda n: _scatter_axes(n, len(sizes.dims_of(n.dx)), [False]),
    nondiff_inputs=frozenset({"shape", "starts", "ends", "axes", "steps"}),
)


def _lower_slice_scatter(n: NodeView, x: Any, updates: Any, starts: Any, ends: Any, axes: Any, steps: Any) -> Call:
    axis_list, step_list = _axes_and_steps(n, rank_of(n.x))
    return Call(_slice_scatter, x, updates, axis_list, starts, ends, step_list)


def _slice_scatter_gradient(op: Builder, n: NodeView, dy: ir.Value) -> Sequence[ir.Value | None]:
    slice_inputs = (n.starts, n.ends, n.axes, n.steps)
    dx = dupdates = None
    if n.wants("x"):
        zero_updates = op.Expand(op.scalar(0.0, like=dy), op.shape_of(n.updates))
        dx = op.own.SliceScatter(dy, zero_updates, *slice_inputs)
    if n.wants("updates"):
        dupdates = op.Slice(dy, *slice_inputs)
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
    _check_step(step)
    src = cast(op, src, dtype_of(x))
    if sizes.dims_of(src) == sizes.dims_of(x) and step == 1:
        return src  # all of x is written
    slice_inputs = _slice_inputs(op, axis, 0 if start is None else start, _TO_LAST if end is None else end, step)
    return op.own.SliceScatter(x, src, *slice_inputs)


def _capture_select_scatter(op: Builder, x: ir.Value, src: ir.Value, dim: int, index: Size) -> ir.Value:
    axis = checked_axis(dim, rank_of(x), "the axis of select_scatter")
    row = unsqueezed(op, cast(op, src, dtype_of(x)), axis)
    return op.own.SliceScatter(x, row, *_slice_inputs(op, axis, *_row_bounds(x, axis, index), 1))


def _check_step(step: Any) -> None:
    if not isinstance(step, int):
        raise GraphError("the step of a slice must be constant", expected="an integer", got=str(step))


SLICE_SCATTER = define_movement(
    "SliceScatter",
    ("x", "updates", "starts", "ends", "axes?", "steps?"),
    lambda n: (TensorType(dtype_of(n.x), sizes.dims_of(n.x)),),
    _lower_slice_scatter,
    _slice_scatter_gradient,
    host_inputs=frozenset({2, 3, 4, 5}),
    domain=OWN,
    from_torch={
        "aten.slice_scatter.default": _capture_slice_scatter,
        "aten.select_scatter.default": _capture_select_scatter,
    },
    body=lambda op, n: _scatter_body(op, n, n.x, n.updates),
    axes=lambda n: _scatter_axes(n, rank_of(n.x), [True, False]),
    nondiff_inputs=frozenset({"starts", "ends", "axes", "steps"}),
)


# Flip: reverses the axes `along`


def _flip_body(op: Builder, n: NodeView) -> ir.Value:
    count = len(n.along)
    start, end, step = (int64_vector(op, [bound] * count) for bound in _WHOLE_BACKWARDS)
    return op.Slice(n.x, start, end, int64_vector(op, n.along), step)


def _flip_axes(n: NodeView) -> str:
    names = axis_names("a", rank_of(n.x))
    return format_axis_map([names], [f"y{i}" if i in n.along else name for i, name in enumerate(names)])


def flipped(op: Builder, x: ir.Value, *axes: int) -> ir.Value:
    """Reverse x along `axes`; return x itself if there are none."""
    along = [checked_axis(a, rank_of(x), "an axis of flip") for a in axes]
    return op.own.Flip(x, along=along) if along else x


def _capture_rot90(op: Builder, x: ir.Value, k: int = 1, dims: Sequence[int] = (0, 1)) -> ir.Value:
    """Capture k rotations by 90 degrees from the first axis towards the second."""
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
    """Shift the elements of x forward by `shift` along an axis; the last ones wrap around to the front."""
    total = sizes.dims_of(x)[axis]
    at_least_one = sizes.maximum(1, total)  # avoids a remainder by 0
    forward = sizes.from_sympy(sizes.parse(shift) % sizes.parse(at_least_one))
    start = sizes.subtract(total, forward)
    return op.Concat(sliced(op, x, axis, start, _TO_LAST), sliced(op, x, axis, 0, start), axis=axis)


def repeated_rows(op: Builder, x: ir.Value, axis: int, count: Size) -> ir.Value:
    """Repeat each row along `axis` `count` times, along a new axis behind it."""
    shape = sizes.dims_of(x)
    return expanded(op, unsqueezed(op, x, axis + 1), (*shape[: axis + 1], count, *shape[axis + 1 :]))
