"""Im2Col and Col2Im: sliding windows as columns, and their sum (torch.nn.Unfold, torch.nn.Fold).

    Im2Col(x[n, c, h, w]) -> y[n, c*k, l]            column l holds window l: k = kh*kw elements of each channel
    Col2Im(x[n, c*k, l], size) -> y[n, c, h, w]      the sum over the windows that hold each pixel

Each is the other's gradient. Windows are those of a convolution with `kernel_shape`, `strides`, `pads`, `dilations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder, as_sizes
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import OWN, TensorType, dtype_of, rank_of
from onnxtrain.ops.body_parts import int64_vector, reshaped
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import REQUIRED, Call, Gradient, NodeView, numel
from onnxtrain.ops.sliding_windows import ints_per_axis, product, sizes_per_axis, symmetric_pads, window_count

aten = torch.ops.aten
_WINDOW_ATTRIBUTES: dict[str, Any] = {
    "kernel_shape": REQUIRED,
    "strides": (1, 1),
    "pads": (0, 0, 0, 0),
    "dilations": (1, 1),
}


def _window_attributes(n: NodeView) -> dict[str, Any]:
    return {name: getattr(n, name) for name in _WINDOW_ATTRIBUTES}


def _window_counts(n: NodeView, size: Sequence[Size]) -> list[Size]:
    """Return the number of windows along each axis of `size`."""
    axes = zip(size, n.kernel_shape, n.strides, symmetric_pads(n, 2), n.dilations, strict=True)
    return [window_count(s, k, stride, pad, dilation) for s, k, stride, pad, dilation in axes]


def _aten_window(n: NodeView) -> list[list[int]]:
    """Return ATen's arguments: kernel, dilation, padding, stride."""
    return [list(n.kernel_shape), list(n.dilations), symmetric_pads(n, 2), list(n.strides)]


def _positions(op: Builder, n: NodeView, axis: int, windows: Size) -> ir.Value:
    """Return the indices in the padded axis of the elements of each window: [kernel, windows]."""
    one = op.scalar(1, ir.DataType.INT64)
    start = op.Mul(op.Range(op.size(0), op.size(windows), one), op.size(n.strides[axis]))
    step = op.constant([[i * n.dilations[axis]] for i in range(n.kernel_shape[axis])], ir.DataType.INT64)
    return op.Add(step, start)


# Im2Col


def _im2col_type(n: NodeView) -> Sequence[TensorType]:
    batch, channels, *size = sizes.dims_of(n.x)
    rows = sizes.multiply(channels, product(n.kernel_shape))
    return (TensorType(dtype_of(n.x), (batch, rows, product(_window_counts(n, size)))),)


def _padded(op: Builder, n: NodeView, x: ir.Value) -> ir.Value:
    height_pad, width_pad = symmetric_pads(n, 2)
    pads = int64_vector(op, [height_pad, width_pad, height_pad, width_pad])
    return op.Pad(x, pads, op.scalar(0, like=x), int64_vector(op, [2, 3]))


def _im2col_body(op: Builder, n: NodeView) -> ir.Value:
    rows, columns = _window_counts(n, sizes.dims_of(n.x)[2:])
    y = op.Gather(_padded(op, n, n.x), _positions(op, n, 0, rows), axis=2)  # [n, c, kh, lh, w]
    y = op.Gather(y, _positions(op, n, 1, columns), axis=4)  # [n, c, kh, lh, kw, lw]
    return reshaped(op, op.Transpose(y, perm=[0, 1, 2, 4, 3, 5]), _im2col_type(n)[0].shape)


def _im2col_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    return op.own.Col2Im(dy, op.sizes(sizes.dims_of(n.x)[2:]), **_window_attributes(n))


def _onnx_window(kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> dict[str, Any]:
    return {
        "kernel_shape": ints_per_axis(kernel_size, 2),
        "strides": ints_per_axis(stride, 2),
        "pads": ints_per_axis(padding, 2) * 2,
        "dilations": ints_per_axis(dilation, 2),
    }


def _capture_im2col(op: Builder, x: ir.Value, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    if rank_of(x) != 4:
        return NotImplemented  # no batch dimension: PyTorch runs it
    return op.own.Im2Col(x, **_onnx_window(kernel_size, dilation, padding, stride))


define_pure(
    OWN,
    "Im2Col",
    ("x",),
    ("y",),
    attributes=_WINDOW_ATTRIBUTES,
    from_torch={"aten.im2col.default": _capture_im2col},
    shapes=_im2col_type,
    body=_im2col_body,
    gradient=(Gradient(_im2col_gradient, reads=()),),
    lower=lambda n, x: Call(aten.im2col.default, x, *_aten_window(n)),
    axes=lambda n: "n [c] [h] [w] -> n [k] [l]",
    flops=lambda n: 0,
)


# Col2Im


def _col2im_type(n: NodeView) -> Sequence[TensorType]:
    size = as_sizes(n.size)
    if size is None:
        raise GraphError(
            "Col2Im: the image size must follow from constants and sizes of inputs",
            got=f"{n.size.name}, whose values are unknown",
        )
    batch, rows, _ = sizes.dims_of(n.x)
    return (TensorType(dtype_of(n.x), (batch, sizes.floor_divide(rows, product(n.kernel_shape)), *size)),)


def _col2im_body(op: Builder, n: NodeView) -> ir.Value:
    """Multiply each axis by a 0/1 matrix that adds up the elements of windows at the same position."""
    batch, channels, *size = _col2im_type(n)[0].shape
    windows, pads = _window_counts(n, size), symmetric_pads(n, 2)
    y = reshaped(op, n.x, [batch, channels, *n.kernel_shape, *windows])
    y = op.Transpose(y, perm=[0, 1, 2, 4, 3, 5])
    flat: Sizes = tuple(sizes.multiply(k, w) for k, w in zip(n.kernel_shape, windows, strict=True))
    y = reshaped(op, y, [batch, channels, *flat])
    matrices = []
    for axis in (0, 1):
        positions = reshaped(op, _positions(op, n, axis, windows[axis]), [flat[axis], 1])
        unpadded = op.Range(op.size(pads[axis]), op.size(sizes.add(size[axis], pads[axis])), op.size(1))
        matrices.append(op.Cast(op.Equal(positions, unpadded), to=dtype_of(n.x)))
    rows, columns = matrices
    return op.MatMul(op.Transpose(rows, perm=[1, 0]), op.MatMul(y, columns))


def _col2im_gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    return [op.own.Im2Col(dy, **_window_attributes(n)), None]


def _capture_col2im(
    op: Builder, x: ir.Value, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any
) -> Any:
    if rank_of(x) != 3:
        return NotImplemented  # no batch dimension: PyTorch runs it
    size = op.sizes(sizes_per_axis(output_size, 2))
    return op.own.Col2Im(x, size, **_onnx_window(kernel_size, dilation, padding, stride))


define_pure(
    OWN,
    "Col2Im",
    ("x", "size"),
    ("y",),
    attributes=_WINDOW_ATTRIBUTES,
    from_torch={"aten.col2im.default": _capture_col2im},
    shapes=_col2im_type,
    body=_col2im_body,
    gradient=(Gradient(_col2im_gradient, reads=()),),
    nondiff_inputs=frozenset({"size"}),
    lower=lambda n, x, size: Call(aten.col2im.default, x, list(size), *_aten_window(n)),
    host_inputs=frozenset({1}),
    axes=lambda n: "n [k] [l], [s] -> n [c] [h] [w]",
    flops=lambda n: numel(n.x),
)
