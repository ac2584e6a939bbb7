"""ONNX's pools that PyTorch expresses as several operators.

GlobalMaxPool(x[n, c, d])                  the maximum of each image; the first of equal elements gets the gradient
LpPool(x[n, c, d]), GlobalLpPool(x)        (sum of |x|^p over the window)^(1/p)
MaxUnpool(x[n, c, e], indices, shape)      each element at its index before a MaxPool, 0 elsewhere
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import TensorType, dtype_of, rank_of
from onnxtrain.ops.body_parts import int64_vector, reshaped, sum_over
from onnxtrain.ops.constructors import define_by_body, never, no_axes
from onnxtrain.ops.definition import REQUIRED, Call, NodeView, numel
from onnxtrain.ops.interfaces.stock_kernels import STOCK_KERNELS
from onnxtrain.ops.pool.window import pool_axes
from onnxtrain.ops.sliding_windows import (
    Padding,
    attribute_per_axis,
    covered_size,
    paddings,
    product,
    spatial_axes,
    spatial_sizes,
    window_count,
)
from onnxtrain.ops.symbolic_ints import required_ints


def _global_types(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(dtype_of(n.x), (*sizes.dims_of(n.x)[:2], *[1] * (rank_of(n.x) - 2))),)


def _global_axes(n: NodeView) -> str:
    return f"n c {spatial_axes('d', n.x)} -> n c {' '.join(['1'] * (rank_of(n.x) - 2))}"


# GlobalMaxPool


def _global_max_body(op: Builder, n: NodeView) -> ir.Value:
    batch, channels, *inner = sizes.dims_of(n.x)
    images = reshaped(op, n.x, [batch, channels, product(inner)])
    return reshaped(op, op.own.MaxDim(images, axis=2, keepdims=1)[0], _global_types(n)[0].shape)


define_by_body(
    "GlobalMaxPool",
    ("x",),
    _global_max_body,
    lambda n, x: Call(torch.amax, x, list(range(2, rank_of(n.x))), True),
    shapes=_global_types,
    axes=_global_axes,
    flops=lambda n: numel(n.x),
)


# LpPool, GlobalLpPool


def _root(op: Builder, summed: ir.Value, order: int) -> ir.Value:
    return op.Pow(summed, op.scalar(1 / order, like=summed))


def _powers(op: Builder, n: NodeView) -> ir.Value:
    return op.Pow(op.Abs(n.x), op.scalar(n.p, like=n.x))


def _lp_windows(n: NodeView) -> list[tuple[int, int, int, Padding]]:
    """Return (kernel, stride, dilation, padding) of each axis after the channels."""
    count = rank_of(n.x) - 2
    return list(
        zip(
            n.kernel_shape,
            attribute_per_axis(n, "strides", count, 1),
            attribute_per_axis(n, "dilations", count, 1),
            paddings(n, spatial_sizes(n.x), n.kernel_shape),
            strict=True,
        )
    )


def _lp_shape(n: NodeView) -> Sizes:
    inner = [
        window_count(size, kernel, stride, before, dilation, bool(n.ceil_mode), after)
        for size, (kernel, stride, dilation, (before, after)) in zip(spatial_sizes(n.x), _lp_windows(n), strict=True)
    ]
    return (*sizes.dims_of(n.x)[:2], *inner)


def _lp_body(op: Builder, n: NodeView) -> ir.Value:
    """Sum over windows by convolving each channel with ones; windows that extend past the end are padded with zeros."""
    windows, count = _lp_windows(n), product(sizes.dims_of(n.x)[:2])
    outputs = _lp_shape(n)[2:]
    lengths = [
        covered_size(c, kernel, stride, dilation)
        for c, (kernel, stride, dilation, _) in zip(outputs, windows, strict=True)
    ]
    befores = [before for *_, (before, _) in windows]
    afters = [
        sizes.maximum(0, sizes.subtract(length, sizes.add(size, before)))
        for length, size, before in zip(lengths, spatial_sizes(n.x), befores, strict=True)
    ]
    images = reshaped(op, _powers(op, n), [count, 1, *spatial_sizes(n.x)])
    inputs = (images, op.sizes([*befores, *afters]), op.scalar(0, like=n.x), int64_vector(op, range(2, rank_of(n.x))))
    padded_sizes = [sizes.add(*terms) for terms in zip(spatial_sizes(n.x), befores, afters, strict=True)]
    padded_type = TensorType(dtype_of(n.x), (count, 1, *padded_sizes))
    padded = op.node("", "Pad", inputs, {}, types=[padded_type]).outputs[0]
    ones = op.Expand(op.scalar(1, like=n.x), op.sizes([1, 1, *n.kernel_shape]))
    strides, dilations = [w[1] for w in windows], [w[2] for w in windows]
    summed = op.Conv(padded, ones, strides=strides, dilations=dilations)
    return reshaped(op, _root(op, summed, n.p), (*sizes.dims_of(n.x)[:2], *outputs))


def lp_pool(
    x: torch.Tensor, order: int, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], padding: Any
) -> torch.Tensor:
    """LpPool; `padding(axis, size)` returns the padding before an axis of that size, and the number of its windows."""
    pads: list[int] = []
    for axis, (size, stride, dilation, window) in enumerate(zip(x.shape[2:], strides, dilations, kernel, strict=True)):
        before, count = padding(axis, size)
        pads = [before, stride * (count - 1) + dilation * (window - 1) + 1 - size - before, *pads]
    images = torch.constant_pad_nd(x.abs().pow(order).flatten(0, 1).unsqueeze(1), pads)
    ones = x.new_ones(1, 1, *kernel)
    summed = torch.convolution(images, ones, None, strides, [0] * len(kernel), dilations, False, [0] * len(kernel), 1)
    return summed.pow(1 / order).reshape(*x.shape[:2], *summed.shape[2:])


def _lower_lp(n: NodeView, x: Any) -> Call:
    windows = _lp_windows(n)

    def padding(axis: int, size: int) -> tuple[int, int]:
        kernel, stride, dilation, _ = windows[axis]
        pads = paddings(n, [size if i == axis else 1 for i in range(len(windows))], n.kernel_shape)[axis]
        before, after = int(pads[0]), int(pads[1])
        return before, int(window_count(size, kernel, stride, before, dilation, bool(n.ceil_mode), after))

    return Call(lp_pool, x, n.p, list(n.kernel_shape), [w[1] for w in windows], [w[2] for w in windows], padding)


define_by_body(
    "LpPool",
    ("x",),
    _lp_body,
    _lower_lp,
    attributes={
        "kernel_shape": REQUIRED,
        "p": 2,
        "strides": None,
        "pads": None,
        "dilations": None,
        "ceil_mode": 0,
        "auto_pad": "NOTSET",
    },
    shapes=lambda n: (TensorType(dtype_of(n.x), _lp_shape(n)),),
    axes=pool_axes,
    flops=lambda n: sizes.multiply(3, numel(n.node.outputs[0]), product(n.kernel_shape)),
)
GLOBAL_LP_POOL = define_by_body(
    "GlobalLpPool",
    ("x",),
    lambda op, n: _root(op, sum_over(op, _powers(op, n), range(2, rank_of(n.x))), n.p),
    lambda n, x: Call(torch.linalg.vector_norm, x, n.p, list(range(2, rank_of(n.x))), True),
    attributes={"p": 2},
    shapes=_global_types,
    axes=_global_axes,
    flops=lambda n: sizes.multiply(3, numel(n.x)),
)
STOCK_KERNELS.register(GLOBAL_LP_POOL, never)  # onnxruntime has no kernel for this opset


# MaxUnpool


def _unpooled_shape(n: NodeView) -> Sizes:
    if n.shape is not None:
        return required_ints(n.shape, "the shape of MaxUnpool")
    count = rank_of(n.x) - 2
    strides, pads = attribute_per_axis(n, "strides", count, 1), attribute_per_axis(n, "pads", 2 * count, 0)
    inner: list[Size] = [
        sizes.add(sizes.multiply(stride, sizes.subtract(size, 1)), kernel - pads[i] - pads[i + count])
        for i, (size, stride, kernel) in enumerate(zip(spatial_sizes(n.x), strides, n.kernel_shape, strict=True))
    ]
    return (*sizes.dims_of(n.x)[:2], *inner)


def _unpool_body(op: Builder, n: NodeView) -> ir.Value:
    """Scatter into zeros; the indices are relative to the whole tensor, as in ONNX's MaxPool."""
    shape = _unpooled_shape(n)
    zeros = op.Expand(op.scalar(0, like=n.x), op.sizes([product(shape)]))
    indices, elements = (reshaped(op, v, [product(sizes.dims_of(n.x))]) for v in (n.indices, n.x))
    return reshaped(op, op.ScatterElements(zeros, indices, elements, axis=0), shape)


def max_unpool(x: torch.Tensor, indices: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    flat = x.new_zeros(torch.Size(shape).numel())
    return flat.scatter_(0, indices.flatten(), x.flatten()).reshape(shape)


def _lower_unpool(n: NodeView, x: Any, indices: Any, shape: Any) -> Call:
    inferred = _unpooled_shape(n)
    if shape is None and any(isinstance(s, str) for s in inferred):
        raise GraphError(
            "the output shape of MaxUnpool is symbolic",
            expected="static dimensions, or the input output_shape",
            got=str(inferred),
            todo="pass the third input, output_shape",
        )
    return Call(max_unpool, x, indices, inferred if shape is None else shape)


define_by_body(
    "MaxUnpool",
    ("x", "indices", "shape?"),
    _unpool_body,
    _lower_unpool,
    attributes={"kernel_shape": REQUIRED, "pads": None, "strides": None},
    shapes=lambda n: (TensorType(dtype_of(n.x), _unpooled_shape(n)),),
    axes=no_axes,
    nondiff_inputs=frozenset({"indices", "shape"}),
    host_inputs=frozenset({2}),
)
