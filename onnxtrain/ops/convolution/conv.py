"""Convolutions and transposed convolutions, over one, two or three spatial axes.

    Conv(x[n, c, d], w[o, c/g, k], b[o]) -> y[n, o, e]
        y[n, o, e] = b[o] + sum over c, k of x[n, c, e*stride - pad + k*dilation] * w[o, c, k]
    ConvTranspose(x[n, c, d], w[c, o/g, k], b[o]) -> y[n, o, e]        Conv's gradient in its input, and b
    ConvGrad, ConvTransposeGrad(dy, x, w) -> dx, dw, db

g is `group`. Padding is the same at both ends of an axis, as in PyTorch; the additional padding at one end that "same"
may need is a Pad node. `output_mask` of a backward op selects the gradients to compute.

Both gradients are convolutions. The gradient of x is the transposed convolution of dy. The gradient of w is a
convolution of x with dy as the weight, with samples and channels swapped, and stride and dilation swapped:
    dw[o, c, k] = sum over n, e of x[n, c, e*stride - pad + k*dilation] * dy[n, o, e]
The body of dw is that convolution or, for small kernels, matmuls: onnxruntime's Conv is slow for a weight as large as
an image.

Source: Dumoulin and Visin 2016, https://arxiv.org/abs/1603.07285 (sections 2, 4).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import MICROSOFT, ONNX, TensorType, dtype_of, rank_of, type_of
from onnxtrain.graph.verify import format_type
from onnxtrain.ops.body_parts import int64_vector, reshaped, sum_over
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.convolution.input_gradient import BLOCK, EXACT_CHANNELS, gradients_in_blocks
from onnxtrain.ops.convolution.weight_gradient import LIBRARY, convolution_gradients
from onnxtrain.ops.cost_model import Shapes, expected_seconds, widening_seconds
from onnxtrain.ops.definition import STANDARD, Call, Gradient, Kernel, NodeView
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.gradient_masks import apply_output_mask, as_bools, output_mask
from onnxtrain.ops.interfaces.local_functions import STATIC_SHAPE_INPUTS
from onnxtrain.ops.interfaces.memory_format import IMAGES, Images
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.ops.registry import capture_call
from onnxtrain.ops.sliding_windows import (
    attribute_per_axis,
    covered_size,
    cropped,
    ints_per_axis,
    padded_at_end,
    product,
    spatial_axes,
    spatial_sizes,
    strided,
    symmetric_pads,
    window_count,
)
from onnxtrain.system.machine import Machine

aten = torch.ops.aten

_GEOMETRY: dict[str, Any] = {"dilations": None, "group": 1, "pads": None, "strides": None}
# Thresholds that choose the body of the weight gradient by the weight's sizes. Onnxruntime 1.31, one thread, kernels of
# 3 x 3: one matmul per kernel position is 1.7 to 3.5 times as fast as Conv with 16 and 64 channels, but slower with 1
# and 3; there one matmul for all positions is 1.5 to 1.9 times as fast, and is used if its columns have at most twice
# the elements of dy.
_MIN_CHANNELS = 16  # also the number of kernel positions from which Conv is used
_MAX_COLUMNS_PER_OUTPUT = 2
_TRANSPOSED: dict[str, Any] = {**_GEOMETRY, "output_padding": None}


def _geometry(n: NodeView) -> tuple[list[int], list[int], list[int]]:
    """Return strides, padding and dilations of the spatial axes."""
    count = rank_of(n.x) - 2
    return (
        attribute_per_axis(n, "strides", count, 1),
        symmetric_pads(n, count),
        attribute_per_axis(n, "dilations", count, 1),
    )


def _geometry_attributes(n: NodeView) -> dict[str, Any]:
    return {name: getattr(n, name) for name in _GEOMETRY}


# Capture


def _convolve(
    op: Builder,
    x: ir.Value,
    weight: ir.Value,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: Size = 1,
    output_padding: Any = None,
) -> Any:
    """Build a Conv or, with `output_padding`, a ConvTranspose; x may be a single sample without a batch axis."""
    if isinstance(groups, str):
        raise TypeError(f"expected a constant number of groups, got the symbolic size {groups}")
    if 0 in sizes.dims_of(weight)[:2]:  # without channels, the shapes of PyTorch's and ONNX's results differ
        return NotImplemented
    if dtype_of(x) != dtype_of(weight):  # which PyTorch accepts if x has no elements
        return NotImplemented
    count = rank_of(weight) - 2
    attributes = {
        "strides": ints_per_axis(stride, count),
        "pads": ints_per_axis(padding, count) * 2,
        "dilations": ints_per_axis(dilation, count),
        "group": groups,
    }
    is_single_sample = rank_of(x) == count + 1
    if is_single_sample:
        x = op.Unsqueeze(x, int64_vector(op, [0]))
    if output_padding is None:
        y = op.Conv(x, weight, bias, **attributes)
    else:
        y = op.ConvTranspose(x, weight, bias, output_padding=ints_per_axis(output_padding, count), **attributes)
    return op.Squeeze(y, int64_vector(op, [0])) if is_single_sample else y


def _capture_named_padding(
    op: Builder,
    x: ir.Value,
    weight: ir.Value,
    bias: Any = None,
    stride: Any = 1,
    padding: str = "valid",
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Capture padding "valid" or "same"; "same" keeps the size of x, with an odd total padded once more at the end."""
    if padding == "valid":
        return _convolve(op, x, weight, bias, stride, 0, dilation, groups)
    count = rank_of(weight) - 2
    kernel = spatial_sizes(weight)
    if any(isinstance(k, str) for k in kernel):
        return NotImplemented  # "same" padding of a kernel with symbolic sizes
    totals = [d * (int(k) - 1) for d, k in zip(ints_per_axis(dilation, count), kernel, strict=True)]
    if any(total_padding % 2 for total_padding in totals):
        padded_sizes = (
            sizes.add(size, total_padding % 2)
            for size, total_padding in zip(sizes.dims_of(x)[-count:], totals, strict=True)
        )
        padded_type = TensorType(dtype_of(x), (*sizes.dims_of(x)[:-count], *padded_sizes))
        paddings = [padding for total_padding in reversed(totals) for padding in (0, total_padding % 2)]
        x = capture_call(op, "aten.constant_pad_nd.default", padded_type, x, paddings, 0)
    return _convolve(op, x, weight, bias, stride, [padding // 2 for padding in totals], dilation, groups)


def _capture_transposed(
    op: Builder,
    x: ir.Value,
    weight: ir.Value,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    return _convolve(op, x, weight, bias, stride, padding, dilation, groups, output_padding)


def _capture_convolution(
    op: Builder,
    x: ir.Value,
    weight: ir.Value,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    output_padding = output_padding if transposed else None
    return _convolve(op, x, weight, bias, stride, padding, dilation, groups, output_padding)


# Conv


def _conv_type(n: NodeView) -> Sequence[TensorType]:
    kernel = spatial_sizes(n.w)
    if len(kernel) != rank_of(n.x) - 2:
        raise GraphError(
            f"x and w of {n.definition.name} have different ranks",
            expected="x[n, c, d...] and w[o, c/g, k...] of the same rank",
            got=f"{format_type(type_of(n.x))} and {format_type(type_of(n.w))}",
        )
    axes = zip(spatial_sizes(n.x), kernel, *_geometry(n), strict=True)
    out = [window_count(s, k, stride, pad, dilation) for s, k, stride, pad, dilation in axes]
    return (TensorType(dtype_of(n.x), (sizes.dims_of(n.x)[0], sizes.dims_of(n.w)[0], *out)),)


def _conv_gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    mask = output_mask(n, "x", "w", "b")
    return apply_output_mask(op.ms.ConvGrad(dy, n.x, n.w, **_geometry_attributes(n), output_mask=mask), mask, n)


def _lower_conv(n: NodeView, x: Any, w: Any, b: Any) -> Call:
    strides, pads, dilations = _geometry(n)
    return Call(torch.convolution, x, w, b, strides, pads, dilations, False, [0] * len(pads), n.group)


def _conv_axes(n: NodeView, transposed: bool = False, backward: bool = False) -> str:
    """Return the axis map: samples pass through, and channels if there is one group."""
    c, o = ("c", "o") if n.group == 1 else ("[c]", "[o]")
    data = f"n {c} {spatial_axes('d', n.x)}"
    result = f"n {o} {spatial_axes('e', n.x)}"
    weight = f"{c if transposed else o} {o if transposed else c} {spatial_axes('k', n.x)}"
    if backward:
        return f"{result}, {data}, {weight} -> {data}, {weight}, {o}"
    bias = "" if len(n.node.inputs) < 3 else ", -" if n.b is None else f", {o}"
    return f"{data}, {weight}{bias} -> {result}"


def _conv_flops(n: NodeView) -> Size:
    """Count a multiplication and an addition for each position of the smaller side and element of the weight."""
    transposed = "output_padding" in n.definition.attributes
    positions = spatial_sizes(n.x) if transposed else _conv_type(n)[0].shape[2:]
    return sizes.multiply(2, sizes.dims_of(n.x)[0], product(positions), product(sizes.dims_of(n.w)))


def _seconds(positions: Callable[[NodeView, Shapes], int]) -> Callable[[NodeView, Shapes, Machine], float]:
    """Return the cost model of a node; `positions` counts the spatial positions at which a sample meets the weight."""

    def seconds(n: NodeView, shapes: Shapes, machine: Machine) -> float:
        x, w = (shapes[list(n.definition.inputs).index(name)] for name in ("x", "w"))
        gradients = sum(n.output_mask[:2]) if "output_mask" in n.definition.attributes else 1
        flops = 2.0 * gradients * x[0] * positions(n, shapes) * math.prod(w)
        return expected_seconds("aten", flops, machine, TORCH_DTYPES[dtype_of(n.x)])

    return seconds


def _in_float32(call: Callable[..., Any], *arguments: Any) -> Any:
    """Run a call on tensors widened to float32, and round its results to their type."""
    dtype = next(a.dtype for a in arguments if isinstance(a, torch.Tensor))
    results = call(*(a.float() if isinstance(a, torch.Tensor) else a for a in arguments))
    if isinstance(results, torch.Tensor):
        return results.to(dtype)
    return tuple(None if v is None else v.to(dtype) for v in results)


def in_float32(lower: Callable[..., Call]) -> Kernel:
    """Return the kernel that runs bfloat16 and float16 tensors in float32."""

    def lower_wide(n: NodeView, *arguments: Any) -> Call:
        call = lower(n, *arguments)
        return Call(_in_float32, call.function, *call.args)

    def seconds(n: NodeView, shapes: Shapes, machine: Machine) -> float:
        wide = replace(machine, rates=replace(machine.rates, narrow={}))
        return n.definition.kernels[0].seconds(n, shapes, wide) + widening_seconds(sum(map(math.prod, shapes)), machine)

    narrow = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)
    return Kernel(
        lower=lower_wide,
        name="float32",
        seconds=seconds,
        applies=lambda n, device: device == "cpu" and dtype_of(n.x) in narrow,
    )


_EXACT_CHANNELS_OF_POINTS = 256
_MIN_CHANNELS_OF_POINTS = 12


def _prefers_channels_last(w: int) -> Callable[[ir.Node], bool]:
    """Return whether a node is faster in channels_last, and as exact as the tolerance requires.

    PyTorch's kernels for contiguous float32 images sum blocks of 16 channels separately, those for channels_last all in
    a row. With n input channels (output channels in the gradient), the mean error of a result is sqrt(n / 16) times
    that of a contiguous one if the kernel is larger than 1 x 1: 1.4 for 32, 1.7 for 48, 1.96 for 64; the largest error
    1.6 to 1.9, 2.3 to 2.5, 2.7 to 3.3. With AVX2, only that of the images' gradient, which `input_gradient.py` computes
    in blocks. For 1 x 1, it is 1.0 times for 64, 1.1 to 2.6 times for 512 (AVX-512, AVX2). The tolerance is 2. Half
    precision rounds more than either. The gradient of a 1 x 1 weight with 3 to 8 input channels has 1.9 to 4.3 times
    the error, with 12 or more 1.0 times.

    Args:
        w: the position of the weight among the inputs.
    """

    def prefers(node: ir.Node) -> bool:
        weight = node.inputs[w]
        assert weight is not None
        if dtype_of(weight) in (ir.DataType.BFLOAT16, ir.DataType.FLOAT16):
            return True
        outer, inner, *kernel = sizes.dims_of(weight)
        if dtype_of(weight) != ir.DataType.FLOAT or not isinstance(outer, int) or not isinstance(inner, int):
            return False
        if kernel == [1, 1] and inner < _MIN_CHANNELS_OF_POINTS:
            return False
        channels = max(outer // node.attributes.get_int("group", 1), inner)
        return channels <= (_EXACT_CHANNELS_OF_POINTS if kernel == [1, 1] else EXACT_CHANNELS)

    return prefers


CONV = define_pure(
    ONNX,
    "Conv",
    ("x", "w", "b?"),
    ("y",),
    attributes=_GEOMETRY,
    from_torch={
        "aten.conv1d.default": _convolve,
        "aten.conv2d.default": _convolve,
        "aten.conv3d.default": _convolve,
        "aten.conv1d.padding": _capture_named_padding,
        "aten.conv2d.padding": _capture_named_padding,
        "aten.conv3d.padding": _capture_named_padding,
        "aten.convolution.default": _capture_convolution,
    },
    shapes=_conv_type,
    body=STANDARD,
    gradient=(Gradient(_conv_gradient, reads=("x", "w")),),
    lower=_lower_conv,
    others=(in_float32(_lower_conv),),
    seconds=_seconds(lambda n, shapes: math.prod(shapes[0][2:]) // math.prod(_geometry(n)[0])),
    axes=_conv_axes,
    flops=_conv_flops,
)

IMAGES.register(CONV, Images(frozenset({"x", "y"}), _prefers_channels_last(w=1)))


# ConvTranspose


def _output_padding(n: NodeView) -> list[int]:
    return attribute_per_axis(n, "output_padding", rank_of(n.x) - 2, 0)


def _conv_transpose_type(n: NodeView) -> Sequence[TensorType]:
    channels = sizes.multiply(sizes.dims_of(n.w)[1], n.group)
    out = [
        sizes.add(covered_size(s, k, stride, dilation), output_padding - 2 * pad)
        for s, k, stride, pad, dilation, output_padding in zip(
            spatial_sizes(n.x), spatial_sizes(n.w), *_geometry(n), _output_padding(n), strict=True
        )
    ]
    return (TensorType(dtype_of(n.x), (sizes.dims_of(n.x)[0], channels, *out)),)


def _conv_transpose_gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    mask = output_mask(n, "x", "w", "b")
    grads = op.ms.ConvTransposeGrad(
        dy, n.x, n.w, **_geometry_attributes(n), output_padding=n.output_padding, output_mask=mask
    )
    return apply_output_mask(grads, mask, n)


def _lower_conv_transpose(n: NodeView, x: Any, w: Any, b: Any) -> Call:
    strides, pads, dilations = _geometry(n)
    return Call(torch.convolution, x, w, b, strides, pads, dilations, True, _output_padding(n), n.group)


CONV_TRANSPOSE = define_pure(
    ONNX,
    "ConvTranspose",
    ("x", "w", "b?"),
    ("y",),
    attributes=_TRANSPOSED,
    from_torch={
        "aten.conv_transpose1d.default": _capture_transposed,
        "aten.conv_transpose2d.input": _capture_transposed,
        "aten.conv_transpose3d.input": _capture_transposed,
    },
    shapes=_conv_transpose_type,
    body=STANDARD,
    gradient=(Gradient(_conv_transpose_gradient, reads=("x", "w")),),
    lower=_lower_conv_transpose,
    others=(in_float32(_lower_conv_transpose),),
    seconds=_seconds(lambda n, shapes: math.prod(shapes[0][2:])),
    axes=lambda n: _conv_axes(n, transposed=True),
    flops=_conv_flops,
)
IMAGES.register(CONV_TRANSPOSE, Images(frozenset({"x", "y"}), _prefers_channels_last(w=1)))


# Gradients


def _grad_types(n: NodeView) -> Sequence[TensorType]:
    return type_of(n.x), type_of(n.w), TensorType(dtype_of(n.w), (sizes.dims_of(n.dy)[1],))


def _bias_gradient(op: Builder, n: NodeView) -> ir.Value:
    return sum_over(op, n.dy, [axis for axis in range(rank_of(n.dy)) if axis != 1], keepdims=False)


def _weight_gradient(op: Builder, n: NodeView, image: ir.Value, cotangent: ir.Value) -> ir.Value:
    """Return the gradient of w[o, c/g, k] from `image`[n, c, d] and `cotangent`[n, o, e].

    They are x and dy of a Conv, dy and x of a ConvTranspose.
    """
    known_sizes = [size for size in sizes.dims_of(n.w) if isinstance(size, int)]
    if n.group == 1 and len(known_sizes) == rank_of(n.w):
        out_channels, channels, *kernel = known_sizes
        kernel_positions = math.prod(kernel)
        if channels * kernel_positions <= _MAX_COLUMNS_PER_OUTPUT * out_channels:
            return _weight_gradient_by_one_matmul(op, n, image, cotangent)
        if channels >= _MIN_CHANNELS > kernel_positions:
            return _weight_gradient_by_matmuls(op, n, image, cotangent)
    return _weight_gradient_by_convolution(op, n, image, cotangent)


def _weight_gradient_by_convolution(op: Builder, n: NodeView, image: ir.Value, cotangent: ir.Value) -> ir.Value:
    """Swap samples and channels, and strides and dilations."""
    image, cotangent = (_with_samples(op, x) for x in (image, cotangent))
    batch, channels, *inner = sizes.dims_of(image)
    strides, pads, dilations = _geometry(n)
    inner_axes = list(range(2, rank_of(image)))
    if n.group == 1:
        image = op.Transpose(image, perm=[1, 0, *inner_axes])
    else:
        group_channels = sizes.floor_divide(channels, n.group)
        image = reshaped(op, image, [batch, n.group, group_channels, *inner])
        image = op.Transpose(image, perm=[2, 1, 0, *(axis + 1 for axis in inner_axes)])
        image = reshaped(op, image, [group_channels, sizes.multiply(n.group, batch), *inner])
    cotangent = op.Transpose(cotangent, perm=[1, 0, *inner_axes])
    dw = op.Conv(image, cotangent, strides=dilations, dilations=strides, pads=[*pads, *pads], group=n.group)
    dw = cropped(op, dw, [0] * len(inner), spatial_sizes(n.w))
    return op.Transpose(dw, perm=[1, 0, *inner_axes])


def _weight_gradient_by_matmuls(op: Builder, n: NodeView, image: ir.Value, cotangent: ir.Value) -> ir.Value:
    """Compute one matmul per kernel position, over all positions of a sample, and sum over samples; without groups."""
    rows = _rows(op, cotangent)
    gradients = [
        sum_over(op, op.MatMul(rows, op.Transpose(columns, perm=[0, 2, 1])), [0], keepdims=True)
        for columns in _columns(op, n, image, cotangent)
    ]
    dw = op.Concat(*gradients, axis=0) if len(gradients) > 1 else gradients[0]
    return reshaped(op, op.Transpose(dw, perm=[1, 2, 0]), sizes.dims_of(n.w))


def _weight_gradient_by_one_matmul(op: Builder, n: NodeView, image: ir.Value, cotangent: ir.Value) -> ir.Value:
    """Concatenate the columns of all kernel positions for a single matmul; without groups."""
    out_channels, channels, *kernel = sizes.dims_of(n.w)
    parts = _columns(op, n, image, cotangent)
    columns = op.Concat(*parts, axis=1) if len(parts) > 1 else parts[0]
    per_sample = op.MatMul(columns, op.Transpose(_rows(op, cotangent), perm=[0, 2, 1]))
    dw = reshaped(op, sum_over(op, per_sample, [0], keepdims=True), [product(kernel), channels, out_channels])
    return reshaped(op, op.Transpose(dw, perm=[2, 1, 0]), sizes.dims_of(n.w))


def _rows(op: Builder, cotangent: ir.Value) -> ir.Value:
    """Flatten the spatial axes: [n, o, positions]."""
    batch, channels, *positions = sizes.dims_of(cotangent)
    return reshaped(op, cotangent, [batch, channels, product(positions)])


def _columns(op: Builder, n: NodeView, image: ir.Value, cotangent: ir.Value) -> list[ir.Value]:
    """Return for each kernel position the elements it reads at each position of `cotangent`: [n, c, positions]."""
    strides, pads, dilations = _geometry(n)
    batch, channels, *inner = sizes.dims_of(image)
    positions = spatial_sizes(cotangent)
    if any(pads):
        padded_sizes = [sizes.add(s, 2 * pad) for s, pad in zip(inner, pads, strict=True)]
        inputs = (
            image,
            op.sizes([*pads, *pads]),
            op.scalar(0, like=image),
            int64_vector(op, range(2, 2 + len(pads))),
        )
        padded_type = TensorType(dtype_of(image), (batch, channels, *padded_sizes))
        image = op.node(ONNX, "Pad", inputs, {}, types=[padded_type]).outputs[0]
    columns = []
    for kernel_position in itertools.product(*(range(int(k)) for k in spatial_sizes(n.w))):
        starts = [index * dilation for index, dilation in zip(kernel_position, dilations, strict=True)]
        elements = strided(op, image, starts, strides, positions)
        columns.append(reshaped(op, elements, [batch, channels, product(positions)]))
    return columns


def _with_samples(op: Builder, x: ir.Value) -> ir.Value:
    """Append a sample of zeros to an empty batch: onnxruntime 1.31 does not return from a Conv over no channels."""
    batch, *rest = sizes.dims_of(x)
    missing = sizes.maximum(0, sizes.subtract(1, batch))
    if missing == 0:
        return x
    padded_type = TensorType(dtype_of(x), (sizes.maximum(1, batch), *rest))
    inputs = (x, op.sizes([0, missing]), op.scalar(0, like=x), int64_vector(op, [0]))
    return op.node("", "Pad", inputs, {}, types=[padded_type]).outputs[0]


def _input_gradient(op: Builder, n: NodeView) -> ir.Value:
    """Return the transposed convolution of dy, with zeros for the elements at the end of x that no window covers."""
    strides, pads, dilations = _geometry(n)
    attributes = {"strides": strides, "dilations": dilations, "group": n.group}
    axes = zip(spatial_sizes(n.x), spatial_sizes(n.dy), spatial_sizes(n.w), strides, pads, dilations, strict=True)
    uncovered = [
        sizes.subtract(sizes.add(s, 2 * p), covered_size(e, k, stride, dil)) for s, e, k, stride, p, dil in axes
    ]
    if all(isinstance(size, int) for size in uncovered):
        return op.ConvTranspose(n.dy, n.w, pads=[*pads, *pads], output_padding=uncovered, **attributes)
    padded = padded_at_end(op, op.ConvTranspose(n.dy, n.w, **attributes), uncovered)
    return cropped(op, padded, pads, spatial_sizes(n.x))


def _conv_grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    return _input_gradient(op, n), _weight_gradient(op, n, n.x, n.dy), _bias_gradient(op, n)


def _conv_transpose_grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    dx = op.Conv(n.dy, n.w, **_geometry_attributes(n))
    dx = cropped(op, dx, [0] * len(spatial_sizes(n.x)), spatial_sizes(n.x))
    return dx, _weight_gradient(op, n, n.dy, n.x), _bias_gradient(op, n)


def convolution_backward(dy: Any, x: Any, w: Any, *options: Any) -> Any:
    """Call PyTorch's kernel for a number of output channels that is known at run time only."""
    return aten.convolution_backward.default(dy, x, w, [dy.shape[1]], *options)


def _lower_grad(n: NodeView, dy: Any, x: Any, w: Any, output_padding: list[int], transposed: bool) -> Call:
    strides, pads, dilations = _geometry(n)
    mask = as_bools(n.output_mask)
    options = (strides, pads, dilations, transposed, output_padding, n.group, mask)
    channels = sizes.dims_of(n.dy)[1]
    if mask[2] and isinstance(channels, str):
        return Call(convolution_backward, dy, x, w, *options)
    return Call(aten.convolution_backward.default, dy, x, w, [channels] if mask[2] else None, *options)


def _lower_conv_grad(n: NodeView, dy: Any, x: Any, w: Any) -> Call:
    if n.output_mask[0] and n.group == 1 and rank_of(n.x) == 4 and dtype_of(n.w) == ir.DataType.FLOAT:
        channels, _, *kernel = sizes.dims_of(n.w)
        if isinstance(channels, int) and BLOCK < channels <= EXACT_CHANNELS and kernel != [1, 1]:
            return Call(gradients_in_blocks, dy, x, w, *_geometry(n), as_bools(n.output_mask))
    return _lower_grad(n, dy, x, w, [0] * (rank_of(n.x) - 2), False)


def _lower_compiled(n: NodeView, dy: Any, x: Any, w: Any) -> Call:
    LIBRARY.request()
    return Call(convolution_gradients, dy, x, w, *_geometry(n), as_bools(n.output_mask))


def _can_compile(n: NodeView, device: str) -> bool:
    is_supported = rank_of(n.x) == 4 and n.group == 1 and dtype_of(n.x) == ir.DataType.FLOAT
    return is_supported and bool(n.output_mask[1]) and may_compile(n, device)


def _lower_conv_transpose_grad(n: NodeView, dy: Any, x: Any, w: Any) -> Call:
    return _lower_grad(n, dy, x, w, _output_padding(n), True)


CONV_GRAD = define_pure(
    MICROSOFT,
    "ConvGrad",
    ("dy", "x", "w"),
    ("dx", "dw", "db"),
    attributes={**_GEOMETRY, "output_mask": (1, 1, 1)},
    shapes=_grad_types,
    body=_conv_grad_body,
    lower=_lower_conv_grad,
    others=(
        in_float32(_lower_conv_grad),
        Kernel(
            lower=_lower_compiled,
            name="compiled",
            # Expected to be slower, so that it runs only after it was measured: it becomes ready during a run.
            seconds=lambda n, shapes, machine: 1.05 * n.definition.kernels[0].seconds(n, shapes, machine),
            applies=_can_compile,
            library=LIBRARY,
        ),
    ),
    seconds=_seconds(lambda n, shapes: math.prod(shapes[0][2:])),
    axes=lambda n: _conv_axes(n, backward=True),
    flops=lambda n: sizes.multiply(4, sizes.dims_of(n.x)[0], product(spatial_sizes(n.dy)), product(sizes.dims_of(n.w))),
)
CONV_TRANSPOSE_GRAD = define_pure(
    MICROSOFT,
    "ConvTransposeGrad",
    ("dy", "x", "w"),
    ("dx", "dw", "db"),
    attributes={**_TRANSPOSED, "output_mask": (1, 1, 1)},
    shapes=_grad_types,
    body=_conv_transpose_grad_body,
    lower=_lower_conv_transpose_grad,
    others=(in_float32(_lower_conv_transpose_grad),),
    seconds=_seconds(lambda n, shapes: math.prod(shapes[1][2:])),
    axes=lambda n: _conv_axes(n, transposed=True, backward=True),
    flops=lambda n: sizes.multiply(4, sizes.dims_of(n.x)[0], product(spatial_sizes(n.x)), product(sizes.dims_of(n.w))),
)
for _op in (CONV_GRAD, CONV_TRANSPOSE_GRAD):
    IMAGES.register(_op, Images(frozenset({"dy", "x", "dx"}), _prefers_channels_last(w=2)))
    STATIC_SHAPE_INPUTS.register(_op, frozenset({"w"}))
