"""GridSample: read images at arbitrary coordinates.

    AffineGrid(theta[n, k, k+1], size) -> grid[n, e.., k]            transformed points: theta @ (point, 1)
    GridSample(x[n, c, d..], grid[n, e.., k]) -> y[n, c, e..]        GridSampleGrad(dy, x, grid) -> dx, dgrid

grid holds the k coordinates in x of each output element, the last axis first. -1 and 1 are the ends of an axis: the
centers of its outer elements with `align_corners`, else their outer edges. `mode` is linear, nearest or cubic;
`padding_mode` says what to read outside x: zeros, the border, or the reflection. The gradient of nearest to grid is 0.

The body of the gradient sums over taps: along each axis the one (nearest), two (linear) or four (cubic) elements around
a point, with their weights and the derivatives of these.

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
from onnxtrain.ops.constructors import define_by_body, define_pure, no_axes
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
_MODES = ("linear", "nearest", "cubic")  # in the order of ATen's enum
_PADDINGS = ("zeros", "border", "reflection")
_CUBIC = -0.75


def _aten_arguments(n: NodeView) -> tuple[int, int, bool]:
    """Return ATen's mode, padding mode and align_corners."""
    if n.mode not in _MODES or n.padding_mode not in _PADDINGS:
        raise GraphError(
            "GridSample: unknown mode or padding_mode",
            expected=f"{' or '.join(_MODES)}; {' or '.join(_PADDINGS)}",
            got=f"mode={n.mode}, padding_mode={n.padding_mode}",
        )
    if n.mode == "cubic" and rank_of(n.x) != 4:
        raise GraphError(
            "GridSample: mode=cubic supports two spatial axes only", expected="x of rank 4", got=f"rank {rank_of(n.x)}"
        )
    return _MODES.index(n.mode), _PADDINGS.index(n.padding_mode), bool(n.align_corners)


def _output_type(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(dtype_of(n.x), (*sizes.dims_of(n.x)[:2], *sizes.dims_of(n.grid)[1:-1])),)


def _axes(n: NodeView) -> str:
    points = " ".join(f"e{i}" for i in range(rank_of(n.grid) - 2))
    return f"n c {spatial_axes('d', n.x)}, n {points} [k] -> n c {points}"


def _gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    mask = output_mask(n, "x", "grid")
    attributes = {name: getattr(n, name) for name in _ATTRIBUTES}
    return apply_output_mask(op.own.GridSampleGrad(dy, n.x, n.grid, **attributes, output_mask=mask), mask, n)


def _capture(op: Builder, x: ir.Value, grid: ir.Value, mode: int, padding: int, align_corners: bool | None) -> Any:
    attributes = {"mode": _MODES[mode], "padding_mode": _PADDINGS[padding], "align_corners": int(bool(align_corners))}
    return op.GridSample(x, grid, **attributes)


_FROM_TORCH: dict[str, FromTorch] = dict.fromkeys(
    ("aten.grid_sampler.default", "aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default"), _capture
)

define_pure(
    ONNX,
    "GridSample",
    ("x", "grid"),
    ("y",),
    attributes=_ATTRIBUTES,
    from_torch=_FROM_TORCH,
    shapes=_output_type,
    body=STANDARD,
    gradient=(Gradient(_gradient, reads=("x", "grid")),),
    lower=lambda n, x, grid: Call(torch.grid_sampler, x, grid, *_aten_arguments(n)),
    axes=_axes,
    flops=lambda n: sizes.multiply(8, numel(n.node.outputs[0])),
)


# The body of the gradient


@dataclass(frozen=True)
class Tap:
    """One element around each point, along one axis; all values are [n, points].

    Attributes:
        index: the element's index, clamped to x.
        inside: 1 if the element is in x, 0 if it is padding.
        weight: the element's weight.
        slope: the derivative of the weight by the coordinate; None for a constant weight.
    """

    index: ir.Value
    inside: ir.Value
    weight: ir.Value
    slope: ir.Value | None


def _reflected(op: Builder, n: NodeView, position: ir.Value, size: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Reflect a position at the ends of the axis until it is inside; return it and its derivative, 1 or -1."""
    zero, one = op.scalar(0, like=position), op.scalar(1, like=position)
    low = zero if n.align_corners else op.scalar(-0.5, like=position)
    span = op.Sub(size, one) if n.align_corners else size
    distance = op.Sub(position, low)
    sign = op.Where(op.Less(distance, zero), op.Neg(one), one)
    distance, is_single = op.Abs(distance), op.Equal(span, zero)  # every reflection is the single element
    safe_span = op.Where(is_single, one, span)
    flips = op.Floor(op.Div(distance, safe_span))
    remainder = op.Sub(distance, op.Mul(flips, safe_span))
    odd = op.Equal(op.Mod(flips, op.scalar(2, like=position), fmod=1), one)
    reflected = op.Add(op.Where(odd, op.Sub(safe_span, remainder), remainder), low)
    sign = op.Where(odd, op.Neg(sign), sign)
    return op.Where(is_single, zero, reflected), op.Where(is_single, zero, sign)


def _padded(op: Builder, n: NodeView, position: ir.Value, size: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """Apply the padding mode to a position; return it and its derivative, which is 0 at the ends as in PyTorch."""
    if n.padding_mode == "zeros":
        return position, None
    derivative = None
    if n.padding_mode == "reflection":
        position, derivative = _reflected(op, n, position, size)
    zero, last = op.scalar(0, like=position), add_scalar(op, size, -1)
    inside = op.Cast(op.And(op.Greater(position, zero), op.Less(position, last)), to=dtype_of(position))
    return op.Max(op.Min(position, last), zero), inside if derivative is None else op.Mul(derivative, inside)


def _cubic_taps(op: Builder, t: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
    """Return weight and slope of the four elements around a point at fraction `t` from the second to the third."""
    a = _CUBIC

    def near(x: ir.Value) -> tuple[ir.Value, ir.Value]:  # (a + 2) x^3 - (a + 3) x^2 + 1
        value = add_scalar(op, op.Mul(op.Mul(add_scalar(op, mul_scalar(op, x, a + 2), -(a + 3)), x), x), 1)
        return value, op.Mul(add_scalar(op, mul_scalar(op, x, 3 * (a + 2)), -2 * (a + 3)), x)

    def far(x: ir.Value) -> tuple[ir.Value, ir.Value]:  # a x^3 - 5 a x^2 + 8 a x - 4 a
        inner = add_scalar(op, op.Mul(add_scalar(op, mul_scalar(op, x, a), -5 * a), x), 8 * a)
        value = add_scalar(op, op.Mul(inner, x), -4 * a)
        return value, add_scalar(op, op.Mul(add_scalar(op, mul_scalar(op, x, 3 * a), -10 * a), x), 8 * a)

    complement = op.Sub(op.scalar(1, like=t), t)
    # The distance to these shrinks as t grows.
    after = [(w, op.Neg(s)) for w, s in (near(complement), far(add_scalar(op, complement, 1)))]
    return [far(add_scalar(op, t, 1)), near(t), *after]


def _taps(op: Builder, n: NodeView, coordinate: ir.Value, extent: Size) -> list[Tap]:
    """Return the taps of one axis of size `extent`. `coordinate` is [n, points]."""
    size = op.size(extent, dtype_of(coordinate))
    one, half = op.scalar(1, like=coordinate), op.scalar(0.5, like=coordinate)
    if n.align_corners:
        step = op.Mul(op.Sub(size, one), half)
        position = op.Mul(op.Add(coordinate, one), step)
    else:
        step = op.Mul(size, half)
        position = op.Sub(op.Mul(op.Add(coordinate, one), step), half)
    if n.mode == "cubic":
        base = op.Floor(position)
        return [
            _tap(op, _padded(op, n, add_scalar(op, base, i - 1), size)[0], size, w, op.Mul(s, step))
            for i, (w, s) in enumerate(_cubic_taps(op, op.Sub(position, base)))
        ]
    position, derivative = _padded(op, n, position, size)
    if n.mode == "nearest":
        ones = op.Expand(one, op.shape_of(position))
        return [_tap(op, op.Round(position), size, ones, None)]
    step = step if derivative is None else op.Mul(step, derivative)
    slope = op.Expand(step, op.shape_of(position))
    base = op.Floor(position)
    t = op.Sub(position, base)
    return [
        _tap(op, base, size, op.Sub(one, t), op.Neg(slope)),
        _tap(op, add_scalar(op, base, 1), size, t, slope),
    ]


def _tap(op: Builder, position: ir.Value, size: ir.Value, weight: ir.Value, slope: ir.Value | None) -> Tap:
    zero, last = op.scalar(0, like=position), add_scalar(op, size, -1)
    inside = op.And(op.GreaterOrEqual(position, zero), op.LessOrEqual(position, last))
    index = op.Cast(op.Max(op.Min(position, last), zero), to=INT64)
    return Tap(index, op.Cast(inside, to=dtype_of(position)), weight, slope)


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
    dcolumns: list[ir.Value | None] = [None] * len(inner)
    for corner in itertools.product(*taps):
        indices = op.Expand(unsqueezed(op, _flat_index(op, corner, inner), 1), op.sizes([batch, channels, count]))
        inside: ir.Value = functools.reduce(op.Mul, [tap.inside for tap in corner])
        weight: ir.Value = functools.reduce(op.Mul, [inside, *(tap.weight for tap in corner)])
        dx = op.ScatterElements(dx, indices, op.Mul(dy, unsqueezed(op, weight, 1)), axis=2, reduction="add")
        element = op.GatherElements(x, indices, axis=2)
        dweight = op.Mul(sum_over(op, op.Mul(dy, element), (1,), keepdims=False), inside)
        for axis, tap in enumerate(corner):
            if tap.slope is not None:
                others = [other.weight for k, other in enumerate(corner) if k != axis]
                term = functools.reduce(op.Mul, [dweight, tap.slope, *others])
                dcolumns[axis] = term if dcolumns[axis] is None else op.Add(dcolumns[axis], term)
    zeros = mul_scalar(op, columns[0], 0)
    dgrid = concatenated(op, [unsqueezed(op, zeros if d is None else d, 2) for d in reversed(dcolumns)], 2)
    dgrid = reshaped(op, dgrid, sizes.dims_of(n.grid))
    return cast(op, reshaped(op, dx, sizes.dims_of(n.x)), dtype_of(n.x)), cast(op, dgrid, dtype_of(n.grid))


def _flat_index(op: Builder, corner: Sequence[Tap], inner: Sequence[Size]) -> ir.Value:
    """Return the index of a corner's element in the flattened spatial axes of sizes `inner`."""
    index = corner[0].index
    for tap, extent in zip(corner[1:], inner[1:], strict=True):
        index = op.Add(op.Mul(index, op.size(extent)), tap.index)
    return index


def _lower_grad(n: NodeView, dy: Any, x: Any, grid: Any) -> Call:
    kernel = aten.grid_sampler_2d_backward if rank_of(n.x) == 4 else aten.grid_sampler_3d_backward
    return Call(kernel.default, dy, x, grid, *_aten_arguments(n), as_bools(n.output_mask))


define_pure(
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


def _axis_coordinates(op: Builder, n: NodeView, extent: Size) -> ir.Value:
    """Return the coordinates of the elements of an axis of size `extent`."""
    dtype = dtype_of(n.theta)
    index, size, one = cast(op, arange(op, extent), dtype), op.size(extent, dtype), op.scalar(1, dtype)
    if not n.align_corners:
        return add_scalar(op, op.Div(add_scalar(op, mul_scalar(op, index, 2), 1), size), -1)
    is_single = op.Equal(size, one)
    coordinates = add_scalar(op, op.Div(mul_scalar(op, index, 2), op.Where(is_single, one, op.Sub(size, one))), -1)
    return op.Where(is_single, op.scalar(0, dtype), coordinates)


def _grid_body(op: Builder, n: NodeView) -> ir.Value:
    batch, _, *inner = _grid_sizes(n)
    columns = [
        expanded(
            op,
            unsqueezed(op, vector_along(op, _axis_coordinates(op, n, extent), axis, len(inner)), len(inner)),
            (*inner, 1),
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
    from_torch={"aten.affine_grid_generator.default": _capture_affine_grid},
    shapes=_grid_type,
    axes=no_axes,
    nondiff_inputs=frozenset({"size"}),
    host_inputs=frozenset({1}),
)
