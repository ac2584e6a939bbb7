"""Indexing operators of PyTorch that are captured as several ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import TensorType, dtype_of, rank_of
from onnxtrain.ops.body_parts import cast, reshaped, sum_over
from onnxtrain.ops.registry import capture_call, register_captures
from onnxtrain.ops.reshape.dims import expanded
from onnxtrain.ops.reshape.movement import checked_axis
from onnxtrain.ops.reshape.rows import vector_along


def _flat(op: Builder, x: ir.Value) -> ir.Value:
    return reshaped(op, x, (sizes.multiply(1, *sizes.dims_of(x)),))


def _take(op: Builder, x: ir.Value, index: ir.Value) -> Any:
    """Capture `take`: elements by their index in the flattened tensor."""
    return op.Gather(_flat(op, x), index, axis=0)


def _index_reduce(
    op: Builder, x: ir.Value, dim: int, index: ir.Value, source: ir.Value, reduce: str, *, include_self: bool = True
) -> Any:
    """Capture `index_reduce`: a scatter whose indices are broadcast along all other axes."""
    shape = sizes.dims_of(x)
    x, index, source = (v if rank_of(v) else reshaped(op, v, (1,)) for v in (x, index, source))
    axis = checked_axis(dim, rank_of(x), "the axis of index_reduce")
    indices = expanded(op, vector_along(op, index, axis, rank_of(x)), sizes.dims_of(source))
    y_type = TensorType(dtype_of(x), sizes.dims_of(x))
    options = {"include_self": include_self}
    y = capture_call(op, "aten.scatter_reduce.two", y_type, x, axis, indices, source, reduce, **options)
    return reshaped(op, y, shape)


def _trace(op: Builder, x: ir.Value) -> Any:
    dtype = op.out[0].dtype
    return sum_over(op, cast(op, op.own.Diagonal(x, offset=0, row_axis=0, column_axis=1), dtype), (0,), keepdims=False)


def _diagonal_scatter(op: Builder, x: ir.Value, source: ir.Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    rank = rank_of(x)
    diagonal = {
        "offset": offset,
        "row_axis": checked_axis(dim1, rank, "an axis of diagonal_scatter"),
        "column_axis": checked_axis(dim2, rank, "an axis of diagonal_scatter"),
    }
    shape = op.shape_of(x)
    true = expanded(op, op.scalar(True, ir.DataType.BOOL), sizes.dims_of(source))
    is_on_diagonal = op.own.DiagonalEmbed(true, shape, **diagonal)
    return op.Where(is_on_diagonal, op.own.DiagonalEmbed(source, shape, **diagonal), x)


def _max_unpool(count: int) -> Any:
    """Capture `max_unpool`: PyTorch's indices count within a channel of a sample, ONNX's in the whole tensor."""

    def capture(op: Builder, x: ir.Value, indices: ir.Value, output_size: Sequence[Size], *options: Any) -> Any:
        if rank_of(x) != count + 2:
            return NotImplemented
        batch, channels = sizes.dims_of(x)[:2]
        channel_elements = sizes.multiply(1, *output_size)
        channel = op.Range(op.size(0), op.size(sizes.multiply(batch, channels)), op.size(1))
        offsets = reshaped(op, op.Mul(channel, op.size(channel_elements)), (batch, channels, *[1] * count))
        shape = op.sizes([batch, channels, *output_size])
        return op.MaxUnpool(x, op.Add(indices, offsets), shape, kernel_shape=[1] * count)

    return capture


register_captures(
    {
        "aten.diagonal_scatter.default": _diagonal_scatter,
        "aten.take.default": _take,
        "aten.index_reduce.default": _index_reduce,
        "aten.trace.default": _trace,
        "aten.max_unpool2d.default": _max_unpool(2),
        "aten.max_unpool3d.default": _max_unpool(3),
    }
)
