"""Adaptive pooling: windows that divide each axis into a given number of parts.

    AdaptiveAveragePool(x[n, c, d], size) -> y[n, c, e]
    AdaptiveMaxPool(x[n, c, d], size) -> y[n, c, e], indices[n, c, e]        indices are relative to the image [d]
    AdaptiveAveragePoolGrad(dy, shape), AdaptiveMaxPoolGrad(dy, indices, shape) -> dx[n, c, d]

Part i of an axis of size s, divided into e parts, is [floor(i*s/e), ceil((i + 1)*s/e)): parts may overlap. With one
part per axis the mean is GlobalAveragePool. Backward ops take the shape of x, so x need not be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.axes import NO_AXES
from onnxtrain.graph.builder import Builder, as_sizes
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import OWN, TensorType, dtype_of, rank_of
from onnxtrain.ops.body_parts import int64_vector, reshaped
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import Call, Gradient, NodeView, numel
from onnxtrain.ops.pool.window import add_batch_axis, input_shape, max_pool_grad_body, remove_batch_axis, unread_input
from onnxtrain.ops.sliding_windows import product, sizes_per_axis, spatial_axes, spatial_sizes
from onnxtrain.torch_compat import aten_kernels

aten = torch.ops.aten
Tensor = torch.Tensor
INT64 = ir.DataType.INT64


def _output_shape(n: NodeView) -> Sizes:
    parts = as_sizes(n.size)
    if parts is None:
        raise GraphError(
            f"the input size of {n.definition.name} is not shape arithmetic",
            expected="a constant, or a value computed from shapes",
            got=n.size.name,
        )
    return (*sizes.dims_of(n.x)[:2], *parts)


def _axes(n: NodeView) -> str:
    outputs = ", ".join([f"n c {spatial_axes('e', n.x)}"] * len(n.node.outputs))
    return f"n c {spatial_axes('d', n.x)}, [s] -> {outputs}"


# Parts of the bodies


def _bounds(op: Builder, size: Size, parts: Size) -> tuple[ir.Value, ir.Value]:
    """Return the first index of each part of an axis, and the one after its last: two vectors."""
    one = op.scalar(1, INT64)
    part = op.Range(op.scalar(0, INT64), op.size(parts), one)
    start = op.Div(op.Mul(part, op.size(size)), op.size(parts))
    rounded_up = op.Sub(op.Add(op.Mul(op.Add(part, one), op.size(size)), op.size(parts)), one)
    return start, op.Div(rounded_up, op.size(parts))


def _within(op: Builder, size: Size, parts: Size) -> ir.Value:
    """Return the mask [parts, size] of the positions in each part."""
    start, end = (reshaped(op, bound, [parts, 1]) for bound in _bounds(op, size, parts))
    position = op.Range(op.scalar(0, INT64), op.size(size), op.scalar(1, INT64))
    return op.And(op.GreaterOrEqual(position, start), op.Less(position, end))


def _lengths(op: Builder, size: Size, parts: Size, dtype: ir.DataType) -> ir.Value:
    start, end = _bounds(op, size, parts)
    return op.Cast(op.Sub(end, start), to=dtype)


def _on_axes(op: Builder, x: ir.Value, rank: int, first: int, extents: Sequence[Size]) -> ir.Value:
    """Reshape x, of shape `extents`, to `rank` axes, with its own from axis `first` on."""
    return reshaped(op, x, [*[1] * first, *extents, *[1] * (rank - first - len(extents))])


def _masked_sum(op: Builder, x: ir.Value, mask: ir.Value, axis: int) -> ir.Value:
    masked = op.Where(mask, x, op.scalar(0, like=x))
    return op.ReduceSum(masked, int64_vector(op, [axis]), keepdims=0)


# AdaptiveAveragePool


def _average_body(op: Builder, n: NodeView) -> ir.Value:
    """Average along one axis after another: the length of a window along an axis does not depend on the others."""
    y: ir.Value = n.x
    rank = rank_of(y)
    for axis, (size, parts) in enumerate(zip(spatial_sizes(n.x), _output_shape(n)[2:], strict=True), 2):
        mask = _on_axes(op, _within(op, size, parts), rank + 1, axis, [parts, size])
        summed = _masked_sum(op, op.Unsqueeze(y, int64_vector(op, [axis])), mask, axis + 1)
        lengths = _lengths(op, size, parts, dtype_of(y))
        y = op.Div(summed, _on_axes(op, lengths, rank, axis, [parts]))
    return y


def _average_gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    return [op.own.AdaptiveAveragePoolGrad(dy, op.shape_of(n.x)), None]


def _lower_average(n: NodeView, x: Any, size: Any) -> Call:
    kernel = {1: torch.adaptive_avg_pool1d, 2: aten_kernels.adaptive_avg_pool2d, 3: aten_kernels.adaptive_avg_pool3d}
    return Call(kernel[rank_of(n.x) - 2], x, list(size))


def _capture_average(count: int) -> Any:
    def capture(op: Builder, x: ir.Value, output_size: Any) -> Any:
        x, is_unbatched = add_batch_axis(op, x, count)
        parts = sizes_per_axis(output_size, count)
        if all(p == 1 for p in parts):
            return remove_batch_axis(op, is_unbatched, op.GlobalAveragePool(x))[0]
        return remove_batch_axis(op, is_unbatched, op.own.AdaptiveAveragePool(x, op.sizes(parts)))[0]

    return capture


define_pure(
    OWN,
    "AdaptiveAveragePool",
    ("x", "size"),
    ("y",),
    from_torch={
        "aten.adaptive_avg_pool1d.default": _capture_average(1),
        "aten.adaptive_avg_pool2d.default": _capture_average(2),
        "aten.adaptive_avg_pool3d.default": _capture_average(3),
        "aten._adaptive_avg_pool2d.default": _capture_average(2),
        "aten._adaptive_avg_pool3d.default": _capture_average(3),
    },
    shapes=lambda n: (TensorType(dtype_of(n.x), _output_shape(n)),),
    body=_average_body,
    gradient=(Gradient(_average_gradient, reads=()),),
    nondiff_inputs=frozenset({"size"}),
    lower=_lower_average,
    host_inputs=frozenset({1}),
    axes=_axes,
    flops=lambda n: numel(n.x),
)


def _average_grad_body(op: Builder, n: NodeView) -> ir.Value:
    dx: ir.Value = n.dy
    rank = rank_of(dx)
    for axis, (size, parts) in enumerate(zip(input_shape(n)[2:], spatial_sizes(n.dy), strict=True), 2):
        lengths = _lengths(op, size, parts, dtype_of(dx))
        shares = op.Unsqueeze(op.Div(dx, _on_axes(op, lengths, rank, axis, [parts])), int64_vector(op, [axis + 1]))
        mask = _on_axes(op, _within(op, size, parts), rank + 1, axis, [parts, size])
        dx = _masked_sum(op, shares, mask, axis)
    return dx


def adaptive_average_backward(dy: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the gradient of x with PyTorch's kernels. 1-D pooling runs as 2-D."""
    if dy.ndim == 3:
        return adaptive_average_backward(dy.unsqueeze(2), (*shape[:2], 1, shape[2])).squeeze(2)
    kernel = aten_kernels.adaptive_avg_pool2d_grad if dy.ndim == 4 else aten_kernels.adaptive_avg_pool3d_grad
    return kernel(dy, unread_input(dy, shape, dy.dtype))


define_pure(
    OWN,
    "AdaptiveAveragePoolGrad",
    ("dy", "shape"),
    ("dx",),
    shapes=lambda n: (TensorType(dtype_of(n.dy), input_shape(n)),),
    body=_average_grad_body,
    lower=lambda n, dy, shape: Call(adaptive_average_backward, dy, shape),
    host_inputs=frozenset({1}),
    axes=lambda n: NO_AXES,  # an axis that passes would have to change in the value of `shape` too
    flops=lambda n: numel(n.node.outputs[0]),
)


# AdaptiveMaxPool


def _max_types(n: NodeView) -> Sequence[TensorType]:
    shape = _output_shape(n)
    return TensorType(dtype_of(n.x), shape), TensorType(INT64, shape)


def _max_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    """Return the maximum over [n, c, e, d]: for each window the whole image, masked outside the window."""
    batch, inner, parts = sizes.dims_of(n.x)[:2], spatial_sizes(n.x), _output_shape(n)[2:]
    count = len(inner)
    within: ir.Value | None = None
    for axis, (size, part) in enumerate(zip(inner, parts, strict=True)):
        ones = [1] * count
        extents = [*ones[:axis], part, *ones[axis + 1 :], *ones[:axis], size, *ones[axis + 1 :]]
        mask = reshaped(op, _within(op, size, part), [1, 1, *extents])
        within = mask if within is None else op.And(within, mask)
    x = reshaped(op, n.x, [*batch, *[1] * count, *inner])
    axes = int64_vector(op, range(2 + count, 2 + 2 * count))
    y = op.ReduceMax(op.Where(within, x, op.scalar(float("-inf"), like=x)), axes, keepdims=1)
    position = op.Range(op.scalar(0, INT64), op.size(product(inner)), op.scalar(1, INT64))
    position = reshaped(op, position, [*[1] * (2 + count), *inner])
    candidates = op.Where(op.And(within, op.Equal(x, y)), position, op.size(product(inner)))
    indices = op.ReduceMin(candidates, axes, keepdims=0)
    return reshaped(op, y, [*batch, *parts]), indices


def _max_gradient(op: Builder, n: NodeView, dy: ir.Value, _: None) -> list[ir.Value | None]:
    return [op.own.AdaptiveMaxPoolGrad(dy, n.indices, op.shape_of(n.x)), None]


def _lower_max(n: NodeView, x: Any, size: Any) -> Call:
    kernel = {1: torch.adaptive_max_pool1d, 2: aten_kernels.adaptive_max_pool2d, 3: aten_kernels.adaptive_max_pool3d}
    return Call(kernel[rank_of(n.x) - 2], x, list(size))


def _capture_max(count: int) -> Any:
    def capture(op: Builder, x: ir.Value, output_size: Any) -> Any:
        x, is_unbatched = add_batch_axis(op, x, count)
        return remove_batch_axis(
            op, is_unbatched, *op.own.AdaptiveMaxPool(x, op.sizes(sizes_per_axis(output_size, count)))
        )

    return capture


define_pure(
    OWN,
    "AdaptiveMaxPool",
    ("x", "size"),
    ("y", "indices"),
    from_torch={f"aten.adaptive_max_pool{count}d.default": _capture_max(count) for count in (1, 2, 3)},
    shapes=_max_types,
    body=_max_body,
    gradient=(Gradient(_max_gradient, reads=("indices",)),),
    nondiff_inputs=frozenset({"size"}),
    lower=_lower_max,
    host_inputs=frozenset({1}),
    axes=_axes,
    flops=lambda n: numel(n.x),
)


def adaptive_max_backward(dy: Tensor, indices: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the gradient of x with PyTorch's kernels. 1-D pooling runs as 2-D."""
    if dy.ndim == 3:
        return adaptive_max_backward(dy.unsqueeze(2), indices.unsqueeze(2), (*shape[:2], 1, shape[2])).squeeze(2)
    kernel = aten.adaptive_max_pool2d_backward if dy.ndim == 4 else aten.adaptive_max_pool3d_backward
    return kernel.default(dy, unread_input(indices, shape, dy.dtype), indices)


define_pure(
    OWN,
    "AdaptiveMaxPoolGrad",
    ("dy", "indices", "shape"),
    ("dx",),
    shapes=lambda n: (TensorType(dtype_of(n.dy), input_shape(n)),),
    body=max_pool_grad_body,
    lower=lambda n, dy, indices, shape: Call(adaptive_max_backward, dy, indices, shape),
    host_inputs=frozenset({2}),
    axes=lambda n: NO_AXES,  # an axis that passes would have to change in the value of `shape` too
    flops=lambda n: numel(n.dy),
)
