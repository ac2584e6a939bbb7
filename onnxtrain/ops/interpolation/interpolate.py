"""Interpolate: resize images and sequences as torch.nn.functional.interpolate does.

    Interpolate(x[n, c, d], size) -> y[n, c, e]        InterpolateGrad(dy, shape) -> dx[n, c, d]

When an axis of size s is resized to e, output element i has this coordinate in x:

    nearest          floor(i * s/e)
    nearest-exact    floor((i + 1/2) * s/e)
    linear, cubic    (i + 1/2) * s/e - 1/2,  with align_corners  i * (s - 1)/(e - 1)

Its value is the nearest element, or a weighted mean of the two (linear) or four (cubic) around it, axis by axis.
`scales` holds the user's e/s, if PyTorch uses these and not the sizes. Backward reads the shape of x, so x is not kept.

A mode that ends in `-antialias` averages all elements that fall on one when downsampling, as ONNX's Resize does.

ScaledSize(x) is e = floor(s * scale), computed in double precision as in PyTorch. ONNX attributes hold no doubles, so
scale is given as mantissa * 2^exponent.

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
from onnxtrain.ops.constructors import define_pure, define_unary
from onnxtrain.ops.definition import REQUIRED, Call, FromTorch, Gradient, NodeView, numel
from onnxtrain.ops.dtypes import accumulation_dtype
from onnxtrain.ops.sliding_windows import spatial_axes, spatial_sizes

aten = torch.ops.aten
INT64 = ir.DataType.INT64
_CUBIC = -0.75

_ATTRIBUTES: dict[str, Any] = {"mode": REQUIRED, "align_corners": 0, "scales": None}

# The names of ATen's operators by mode and number of spatial axes.
_ATEN_NAMES = {
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


def _output_shape(n: NodeView) -> Sizes:
    return (*sizes.dims_of(n.x)[:2], *_required_sizes(n.size, "Interpolate: the output size"))


def _original_shape(n: NodeView) -> Sizes:
    return _required_sizes(n.shape, "InterpolateGrad: the shape of x")


def _required_sizes(value: ir.Value, label: str) -> Sizes:
    required = as_sizes(value)
    if required is None:
        raise GraphError(
            f"{label} must follow from constants and sizes of inputs", got=f"{value.name}, whose values are unknown"
        )
    return required


# Sizes


def _scale(n: NodeView) -> float:
    return math.ldexp(n.mantissa, n.exponent)


def _scaled_size_body(op: Builder, n: NodeView) -> ir.Value:
    scaled = op.Mul(op.Cast(n.x, to=ir.DataType.DOUBLE), op.scalar(_scale(n), ir.DataType.DOUBLE))
    return op.Cast(op.Floor(scaled), to=INT64)


def scaled_size(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x.double() * scale).long()


def _scaled_size_on_host(n: NodeView, x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_scaled_size_on_host(n, size) for size in x)
    return int(x * _scale(n)) if isinstance(x, int) else x.scaled(_scale(n))


define_unary(
    "ScaledSize",
    (),
    scaled_size,
    None,
    domain=OWN,
    attributes={"mantissa": REQUIRED, "exponent": REQUIRED},
    body=_scaled_size_body,
    lower=lambda n, x: Call(scaled_size, x, _scale(n)),
    host_eval=_scaled_size_on_host,
)


# Kernels


def _aten_arguments(n: NodeView, count: int) -> list[Any]:
    """Return the arguments of ATen's operators after the sizes."""
    scales = [None] * count if n.scales is None else [float(s) for s in n.scales]
    return scales if n.mode.startswith("nearest") else [bool(n.align_corners), *scales]


def _lower(n: NodeView, x: Any, size: Any) -> Call:
    count = rank_of(n.x) - 2
    kernel = getattr(aten, _ATEN_NAMES[n.mode, count]).default
    return Call(kernel, x, list(size), *_aten_arguments(n, count))


def _lower_grad(n: NodeView, dy: Any, shape: Any) -> Call:
    count = rank_of(n.dy) - 2
    kernel = getattr(aten, f"{_ATEN_NAMES[n.mode, count]}_backward").default
    return Call(_interpolate_backward, kernel, dy, list(shape), *_aten_arguments(n, count))


def _interpolate_backward(kernel: Any, dy: torch.Tensor, shape: Sequence[int], *arguments: Any) -> Any:
    return kernel(dy, dy.shape[2:], shape, *arguments)


# Bodies. A tap is (indices into x, weights), one of each per output element along one axis.

Tap = tuple[ir.Value, ir.Value]


def _ratio(op: Builder, n: NodeView, axis: int, size: Size, out: Size, dtype: ir.DataType) -> ir.Value:
    """Return the distance in x between adjacent output elements."""
    if n.align_corners:
        steps = op.Max(op.size(sizes.subtract(out, 1)), op.size(1))
        aligned = op.Div(op.size(sizes.subtract(size, 1), dtype), op.Cast(steps, to=dtype))
        is_single = op.Equal(op.size(out), op.size(1))
        return op.Where(is_single, op.scalar(0, dtype), aligned)
    if n.scales is not None:
        return op.Div(op.scalar(1, dtype), op.scalar(n.scales[axis], dtype))
    return op.Div(op.size(size, dtype), op.size(out, dtype))


def _clamped_indices(op: Builder, coordinates: ir.Value, size: Size) -> ir.Value:
    """Cast integral coordinates to indices and clamp them to an axis of this size."""
    last = op.size(sizes.subtract(size, 1))
    return op.Max(op.Min(op.Cast(coordinates, to=INT64), last), op.size(0))


def _taps(op: Builder, n: NodeView, axis: int, size: Size, out: Size, dtype: ir.DataType) -> list[Tap]:
    index = op.Cast(op.Range(op.size(0), op.size(out), op.size(1)), to=dtype)
    ratio = _ratio(op, n, axis, size, out, dtype)
    if n.mode.startswith("nearest"):
        center = add_scalar(op, index, 0.5) if n.mode == "nearest-exact" else index
        nearest = _clamped_indices(op, op.Floor(op.Mul(center, ratio)), size)
        return [(nearest, op.Expand(op.scalar(1, dtype), op.sizes([out])))]
    if n.align_corners:
        coordinate = op.Mul(index, ratio)
    else:
        coordinate = add_scalar(op, op.Mul(add_scalar(op, index, 0.5), ratio), -0.5)
    if n.mode == "linear":
        coordinate = op.Max(coordinate, op.scalar(0, dtype))
    base = op.Floor(coordinate)
    weights = _weights(op, n.mode, op.Sub(coordinate, base))
    offset = 0 if n.mode == "linear" else -1
    return [(_clamped_indices(op, add_scalar(op, base, i + offset), size), w) for i, w in enumerate(weights)]


def _weights(op: Builder, mode: str, t: ir.Value) -> list[ir.Value]:
    """Return the weights of the elements around a coordinate that is at fraction `t` between the two nearest."""
    complement = op.Sub(op.scalar(1, like=t), t)
    if mode == "linear":
        return [complement, t]

    def near(x: ir.Value) -> ir.Value:  # (a + 2) x^3 - (a + 3) x^2 + 1
        slope = add_scalar(op, mul_scalar(op, x, _CUBIC + 2), -(_CUBIC + 3))
        return add_scalar(op, op.Mul(op.Mul(slope, x), x), 1)

    def far(x: ir.Value) -> ir.Value:  # a x^3 - 5 a x^2 + 8 a x - 4 a
        inner = add_scalar(op, op.Mul(add_scalar(op, mul_scalar(op, x, _CUBIC), -5 * _CUBIC), x), 8 * _CUBIC)
        return add_scalar(op, op.Mul(inner, x), -4 * _CUBIC)

    return [far(add_scalar(op, t, 1)), near(t), near(complement), far(add_scalar(op, complement, 1))]


def _resize_attributes(n: NodeView) -> dict[str, Any]:
    """Return the attributes of ONNX's Resize for a mode with antialiasing."""
    mode = n.mode.removesuffix(_ANTIALIAS)
    return {"antialias": 1, "mode": mode, "cubic_coeff_a": -0.5, "exclude_outside": 1, "axes": [2, 3]}


def _scales_or_sizes(op: Builder, n: NodeView, out: Sequence[Size]) -> tuple[ir.Value | None, ir.Value | None]:
    """Return the inputs `scales` and `sizes` of ONNX's Resize, one of which is None."""
    if n.scales is not None:
        return op.constant(n.scales, ir.DataType.FLOAT), None
    return None, op.sizes(out)


def _body(op: Builder, n: NodeView) -> ir.Value:
    dtype = accumulation_dtype(dtype_of(n.x))
    y, rank = cast(op, n.x, dtype), rank_of(n.x)
    if n.mode.endswith(_ANTIALIAS):
        y = op.Resize(y, None, *_scales_or_sizes(op, n, _output_shape(n)[2:]), **_resize_attributes(n))
        return cast(op, y, dtype_of(n.x))
    for axis, (size, out) in enumerate(zip(spatial_sizes(n.x), _output_shape(n)[2:], strict=True)):
        total: ir.Value | None = None
        taps = _taps(op, n, axis, size, out, dtype)
        for indices, weights in taps:
            term = op.Gather(y, indices, axis=2 + axis)
            if len(taps) > 1:
                term = op.Mul(term, reshaped(op, weights, [out, *[1] * (rank - 3 - axis)]))
            total = term if total is None else op.Add(total, term)
        assert total is not None
        y = total
    return cast(op, y, dtype_of(n.x))


def _grad_body(op: Builder, n: NodeView) -> ir.Value:
    """Multiply dy along each axis by the matrix [out, size] of the weights."""
    dtype = accumulation_dtype(dtype_of(n.dy))
    dx, rank = cast(op, n.dy, dtype), rank_of(n.dy)
    if n.mode.endswith(_ANTIALIAS):
        scales_or_sizes = _scales_or_sizes(op, n, spatial_sizes(n.dy))
        dx = op.ms.ResizeGrad(dx, n.shape, None, *scales_or_sizes, **_resize_attributes(n))
        return cast(op, dx, dtype_of(n.dy))
    for axis, (size, out) in enumerate(zip(_original_shape(n)[2:], spatial_sizes(n.dy), strict=True)):
        matrix: ir.Value | None = None
        columns = op.Range(op.size(0), op.size(size), op.size(1))
        for indices, weights in _taps(op, n, axis, size, out, dtype):
            is_read = op.Equal(reshaped(op, indices, [out, 1]), columns)
            term = op.Where(is_read, reshaped(op, weights, [out, 1]), op.scalar(0, dtype))
            matrix = term if matrix is None else op.Add(matrix, term)
        swap = list(range(rank))
        swap[2 + axis], swap[-1] = swap[-1], swap[2 + axis]
        dx = op.Transpose(op.MatMul(op.Transpose(dx, perm=swap), matrix), perm=swap)
    return cast(op, dx, dtype_of(n.dy))


# Capture


def _gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    attributes = {name: getattr(n, name) for name in _ATTRIBUTES}
    return [op.own.InterpolateGrad(dy, op.shape_of(n.x), **attributes), None]


def _interpolate(op: Builder, x: ir.Value, mode: str, align_corners: bool, scales: Sequence[Any] | None) -> Any:
    size = op.out[0].shape[2:]
    factors = None if scales is None or any(s is None for s in scales) else [float(s) for s in scales]
    if mode.endswith(_ANTIALIAS) and (align_corners or not all(float(np.float32(s)) == s for s in factors or ())):
        return NotImplemented  # ONNX's align_corners differs, and its scales are float32
    return op.own.Interpolate(x, op.sizes(size), mode=mode, align_corners=int(align_corners), scales=factors)


def _nearest_captures(mode: str) -> tuple[FromTorch, FromTorch]:
    """Return the captures of `.vec` and `.default`. The output size is PyTorch's."""

    def vector(op: Builder, x: ir.Value, output_size: Any, scale_factors: Any) -> Any:
        return _interpolate(op, x, mode, False, scale_factors)

    def default(op: Builder, x: ir.Value, output_size: Any, *scales: Any, **named: Any) -> Any:
        return _interpolate(op, x, mode, False, [*scales, *named.values()] or None)

    return vector, default


def _weighted_captures(mode: str) -> tuple[FromTorch, FromTorch]:
    """Return captures as `_nearest_captures` does, for overloads that take align_corners."""

    def vector(op: Builder, x: ir.Value, output_size: Any, align_corners: bool, scale_factors: Any) -> Any:
        return _interpolate(op, x, mode, align_corners, scale_factors)

    def default(op: Builder, x: ir.Value, output_size: Any, align_corners: bool, *scales: Any, **named: Any) -> Any:
        return _interpolate(op, x, mode, align_corners, [*scales, *named.values()] or None)

    return vector, default


def _from_torch() -> dict[str, FromTorch]:
    captures: dict[str, FromTorch] = {}
    for (mode, _), name in _ATEN_NAMES.items():
        vector, default = _nearest_captures(mode) if mode.startswith("nearest") else _weighted_captures(mode)
        captures[f"aten.{name}.vec"], captures[f"aten.{name}.default"] = vector, default
    return captures


define_pure(
    OWN,
    "Interpolate",
    ("x", "size"),
    ("y",),
    attributes=_ATTRIBUTES,
    from_torch=_from_torch(),
    shapes=lambda n: (TensorType(dtype_of(n.x), _output_shape(n)),),
    body=_body,
    gradient=(Gradient(_gradient, reads=()),),
    nondiff_inputs=frozenset({"size"}),
    lower=_lower,
    host_inputs=frozenset({1}),
    axes=lambda n: f"n c {spatial_axes('d', n.x)}, [s] -> n c {spatial_axes('e', n.x)}",
    flops=lambda n: sizes.multiply(4, numel(n.node.outputs[0])),
)
define_pure(
    OWN,
    "InterpolateGrad",
    ("dy", "shape"),
    ("dx",),
    attributes=_ATTRIBUTES,
    shapes=lambda n: (TensorType(dtype_of(n.dy), _original_shape(n)),),
    body=_grad_body,
    lower=_lower_grad,
    host_inputs=frozenset({1}),
    axes=lambda n: NO_AXES,  # an axis that maps must be sliced in `shape`, too
    flops=lambda n: sizes.multiply(4, numel(n.dy)),
)
