"""Interpolation: images and sequences in other sizes.

    Interpolate(x[n, c, d], size) -> y[n, c, e]        InterpolateGrad(dy, shape) -> dx[n, c, d]

Along each axis of s elements that becomes one of e, element i of the output lies in x at

    nearest          floor(i * s/e)
    nearest-exact    floor((i + 1/2) * s/e)
    linear, cubic    (i + 1/2) * s/e - 1/2,  with align_corners  i * (s - 1)/(e - 1)

and is the nearest element, or a mean of the two or four around: separable, one axis after the other. `scales` holds
e/s as the user gave it, where PyTorch uses that and not the sizes. Backward takes the shape of x, so that x need not be
kept.

With `-antialias` behind the mode, an element that stands for several is a mean of all of them: ONNX's Resize.

ScaledSize(x) is e = floor(s * scale) in doubles, as PyTorch computes it; scale is mantissa * 2^exponent, because an
attribute of ONNX holds no double.

Source of the cubic weights: Keys 1981, https://doi.org/10.1109/TASSP.1981.1163711 (with a = -3/4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.axes import NO_AXES
from onnxtrain.graph.builder import Builder, as_sizes
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import OWN, TensorType, dtype_of, rank_of
from onnxtrain.ops.body_parts import add_scalar, cast, mul_scalar, reshaped
from onnxtrain.ops.constructors import define_fused, define_unary
from onnxtrain.ops.definition import REQUIRED, Call, FromTorch, Gradient, NodeView, numel
from onnxtrain.ops.dtypes import accumulation_dtype
from onnxtrain.ops.sliding_windows import spatial_axes, spatial_sizes

aten = torch.ops.aten
INT64 = ir.DataType.INT64
_CUBIC = -0.75

_ATTRIBUTES: dict[str, Any] = {"mode": REQUIRED, "align_corners": 0, "scales": None}

# For each mode and number of axes the name of ATen's operators.
_NAMES = {
    **{("nearest", count): f"upsample_nearest{count}d" for count in (1, 2, 3)},
    **{("nearest-exact", count): f"_upsample_nearest_exact{count}d" for count in (1, 2, 3)},
    ("linear", 1): "upsample_linear1d",
    ("linear", 2): "upsample_bilinear2d",
    ("linear", 3): "upsample_trilinear3d",
    ("cubic", 2): "upsample_bicubic2d",
    ("linear-antialias", 2): "_upsample_bilinear2d_aa",
    ("cubic-antialias", 2): "_upsample_bicubic2d_aa",
}
_ANTIALIAS = "-antialias"


def _resized(n: NodeView) -> Sizes:
    size = as_sizes(n.size)
    if size is None:
        raise GraphError("Interpolate needs to know its sizes", got=f"{n.size.name}, of unknown contents")
    return (*sizes.dims_of(n.x)[:2], *size)


def _original(n: NodeView) -> Sizes:
    shape = as_sizes(n.shape)
    if shape is None:
        raise GraphError("InterpolateGrad needs to know its sizes", got=f"{n.shape.name}, of unknown contents")
    return shape


# Sizes


def _scale(n: NodeView) -> float:
    return math.ldexp(n.mantissa, n.exponent)


def _scaled_body(op: Builder, n: NodeView) -> ir.Value:
    wide = op.Mul(op.Cast(n.x, to=ir.DataType.DOUBLE), op.scalar(_scale(n), ir.DataType.DOUBLE))
    return op.Cast(op.Floor(wide), to=INT64)  # type: ignore[no-any-return]


def scaled_size(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x.double() * scale).long()


def _scaled_on_host(n: NodeView, x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_scaled_on_host(n, part) for part in x)
    return int(x * _scale(n)) if isinstance(x, int) else x.scaled(_scale(n))


define_unary(
    "ScaledSize",
    (),
    scaled_size,
    None,
    domain=OWN,
    attributes={"mantissa": REQUIRED, "exponent": REQUIRED},
    body=_scaled_body,
    lower=lambda n, x: Call(scaled_size, x, _scale(n)),
    host_eval=_scaled_on_host,
)


# Kernels


def _settings(n: NodeView, count: int) -> list[Any]:
    """What ATen's operators take after the sizes."""
    scales = [None] * count if n.scales is None else [float(s) for s in n.scales]
    return scales if n.mode.startswith("nearest") else [bool(n.align_corners), *scales]


def _lower(n: NodeView, x: Any, size: Any) -> Call:
    count = rank_of(n.x) - 2
    kernel = getattr(aten, _NAMES[n.mode, count]).default
    return Call(kernel, x, list(size), *_settings(n, count))


def _lower_grad(n: NodeView, dy: Any, shape: Any) -> Call:
    count = rank_of(n.dy) - 2
    kernel = getattr(aten, f"{_NAMES[n.mode, count]}_backward").default
    return Call(_resize_backward, kernel, dy, list(shape), *_settings(n, count))


def _resize_backward(kernel: Any, dy: torch.Tensor, shape: Sequence[int], *settings: Any) -> Any:
    return kernel(dy, dy.shape[2:], shape, *settings)


# Bodies. A tap is (places in x, weights) for each element of the output along one axis.

Tap = tuple[ir.Value, ir.Value]


def _ratio(op: Builder, n: NodeView, axis: int, size: Size, out: Size, dtype: ir.DataType) -> ir.Value:
    """The distance in x between neighbours of the output."""
    if n.align_corners:
        steps = op.Max(op.size(sizes.subtract(out, 1)), op.size(1))
        aligned = op.Div(op.size(sizes.subtract(size, 1), dtype), op.Cast(steps, to=dtype))
        alone = op.Equal(op.size(out), op.size(1))
        result: ir.Value = op.Where(alone, op.scalar(0, dtype), aligned)
        return result
    if n.scales is not None:
        return op.Div(op.scalar(1, dtype), op.scalar(n.scales[axis], dtype))  # type: ignore[no-any-return]
    return op.Div(op.size(size, dtype), op.size(out, dtype))  # type: ignore[no-any-return]


def _within(op: Builder, places: ir.Value, size: Size) -> ir.Value:
    """Floating places as indices of an axis."""
    last = op.size(sizes.subtract(size, 1))
    return op.Max(op.Min(op.Cast(places, to=INT64), last), op.size(0))  # type: ignore[no-any-return]


def _taps(op: Builder, n: NodeView, axis: int, size: Size, out: Size, dtype: ir.DataType) -> list[Tap]:
    count = op.Cast(op.Range(op.size(0), op.size(out), op.size(1)), to=dtype)
    ratio = _ratio(op, n, axis, size, out, dtype)
    if n.mode.startswith("nearest"):
        middle = add_scalar(op, count, 0.5) if n.mode == "nearest-exact" else count
        return [(_within(op, op.Floor(op.Mul(middle, ratio)), size), op.Expand(op.scalar(1, dtype), op.sizes([out])))]
    place = op.Mul(count, ratio) if n.align_corners else add_scalar(op, op.Mul(add_scalar(op, count, 0.5), ratio), -0.5)
    if n.mode == "linear":
        place = op.Max(place, op.scalar(0, dtype))
    first = op.Floor(place)
    weights = _weights(op, n.mode, op.Sub(place, first))
    offset = 0 if n.mode == "linear" else -1
    return [(_within(op, add_scalar(op, first, i + offset), size), w) for i, w in enumerate(weights)]


def _weights(op: Builder, mode: str, t: ir.Value) -> list[ir.Value]:
    """The weights of the elements around a place at `t` of the way from the one before to the one after."""
    rest = op.Sub(op.scalar(1, like=t), t)
    if mode == "linear":
        return [rest, t]

    def near(x: ir.Value) -> ir.Value:  # (a + 2) x^3 - (a + 3) x^2 + 1
        slope = add_scalar(op, mul_scalar(op, x, _CUBIC + 2), -(_CUBIC + 3))
        return add_scalar(op, op.Mul(op.Mul(slope, x), x), 1)

    def far(x: ir.Value) -> ir.Value:  # a x^3 - 5 a x^2 + 8 a x - 4 a
        inner = add_scalar(op, op.Mul(add_scalar(op, mul_scalar(op, x, _CUBIC), -5 * _CUBIC), x), 8 * _CUBIC)
        return add_scalar(op, op.Mul(inner, x), -4 * _CUBIC)

    return [far(add_scalar(op, t, 1)), near(t), near(rest), far(add_scalar(op, rest, 1))]


def _standard(n: NodeView) -> dict[str, Any]:
    """What ONNX's Resize takes for a mode with antialias."""
    how = {"antialias": 1, "mode": n.mode.removesuffix(_ANTIALIAS), "cubic_coeff_a": -0.5, "exclude_outside": 1}
    return {**how, "axes": [2, 3]}


def _extent(op: Builder, n: NodeView, wanted: Sequence[Size]) -> tuple[ir.Value | None, ir.Value | None]:
    """Scales or sizes, as ONNX's Resize takes them."""
    if n.scales is not None:
        return op.constant(n.scales, ir.DataType.FLOAT), None
    return None, op.sizes(wanted)


def _body(op: Builder, n: NodeView) -> ir.Value:
    dtype = accumulation_dtype(dtype_of(n.x))
    y, rank = cast(op, n.x, dtype), rank_of(n.x)
    if n.mode.endswith(_ANTIALIAS):
        y = op.Resize(y, None, *_extent(op, n, _resized(n)[2:]), **_standard(n))
        return cast(op, y, dtype_of(n.x))
    for axis, (size, out) in enumerate(zip(spatial_sizes(n.x), _resized(n)[2:], strict=True)):
        summed: ir.Value | None = None
        taps = _taps(op, n, axis, size, out, dtype)
        for places, weights in taps:
            found = op.Gather(y, places, axis=2 + axis)
            if len(taps) > 1:
                found = op.Mul(found, reshaped(op, weights, [out, *[1] * (rank - 3 - axis)]))
            summed = found if summed is None else op.Add(summed, found)
        assert summed is not None
        y = summed
    return cast(op, y, dtype_of(n.x))


def _grad_body(op: Builder, n: NodeView) -> ir.Value:
    """The weights of each axis as a matrix [out, size], from which dy is multiplied."""
    dtype = accumulation_dtype(dtype_of(n.dy))
    dx, rank = cast(op, n.dy, dtype), rank_of(n.dy)
    if n.mode.endswith(_ANTIALIAS):
        dx = op.ms.ResizeGrad(dx, n.shape, None, *_extent(op, n, spatial_sizes(n.dy)), **_standard(n))
        return cast(op, dx, dtype_of(n.dy))
    for axis, (size, out) in enumerate(zip(_original(n)[2:], spatial_sizes(n.dy), strict=True)):
        matrix: ir.Value | None = None
        columns = op.Range(op.size(0), op.size(size), op.size(1))
        for places, weights in _taps(op, n, axis, size, out, dtype):
            at = op.Equal(reshaped(op, places, [out, 1]), columns)
            part = op.Where(at, reshaped(op, weights, [out, 1]), op.scalar(0, dtype))
            matrix = part if matrix is None else op.Add(matrix, part)
        swap = list(range(rank))
        swap[2 + axis], swap[-1] = swap[-1], swap[2 + axis]
        dx = op.Transpose(op.MatMul(op.Transpose(dx, perm=swap), matrix), perm=swap)
    return cast(op, dx, dtype_of(n.dy))


# Capture


def _gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    how = {name: getattr(n, name) for name in _ATTRIBUTES}
    return [op.own.InterpolateGrad(dy, op.shape_of(n.x), **how), None]


def _interpolate(op: Builder, x: ir.Value, mode: str, align_corners: bool, scales: Sequence[Any] | None) -> Any:
    size = op.out[0].shape[2:]
    given = None if scales is None or any(s is None for s in scales) else [float(s) for s in scales]
    if mode.endswith(_ANTIALIAS) and (align_corners or not all(float(np.float32(s)) == s for s in given or ())):
        return NotImplemented  # ONNX means something else by the corners, and has scales in float32
    return op.own.Interpolate(x, op.sizes(size), mode=mode, align_corners=int(align_corners), scales=given)


def _of_nearest(mode: str) -> tuple[FromTorch, FromTorch]:
    """How `.vec` and `.default` are captured. The output's size is PyTorch's own."""

    def vector(op: Builder, x: ir.Value, output_size: Any, scale_factors: Any) -> Any:
        return _interpolate(op, x, mode, False, scale_factors)

    def default(op: Builder, x: ir.Value, output_size: Any, *scales: Any, **named: Any) -> Any:
        return _interpolate(op, x, mode, False, [*scales, *named.values()] or None)

    return vector, default


def _of_weighted(mode: str) -> tuple[FromTorch, FromTorch]:
    """How `.vec` and `.default` are captured. The output's size is PyTorch's own."""

    def vector(op: Builder, x: ir.Value, output_size: Any, align_corners: bool, scale_factors: Any) -> Any:
        return _interpolate(op, x, mode, align_corners, scale_factors)

    def default(op: Builder, x: ir.Value, output_size: Any, align_corners: bool, *scales: Any, **named: Any) -> Any:
        return _interpolate(op, x, mode, align_corners, [*scales, *named.values()] or None)

    return vector, default


def _from_torch() -> dict[str, FromTorch]:
    found: dict[str, FromTorch] = {}
    for (mode, _), name in _NAMES.items():
        vector, default = _of_nearest(mode) if mode.startswith("nearest") else _of_weighted(mode)
        found[f"aten.{name}.vec"], found[f"aten.{name}.default"] = vector, default
    return found


define_fused(
    OWN,
    "Interpolate",
    ("x", "size"),
    ("y",),
    attributes=_ATTRIBUTES,
    from_torch=_from_torch(),
    shapes=lambda n: (TensorType(dtype_of(n.x), _resized(n)),),
    body=_body,
    gradient=(Gradient(_gradient, reads=()),),
    nondiff_inputs=frozenset({"size"}),
    lower=_lower,
    host_inputs=frozenset({1}),
    axes=lambda n: f"n c {spatial_axes('d', n.x)}, [s] -> n c {spatial_axes('e', n.x)}",
    flops=lambda n: sizes.multiply(4, numel(n.node.outputs[0])),
)
define_fused(
    OWN,
    "InterpolateGrad",
    ("dy", "shape"),
    ("dx",),
    attributes=_ATTRIBUTES,
    shapes=lambda n: (TensorType(dtype_of(n.dy), _original(n)),),
    body=_grad_body,
    lower=_lower_grad,
    host_inputs=frozenset({1}),
    axes=lambda n: NO_AXES,  # what passes has to be taken from the shape too
    flops=lambda n: sizes.multiply(4, numel(n.dy)),
)
