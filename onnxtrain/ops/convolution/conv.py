"""Convolutions and their transposes, over one, two or three axes.

    Conv(x[n, c, d], w[o, c/g, k], b[o]) -> y[n, o, e]
        y[n, o, e] = b[o] + sum over c, k of x[n, c, e*stride - pad + k*dilation] * w[o, c, k]
    ConvTranspose(x[n, c, d], w[c, o/g, k], b[o]) -> y[n, o, e]        Conv's gradient in its input, and b
    ConvGrad, ConvTransposeGrad(dy, x, w) -> dx, dw, db

g is `group`. Padding is the same at both ends of an axis, as in PyTorch; what "same" pads more at one end is a Pad
node. `output_mask` of a backward op says which gradients are read; the kernel leaves the others out.

A gradient is a convolution again. In x it is the transposed one. In w it is one where samples and channels change
places, dy is the weight, and stride and dilation change places:
    dw[o, c, k] = sum over n, e of x[n, c, e*stride - pad + k*dilation] * dy[n, o, e]
Its body is that, or for windows of few places matrix products: onnxruntime's Conv is slow where the weight is as large
as an image.

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
from onnxtrain.ops.constructors import TORCH_DTYPES
from onnxtrain.ops.convolution.weight_gradient import LIBRARY, convolution_gradients
from onnxtrain.ops.cost_model import Shapes, expected_seconds, widening_seconds
from onnxtrain.ops.definition import STANDARD, Call, Gradient, Kernel, Layout, NodeView
from onnxtrain.ops.fused import another_call, axes_constant, flags, fused, masked, reshaped, total, wanted
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.ops.sliding_windows import (
    as_list,
    covered,
    cut_out,
    every,
    extended,
    names,
    per_axis,
    product,
    spatial,
    symmetric_pads,
    window_count,
)
from onnxtrain.system.machine import Machine

aten = torch.ops.aten

_GEOMETRY: dict[str, Any] = {"dilations": None, "group": 1, "pads": None, "strides": None}
# How the weight's gradient is computed, by the weight's sizes. Onnxruntime 1.31, one thread, windows of 3 x 3: a
# product for each place is 1.7 to 3.5 times as fast as Conv with 16 and 64 channels, but slower with 1 and 3; one
# product for all is 1.5 to 1.9 times as fast there, and is done where its columns are no larger than twice dy.
_MANY = 16  # channels, or places of a window
_LARGER = 2
_TRANSPOSED: dict[str, Any] = {**_GEOMETRY, "output_padding": None}


def _geometry(n: NodeView) -> tuple[list[int], list[int], list[int]]:
    """Strides, padding and dilations of each axis."""
    count = rank_of(n.x) - 2
    return per_axis(n, "strides", count, 1), symmetric_pads(n, count), per_axis(n, "dilations", count, 1)


def _same_geometry(n: NodeView) -> dict[str, Any]:
    """The attributes, for a node of the same geometry."""
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
    more: Any = None,
) -> Any:
    """A Conv, or with `more` (output_padding) a ConvTranspose; x may be a single sample."""
    if isinstance(groups, str):
        raise TypeError(f"groups is {groups}, and an attribute is a number")
    if 0 in sizes.dims_of(weight)[:2]:  # of no channels PyTorch gives another shape than ONNX
        return NotImplemented
    count = rank_of(weight) - 2
    pads = as_list(padding, count)
    how = {"strides": as_list(stride, count), "pads": pads * 2, "dilations": as_list(dilation, count), "group": groups}
    single = rank_of(x) == count + 1
    if single:
        x = op.Unsqueeze(x, axes_constant(op, [0]))
    if more is None:
        y = op.Conv(x, weight, bias, **how)
    else:
        y = op.ConvTranspose(x, weight, bias, output_padding=as_list(more, count), **how)
    return op.Squeeze(y, axes_constant(op, [0])) if single else y


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
    """Padding "same" gives y the size of x; where it is odd, one place more at the end."""
    if padding == "valid":
        return _convolve(op, x, weight, bias, stride, 0, dilation, groups)
    count = rank_of(weight) - 2
    kernel = spatial(weight)
    if any(isinstance(k, str) for k in kernel):
        return NotImplemented  # a kernel whose size changes
    whole = [d * (int(k) - 1) for d, k in zip(as_list(dilation, count), kernel, strict=True)]
    if any(w % 2 for w in whole):
        longer = (sizes.add(size, w % 2) for size, w in zip(sizes.dims_of(x)[-count:], whole, strict=True))
        padded = TensorType(dtype_of(x), (*sizes.dims_of(x)[:-count], *longer))
        ends = [end for w in reversed(whole) for end in (0, w % 2)]
        x = another_call(op, "aten.constant_pad_nd.default", padded, x, ends, 0)
    return _convolve(op, x, weight, bias, stride, [w // 2 for w in whole], dilation, groups)


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
    more = output_padding if transposed else None
    return _convolve(op, x, weight, bias, stride, padding, dilation, groups, more)


# Conv


def _conv_type(n: NodeView) -> Sequence[TensorType]:
    kernel = spatial(n.w)
    if len(kernel) != rank_of(n.x) - 2:
        raise GraphError(
            "Conv's x and w have the same number of axes", got=f"{sizes.dims_of(n.x)} and {sizes.dims_of(n.w)}"
        )
    axes = zip(spatial(n.x), kernel, *_geometry(n), strict=True)
    out = [window_count(s, k, stride, pad, dilation) for s, k, stride, pad, dilation in axes]
    return (TensorType(dtype_of(n.x), (sizes.dims_of(n.x)[0], sizes.dims_of(n.w)[0], *out)),)


def _conv_gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    mask = wanted(n, "x", "w", "b")
    return masked(op.ms.ConvGrad(dy, n.x, n.w, **_same_geometry(n), output_mask=mask), mask, n)


def _lower_conv(n: NodeView, x: Any, w: Any, b: Any) -> Call:
    strides, pads, dilations = _geometry(n)
    return Call(torch.convolution, x, w, b, strides, pads, dilations, False, [0] * len(pads), n.group)


def _conv_axes(n: NodeView, transposed: bool = False, backward: bool = False) -> str:
    """Samples pass; channels too, where they are in one group."""
    c, o = ("c", "o") if n.group == 1 else ("[c]", "[o]")
    data = f"n {c} {names('d', n.x)}"
    result = f"n {o} {names('e', n.x)}"
    weight = f"{c if transposed else o} {o if transposed else c} {names('k', n.x)}"
    if backward:
        return f"{result}, {data}, {weight} -> {data}, {weight}, {o}"
    bias = "" if len(n.node.inputs) < 3 else ", -" if n.b is None else f", {o}"
    return f"{data}, {weight}{bias} -> {result}"


def _conv_flops(n: NodeView) -> Size:
    """Two for each product of an element of the smaller side with the weights it meets."""
    transposed = "output_padding" in n.definition.attributes
    positions = spatial(n.x) if transposed else _conv_type(n)[0].shape[2:]
    return sizes.multiply(2, sizes.dims_of(n.x)[0], product(positions), product(sizes.dims_of(n.w)))


def _seconds(positions: Callable[[NodeView, Shapes], int]) -> Callable[[NodeView, Shapes, Machine], float]:
    """The cost model; `positions` counts those of the smaller side, at each of which x meets all of w in a sample."""

    def seconds(n: NodeView, shapes: Shapes, machine: Machine) -> float:
        x, w = (shapes[list(n.definition.inputs).index(name)] for name in ("x", "w"))
        gradients = sum(n.output_mask[:2]) if "output_mask" in n.definition.attributes else 1
        flops = 2.0 * gradients * x[0] * positions(n, shapes) * math.prod(w)
        return expected_seconds("aten", flops, machine, TORCH_DTYPES[dtype_of(n.x)])

    return seconds


def _in_float32(call: Callable[..., Any], *arguments: Any) -> Any:
    """Widens tensors, and rounds the results again."""
    dtype = next(a.dtype for a in arguments if isinstance(a, torch.Tensor))
    found = call(*(a.float() if isinstance(a, torch.Tensor) else a for a in arguments))
    if isinstance(found, torch.Tensor):
        return found.to(dtype)
    return tuple(None if v is None else v.to(dtype) for v in found)


def in_float32(lower: Callable[..., Call]) -> Kernel:
    """The same call on narrow elements that are widened before and rounded after it."""

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


CONV = fused(
    ONNX,
    "Conv",
    ("x", "w", "b?"),
    ("y",),
    attributes=_GEOMETRY,
    since_version=11,
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
    layout=Layout(frozenset({"x", "y"}), prefers_channels_last=True),
)


# ConvTranspose


def _output_padding(n: NodeView) -> list[int]:
    return per_axis(n, "output_padding", rank_of(n.x) - 2, 0)


def _conv_transpose_type(n: NodeView) -> Sequence[TensorType]:
    channels = sizes.multiply(sizes.dims_of(n.w)[1], n.group)
    out = [
        sizes.add(covered(s, k, stride, dilation), more - 2 * pad)
        for s, k, stride, pad, dilation, more in zip(
            spatial(n.x), spatial(n.w), *_geometry(n), _output_padding(n), strict=True
        )
    ]
    return (TensorType(dtype_of(n.x), (sizes.dims_of(n.x)[0], channels, *out)),)


def _conv_transpose_gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    mask = wanted(n, "x", "w", "b")
    grads = op.ms.ConvTransposeGrad(
        dy, n.x, n.w, **_same_geometry(n), output_padding=n.output_padding, output_mask=mask
    )
    return masked(grads, mask, n)


def _lower_conv_transpose(n: NodeView, x: Any, w: Any, b: Any) -> Call:
    strides, pads, dilations = _geometry(n)
    return Call(torch.convolution, x, w, b, strides, pads, dilations, True, _output_padding(n), n.group)


fused(
    ONNX,
    "ConvTranspose",
    ("x", "w", "b?"),
    ("y",),
    attributes=_TRANSPOSED,
    since_version=11,
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
    layout=Layout(frozenset({"x", "y"}), prefers_channels_last=True),
)


# Gradients


def _grad_types(n: NodeView) -> Sequence[TensorType]:
    return type_of(n.x), type_of(n.w), TensorType(dtype_of(n.w), (sizes.dims_of(n.dy)[1],))


def _bias_gradient(op: Builder, n: NodeView) -> ir.Value:
    return total(op, n.dy, [axis for axis in range(rank_of(n.dy)) if axis != 1], keepdims=False)


def _weight_gradient(op: Builder, n: NodeView, source: ir.Value, moving: ir.Value) -> ir.Value:
    """The gradient of w[o, c/g, k], where windows of `source`[n, c, d] meet `moving`[n, o, e]."""
    numbers = [size for size in sizes.dims_of(n.w) if isinstance(size, int)]
    if n.group == 1 and len(numbers) == rank_of(n.w):
        outs, channels, *kernel = numbers
        places = math.prod(kernel)
        if channels * places <= _LARGER * outs:
            return _weight_gradient_by_columns(op, n, source, moving)
        if channels >= _MANY > places:
            return _weight_gradient_by_place(op, n, source, moving)
    return _weight_gradient_by_convolution(op, n, source, moving)


def _weight_gradient_by_convolution(op: Builder, n: NodeView, source: ir.Value, moving: ir.Value) -> ir.Value:
    """Samples and channels change places, and so do strides and dilations."""
    source, moving = (_with_samples(op, x) for x in (source, moving))
    batch, channels, *inner = sizes.dims_of(source)
    strides, pads, dilations = _geometry(n)
    inner_axes = list(range(2, rank_of(source)))
    if n.group == 1:
        source = op.Transpose(source, perm=[1, 0, *inner_axes])
    else:
        each = sizes.floor_divide(channels, n.group)
        source = reshaped(op, source, [batch, n.group, each, *inner])
        source = op.Transpose(source, perm=[2, 1, 0, *(axis + 1 for axis in inner_axes)])
        source = reshaped(op, source, [each, sizes.multiply(n.group, batch), *inner])
    moving = op.Transpose(moving, perm=[1, 0, *inner_axes])
    found = op.Conv(source, moving, strides=dilations, dilations=strides, pads=[*pads, *pads], group=n.group)
    found = cut_out(op, found, [0] * len(inner), spatial(n.w))
    result: ir.Value = op.Transpose(found, perm=[1, 0, *inner_axes])
    return result


def _weight_gradient_by_place(op: Builder, n: NodeView, source: ir.Value, moving: ir.Value) -> ir.Value:
    """Without groups: for each place of a window the product over all positions, then the sum over samples."""
    rows = _rows(op, moving)
    found = [
        total(op, op.MatMul(rows, op.Transpose(columns, perm=[0, 2, 1])), [0], keepdims=True)
        for columns in _columns(op, n, source, moving)
    ]
    places = op.Concat(*found, axis=0) if len(found) > 1 else found[0]
    return reshaped(op, op.Transpose(places, perm=[1, 2, 0]), sizes.dims_of(n.w))


def _weight_gradient_by_columns(op: Builder, n: NodeView, source: ir.Value, moving: ir.Value) -> ir.Value:
    """Without groups: one product for all places of a window, whose columns stand below each other."""
    outs, channels, *kernel = sizes.dims_of(n.w)
    found = _columns(op, n, source, moving)
    columns = op.Concat(*found, axis=1) if len(found) > 1 else found[0]
    products = op.MatMul(columns, op.Transpose(_rows(op, moving), perm=[0, 2, 1]))
    places = reshaped(op, total(op, products, [0], keepdims=True), [product(kernel), channels, outs])
    return reshaped(op, op.Transpose(places, perm=[2, 1, 0]), sizes.dims_of(n.w))


def _rows(op: Builder, moving: ir.Value) -> ir.Value:
    """The positions of each plane in a row: [n, o, positions]."""
    batch, outs, *positions = sizes.dims_of(moving)
    return reshaped(op, moving, [batch, outs, product(positions)])


def _columns(op: Builder, n: NodeView, source: ir.Value, moving: ir.Value) -> list[ir.Value]:
    """For each place of a window what the weight there meets at each position of `moving`: [n, c, positions]."""
    strides, pads, dilations = _geometry(n)
    batch, channels, *inner = sizes.dims_of(source)
    positions = spatial(moving)
    if any(pads):
        longer = [sizes.add(s, 2 * pad) for s, pad in zip(inner, pads, strict=True)]
        inputs = (
            source,
            op.sizes([*pads, *pads]),
            op.scalar(0, like=source),
            axes_constant(op, range(2, 2 + len(pads))),
        )
        kind = TensorType(dtype_of(source), (batch, channels, *longer))
        source = op.node(ONNX, "Pad", inputs, {}, types=[kind]).outputs[0]
    found = []
    for place in itertools.product(*(range(int(k)) for k in spatial(n.w))):
        starts = [index * dilation for index, dilation in zip(place, dilations, strict=True)]
        met = every(op, source, starts, strides, positions)
        found.append(reshaped(op, met, [batch, channels, product(positions)]))
    return found


def _with_samples(op: Builder, x: ir.Value) -> ir.Value:
    """A sample of zeros where there is none: onnxruntime 1.31 does not return from a Conv over no channels."""
    batch, *rest = sizes.dims_of(x)
    missing = sizes.maximum(0, sizes.subtract(1, batch))
    if missing == 0:
        return x
    padded = TensorType(dtype_of(x), (sizes.maximum(1, batch), *rest))
    inputs = (x, op.sizes([0, missing]), op.scalar(0, like=x), axes_constant(op, [0]))
    result: ir.Value = op.node("", "Pad", inputs, {}, types=[padded]).outputs[0]
    return result


def _input_gradient(op: Builder, n: NodeView) -> ir.Value:
    """The transposed convolution of dy; where windows leave places at the end of x uncovered, dx has zeros."""
    strides, pads, dilations = _geometry(n)
    how = {"strides": strides, "dilations": dilations, "group": n.group}
    axes = zip(spatial(n.x), spatial(n.dy), spatial(n.w), strides, pads, dilations, strict=True)
    left = [sizes.subtract(sizes.add(s, 2 * p), covered(e, k, stride, dil)) for s, e, k, stride, p, dil in axes]
    if all(isinstance(rest, int) for rest in left):
        dx: ir.Value = op.ConvTranspose(n.dy, n.w, pads=[*pads, *pads], output_padding=left, **how)
        return dx
    padded = extended(op, op.ConvTranspose(n.dy, n.w, **how), left)
    return cut_out(op, padded, pads, spatial(n.x))


def _conv_grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    return _input_gradient(op, n), _weight_gradient(op, n, n.x, n.dy), _bias_gradient(op, n)


def _conv_transpose_grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    found = op.Conv(n.dy, n.w, **_same_geometry(n))
    dx = cut_out(op, found, [0] * len(spatial(n.x)), spatial(n.x))
    return dx, _weight_gradient(op, n, n.dy, n.x), _bias_gradient(op, n)


def convolution_backward(dy: Any, x: Any, w: Any, *how: Any) -> Any:
    """PyTorch's kernel where the number of output channels is not known in advance."""
    return aten.convolution_backward.default(dy, x, w, [dy.shape[1]], *how)


def _lower_grad(n: NodeView, dy: Any, x: Any, w: Any, output_padding: list[int], transposed: bool) -> Call:
    strides, pads, dilations = _geometry(n)
    mask = flags(n.output_mask)
    how = (strides, pads, dilations, transposed, output_padding, n.group, mask)
    channels = sizes.dims_of(n.dy)[1]
    if mask[2] and isinstance(channels, str):
        return Call(convolution_backward, dy, x, w, *how)
    return Call(aten.convolution_backward.default, dy, x, w, [channels] if mask[2] else None, *how)


def _lower_conv_grad(n: NodeView, dy: Any, x: Any, w: Any) -> Call:
    return _lower_grad(n, dy, x, w, [0] * (rank_of(n.x) - 2), False)


def _lower_compiled(n: NodeView, dy: Any, x: Any, w: Any) -> Call:
    LIBRARY.request()
    return Call(convolution_gradients, dy, x, w, *_geometry(n), flags(n.output_mask))


def _compiles(n: NodeView, device: str) -> bool:
    of_pictures = rank_of(n.x) == 4 and n.group == 1 and dtype_of(n.x) == ir.DataType.FLOAT
    return of_pictures and bool(n.output_mask[1]) and may_compile(n, device)


def _lower_conv_transpose_grad(n: NodeView, dy: Any, x: Any, w: Any) -> Call:
    return _lower_grad(n, dy, x, w, _output_padding(n), True)


fused(
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
            # Not before it is measured: it comes in mid-run.
            seconds=lambda n, shapes, machine: 1.05 * n.definition.kernels[0].seconds(n, shapes, machine),
            applies=_compiles,
            is_ready=LIBRARY.is_there,
            prepare=LIBRARY.request,
        ),
    ),
    seconds=_seconds(lambda n, shapes: math.prod(shapes[0][2:])),
    layout=Layout(frozenset({"dy", "x", "dx"}), prefers_channels_last=True),
    static_shape_inputs=frozenset({"w"}),
    axes=lambda n: _conv_axes(n, backward=True),
    flops=lambda n: sizes.multiply(4, sizes.dims_of(n.x)[0], product(spatial(n.dy)), product(sizes.dims_of(n.w))),
)
fused(
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
    layout=Layout(frozenset({"dy", "x", "dx"}), prefers_channels_last=True),
    static_shape_inputs=frozenset({"w"}),
    axes=lambda n: _conv_axes(n, transposed=True, backward=True),
    flops=lambda n: sizes.multiply(4, sizes.dims_of(n.x)[0], product(spatial(n.x)), product(sizes.dims_of(n.w))),
)
