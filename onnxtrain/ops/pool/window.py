"""Pooling over sliding windows.

    MaxPool(x[n, c, d]) -> y[n, c, e], indices[n, c, e]        the maximum of each window and its index
    AveragePool(x[n, c, d]) -> y[n, c, e]                      the mean of each window, with or without padding
    MaxPoolGrad(dy, indices, shape), AveragePoolGrad(dy, shape) -> dx[n, c, d]

The indices of our own MaxPool are relative to the image [d] of one channel, as in PyTorch. Those of ONNX's MaxPool are
relative to the whole tensor. Backward ops take the shape of x, so x need not be saved.

With `ceil_mode` the last window may extend past the padding, but not start after it. AveragePool divides by the number
of elements of the window within x and its padding, or within x alone (`count_include_pad=0`).
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
from onnxtrain.graph.values import MICROSOFT, ONNX, OWN, TensorType, dtype_of, rank_of
from onnxtrain.ops.body_parts import int64_vector, mul_scalar, reshaped
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import REQUIRED, STANDARD, Call, Gradient, NodeView, numel
from onnxtrain.ops.elementwise.arithmetic import MOD
from onnxtrain.ops.interfaces.memory_format import IMAGES, Images
from onnxtrain.ops.registry import definition_of, input_of, view
from onnxtrain.ops.sliding_windows import (
    attribute_per_axis,
    covered_size,
    cropped,
    ints_per_axis,
    padded_at_end,
    product,
    spatial_axes,
    spatial_sizes,
    symmetric_pads,
    window_count,
)
from onnxtrain.torch_compat import aten_kernels

aten = torch.ops.aten
Tensor = torch.Tensor

_WINDOW: dict[str, Any] = {"kernel_shape": REQUIRED, "strides": None, "pads": None, "ceil_mode": 0}
_MAX: dict[str, Any] = {**_WINDOW, "dilations": None}
_AVERAGE: dict[str, Any] = {**_WINDOW, "count_include_pad": 0}


def pool_axes(n: NodeView) -> str:
    """Return the axis map: samples and channels of x are those of the outputs."""
    outputs = [f"n c {spatial_axes('e', n.x)}"] * len(n.node.outputs)
    return f"n c {spatial_axes('d', n.x)} -> {', '.join(outputs)}"


def input_shape(n: NodeView) -> Sizes:
    """Return the shape of x, from the input `shape` of a backward op."""
    shape = as_sizes(n.shape)
    if shape is None:
        raise GraphError(
            f"the input shape of {n.definition.name} is not shape arithmetic",
            expected="a constant, or a value computed from shapes",
            got=n.shape.name,
        )
    return shape


def _memory_format(like: Tensor) -> torch.memory_format:
    """Return the memory format of a tensor of images: contiguous or channels_last."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(like.ndim)
    if channels_last is None or like.is_contiguous() or not like.is_contiguous(memory_format=channels_last):
        return torch.contiguous_format
    return channels_last


def unread_input(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a stand-in for x in PyTorch's backward kernels, which read its shape and memory format, not its values."""
    memory_format = _memory_format(like)
    if memory_format is torch.contiguous_format and like.device.type == "cpu":
        return torch.empty((), dtype=dtype).expand(
            *shape
        )  # takes no memory; CUDA kernels would copy an expanded tensor
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=memory_format)


def _geometry(n: NodeView, x: ir.Value) -> list[list[int]]:
    """Return kernel, strides, padding and, for max pooling, dilations, each by the axes of x after the channels."""
    count = rank_of(x) - 2
    geometry = [list(n.kernel_shape), attribute_per_axis(n, "strides", count, 1), symmetric_pads(n, count)]
    return (
        [*geometry, attribute_per_axis(n, "dilations", count, 1)]
        if "dilations" in n.definition.attributes
        else geometry
    )


def _attributes_for_backward(n: NodeView) -> dict[str, Any]:
    """Return the attributes of the backward op: the same windows."""
    return {name: getattr(n, name) for name in n.definition.attributes}


def _output_shape(n: NodeView) -> Sizes:
    geometry = _geometry(n, n.x)
    dilations = geometry[3] if len(geometry) == 4 else [1] * len(geometry[0])
    out = [
        window_count(s, k, stride, pad, dilation, bool(n.ceil_mode))
        for s, k, stride, pad, dilation in zip(spatial_sizes(n.x), *geometry[:3], dilations, strict=True)
    ]
    return (*sizes.dims_of(n.x)[:2], *out)


def _flops(n: NodeView) -> Size:
    return sizes.multiply(numel(n.node.outputs[0]), product(n.kernel_shape))


# MaxPool


def _image_size(x: ir.Value) -> Size:
    return product(spatial_sizes(x))


def _max_types(n: NodeView) -> Sequence[TensorType]:
    shape = _output_shape(n)
    return TensorType(dtype_of(n.x), shape), TensorType(ir.DataType.INT64, shape)


_MAX_KERNELS = {
    1: torch.max_pool1d_with_indices,
    2: aten_kernels.max_pool2d_with_indices,
    3: aten_kernels.max_pool3d_with_indices,
}


def _lower_max(n: NodeView, x: Any) -> Call:
    return Call(_MAX_KERNELS[rank_of(n.x) - 2], x, *_geometry(n, n.x), bool(n.ceil_mode))


def _max_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    y, tensor_indices = op.MaxPool(n.x, **_attributes_for_backward(n))
    return y, op.Mod(tensor_indices, op.size(_image_size(n.x)))


def _max_gradient(op: Builder, n: NodeView, dy: ir.Value, _: None) -> ir.Value:
    return op.ms.MaxPoolGrad(dy, n.indices, op.shape_of(n.x), **_attributes_for_backward(n))


def window_attributes(kernel: Any, stride: Any, padding: Any, count: int) -> dict[str, Any]:
    """Return the ONNX attributes for ATen's arguments; without a stride, it is the kernel size."""
    shape = ints_per_axis(kernel, count)
    pads = ints_per_axis(padding, count)
    return {"kernel_shape": shape, "strides": ints_per_axis(stride, count) if stride else shape, "pads": pads * 2}


def add_batch_axis(op: Builder, x: ir.Value, count: int) -> tuple[ir.Value, bool]:
    """Return x with a batch axis, and whether it was unbatched; it has `count` axes after the channels."""
    is_unbatched = rank_of(x) == count + 1
    return (op.Unsqueeze(x, int64_vector(op, [0])) if is_unbatched else x), is_unbatched


def remove_batch_axis(op: Builder, is_unbatched: bool, *values: ir.Value) -> list[ir.Value]:
    return [op.Squeeze(v, int64_vector(op, [0])) if is_unbatched else v for v in values]


def _capture_max(count: int, with_indices: bool) -> Any:
    def capture(
        op: Builder,
        x: ir.Value,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:
        x, is_unbatched = add_batch_axis(op, x, count)
        attributes = window_attributes(kernel_size, stride, padding, count)
        outputs = op.own.MaxPool(x, **attributes, dilations=ints_per_axis(dilation, count), ceil_mode=int(ceil_mode))
        y, indices = remove_batch_axis(op, is_unbatched, *outputs)
        return (y, indices) if with_indices else y

    return capture


MAX_POOL = define_pure(
    OWN,
    "MaxPool",
    ("x",),
    ("y", "indices"),
    attributes=_MAX,
    from_torch={
        f"aten.max_pool{count}d{suffix}.default": _capture_max(count, bool(suffix))
        for count in (1, 2, 3)
        for suffix in ("", "_with_indices")
    },
    shapes=_max_types,
    body=_max_body,
    gradient=(Gradient(_max_gradient, reads=("indices",)),),
    lower=_lower_max,
    axes=pool_axes,
    flops=_flops,
)
IMAGES.register(MAX_POOL, Images(frozenset({"x", "y", "indices"})))


# MaxPool of ONNX: indices relative to the whole tensor


def max_pool(kernel: Any, x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """PyTorch's kernel, with its indices converted to ONNX's."""
    y, indices = kernel(x, *arguments)
    images = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(*x.shape[:2], *[1] * (x.ndim - 2))
    return y, indices + images * x.shape[2:].numel()


def _onnx_max_gradient(op: Builder, n: NodeView, dy: ir.Value, _: None) -> ir.Value:
    image_indices = op.Mod(n.indices, op.size(_image_size(n.x)))
    return op.ms.MaxPoolGrad(dy, image_indices, op.shape_of(n.x), **_attributes_for_backward(n))


ONNX_MAX_POOL = define_pure(
    ONNX,
    "MaxPool",
    ("x",),
    ("y", "indices"),
    attributes=_MAX,
    shapes=_max_types,
    body=STANDARD,
    gradient=(Gradient(_onnx_max_gradient, reads=("indices",)),),
    lower=lambda n, x: Call(max_pool, _MAX_KERNELS[rank_of(n.x) - 2], x, *_geometry(n, n.x), bool(n.ceil_mode)),
    axes=lambda n: (
        f"[n] [c] {spatial_axes('d', n.x)} -> [n] [c] {spatial_axes('e', n.x)}, [n] [c] {spatial_axes('e', n.x)}"
    ),
    flops=_flops,
)


# MaxPoolGrad: scatters each element of dy to the index of the maximum of its window


def flatten_images(op: Builder, x: ir.Value, batch: Sequence[Size]) -> ir.Value:
    """Reshape x to one row per image: [n * c, d]."""
    return reshaped(op, x, [product(batch), product(spatial_sizes(x))])


def max_pool_grad_body(op: Builder, n: NodeView) -> ir.Value:
    shape = input_shape(n)
    zeros = op.Expand(op.scalar(0, like=n.dy), op.sizes([product(shape[:2]), product(shape[2:])]))
    indices, dy = (flatten_images(op, v, shape[:2]) for v in (n.indices, n.dy))
    return reshaped(op, op.ScatterElements(zeros, indices, dy, axis=1, reduction="add"), shape)


def max_pool_backward(dy: Tensor, indices: Tensor, shape: Sequence[int], *arguments: Any) -> Tensor:
    """Return the gradient of x with PyTorch's kernels; `arguments` are those of forward. 1-D pooling runs as 2-D."""
    if dy.ndim == 3:
        *geometry, ceil = arguments
        geometry_2d = [[0 if i == 2 else 1, *w] for i, w in enumerate(geometry)]
        dx = max_pool_backward(dy.unsqueeze(2), indices.unsqueeze(2), (*shape[:2], 1, shape[2]), *geometry_2d, ceil)
        return dx.squeeze(2)
    kernel = aten.max_pool2d_with_indices_backward if dy.ndim == 4 else aten.max_pool3d_with_indices_backward
    dx = torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=_memory_format(indices))
    # The kernel reads only the shape and memory format of x: dx, which has the same, stands in for it.
    kernel.grad_input(dy, dx, *arguments, indices, grad_input=dx)
    return dx


def max_pool_of(n: NodeView) -> NodeView | None:
    """Return the MaxPool whose indices this MaxPoolGrad reads, directly or, for ONNX's MaxPool, through Mod.

    Else None.
    """
    producer = (input_of(n.indices, MOD) or n.indices).producer()
    return view(producer) if producer is not None and definition_of(producer) in (MAX_POOL, ONNX_MAX_POOL) else None


MAX_POOL_GRAD = define_pure(
    MICROSOFT,
    "MaxPoolGrad",
    ("dy", "indices", "shape"),
    ("dx",),
    attributes=_MAX,
    shapes=lambda n: (TensorType(dtype_of(n.dy), input_shape(n)),),
    body=max_pool_grad_body,
    lower=lambda n, dy, indices, shape: Call(
        max_pool_backward, dy, indices, shape, *_geometry(n, n.dy), bool(n.ceil_mode)
    ),
    host_inputs=frozenset({2}),
    axes=lambda n: NO_AXES,  # an axis that passes would have to change in the value of `shape` too
    flops=lambda n: numel(n.dy),
)
IMAGES.register(MAX_POOL_GRAD, Images(frozenset({"dy", "indices", "dx"})))


# AveragePool


def _lower_average(n: NodeView, x: Any) -> Call:
    kernel = {1: torch.avg_pool1d, 2: aten_kernels.avg_pool2d, 3: aten_kernels.avg_pool3d}[rank_of(n.x) - 2]
    return Call(kernel, x, *_geometry(n, n.x), bool(n.ceil_mode), bool(n.count_include_pad))


def _average_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    return op.ms.AveragePoolGrad(dy, op.shape_of(n.x), **_attributes_for_backward(n))


def _capture_average(count: int) -> Any:
    def capture(
        op: Builder,
        x: ir.Value,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        x, is_unbatched = add_batch_axis(op, x, count)
        attributes = window_attributes(kernel_size, stride, padding, count)
        includes_pad = count_include_pad or divisor_override is not None
        y = op.AveragePool(x, **attributes, ceil_mode=int(ceil_mode), count_include_pad=int(includes_pad))
        if divisor_override is not None:
            if ceil_mode:  # the last windows are truncated: their means have smaller divisors
                divisors = window_element_counts(op, view(y.producer()), y, sizes.dims_of(x)[2:])
                y = mul_scalar(op, op.Mul(y, op.Cast(divisors, to=dtype_of(y))), 1 / divisor_override)
            else:
                y = mul_scalar(op, y, int(product(attributes["kernel_shape"])) / divisor_override)
        return remove_batch_axis(op, is_unbatched, y)[0]

    return capture


AVERAGE_POOL = define_pure(
    ONNX,
    "AveragePool",
    ("x",),
    ("y",),
    attributes=_AVERAGE,
    from_torch={f"aten.avg_pool{count}d.default": _capture_average(count) for count in (1, 2, 3)},
    shapes=lambda n: (TensorType(dtype_of(n.x), _output_shape(n)),),
    body=STANDARD,
    gradient=(Gradient(_average_gradient, reads=()),),
    lower=_lower_average,
    axes=pool_axes,
    flops=_flops,
)
IMAGES.register(AVERAGE_POOL, Images(frozenset({"x", "y"})))


# AveragePoolGrad: distributes each element of dy evenly over its window


def window_element_counts(op: Builder, n: NodeView, y: ir.Value, x_sizes: Sizes) -> ir.Value:
    """Return the divisor of each window: [1, 1, e]. `y` has the shape of the output."""
    result: ir.Value | None = None
    one = op.scalar(1, ir.DataType.INT64)
    for axis, (size, count, kernel, stride, pad) in enumerate(
        zip(x_sizes, spatial_sizes(y), *_geometry(n, y), strict=True)
    ):
        window = op.Range(op.scalar(0, ir.DataType.INT64), op.size(count), one)
        start = op.Sub(op.Mul(window, op.size(stride)), op.size(pad))
        end = op.Min(op.Add(start, op.size(kernel)), op.size(sizes.add(size, pad if n.count_include_pad else 0)))
        if not n.count_include_pad:
            start = op.Max(start, op.size(0))
        ones = [1] * rank_of(y)
        lengths = reshaped(op, op.Sub(end, start), [*ones[: 2 + axis], count, *ones[3 + axis :]])
        result = lengths if result is None else op.Mul(result, lengths)
    assert result is not None
    return result


def _average_grad_body(op: Builder, n: NodeView) -> ir.Value:
    """Return a transposed convolution of each channel with a kernel of ones."""
    shape = input_shape(n)
    kernel, strides, pads = _geometry(n, n.dy)
    shares = op.Div(n.dy, op.Cast(window_element_counts(op, n, n.dy, shape[2:]), to=dtype_of(n.dy)))
    images = reshaped(op, shares, [product(shape[:2]), 1, *spatial_sizes(n.dy)])
    ones = op.Expand(op.scalar(1, like=n.dy), op.sizes([1, 1, *kernel]))
    dx = op.ConvTranspose(images, ones, strides=strides)
    lengths = [covered_size(e, k, s, 1) for e, k, s in zip(spatial_sizes(n.dy), kernel, strides, strict=True)]
    ends = [sizes.add(size, pad) for size, pad in zip(shape[2:], pads, strict=True)]
    missing = [sizes.maximum(0, sizes.subtract(end, length)) for end, length in zip(ends, lengths, strict=True)]
    return reshaped(op, cropped(op, padded_at_end(op, dx, missing), pads, shape[2:]), shape)


def average_pool_backward(dy: Tensor, shape: Sequence[int], *arguments: Any) -> Tensor:
    """Return the gradient of x with PyTorch's kernels; `arguments` are those of forward. 1-D pooling runs as 2-D."""
    if dy.ndim == 3:
        *geometry, ceil, count_include_pad = arguments
        geometry_2d = [[0 if i == 2 else 1, *w] for i, w in enumerate(geometry)]
        dx = average_pool_backward(dy.unsqueeze(2), (*shape[:2], 1, shape[2]), *geometry_2d, ceil, count_include_pad)
        return dx.squeeze(2)
    kernel = aten.avg_pool2d_backward if dy.ndim == 4 else aten.avg_pool3d_backward
    return kernel.default(dy, unread_input(dy, shape, dy.dtype), *arguments, None)


AVERAGE_POOL_GRAD = define_pure(
    MICROSOFT,
    "AveragePoolGrad",
    ("dy", "shape"),
    ("dx",),
    attributes=_AVERAGE,
    shapes=lambda n: (TensorType(dtype_of(n.dy), input_shape(n)),),
    body=_average_grad_body,
    lower=lambda n, dy, shape: Call(
        average_pool_backward, dy, shape, *_geometry(n, n.dy), bool(n.ceil_mode), bool(n.count_include_pad)
    ),
    host_inputs=frozenset({1}),
    axes=lambda n: NO_AXES,  # an axis that passes would have to change in the value of `shape` too
    flops=lambda n: sizes.multiply(numel(n.dy), product(n.kernel_shape)),
)
IMAGES.register(AVERAGE_POOL_GRAD, Images(frozenset({"dy", "dx"})))


# GlobalAveragePool


def _global_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    share = op.Div(dy, op.size(_image_size(n.x), dtype_of(dy)))
    return op.Expand(share, op.shape_of(n.x))


GLOBAL_AVERAGE_POOL = define_pure(
    ONNX,
    "GlobalAveragePool",
    ("x",),
    ("y",),
    shapes=lambda n: (TensorType(dtype_of(n.x), (*sizes.dims_of(n.x)[:2], *[1] * (rank_of(n.x) - 2))),),
    body=STANDARD,
    gradient=(Gradient(_global_gradient, reads=()),),
    lower=lambda n, x: Call(torch.mean, x, list(range(2, rank_of(n.x))), True),
    axes=lambda n: f"n c {spatial_axes('d', n.x)} -> n c {' '.join(['1'] * (rank_of(n.x) - 2))}",
    flops=lambda n: numel(n.x),
)
IMAGES.register(GLOBAL_AVERAGE_POOL, Images(frozenset({"x", "y"})))
