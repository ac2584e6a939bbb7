"""Pools over sliding windows.

    MaxPool(x[n, c, d]) -> y[n, c, e], indices[n, c, e]        the largest element of each window and where it lies
    AveragePool(x[n, c, d]) -> y[n, c, e]                      the mean of each window, padding counted or not
    MaxPoolGrad(dy, indices, shape), AveragePoolGrad(dy, shape) -> dx[n, c, d]

Indices count within a plane, one sample's one channel, as in PyTorch: MaxPool of our domain. Those of ONNX's MaxPool
count through the whole tensor. Backward ops take the shape of x, so that x need not be kept.

`ceil_mode` lets the last window reach over the padding, but not start behind it. AveragePool divides by the window's
part within x and its padding, or within x alone (`count_include_pad=0`).
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
from onnxtrain.ops.definition import REQUIRED, STANDARD, Call, Gradient, Layout, NodeView, numel
from onnxtrain.ops.fused import axes_constant, fused, reshaped, times
from onnxtrain.ops.registry import view
from onnxtrain.ops.sliding_windows import (
    as_list,
    covered,
    cut_out,
    extended,
    names,
    per_axis,
    product,
    spatial,
    symmetric_pads,
    window_count,
)
from onnxtrain.torch_compat import aten_kernels

aten = torch.ops.aten
Tensor = torch.Tensor

_WINDOW: dict[str, Any] = {"kernel_shape": REQUIRED, "strides": None, "pads": None, "ceil_mode": 0}
_MAX: dict[str, Any] = {**_WINDOW, "dilations": None}
_AVERAGE: dict[str, Any] = {**_WINDOW, "count_include_pad": 0}


def pooled_axes(n: NodeView) -> str:
    """Samples and channels pass."""
    outputs = [f"n c {names('e', n.x)}"] * len(n.node.outputs)
    return f"n c {names('d', n.x)} -> {', '.join(outputs)}"


def given_shape(n: NodeView) -> Sizes:
    """The sizes of x, which a backward op is told."""
    shape = as_sizes(n.shape)
    if shape is None:
        raise GraphError(f"{n.definition.name} needs to know its sizes", got=f"{n.shape.name}, of unknown contents")
    return shape


def _layout(like: Tensor) -> torch.memory_format:
    """How a tensor of pictures lies in memory."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(like.ndim)
    lies_last = last is not None and not like.is_contiguous() and like.is_contiguous(memory_format=last)
    return last if last is not None and lies_last else torch.contiguous_format


def stand_in(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What PyTorch's backward kernels take for x, of which they read sizes and layout: memory that is not touched."""
    layout = _layout(like)
    if layout is torch.contiguous_format and like.device.type == "cpu":
        return torch.empty((), dtype=dtype).expand(*shape)  # no memory at all: a GPU's kernels would copy it
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=layout)


def _geometry(n: NodeView, x: ir.Value) -> list[list[int]]:
    """Kernel, strides, padding, and for a maximum dilations, of each axis of x after the channels."""
    count = rank_of(x) - 2
    found = [list(n.kernel_shape), per_axis(n, "strides", count, 1), symmetric_pads(n, count)]
    return [*found, per_axis(n, "dilations", count, 1)] if "dilations" in n.definition.attributes else found


def _attributes(n: NodeView) -> dict[str, Any]:
    """Those of a backward op of the same windows."""
    return {name: getattr(n, name) for name in n.definition.attributes}


def _pooled(n: NodeView) -> Sizes:
    how = [*_geometry(n, n.x)]
    dilations = how[3] if len(how) == 4 else [1] * len(how[0])
    out = [
        window_count(s, k, stride, pad, dilation, bool(n.ceil_mode))
        for s, k, stride, pad, dilation in zip(spatial(n.x), *how[:3], dilations, strict=True)
    ]
    return (*sizes.dims_of(n.x)[:2], *out)


def _flops(n: NodeView) -> Size:
    return sizes.multiply(numel(n.node.outputs[0]), product(n.kernel_shape))


# MaxPool


def _plane(x: ir.Value) -> Size:
    return product(spatial(x))


def _max_types(n: NodeView) -> Sequence[TensorType]:
    shape = _pooled(n)
    return TensorType(dtype_of(n.x), shape), TensorType(ir.DataType.INT64, shape)


_MAX_KERNELS = {
    1: torch.max_pool1d_with_indices,
    2: aten_kernels.max_pool2d_with_indices,
    3: aten_kernels.max_pool3d_with_indices,
}


def _lower_max(n: NodeView, x: Any) -> Call:
    return Call(_MAX_KERNELS[rank_of(n.x) - 2], x, *_geometry(n, n.x), bool(n.ceil_mode))


def _max_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    y, flat = op.MaxPool(n.x, **_attributes(n))
    return y, op.Mod(flat, op.size(_plane(n.x)))


def _max_gradient(op: Builder, n: NodeView, dy: ir.Value, _: None) -> ir.Value:
    dx: ir.Value = op.ms.MaxPoolGrad(dy, n.indices, op.shape_of(n.x), **_attributes(n))
    return dx


def windows(kernel: Any, stride: Any, padding: Any, count: int) -> dict[str, Any]:
    """The attributes for ATen's arguments; no stride means that windows lie side by side."""
    shape = as_list(kernel, count)
    pads = as_list(padding, count)
    return {"kernel_shape": shape, "strides": as_list(stride, count) if stride else shape, "pads": pads * 2}


def batched(op: Builder, x: ir.Value, count: int) -> tuple[ir.Value, bool]:
    """Puts samples first. Gives x, and whether it was a single one."""
    single = rank_of(x) == count + 1
    return (op.Unsqueeze(x, axes_constant(op, [0])) if single else x), single


def unbatched(op: Builder, single: bool, *values: ir.Value) -> list[ir.Value]:
    return [op.Squeeze(v, axes_constant(op, [0])) if single else v for v in values]


def _captured_max(count: int, with_indices: bool) -> Any:
    def capture(
        op: Builder,
        x: ir.Value,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:
        x, single = batched(op, x, count)
        how = windows(kernel_size, stride, padding, count)
        found = op.own.MaxPool(x, **how, dilations=as_list(dilation, count), ceil_mode=int(ceil_mode))
        y, indices = unbatched(op, single, *found)
        return (y, indices) if with_indices else y

    return capture


MAX_POOL = fused(
    OWN,
    "MaxPool",
    ("x",),
    ("y", "indices"),
    attributes=_MAX,
    from_torch={
        f"aten.max_pool{count}d{suffix}.default": _captured_max(count, bool(suffix))
        for count in (1, 2, 3)
        for suffix in ("", "_with_indices")
    },
    shapes=_max_types,
    body=_max_body,
    gradient=(Gradient(_max_gradient, reads=("indices",)),),
    lower=_lower_max,
    axes=pooled_axes,
    flops=_flops,
    layout=Layout(frozenset({"x", "y", "indices"})),
)


# MaxPool of ONNX: indices count through all samples and channels


def max_pool(kernel: Any, x: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    """PyTorch's kernel, with indices made ONNX's."""
    y, indices = kernel(x, *how)
    planes = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(*x.shape[:2], *[1] * (x.ndim - 2))
    return y, indices + planes * x.shape[2:].numel()


def _standard_max_gradient(op: Builder, n: NodeView, dy: ir.Value, _: None) -> ir.Value:
    within = op.Mod(n.indices, op.size(_plane(n.x)))
    dx: ir.Value = op.ms.MaxPoolGrad(dy, within, op.shape_of(n.x), **_attributes(n))
    return dx


fused(
    ONNX,
    "MaxPool",
    ("x",),
    ("y", "indices"),
    attributes=_MAX,
    since_version=12,
    shapes=_max_types,
    body=STANDARD,
    gradient=(Gradient(_standard_max_gradient, reads=("indices",)),),
    lower=lambda n, x: Call(max_pool, _MAX_KERNELS[rank_of(n.x) - 2], x, *_geometry(n, n.x), bool(n.ceil_mode)),
    axes=lambda n: f"[n] [c] {names('d', n.x)} -> [n] [c] {names('e', n.x)}, [n] [c] {names('e', n.x)}",
    flops=_flops,
)


# MaxPoolGrad: each element of dy goes where the largest element of its window was


def planes_to(op: Builder, x: ir.Value, batch: Sequence[Size]) -> ir.Value:
    """One row for each plane of x."""
    return reshaped(op, x, [product(batch), product(spatial(x))])


def scatter_body(op: Builder, n: NodeView) -> ir.Value:
    shape = given_shape(n)
    zeros = op.Expand(op.scalar(0, like=n.dy), op.sizes([product(shape[:2]), product(shape[2:])]))
    where, what = (planes_to(op, v, shape[:2]) for v in (n.indices, n.dy))
    return reshaped(op, op.ScatterElements(zeros, where, what, axis=1, reduction="add"), shape)


def max_pool_backward(dy: Tensor, indices: Tensor, shape: Sequence[int], *how: Any) -> Tensor:
    """PyTorch's kernels."""
    if dy.ndim == 3:
        *per_window, ceil = how
        wide = [[0 if i == 2 else 1, *w] for i, w in enumerate(per_window)]
        found = max_pool_backward(dy.unsqueeze(2), indices.unsqueeze(2), (*shape[:2], 1, shape[2]), *wide, ceil)
        return found.squeeze(2)
    kernel = aten.max_pool2d_with_indices_backward if dy.ndim == 4 else aten.max_pool3d_with_indices_backward
    dx = torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=_layout(indices))
    kernel.grad_input(dy, dx, *how, indices, grad_input=dx)  # of x sizes and layout are read: dx has them too
    return dx


def pool_of(n: NodeView) -> NodeView | None:
    """The MaxPool whose indices this MaxPoolGrad reads: as they are, or those of ONNX's MaxPool within a plane."""
    producer = n.indices.producer()
    if producer is not None and producer.op_type == "Mod" and producer.inputs[0] is not None:
        producer = producer.inputs[0].producer()
    is_pool = producer is not None and producer.op_type == "MaxPool" and producer.domain in (ONNX, OWN)
    return view(producer) if is_pool else None


MAX_POOL_GRAD = fused(
    MICROSOFT,
    "MaxPoolGrad",
    ("dy", "indices", "shape"),
    ("dx",),
    attributes=_MAX,
    shapes=lambda n: (TensorType(dtype_of(n.dy), given_shape(n)),),
    body=scatter_body,
    lower=lambda n, dy, indices, shape: Call(
        max_pool_backward, dy, indices, shape, *_geometry(n, n.dy), bool(n.ceil_mode)
    ),
    host_inputs=frozenset({2}),
    axes=lambda n: NO_AXES,  # what passes has to be taken from the shape too
    flops=lambda n: numel(n.dy),
    layout=Layout(frozenset({"dy", "indices", "dx"})),
)


# AveragePool


def _lower_average(n: NodeView, x: Any) -> Call:
    kernel = {1: torch.avg_pool1d, 2: aten_kernels.avg_pool2d, 3: aten_kernels.avg_pool3d}[rank_of(n.x) - 2]
    return Call(kernel, x, *_geometry(n, n.x), bool(n.ceil_mode), bool(n.count_include_pad))


def _average_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    dx: ir.Value = op.ms.AveragePoolGrad(dy, op.shape_of(n.x), **_attributes(n))
    return dx


def _captured_average(count: int) -> Any:
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
        x, single = batched(op, x, count)
        how = windows(kernel_size, stride, padding, count)
        whole = count_include_pad or divisor_override is not None
        y = op.AveragePool(x, **how, ceil_mode=int(ceil_mode), count_include_pad=int(whole))
        if divisor_override is not None:
            if ceil_mode:  # windows are cut off at the end, each mean is over its own count
                each = counted(op, view(y.producer()), y, sizes.dims_of(x)[2:])
                y = times(op, op.Mul(y, op.Cast(each, to=dtype_of(y))), 1 / divisor_override)
            else:
                y = times(op, y, int(product(how["kernel_shape"])) / divisor_override)
        return unbatched(op, single, y)[0]

    return capture


fused(
    ONNX,
    "AveragePool",
    ("x",),
    ("y",),
    attributes=_AVERAGE,
    since_version=19,
    from_torch={f"aten.avg_pool{count}d.default": _captured_average(count) for count in (1, 2, 3)},
    shapes=lambda n: (TensorType(dtype_of(n.x), _pooled(n)),),
    body=STANDARD,
    gradient=(Gradient(_average_gradient, reads=()),),
    lower=_lower_average,
    axes=pooled_axes,
    flops=_flops,
    layout=Layout(frozenset({"x", "y"})),
)


# AveragePoolGrad: each element of dy is spread evenly over its window


def counted(op: Builder, n: NodeView, y: ir.Value, x_sizes: Sizes) -> ir.Value:
    """By how many elements each window is divided: [1, 1, e]. `y` has the sizes of the average."""
    result: ir.Value | None = None
    one = op.scalar(1, ir.DataType.INT64)
    for axis, (size, count, kernel, stride, pad) in enumerate(zip(x_sizes, spatial(y), *_geometry(n, y), strict=True)):
        number = op.Range(op.scalar(0, ir.DataType.INT64), op.size(count), one)
        start = op.Sub(op.Mul(number, op.size(stride)), op.size(pad))
        end = op.Min(op.Add(start, op.size(kernel)), op.size(sizes.add(size, pad if n.count_include_pad else 0)))
        if not n.count_include_pad:
            start = op.Max(start, op.size(0))
        places = [1] * rank_of(y)
        each = reshaped(op, op.Sub(end, start), [*places[: 2 + axis], count, *places[3 + axis :]])
        result = each if result is None else op.Mul(result, each)
    assert result is not None
    return result


def _average_grad_body(op: Builder, n: NodeView) -> ir.Value:
    """A transposed convolution with ones, of each plane by itself."""
    shape = given_shape(n)
    kernel, strides, pads = _geometry(n, n.dy)
    each = op.Div(n.dy, op.Cast(counted(op, n, n.dy, shape[2:]), to=dtype_of(n.dy)))
    rows = reshaped(op, each, [product(shape[:2]), 1, *spatial(n.dy)])
    ones = op.Expand(op.scalar(1, like=n.dy), op.sizes([1, 1, *kernel]))
    spread = op.ConvTranspose(rows, ones, strides=strides)
    reached = [covered(e, k, s, 1) for e, k, s in zip(spatial(n.dy), kernel, strides, strict=True)]
    ends = [sizes.add(size, pad) for size, pad in zip(shape[2:], pads, strict=True)]
    missing = [sizes.maximum(0, sizes.subtract(end, have)) for end, have in zip(ends, reached, strict=True)]
    return reshaped(op, cut_out(op, extended(op, spread, missing), pads, shape[2:]), shape)


def average_pool_backward(dy: Tensor, shape: Sequence[int], *how: Any) -> Tensor:
    """PyTorch's kernels."""
    if dy.ndim == 3:
        *per_window, ceil, pad_counts = how
        wide = [[0 if i == 2 else 1, *w] for i, w in enumerate(per_window)]
        found = average_pool_backward(dy.unsqueeze(2), (*shape[:2], 1, shape[2]), *wide, ceil, pad_counts)
        return found.squeeze(2)
    kernel = aten.avg_pool2d_backward if dy.ndim == 4 else aten.avg_pool3d_backward
    return kernel.default(dy, stand_in(dy, shape, dy.dtype), *how, None)  # type: ignore[no-any-return]


fused(
    MICROSOFT,
    "AveragePoolGrad",
    ("dy", "shape"),
    ("dx",),
    attributes=_AVERAGE,
    shapes=lambda n: (TensorType(dtype_of(n.dy), given_shape(n)),),
    body=_average_grad_body,
    lower=lambda n, dy, shape: Call(
        average_pool_backward, dy, shape, *_geometry(n, n.dy), bool(n.ceil_mode), bool(n.count_include_pad)
    ),
    host_inputs=frozenset({1}),
    axes=lambda n: NO_AXES,  # what passes has to be taken from the shape too
    flops=lambda n: sizes.multiply(numel(n.dy), product(n.kernel_shape)),
    layout=Layout(frozenset({"dy", "dx"})),
)


# GlobalAveragePool


def _global_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    each = op.Div(dy, op.size(_plane(n.x), dtype_of(dy)))
    dx: ir.Value = op.Expand(each, op.shape_of(n.x))
    return dx


fused(
    ONNX,
    "GlobalAveragePool",
    ("x",),
    ("y",),
    shapes=lambda n: (TensorType(dtype_of(n.x), (*sizes.dims_of(n.x)[:2], *[1] * (rank_of(n.x) - 2))),),
    body=STANDARD,
    gradient=(Gradient(_global_gradient, reads=()),),
    lower=lambda n, x: Call(torch.mean, x, list(range(2, rank_of(n.x))), True),
    axes=lambda n: f"n c {names('d', n.x)} -> n c {' '.join(['1'] * (rank_of(n.x) - 2))}",
    flops=lambda n: numel(n.x),
    layout=Layout(frozenset({"x", "y"})),
)
