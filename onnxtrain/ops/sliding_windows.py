"""Sliding windows over the spatial axes, for convolutions and pools.

Along an axis of size s, output element i reads the positions  i*stride - pad + j*dilation  for j < kernel; positions
outside [0, s) are padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import TensorType, dtype_of, rank_of
from onnxtrain.ops.body_parts import int64_vector
from onnxtrain.ops.definition import NodeView


def sizes_per_axis(argument: Any, count: int) -> list[Any]:
    """Return an argument of an ATen call as one size per axis; a single size is valid for all axes."""
    per_axis = list(argument) if isinstance(argument, (list, tuple)) else [argument]
    return per_axis * count if len(per_axis) == 1 else per_axis


def ints_per_axis(argument: Any, count: int) -> list[Any]:
    """Return an argument of an ATen call as one integer per axis; a single integer is valid for all axes.

    Raises:
        TypeError: one of them is a symbolic size, which an attribute cannot hold.
    """
    integers = sizes_per_axis(argument, count)
    if any(isinstance(integer, str) for integer in integers):
        raise TypeError(f"expected integers, got symbolic sizes: {integers}")
    return integers


def attribute_per_axis(n: NodeView, name: str, count: int, default: int) -> list[int]:
    """Return an attribute as one integer for each of `count` axes."""
    values = getattr(n, name)
    return [default] * count if values is None else list(values)


def symmetric_pads(n: NodeView, count: int) -> list[int]:
    """Return the padding of each of `count` axes, as PyTorch takes it: the same at both ends.

    Raises:
        GraphError: the ends differ.
    """
    pads = attribute_per_axis(n, "pads", 2 * count, 0)
    if pads[:count] != pads[count:]:
        raise GraphError(
            f"{n.definition.name}: asymmetric padding is not supported",
            expected="the same padding at both ends of each axis",
            got=str(pads),
            todo="pad with a Pad node before the op",
        )
    return pads[:count]


Padding = tuple[Size, Size]  # before and after an axis


def paddings(n: NodeView, inner: Sequence[Size], kernel: Sequence[Size]) -> list[Padding]:
    """Return the padding of each axis, with the node's `auto_pad` resolved for these sizes."""
    count = len(inner)
    strides, dilations = attribute_per_axis(n, "strides", count, 1), attribute_per_axis(n, "dilations", count, 1)
    return auto_padding(n.auto_pad, attribute_per_axis(n, "pads", 2 * count, 0), inner, kernel, strides, dilations)


def auto_padding(
    auto_pad: str,
    pads: Sequence[Size],
    inner: Sequence[Size],
    kernel: Sequence[Size],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> list[Padding]:
    """Return the padding of axes of sizes `inner`: from `pads` (all begins, then all ends) or from `auto_pad`.

    SAME_UPPER and SAME_LOWER make ceil(s / stride) windows of an axis of size s. The positions they need beyond s are
    padding, half at each end; an odd one is added at the end, with SAME_LOWER at the beginning.
    """
    count = len(inner)
    if auto_pad == "NOTSET":
        return list(zip(pads[:count], pads[count:], strict=True))
    if auto_pad == "VALID":
        return [(0, 0)] * count
    padding: list[Padding] = []
    for size, window, stride, dilation in zip(inner, kernel, strides, dilations, strict=True):
        windows = sizes.floor_divide(sizes.add(size, stride - 1), stride)
        lacking = sizes.maximum(0, sizes.subtract(covered_size(windows, window, stride, dilation), size))
        smaller = sizes.floor_divide(lacking, 2)
        larger = sizes.subtract(lacking, smaller)
        padding.append((smaller, larger) if auto_pad == "SAME_UPPER" else (larger, smaller))
    return padding


def window_count(
    size: Size, kernel: Size, stride: int, pad: Size, dilation: int, ceil: bool = False, after: Size | None = None
) -> Size:
    """Return how many windows fit, with padding `pad` at both ends, or `pad` before and `after` after the axis.

    With `ceil` the last window may extend beyond the padding, but must start before the padding at the end.
    """
    padding = sizes.multiply(2, pad) if after is None else sizes.add(pad, after)
    span = sizes.subtract(sizes.add(size, padding, -1), sizes.multiply(dilation, sizes.subtract(kernel, 1)))
    if not ceil:
        return sizes.add(sizes.floor_divide(span, stride), 1)
    fitting = sizes.add(sizes.floor_divide(sizes.add(span, stride - 1), stride), 1)
    starting = sizes.floor_divide(sizes.add(size, pad, stride - 1), stride)
    return sizes.minimum(fitting, starting)


def covered_size(count: Size, kernel: Size, stride: int, dilation: int) -> Size:
    """Return how many positions `count` windows span, from the first of the first to the last of the last."""
    between = sizes.multiply(stride, sizes.subtract(count, 1))
    return sizes.add(between, sizes.multiply(dilation, sizes.subtract(kernel, 1)), 1)


def product(factors: Sequence[Size]) -> Size:
    return sizes.multiply(1, *factors)


def spatial_sizes(x: ir.Value) -> Sizes:
    """Return the sizes of the spatial axes: those after the channels."""
    return sizes.dims_of(x)[2:]


def spatial_axes(letter: str, x: ir.Value) -> str:
    """Return the spatial axes of x for an axis map, each marked as unsliceable."""
    return " ".join(f"[{letter}{i}]" for i in range(rank_of(x) - 2))


def cropped(op: Builder, x: ir.Value, starts: Sequence[int], lengths: Sequence[Size]) -> ir.Value:
    """Return the part of x that begins at `starts` and has sizes `lengths`, on the spatial axes."""
    shape = spatial_sizes(x)
    if not any(starts) and tuple(lengths) == shape:
        return x
    axes = range(2, 2 + len(shape))
    ends = [sizes.add(s, length) for s, length in zip(starts, lengths, strict=True)]
    cropped_type = TensorType(dtype_of(x), (*sizes.dims_of(x)[:2], *lengths))
    inputs = (x, op.sizes(list(starts)), op.sizes(ends), int64_vector(op, axes))
    return op.node("", "Slice", inputs, {}, types=[cropped_type]).outputs[0]


def strided(op: Builder, x: ir.Value, starts: Sequence[int], steps: Sequence[int], counts: Sizes) -> ir.Value:
    """Return `counts` positions of x along the spatial axes, `steps` apart."""
    spans = (sizes.multiply(step, sizes.subtract(count, 1)) for step, count in zip(steps, counts, strict=True))
    ends = [sizes.add(start, span, 1) for start, span in zip(starts, spans, strict=True)]
    axes = int64_vector(op, range(2, 2 + len(starts)))
    inputs = (x, op.sizes(list(starts)), op.sizes(ends), axes, op.sizes(list(steps)))
    strided_type = TensorType(dtype_of(x), (*sizes.dims_of(x)[:2], *counts))
    return op.node("", "Slice", inputs, {}, types=[strided_type]).outputs[0]


def padded_at_end(op: Builder, x: ir.Value, missing: Sequence[Size]) -> ir.Value:
    """Append this many zeros to each spatial axis."""
    if all(m == 0 for m in missing):
        return x
    padded_sizes = tuple(sizes.add(size, m) for size, m in zip(spatial_sizes(x), missing, strict=True))
    padded_type = TensorType(dtype_of(x), (*sizes.dims_of(x)[:2], *padded_sizes))
    axes = int64_vector(op, range(2, rank_of(x)))
    pads = op.sizes([0] * len(missing) + list(missing))
    inputs = (x, pads, op.scalar(0, like=x), axes)
    return op.node("", "Pad", inputs, {}, types=[padded_type]).outputs[0]
