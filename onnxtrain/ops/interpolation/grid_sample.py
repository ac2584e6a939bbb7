"""Images read at any places.

    AffineGrid(theta[n, k, k+1], size) -> grid[n, e.., k]            places moved by a matrix: theta @ (place, 1)
    GridSample(x[n, c, d..], grid[n, e.., k]) -> y[n, c, e..]        GridSampleGrad(dy, x, grid) -> dx, dgrid

grid holds, for each output element, its k coordinates in x, those of the last axis first; -1 and 1 are the ends of an
axis: the middles of its outer elements with `align_corners`, else their outer edges. `mode` is linear, nearest or
cubic; `padding_mode` says what lies outside x: zeros, its border, or its reflection.
The steps of nearest have no slope.

A body sums over taps: along each axis the two (linear), four (cubic) or one elements around a place, with their weights
and the slopes of these.

Source: Jaderberg et al. 2015, https://arxiv.org/abs/1506.02025 (eq. 5 to 7).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import ONNX, OWN, TensorType, dtype_of, rank_of, type_of
from onnxtrain.ops.body_parts import add_scalar, cast, int64_vector, mul_scalar, reshaped, sum_over
from onnxtrain.ops.constructors import define_by_body, define_fused, no_axes
from onnxtrain.ops.definition import STANDARD, Call, FromTorch, Gradient, NodeView, numel
from onnxtrain.ops.dtypes import accumulation_dtype
from onnxtrain.ops.gradient_masks import apply_output_mask, as_bools, output_mask
from onnxtrain.ops.reshape.dims import expanded, unsqueezed
from onnxtrain.ops.reshape.join import concatenated, split
from onnxtrain.ops.reshape.rows import arange, vector_along
from onnxtrain.ops.sliding_windows import product, spatial_axes, spatial_sizes
from onnxtrain.ops.symbolic_ints import required_ints

aten = torch.ops.aten
INT64 = ir.DataType.INT64
_ATTRIBUTES: dict[str, Any] = {"mode": "linear", "padding_mode": "zeros", "align_corners": 0}
_MODES = ("linear", "nearest", "cubic")  # as ATen numbers them
_PADDINGS = ("zeros", "border", "reflection")
_CUBIC = -0.75


def _numbers(n: NodeView) -> tuple[int, int, bool]:
    if n.mode not in _MODES or n.padding_mode not in _PADDINGS:
        raise GraphError("GridSample does not know the mode", got=f"mode={n.mode}, padding_mode={n.padding_mode}")
    if n.mode == "cubic" and rank_of(n.x) != 4:
        raise GraphError("GridSample reads images of two axes with mode=cubic", got=f"{rank_of(n.x) - 2} axes")
    return _MODES.index(n.mode), _PADDINGS.index(n.padding_mode), bool(n.align_corners)


def _sampled(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(dtype_of(n.x), (*sizes.dims_of(n.x)[:2], *sizes.dims_of(n.grid)[1:-1])),)


def _axes(n: NodeView) -> str:
    places = " ".join(f"e{i}" for i in range(rank_of(n.grid) - 2))
    return f"n c {spatial_axes('d', n.x)}, n {places} [k] -> n c {places}"


def _gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    mask = output_mask(n, "x", "grid")
    how = {name: getattr(n, name) for name in _ATTRIBUTES}
    return apply_output_mask(op.own.GridSampleGrad(dy, n.x, n.grid, **how, output_mask=mask), mask, n)


def _capture(op: Builder, x: ir.Value, grid: ir.Value, mode: int, padding: int, align_corners: bool | None) -> Any:
    how = {"mode": _MODES[mode], "padding_mode": _PADDINGS[padding], "align_corners": int(bool(align_corners))}
    return op.GridSample(x, grid, **how)


_FROM_TORCH: dict[str, FromTorch] = dict.fromkeys(
    ("aten.grid_sampler.default", "aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default"), _capture
)

define_fused(
    ONNX,
    "GridSample",
    ("x", "grid"),
    ("y",),
    attributes=_ATTRIBUTES,
    since_version=20,
    from_torch=_FROM_TORCH,
    shapes=_sampled,
    body=STANDARD,
    gradient=(Gradient(_gradient, reads=("x", "grid")),),
    lower=lambda n, x, grid: Call(torch.grid_sampler, x, grid, *_numbers(n)),
    axes=_axes,
    flops=lambda n: sizes.multiply(8, numel(n.node.outputs[0])),
)


# The body of the gradient


@dataclass(frozen=True)
class Tap:
    """One element around each place, along one axis; all are [n, places].

    Attributes:
        place: its position in x.
        inside: 1 where it is in x, 0 where it is padding.
        weight, slope: its weight, and the weight's derivative by the coordinate; None: a constant weight.
    """

    place: ir.Value
    inside: ir.Value
    weight: ir.Value
    slope: ir.Value | None


def _reflected(op: Builder, n: NodeView, place: ir.Value, size: ir.Value) -> tuple[ir.Value, ir.Value]:
    """A place mirrored at the ends until it is within them, and the sign that its slope got."""
    zero, one = op.scalar(0, like=place), op.scalar(1, like=place)
    low = zero if n.align_corners else op.scalar(-0.5, like=place)
    span = op.Sub(size, one) if n.align_corners else size
    away = op.Sub(place, low)
    sign = op.Where(op.Less(away, zero), op.Neg(one), one)
    away, alone = op.Abs(away), op.Equal(span, zero)  # a single element, which all reflections are
    safe = op.Where(alone, one, span)
    flips = op.Floor(op.Div(away, safe))
    rest = op.Sub(away, op.Mul(flips, safe))
    odd = op.Equal(op.Mod(flips, op.scalar(2, like=place), fmod=1), one)
    found = op.Add(op.Where(odd, op.Sub(safe, rest), rest), low)
    sign = op.Where(odd, op.Neg(sign), sign)
    return op.Where(alone, zero, found), op.Where(alone, zero, sign)


def _bounded(op: Builder, n: NodeView, place: ir.Value, size: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """A place as the padding wants it, and the factor of its slope; at the very ends there is none, as in PyTorch."""
    if n.padding_mode == "zeros":
        return place, None
    factor = None
    if n.padding_mode == "reflection":
        place, factor = _reflected(op, n, place, size)
    zero, last = op.scalar(0, like=place), add_scalar(op, size, -1)
    within = op.Cast(op.And(op.Greater(place, zero), op.Less(place, last)), to=dtype_of(place))
    return op.Max(op.Min(place, last), zero), within if factor is None else op.Mul(factor, within)


def _cubic_taps(op: Builder, t: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
    """The weights of four elements around a place at `t` between the second and third, and their slopes."""
    a = _CUBIC

    def near(x: ir.Value) -> tuple[ir.Value, ir.Value]:  # (a + 2) x^3 - (a + 3) x^2 + 1
        value = add_scalar(op, op.Mul(op.Mul(add_scalar(op, mul_scalar(op, x, a + 2), -(a + 3)), x), x), 1)
        return value, op.Mul(add_scalar(op, mul_scalar(op, x, 3 * (a + 2)), -2 * (a + 3)), x)

    def far(x: ir.Value) -> tuple[ir.Value, ir.Value]:  # a x^3 - 5 a x^2 + 8 a x - 4 a
        inner = add_scalar(op, op.Mul(add_scalar(op, mul_scalar(op, x, a), -5 * a), x), 8 * a)
        value = add_scalar(op, op.Mul(inner, x), -4 * a)
        return value, add_scalar(op, op.Mul(add_scalar(op, mul_scalar(op, x, 3 * a), -10 * a), x), 8 * a)

    rest = op.Sub(op.scalar(1, like=t), t)
    after = [(w, op.Neg(s)) for w, s in (near(rest), far(add_scalar(op, rest, 1)))]  # they come nearer as t grows
    return [far(add_scalar(op, t, 1)), near(t), *after]


def _taps(op: Builder, n: NodeView, coordinate: ir.Value, extent: Size) -> list[Tap]:
    """The taps of one axis. `coordinate` is [n, places]."""
    size = op.size(extent, dtype_of(coordinate))
    one, half = op.scalar(1, like=coordinate), op.scalar(0.5, like=coordinate)
    if n.align_corners:
        step = op.Mul(op.Sub(size, one), half)
        place = op.Mul(op.Add(coordinate, one), step)
    else:
        step = op.Mul(size, half)
        place = op.Sub(op.Mul(op.Add(coordinate, one), step), half)
    if n.mode == "cubic":
        first = op.Floor(place)
        return [
            _tap(op, n, _bounded(op, n, add_scalar(op, first, i - 1), size)[0], size, extent, w, op.Mul(s, step))
            for i, (w, s) in enumerate(_cubic_taps(op, op.Sub(place, first)))
        ]
    place, factor = _bounded(op, n, place, size)
    if n.mode == "nearest":
        ones = op.Expand(one, op.shape_of(place))
        return [_tap(op, n, op.Round(place), size, extent, ones, None)]
    step = step if factor is None else op.Mul(step, factor)
    slope = op.Expand(step, op.shape_of(place))
    first = op.Floor(place)
    t = op.Sub(place, first)
    return [
        _tap(op, n, first, size, extent, op.Sub(one, t), op.Neg(slope)),
        _tap(op, n, add_scalar(op, first, 1), size, extent, t, slope),
    ]


def _tap(
    op: Builder, n: NodeView, place: ir.Value, size: ir.Value, extent: Size, weight: ir.Value, slope: ir.Value | None
) -> Tap:
    zero, last = op.scalar(0, like=place), add_scalar(op, size, -1)
    inside = op.And(op.GreaterOrEqual(place, zero), op.LessOrEqual(place, last))
    index = op.Cast(op.Max(op.Min(place, last), zero), to=INT64)
    return Tap(index, op.Cast(inside, to=dtype_of(place)), weight, slope)


def _grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    dtype = accumulation_dtype(dtype_of(n.x))
    (batch, channels), inner = sizes.dims_of(n.x)[:2], spatial_sizes(n.x)
    count, plane = product(sizes.dims_of(n.grid)[1:-1]), product(inner)
    grid = reshaped(op, cast(op, n.grid, dtype), [batch, count, len(inner)])
    columns = [op.Squeeze(c, int64_vector(op, [2])) for c in split(op, grid, [1] * len(inner), 2)]
    taps = [_taps(op, n, column, extent) for column, extent in zip(reversed(columns), inner, strict=True)]
    x = reshaped(op, cast(op, n.x, dtype), [batch, channels, plane])
    dy = reshaped(op, cast(op, n.dy, dtype), [batch, channels, count])
    dx = op.Expand(op.scalar(0, like=x), op.sizes([batch, channels, plane]))
    slopes: list[ir.Value | None] = [None] * len(inner)
    for corner in itertools.product(*taps):
        place = _flat_place(op, corner, inner)
        indices = op.Expand(unsqueezed(op, place, 1), op.sizes([batch, channels, count]))
        inside: ir.Value = functools.reduce(op.Mul, [tap.inside for tap in corner])
        weight: ir.Value = functools.reduce(op.Mul, [inside, *(tap.weight for tap in corner)])
        dx = op.ScatterElements(dx, indices, op.Mul(dy, unsqueezed(op, weight, 1)), axis=2, reduction="add")
        found = op.GatherElements(x, indices, axis=2)
        seen = op.Mul(sum_over(op, op.Mul(dy, found), (1,), keepdims=False), inside)
        for axis, tap in enumerate(corner):
            if tap.slope is not None:
                others = [other.weight for k, other in enumerate(corner) if k != axis]
                part = functools.reduce(op.Mul, [seen, tap.slope, *others])
                slopes[axis] = part if slopes[axis] is None else op.Add(slopes[axis], part)
    nothing = mul_scalar(op, columns[0], 0)
    dgrid = concatenated(op, [unsqueezed(op, nothing if s is None else s, 2) for s in reversed(slopes)], 2)
    dgrid = reshaped(op, dgrid, sizes.dims_of(n.grid))
    return cast(op, reshaped(op, dx, sizes.dims_of(n.x)), dtype_of(n.x)), cast(op, dgrid, dtype_of(n.grid))


def _flat_place(op: Builder, corner: Sequence[Tap], inner: Sequence[Size]) -> ir.Value:
    place = corner[0].place
    for tap, extent in zip(corner[1:], inner[1:], strict=True):
        place = op.Add(op.Mul(place, op.size(extent)), tap.place)
    return place


def _lower_grad(n: NodeView, dy: Any, x: Any, grid: Any) -> Call:
    kernel = aten.grid_sampler_2d_backward if rank_of(n.x) == 4 else aten.grid_sampler_3d_backward
    return Call(kernel.default, dy, x, grid, *_numbers(n), as_bools(n.output_mask))


define_fused(
    OWN,
    "GridSampleGrad",
    ("dy", "x", "grid"),
    ("dx", "dgrid"),
    attributes={**_ATTRIBUTES, "output_mask": (1, 1)},
    shapes=lambda n: (type_of(n.x), type_of(n.grid)),
    body=_grad_body,
    lower=_lower_grad,
    atomic_on_gpu=True,
    axes=lambda n: "",
    flops=lambda n: sizes.multiply(24, numel(n.dy)),
)


# AffineGrid


def _grid_sizes(n: NodeView) -> Sizes:
    return required_ints(n.size, "the size of AffineGrid")


def _grid_type(n: NodeView) -> Sequence[TensorType]:
    batch, _, *inner = _grid_sizes(n)
    return (TensorType(dtype_of(n.theta), (batch, *inner, len(inner))),)


def _along_axis(op: Builder, n: NodeView, extent: Size) -> ir.Value:
    """The coordinates of an axis's elements."""
    dtype = dtype_of(n.theta)
    number, size, one = cast(op, arange(op, extent), dtype), op.size(extent, dtype), op.scalar(1, dtype)
    if not n.align_corners:
        return add_scalar(op, op.Div(add_scalar(op, mul_scalar(op, number, 2), 1), size), -1)
    single = op.Equal(size, one)
    found = add_scalar(op, op.Div(mul_scalar(op, number, 2), op.Where(single, one, op.Sub(size, one))), -1)
    return op.Where(single, op.scalar(0, dtype), found)  # type: ignore[no-any-return]


def _grid_body(op: Builder, n: NodeView) -> ir.Value:
    batch, _, *inner = _grid_sizes(n)
    columns = [
        expanded(
            op, unsqueezed(op, vector_along(op, _along_axis(op, n, extent), axis, len(inner)), len(inner)), (*inner, 1)
        )
        for axis, extent in reversed(list(enumerate(inner)))
    ]
    ones = op.Expand(op.scalar(1, like=n.theta), op.sizes([*inner, 1]))
    points = reshaped(op, concatenated(op, [*columns, ones], len(inner)), [product(inner), len(inner) + 1])
    return reshaped(op, op.MatMul(points, op.Transpose(n.theta, perm=[0, 2, 1])), [batch, *inner, len(inner)])


def affine_grid(theta: torch.Tensor, size: Sequence[int], align_corners: bool) -> torch.Tensor:
    return torch.affine_grid_generator(theta, list(size), align_corners)


def _capture_affine_grid(op: Builder, theta: ir.Value, size: Sequence[Size], align_corners: bool) -> Any:
    return op.AffineGrid(theta, op.sizes(size), align_corners=int(align_corners))


define_by_body(
    "AffineGrid",
    ("theta", "size"),
    _grid_body,
    lambda n, theta, size: Call(affine_grid, theta, size, bool(n.align_corners)),
    attributes={"align_corners": 0},
    since_version=20,
    from_torch={"aten.affine_grid_generator.default": _capture_affine_grid},
    shapes=_grid_type,
    axes=no_axes,
    nondiff_inputs=frozenset({"size"}),
    host_inputs=frozenset({1}),
)
