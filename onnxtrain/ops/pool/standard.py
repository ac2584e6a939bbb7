"""Pools of ONNX that PyTorch writes as several ops.

GlobalMaxPool(x[n, c, d])                  the largest place of each plane; the first of equals gets the gradient
LpPool(x[n, c, d]), GlobalLpPool(x)        (sum of |x|^p over the window)^(1/p)
MaxUnpool(x[n, c, e], places, shape)       each element where it was before a MaxPool, 0 elsewhere
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
from onnxtrain.ops.composite import composite, no_axes
from onnxtrain.ops.constructors import never
from onnxtrain.ops.definition import REQUIRED, Call, NodeView, numel
from onnxtrain.ops.fused import axes_constant, reshaped, total
from onnxtrain.ops.pool.window import pooled_axes
from onnxtrain.ops.sliding_windows import Padding, names, paddings, per_axis, product, spatial, window_count
from onnxtrain.ops.symbolic_ints import needed_sizes


def _one_each(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(dtype_of(n.x), (*sizes.dims_of(n.x)[:2], *[1] * (rank_of(n.x) - 2))),)


def _global_axes(n: NodeView) -> str:
    return f"n c {names('d', n.x)} -> n c {' '.join(['1'] * (rank_of(n.x) - 2))}"


# GlobalMaxPool


def _global_max_body(op: Builder, n: NodeView) -> ir.Value:
    batch, channels, *inner = sizes.dims_of(n.x)
    planes = reshaped(op, n.x, [batch, channels, product(inner)])
    return reshaped(op, op.own.MaxDim(planes, axis=2, keepdims=1)[0], _one_each(n)[0].shape)


composite(
    "GlobalMaxPool",
    ("x",),
    _global_max_body,
    lambda n, x: Call(torch.amax, x, list(range(2, rank_of(n.x))), True),
    shapes=_one_each,
    axes=_global_axes,
    flops=lambda n: numel(n.x),
)


# LpPool, GlobalLpPool


def _root(op: Builder, summed: ir.Value, order: int) -> ir.Value:
    result: ir.Value = op.Pow(summed, op.scalar(1 / order, like=summed))
    return result


def _powers(op: Builder, n: NodeView) -> ir.Value:
    result: ir.Value = op.Pow(op.Abs(n.x), op.scalar(n.p, like=n.x))
    return result


def _lp_windows(n: NodeView) -> list[tuple[int, int, int, Padding]]:
    """(kernel, stride, dilation, padding) of each axis."""
    count = rank_of(n.x) - 2
    return list(
        zip(
            n.kernel_shape,
            per_axis(n, "strides", count, 1),
            per_axis(n, "dilations", count, 1),
            paddings(n, spatial(n.x), n.kernel_shape),
            strict=True,
        )
    )


def _lp_sizes(n: NodeView) -> Sizes:
    inner = [
        window_count(size, kernel, stride, before, dilation, bool(n.ceil_mode), after)
        for size, (kernel, stride, dilation, (before, after)) in zip(spatial(n.x), _lp_windows(n), strict=True)
    ]
    return (*sizes.dims_of(n.x)[:2], *inner)


def _lp_body(op: Builder, n: NodeView) -> ir.Value:
    """Sums of windows are a convolution of each plane with ones; windows over the end see zeros."""
    windows, rows = _lp_windows(n), product(sizes.dims_of(n.x)[:2])
    counts = _lp_sizes(n)[2:]
    needed = [
        (count, stride, dilation * (kernel - 1) + 1)
        for count, (kernel, stride, dilation, _) in zip(counts, windows, strict=True)
    ]
    reach = [sizes.add(sizes.multiply(s, sizes.subtract(c, 1)), span) for c, s, span in needed]
    befores = [before for *_, (before, _) in windows]
    afters = [
        sizes.maximum(0, sizes.subtract(covered, sizes.add(size, before)))
        for covered, size, before in zip(reach, spatial(n.x), befores, strict=True)
    ]
    planes = reshaped(op, _powers(op, n), [rows, 1, *spatial(n.x)])
    inputs = (planes, op.sizes([*befores, *afters]), op.scalar(0, like=n.x), axes_constant(op, range(2, rank_of(n.x))))
    longer = [sizes.add(*around) for around in zip(spatial(n.x), befores, afters, strict=True)]
    padded = op.node("", "Pad", inputs, {}, types=[TensorType(dtype_of(n.x), (rows, 1, *longer))]).outputs[0]
    ones = op.Expand(op.scalar(1, like=n.x), op.sizes([1, 1, *n.kernel_shape]))
    strides, dilations = [w[1] for w in windows], [w[2] for w in windows]
    summed = op.Conv(padded, ones, strides=strides, dilations=dilations)
    return reshaped(op, _root(op, summed, n.p), (*sizes.dims_of(n.x)[:2], *counts))


def lp_pool(
    x: torch.Tensor, order: int, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], sides: Any
) -> torch.Tensor:
    """`sides` gives the padding before and the number of windows of each axis, from its size."""
    pads: list[int] = []
    for axis, (size, stride, dilation, window) in enumerate(zip(x.shape[2:], strides, dilations, kernel, strict=True)):
        before, count = sides(axis, size)
        pads = [before, stride * (count - 1) + dilation * (window - 1) + 1 - size - before, *pads]
    planes = torch.constant_pad_nd(x.abs().pow(order).flatten(0, 1).unsqueeze(1), pads)
    ones = x.new_ones(1, 1, *kernel)
    summed = torch.convolution(planes, ones, None, strides, [0] * len(kernel), dilations, False, [0] * len(kernel), 1)
    return summed.pow(1 / order).reshape(*x.shape[:2], *summed.shape[2:])


def _lower_lp(n: NodeView, x: Any) -> Call:
    windows = _lp_windows(n)

    def sides(axis: int, size: int) -> tuple[int, int]:
        kernel, stride, dilation, _ = windows[axis]
        sized = paddings(n, [size if i == axis else 1 for i in range(len(windows))], n.kernel_shape)[axis]
        before, after = int(sized[0]), int(sized[1])
        return before, int(window_count(size, kernel, stride, before, dilation, bool(n.ceil_mode), after))

    return Call(lp_pool, x, n.p, list(n.kernel_shape), [w[1] for w in windows], [w[2] for w in windows], sides)


composite(
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
    since_version=18,
    shapes=lambda n: (TensorType(dtype_of(n.x), _lp_sizes(n)),),
    axes=pooled_axes,
    flops=lambda n: sizes.multiply(3, numel(n.node.outputs[0]), product(n.kernel_shape)),
)
composite(
    "GlobalLpPool",
    ("x",),
    lambda op, n: _root(op, total(op, _powers(op, n), range(2, rank_of(n.x))), n.p),
    lambda n, x: Call(torch.linalg.vector_norm, x, n.p, list(range(2, rank_of(n.x))), True),
    attributes={"p": 2},
    since_version=2,
    ort_compatible=never,  # onnxruntime has no kernel of this opset
    shapes=_one_each,
    axes=_global_axes,
    flops=lambda n: sizes.multiply(3, numel(n.x)),
)


# MaxUnpool


def _unpooled(n: NodeView) -> Sizes:
    if n.shape is not None:
        return needed_sizes(n.shape, "the shape of MaxUnpool")
    count = rank_of(n.x) - 2
    strides, pads = per_axis(n, "strides", count, 1), per_axis(n, "pads", 2 * count, 0)
    inner: list[Size] = [
        sizes.add(sizes.multiply(stride, sizes.subtract(size, 1)), kernel - pads[i] - pads[i + count])
        for i, (size, stride, kernel) in enumerate(zip(spatial(n.x), strides, n.kernel_shape, strict=True))
    ]
    return (*sizes.dims_of(n.x)[:2], *inner)


def _unpool_body(op: Builder, n: NodeView) -> ir.Value:
    """Places count through the whole tensor, as in ONNX's MaxPool."""
    shape = _unpooled(n)
    everything, given = product(shape), product(sizes.dims_of(n.x))
    zeros = op.Expand(op.scalar(0, like=n.x), op.sizes([everything]))
    flat = (reshaped(op, n.places, [given]), reshaped(op, n.x, [given]))
    return reshaped(op, op.ScatterElements(zeros, *flat, axis=0), shape)


def max_unpool(x: torch.Tensor, places: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    flat = x.new_zeros(torch.Size(shape).numel())
    return flat.scatter_(0, places.flatten(), x.flatten()).reshape(shape)


def _lower_unpool(n: NodeView, x: Any, places: Any, shape: Any) -> Call:
    known = _unpooled(n)
    if shape is None and any(isinstance(s, str) for s in known):
        raise GraphError("MaxUnpool needs to know its sizes", got=str(known), todo="give it its third input")
    return Call(max_unpool, x, places, known if shape is None else shape)


composite(
    "MaxUnpool",
    ("x", "places", "shape?"),
    _unpool_body,
    _lower_unpool,
    attributes={"kernel_shape": REQUIRED, "pads": None, "strides": None},
    since_version=11,
    shapes=lambda n: (TensorType(dtype_of(n.x), _unpooled(n)),),
    axes=no_axes,
    nondiff_inputs=frozenset({"places", "shape"}),
    host_inputs=frozenset({2}),
)
