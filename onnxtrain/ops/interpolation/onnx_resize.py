"""ONNX's Resize in all its modes, axis by axis.

    Resize(x, roi, scales, sizes) -> y                   ResizeGrad(dy, shape, roi, scales, sizes) -> dx

PyTorch's modes are captured as Interpolate, which runs PyTorch's kernels. `coordinate_transformation_mode` gives the
coordinate in x of each output element. Its value is the nearest element (`nearest_mode`), or a weighted mean of the two
(linear) or four (cubic) around it; with `antialias`, of all elements that fall on it when downsampling. With
tf_crop_and_resize it is `extrapolation_value` outside x. `keep_aspect_ratio_policy` adjusts `sizes`.
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
from onnxtrain.ops.constructors import always, define_pure
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
_MODES = ("nearest", "linear", "cubic")
_COORDINATE_MODES = frozenset(
    {
        "half_pixel",
        "half_pixel_symmetric",
        "pytorch_half_pixel",
        "align_corners",
        "asymmetric",
        "tf_crop_and_resize",
    }
)


# Attributes and inputs of a node


@dataclass(frozen=True)
class AxisResize:
    """One axis to resize.

    Attributes:
        axis: its index.
        scale: output size / input size as the node gives it; None: by the actual sizes.
        start, end: the region of x to resize, as fractions of the axis.
    """

    axis: int
    scale: float | None
    start: float
    end: float


@dataclass(frozen=True)
class Resampling:
    """The attributes that define the value of an output element; see ONNX's Resize."""

    mode: str
    coordinate_mode: str
    nearest_mode: str
    cubic_coeff_a: float
    antialias: bool
    exclude_outside: bool
    extrapolation_value: float


def _resampling(n: NodeView) -> Resampling:
    if n.coordinate_transformation_mode not in _COORDINATE_MODES or n.mode not in _MODES:
        raise GraphError(
            "Resize: unknown mode or coordinate_transformation_mode",
            expected=f"{' or '.join(_MODES)}; {' or '.join(sorted(_COORDINATE_MODES))}",
            got=f"mode={n.mode}, coordinate_transformation_mode={n.coordinate_transformation_mode}",
        )
    return Resampling(
        n.mode,
        n.coordinate_transformation_mode,
        n.nearest_mode,
        n.cubic_coeff_a,
        bool(n.antialias),
        bool(n.exclude_outside),
        n.extrapolation_value,
    )


def _constant_floats(value: ir.Value | None, label: str) -> list[float] | None:
    """Return the values of an optional constant input; None if it is absent or empty."""
    if value is None or sizes.dims_of(value) == (0,):
        return None
    constant = constant_of(value)
    if constant is None:
        raise GraphError(f"{label} must be constant", got=f"{value.name}, which is computed")
    return [float(v) for v in constant.reshape(-1)]


def _axes(n: NodeView, rank: int) -> list[int]:
    return list(range(rank)) if n.axes is None else [normalize_axis(a, rank) for a in n.axes]


def _scales(n: NodeView) -> list[float] | None:
    return _constant_floats(n.scales, "the scales of Resize")


def _new_sizes(n: NodeView, shape: Sizes) -> list[Size]:
    """Return the output's size along each of the node's axes."""
    axes, scales = _axes(n, len(shape)), _scales(n)
    if scales is not None:
        return [_scaled(shape[axis], scale) for axis, scale in zip(axes, scales, strict=True)]
    targets = list(required_ints(n.sizes, "the output sizes of Resize"))
    if n.keep_aspect_ratio_policy == "stretch":
        return targets
    sources = [shape[axis] for axis in axes]
    if any(isinstance(s, str) for s in (*sources, *targets)):
        raise GraphError(
            f"Resize: keep_aspect_ratio_policy={n.keep_aspect_ratio_policy} needs static sizes",
            expected="integers",
            got=f"{sources} to {targets}",
            todo="export the model with static sizes, or pass scales instead of sizes",
        )
    choose = min if n.keep_aspect_ratio_policy == "not_larger" else max
    scale = choose(int(target) / int(source) for source, target in zip(sources, targets, strict=True))
    return [math.floor(scale * int(source) + 0.5) for source in sources]


def _scaled(size: Size, scale: float) -> Size:
    if isinstance(size, int):
        return math.floor(size * scale)
    numerator, denominator = scale.as_integer_ratio()
    return sizes.floor_divide(sizes.multiply(size, numerator), denominator)


def _resized_axes(n: NodeView, shape: Sizes) -> list[AxisResize]:
    """Return the axes that change."""
    axes, scales = _axes(n, len(shape)), _scales(n)
    crops = n.coordinate_transformation_mode == "tf_crop_and_resize"
    region = _constant_floats(n.roi, "the region (roi) of Resize") if crops else None
    if crops and region is None:
        raise GraphError(
            "Resize: coordinate_transformation_mode=tf_crop_and_resize needs a region", todo="pass the input roi"
        )
    count = len(axes)
    region = region or [0.0] * count + [1.0] * count
    new_sizes = _new_sizes(n, shape)
    if scales is None and n.keep_aspect_ratio_policy != "stretch":
        scales = [int(size) / int(shape[axis]) for axis, size in zip(axes, new_sizes, strict=True)]
    return [
        AxisResize(axis, None if scales is None else scales[i], region[i], region[count + i])
        for i, axis in enumerate(axes)
        if new_sizes[i] != shape[axis] or (region[i], region[count + i]) != (0.0, 1.0)
    ]


def _new_shape(n: NodeView, shape: Sizes) -> Sizes:
    result = list(shape)
    for axis, size in zip(_axes(n, len(shape)), _new_sizes(n, shape), strict=True):
        result[axis] = size
    return tuple(result)


# Kernels


def _coordinates(resampling: Resampling, change: AxisResize, size: int, out: int, scale: float) -> np.ndarray[Any, Any]:
    """Return the coordinate in x of each output element, in elements."""
    index = np.arange(out, dtype=np.float64)
    mode, length = resampling.coordinate_mode, scale * size
    if mode == "align_corners":
        return index * 0 if length == 1 else index * ((size - 1) / (length - 1))
    if mode == "asymmetric":
        return index / scale
    if mode == "tf_crop_and_resize":
        span = (change.end - change.start) * (size - 1)
        offset = index * 0 + span / 2 if length == 1 else index * (span / (length - 1))
        return offset + change.start * (size - 1)
    if mode == "pytorch_half_pixel" and length == 1:
        return index * 0 - 0.5
    half_pixel = (index + 0.5) / scale - 0.5
    return half_pixel + size / 2 * (1 - out / length) if mode == "half_pixel_symmetric" else half_pixel


def _weight(resampling: Resampling, distance: np.ndarray[Any, Any]) -> Any:
    """Return the weights of elements at these distances."""
    x = np.abs(distance)
    if resampling.mode == "linear":
        return np.clip(1 - x, 0, 1)
    a = resampling.cubic_coeff_a
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


_ROUND: dict[str, Callable[[Any], Any]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _taps(resampling: Resampling, change: AxisResize, size: int, out: int) -> tuple[Any, Any, Any]:
    """Return indices into x and their weights, [out, taps], and whether the output element is outside x, [out]."""
    scale = change.scale or (out / size if size else 1.0)
    coordinates = _coordinates(resampling, change, size, out, scale)
    if resampling.coordinate_mode == "tf_crop_and_resize":
        outside = (coordinates < 0) | (coordinates > size - 1)
    else:
        outside = np.zeros(out, bool)
    if resampling.mode == "nearest":
        indices = _ROUND[resampling.nearest_mode](coordinates)[:, None]
        weights = np.ones_like(indices)
    else:
        shrink = min(scale, 1.0) if resampling.antialias else 1.0
        reach = math.ceil((1 if resampling.mode == "linear" else 2) / shrink)
        indices = np.floor(coordinates)[:, None] + np.arange(1 - reach, reach + 1)
        weights = _weight(resampling, (indices - coordinates[:, None]) * shrink)
        if resampling.antialias:
            weights /= weights.sum(1, keepdims=True)
    if resampling.exclude_outside:
        weights *= (indices >= 0) & (indices < size)
        weights /= weights.sum(1, keepdims=True)
    return np.clip(indices, 0, max(size - 1, 0)).astype(np.int64), weights, outside


def resize(x: Tensor, shape: Sequence[int], changes: Sequence[AxisResize], resampling: Resampling) -> Tensor:
    """Resize x to `shape`, axis by axis."""
    y = x if x.dtype == torch.float64 else x.float()
    outside = torch.zeros((), dtype=torch.bool, device=x.device)
    for change in changes:
        axis = change.axis
        indices, weights, outside_axis = _taps_on_device(x, change, resampling, x.shape[axis], shape[axis])
        aligned = [-1 if i == axis else 1 for i in range(x.ndim)]
        terms = [y.index_select(axis, i) * w.view(aligned) for i, w in zip(indices.T, weights.T, strict=True)]
        y = torch.stack(terms).sum(0) if len(terms) > 1 else terms[0]
        outside = outside | outside_axis.view(aligned)
    if resampling.coordinate_mode == "tf_crop_and_resize":
        y = torch.where(outside, resampling.extrapolation_value, y)
    return (y if changes else y.clone()).to(x.dtype)


def resize_backward(dy: Tensor, shape: Sequence[int], changes: Sequence[AxisResize], resampling: Resampling) -> Tensor:
    """Add each output element's gradient to the elements of x that it was computed from."""
    dx = dy if dy.dtype == torch.float64 else dy.float()
    for change in reversed(changes):
        axis = change.axis
        indices, weights, outside = _taps_on_device(dy, change, resampling, shape[axis], dy.shape[axis])
        aligned = [-1 if i == axis else 1 for i in range(dy.ndim)]
        inside = torch.where(outside.view(aligned), 0.0, dx)
        total = dx.new_zeros([shape[axis] if i == axis else s for i, s in enumerate(dx.shape)])
        for i, w in zip(indices.T, weights.T, strict=True):
            total.index_add_(axis, i, inside * w.view(aligned))
        dx = total
    return (dx if changes else dx.clone()).to(dy.dtype)


def _taps_on_device(
    x: Tensor, change: AxisResize, resampling: Resampling, size: int, out: int
) -> tuple[Tensor, Tensor, Tensor]:
    indices, weights, outside = _taps(resampling, change, size, out)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (
        torch.from_numpy(indices).to(x.device),
        torch.from_numpy(weights).to(x.device, dtype),
        torch.from_numpy(outside).to(x.device),
    )


@dataclass(frozen=True)
class Target:
    """The target of an axis: a static `size`, or a `scale`, or, if both are None, the node's input `sizes`."""

    axis: int
    size: int | None
    scale: float | None


def resize_dynamically(
    x: Tensor, input_sizes: Any, targets: Sequence[Target], changes: Sequence[AxisResize], resampling: Resampling
) -> Tensor:
    """Resize x to a shape of which some sizes are known only at run time."""
    shape = list(x.shape)
    for i, target in enumerate(targets):
        if target.size is not None:
            shape[target.axis] = target.size
        elif target.scale is not None:
            shape[target.axis] = math.floor(x.shape[target.axis] * target.scale)
        else:
            shape[target.axis] = input_sizes[i]
    return resize(x, shape, changes, resampling)


def _lower(n: NodeView, x: Any, roi: Any, scales: Any, input_sizes: Any) -> Call:
    shape, constant_scales = sizes.dims_of(n.x), _scales(n)
    changes, new_shape = _resized_axes(n, shape), _new_shape(n, shape)
    if not any(isinstance(s, str) for s in new_shape):
        return Call(resize, x, new_shape, changes, _resampling(n))
    targets = []
    for i, axis in enumerate(_axes(n, len(shape))):
        size = new_shape[axis]
        scale = constant_scales[i] if constant_scales else None
        targets.append(Target(axis, size if isinstance(size, int) else None, scale))
    return Call(resize_dynamically, x, input_sizes, targets, changes, _resampling(n))


def _lower_grad(n: NodeView, dy: Any, shape: Any, roi: Any, scales: Any, input_sizes: Any) -> Call:
    return Call(resize_backward, dy, shape, _resized_axes(n, _original_shape(n)), _resampling(n))


# The body of the gradient multiplies dy along each axis by the matrix [out, size] of the weights, which is the Resize
# of an identity matrix.


def _original_shape(n: NodeView) -> Sizes:
    return required_ints(n.shape, "the output shape of ResizeGrad")


def _weight_matrix(op: Builder, n: NodeView, change: AxisResize, size: Size, out: Size, dtype: ir.DataType) -> ir.Value:
    rows = arange(op, size)
    identity = op.Cast(op.Equal(unsqueezed(op, rows, 1), unsqueezed(op, rows, 0)), to=dtype)
    attributes = {name: getattr(n, name) for name in _ATTRIBUTES}
    attributes |= {"axes": [0], "extrapolation_value": 0.0, "keep_aspect_ratio_policy": "stretch"}
    crops = n.coordinate_transformation_mode == "tf_crop_and_resize"
    roi = op.constant([change.start, change.end], dtype) if crops else None
    scales = None if change.scale is None else op.constant([change.scale], ir.DataType.FLOAT)
    output_sizes = op.sizes([out]) if scales is None else None
    inputs, matrix_type = (identity, roi, scales, output_sizes), TensorType(dtype, (out, size))
    return op.node(ONNX, "Resize", inputs, attributes, types=[matrix_type]).outputs[0]


def _grad_body(op: Builder, n: NodeView) -> ir.Value:
    shape = _original_shape(n)
    dtype = accumulation_dtype(dtype_of(n.dy))
    dx, rank = cast(op, n.dy, dtype), len(shape)
    for change in _resized_axes(n, shape):
        axis = change.axis
        matrix = _weight_matrix(op, n, change, shape[axis], sizes.dims_of(n.dy)[axis], dtype)
        swap = list(range(rank))
        swap[axis], swap[-1] = swap[-1], swap[axis]
        dx = op.Transpose(op.MatMul(op.Transpose(dx, perm=swap), matrix), perm=swap)
    return cast(op, dx, dtype_of(n.dy))


def _gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    attributes = {name: getattr(n, name) for name in _ATTRIBUTES}
    dx = op.ms.ResizeGrad(dy, op.shape_of(n.x), n.roi, n.scales, n.sizes, **attributes)
    return [dx, None, None, None][: len(n.node.inputs)]


define_pure(
    ONNX,
    "Resize",
    ("x", "roi?", "scales?", "sizes?"),
    ("y",),
    attributes=_ATTRIBUTES,
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
define_pure(
    MICROSOFT,
    "ResizeGrad",
    ("dy", "shape", "roi?", "scales?", "sizes?"),
    ("dx",),
    attributes=_ATTRIBUTES,
    shapes=lambda n: (TensorType(dtype_of(n.dy), _original_shape(n)),),
    body=_grad_body,
    lower=_lower_grad,
    atomic_on_gpu=True,
    host_inputs=frozenset({1, 4}),
    synchronizes=always,
    axes=lambda n: NO_AXES,
    flops=lambda n: sizes.multiply(4, numel(n.dy)),
)
