"""ONNX's Resize in all its modes, axis after axis; forms that PyTorch has are Interpolate, which has its kernels.

    Resize(x, roi, scales, sizes) -> y                   ResizeGrad(dy, shape, roi, scales, sizes) -> dx

Along an axis of s elements that becomes one of e, output i lies in x at a place that `coordinate_transformation_mode`
says, and is the nearest element (`nearest_mode`), or a mean of two (linear) or four (cubic) around; with `antialias`,
where the axis shrinks, of as many as fall together. With tf_crop_and_resize what lies outside x is
`extrapolation_value`. `keep_aspect_ratio_policy` works out sizes from `sizes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.axes import NO_AXES
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import MICROSOFT, ONNX, TensorType, constant_of, dtype_of, normalize_axis
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.constructors import always, define_fused
from onnxtrain.ops.definition import STANDARD, Call, Gradient, NodeView, numel
from onnxtrain.ops.dtypes import accumulation_dtype
from onnxtrain.ops.reshape.dims import unsqueezed
from onnxtrain.ops.reshape.rows import arange
from onnxtrain.ops.symbolic_ints import required_ints

Tensor = torch.Tensor

_ATTRIBUTES: dict[str, Any] = {
    "antialias": 0,
    "axes": None,
    "coordinate_transformation_mode": "half_pixel",
    "cubic_coeff_a": -0.75,
    "exclude_outside": 0,
    "extrapolation_value": 0.0,
    "keep_aspect_ratio_policy": "stretch",
    "mode": "nearest",
    "nearest_mode": "round_prefer_floor",
}
_PLACES = frozenset(
    {
        "half_pixel",
        "half_pixel_symmetric",
        "pytorch_half_pixel",
        "align_corners",
        "asymmetric",
        "tf_crop_and_resize",
    }
)


# What a node says


@dataclass(frozen=True)
class Resized:
    """One axis that is resized.

    Attributes:
        axis: which.
        scale: output to input, where the node gives it; None: by the sizes.
        start, end: the region of x that is resized, as shares of the axis.
    """

    axis: int
    scale: float | None
    start: float
    end: float


@dataclass(frozen=True)
class How:
    """The attributes that say what an output element is."""

    mode: str
    places: str
    nearest: str
    cubic: float
    antialias: bool
    exclude_outside: bool
    outside: float


def _how(n: NodeView) -> How:
    if n.coordinate_transformation_mode not in _PLACES or n.mode not in ("nearest", "linear", "cubic"):
        raise GraphError(
            "Resize does not know the mode", got=f"mode={n.mode}, places {n.coordinate_transformation_mode}"
        )
    return How(
        n.mode,
        n.coordinate_transformation_mode,
        n.nearest_mode,
        n.cubic_coeff_a,
        bool(n.antialias),
        bool(n.exclude_outside),
        n.extrapolation_value,
    )


def _numbers(value: ir.Value | None, use: str) -> list[float] | None:
    """The floating numbers of an optional input; None where it is absent or empty."""
    if value is None or sizes.dims_of(value) == (0,):
        return None
    known = constant_of(value)
    if known is None:
        raise GraphError(f"{use} must be constant", got=f"{value.name}, which is computed")
    return [float(v) for v in known.reshape(-1)]


def _axes(n: NodeView, rank: int) -> list[int]:
    return list(range(rank)) if n.axes is None else [normalize_axis(a, rank) for a in n.axes]


def _scales(n: NodeView) -> list[float] | None:
    return _numbers(n.scales, "the scales of Resize")


def _new_sizes(n: NodeView, shape: Sizes) -> list[Size]:
    """The output's size along each of the node's axes."""
    axes, scales = _axes(n, len(shape)), _scales(n)
    if scales is not None:
        return [_scaled(shape[axis], scale) for axis, scale in zip(axes, scales, strict=True)]
    wanted = list(required_ints(n.sizes, "the sizes that Resize gives"))
    if n.keep_aspect_ratio_policy == "stretch":
        return wanted
    have = [shape[axis] for axis in axes]
    if any(isinstance(s, str) for s in (*have, *wanted)):
        raise GraphError("Resize keeps an aspect ratio of known sizes only", got=f"{have} to {wanted}")
    choose = min if n.keep_aspect_ratio_policy == "not_larger" else max
    scale = choose(int(w) / int(h) for h, w in zip(have, wanted, strict=True))
    return [math.floor(scale * int(h) + 0.5) for h in have]


def _scaled(size: Size, scale: float) -> Size:
    if isinstance(size, int):
        return math.floor(size * scale)
    numerator, denominator = scale.as_integer_ratio()
    return sizes.floor_divide(sizes.multiply(size, numerator), denominator)


def _resized(n: NodeView, shape: Sizes) -> list[Resized]:
    """The axes that change."""
    axes, scales = _axes(n, len(shape)), _scales(n)
    region = _numbers(n.roi, "the region of Resize") if n.coordinate_transformation_mode.startswith("tf") else None
    if n.coordinate_transformation_mode.startswith("tf") and region is None:
        raise GraphError("Resize needs its region", todo="give it the input roi")
    count = len(axes)
    region = region or [0.0] * count + [1.0] * count
    new = _new_sizes(n, shape)
    if scales is None and n.keep_aspect_ratio_policy != "stretch":
        scales = [int(w) / int(shape[axis]) for axis, w in zip(axes, new, strict=True)]
    return [
        Resized(axis, None if scales is None else scales[i], region[i], region[count + i])
        for i, axis in enumerate(axes)
        if new[i] != shape[axis] or (region[i], region[count + i]) != (0.0, 1.0)
    ]


def _new_shape(n: NodeView, shape: Sizes) -> Sizes:
    result = list(shape)
    for axis, size in zip(_axes(n, len(shape)), _new_sizes(n, shape), strict=True):
        result[axis] = size
    return tuple(result)


# Kernels


def _origins(how: How, change: Resized, size: int, out: int, scale: float) -> np.ndarray[Any, Any]:
    """Where each output element lies in x, in elements."""
    number = np.arange(out, dtype=np.float64)
    length = scale * size
    if how.places == "align_corners":
        return number * 0 if length == 1 else number * ((size - 1) / (length - 1))
    if how.places == "asymmetric":
        return number / scale
    if how.places == "tf_crop_and_resize":
        span = (change.end - change.start) * (size - 1)
        inner = number * 0 + span / 2 if length == 1 else number * (span / (length - 1))
        return inner + change.start * (size - 1)
    if how.places == "pytorch_half_pixel" and length == 1:
        return number * 0 - 0.5
    middle = (number + 0.5) / scale - 0.5
    return middle + size / 2 * (1 - out / length) if how.places == "half_pixel_symmetric" else middle


def _kernel(how: How, distance: np.ndarray[Any, Any]) -> Any:
    """The weight of an element at this distance."""
    x = np.abs(distance)
    if how.mode == "linear":
        return np.clip(1 - x, 0, 1)
    a = how.cubic
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


_ROUND: dict[str, Callable[[Any], Any]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def taps(how: How, change: Resized, size: int, out: int) -> tuple[Any, Any, Any]:
    """For each output element the places in x and their weights, [out, taps], and whether it lies outside, [out]."""
    scale = change.scale or (out / size if size else 1.0)
    origin = _origins(how, change, size, out, scale)
    beyond = (origin < 0) | (origin > size - 1) if how.places == "tf_crop_and_resize" else np.zeros(out, bool)
    if how.mode == "nearest":
        places = _ROUND[how.nearest](origin)[:, None]
        weights = np.ones_like(places)
    else:
        shrink = min(scale, 1.0) if how.antialias else 1.0
        reach = math.ceil((1 if how.mode == "linear" else 2) / shrink)
        places = np.floor(origin)[:, None] + np.arange(1 - reach, reach + 1)
        weights = _kernel(how, (places - origin[:, None]) * shrink)
        if how.antialias:
            weights /= weights.sum(1, keepdims=True)
    if how.exclude_outside:
        weights *= (places >= 0) & (places < size)
        weights /= weights.sum(1, keepdims=True)
    return np.clip(places, 0, max(size - 1, 0)).astype(np.int64), weights, beyond


def resize(x: Tensor, out: Sequence[int], changes: Sequence[Resized], how: How) -> Tensor:
    """Resizes x axis after axis to the shape `out`."""
    y = x if x.dtype == torch.float64 else x.float()
    outside = torch.zeros((), dtype=torch.bool, device=x.device)
    for change in changes:
        places, weights, beyond = _on_device(x, change, how, x.shape[change.axis], out[change.axis])
        aligned = [-1 if i == change.axis else 1 for i in range(x.ndim)]
        parts = [y.index_select(change.axis, p) * w.view(aligned) for p, w in zip(places.T, weights.T, strict=True)]
        y = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
        outside = outside | beyond.view(aligned)
    if how.places == "tf_crop_and_resize":
        y = torch.where(outside, how.outside, y)
    return (y if changes else y.clone()).to(x.dtype)


def resize_backward(dy: Tensor, shape: Sequence[int], changes: Sequence[Resized], how: How) -> Tensor:
    """Gives each output element's gradient to the places it was made of."""
    dx = dy if dy.dtype == torch.float64 else dy.float()
    for change in reversed(changes):
        axis = change.axis
        places, weights, beyond = _on_device(dy, change, how, shape[axis], dy.shape[axis])
        aligned = [-1 if i == axis else 1 for i in range(dy.ndim)]
        inside = torch.where(beyond.view(aligned), 0.0, dx)
        total = dx.new_zeros([shape[axis] if i == axis else s for i, s in enumerate(dx.shape)])
        for p, w in zip(places.T, weights.T, strict=True):
            total.index_add_(axis, p, inside * w.view(aligned))
        dx = total
    return (dx if changes else dx.clone()).to(dy.dtype)


def _on_device(x: Tensor, change: Resized, how: How, size: int, out: int) -> tuple[Tensor, Tensor, Tensor]:
    places, weights, beyond = taps(how, change, size, out)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (
        torch.from_numpy(places).to(x.device),
        torch.from_numpy(weights).to(x.device, dtype),
        torch.from_numpy(beyond).to(x.device),
    )


@dataclass(frozen=True)
class Target:
    """What an axis becomes: `size` where that is known before the run, else by `scale` or by the given sizes."""

    axis: int
    size: int | None
    scale: float | None


def resize_to(x: Tensor, wanted: Any, targets: Sequence[Target], changes: Sequence[Resized], how: How) -> Tensor:
    """Resize where some sizes are known only now."""
    out = list(x.shape)
    for i, target in enumerate(targets):
        if target.size is not None:
            out[target.axis] = target.size
        elif target.scale is not None:
            out[target.axis] = math.floor(x.shape[target.axis] * target.scale)
        else:
            out[target.axis] = wanted[i]
    return resize(x, out, changes, how)


def _lower(n: NodeView, x: Any, roi: Any, scales: Any, wanted: Any) -> Call:
    shape, given = sizes.dims_of(n.x), _scales(n)
    changes, new = _resized(n, shape), _new_shape(n, shape)
    if not any(isinstance(s, str) for s in new):
        return Call(resize, x, new, changes, _how(n))
    targets = [
        Target(axis, new[axis] if isinstance(new[axis], int) else None, given[i] if given else None)  # type: ignore[arg-type]  # an int, as is asked
        for i, axis in enumerate(_axes(n, len(shape)))
    ]
    return Call(resize_to, x, wanted, targets, changes, _how(n))


def _lower_grad(n: NodeView, dy: Any, shape: Any, roi: Any, scales: Any, wanted: Any) -> Call:
    return Call(resize_backward, dy, shape, _resized(n, _original(n)), _how(n))


# The body of the gradient: for each axis the matrix [out, size] of its weights, which is Resize of the unit matrix.


def _original(n: NodeView) -> Sizes:
    return required_ints(n.shape, "the output shape of ResizeGrad")


def _matrix(op: Builder, n: NodeView, change: Resized, size: Size, out: Size, dtype: ir.DataType) -> ir.Value:
    rows = arange(op, size)
    unit = op.Cast(op.Equal(unsqueezed(op, rows, 1), unsqueezed(op, rows, 0)), to=dtype)
    how = {name: getattr(n, name) for name in _ATTRIBUTES}
    how |= {"axes": [0], "extrapolation_value": 0.0, "keep_aspect_ratio_policy": "stretch"}
    roi = (
        op.constant([change.start, change.end], dtype)
        if how["coordinate_transformation_mode"].startswith("tf")
        else None
    )
    scales = None if change.scale is None else op.constant([change.scale], ir.DataType.FLOAT)
    wanted = op.sizes([out]) if scales is None else None
    given = TensorType(dtype, (out, size))
    return op.node(ONNX, "Resize", (unit, roi, scales, wanted), how, types=[given]).outputs[0]


def _grad_body(op: Builder, n: NodeView) -> ir.Value:
    shape = _original(n)
    dtype = accumulation_dtype(dtype_of(n.dy))
    dx, rank = cast(op, n.dy, dtype), len(shape)
    for change in _resized(n, shape):
        axis = change.axis
        matrix = _matrix(op, n, change, shape[axis], sizes.dims_of(n.dy)[axis], dtype)
        swap = list(range(rank))
        swap[axis], swap[-1] = swap[-1], swap[axis]
        dx = op.Transpose(op.MatMul(op.Transpose(dx, perm=swap), matrix), perm=swap)
    return cast(op, dx, dtype_of(n.dy))


def _gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    how = {name: getattr(n, name) for name in _ATTRIBUTES}
    dx = op.ms.ResizeGrad(dy, op.shape_of(n.x), n.roi, n.scales, n.sizes, **how)
    return [dx, None, None, None][: len(n.node.inputs)]


define_fused(
    ONNX,
    "Resize",
    ("x", "roi?", "scales?", "sizes?"),
    ("y",),
    attributes=_ATTRIBUTES,
    since_version=19,
    shapes=lambda n: (TensorType(dtype_of(n.x), _new_shape(n, sizes.dims_of(n.x))),),
    body=STANDARD,
    gradient=(Gradient(_gradient, reads=()),),
    nondiff_inputs=frozenset({"roi", "scales", "sizes"}),
    lower=_lower,
    host_inputs=frozenset({3}),
    synchronizes=always,
    axes=lambda n: NO_AXES,
    flops=lambda n: sizes.multiply(4, numel(n.node.outputs[0])),
)
define_fused(
    MICROSOFT,
    "ResizeGrad",
    ("dy", "shape", "roi?", "scales?", "sizes?"),
    ("dx",),
    attributes=_ATTRIBUTES,
    shapes=lambda n: (TensorType(dtype_of(n.dy), _original(n)),),
    body=_grad_body,
    lower=_lower_grad,
    atomic_on_gpu=True,
    host_inputs=frozenset({1, 4}),
    synchronizes=always,
    axes=lambda n: NO_AXES,
    flops=lambda n: sizes.multiply(4, numel(n.dy)),
)
