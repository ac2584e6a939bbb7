"""Grouped-query attention: heads of q that share one head of k and v."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import dtype_of, rank_of
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.elementwise.copies import CAST, CLONE
from onnxtrain.ops.matmul import constant_axes
from onnxtrain.ops.registry import input_of
from onnxtrain.ops.reshape.dims import EXPAND
from onnxtrain.ops.reshape.shape import RESHAPE


def group_size(q: ir.Value, k: ir.Value) -> Size:
    """Return how many heads of q[..., h, l, e] share one head of k[..., g, s, e]."""
    if rank_of(q) < 3 or sizes.dims_of(q)[-3] == sizes.dims_of(k)[-3]:
        return 1
    return sizes.floor_divide(sizes.dims_of(q)[-3], sizes.dims_of(k)[-3])


def repeat_heads(op: Builder, value: ir.Value, count: Size) -> ir.Value:
    """Repeat each head `count` times, as repeat_interleave: [..., g, s, e] -> [..., g * count, s, e]."""
    if count == 1:
        return value
    *batch, heads, rows, columns = sizes.dims_of(value)
    expanded = op.Unsqueeze(value, constant_axes(op, len(batch) + 1))
    expanded = op.Expand(expanded, op.sizes([*batch, heads, count, rows, columns]))
    shape = op.sizes([*batch, sizes.multiply(heads, count), rows, columns])
    return op.Reshape(expanded, shape, allowzero=1)


def strip_repeat(op: Builder, value: ir.Value) -> tuple[ir.Value, Size]:
    """Return the heads [..., g, s, e] that a model's `repeat_kv` repeats, and the count; without one, `value` and 1.

    Models write it as Expand and Reshape, and autocast appends a Cast. Stripping the repeat before the Cast keeps the
    sum over repeated heads in backward out of the narrow type.
    """
    source = input_of(value, CAST) or value
    expanded = input_of(source, RESHAPE)
    expanded = expanded and (input_of(expanded, CLONE) or expanded)
    original = expanded and input_of(expanded, EXPAND)
    if expanded is None or original is None or rank_of(original) != rank_of(source) + 1 or rank_of(expanded) < 4:
        return value, 1
    *batch, heads, count, rows, columns = sizes.dims_of(expanded)
    if sizes.dims_of(original) != (*batch, heads, 1, rows, columns):
        return value, 1
    if sizes.dims_of(source) != (*batch, sizes.multiply(heads, count), rows, columns):
        return value, 1
    return cast(op, op.Squeeze(original, constant_axes(op, len(batch) + 1)), dtype_of(value)), count


def sum_over_groups(op: Builder, gradient: ir.Value, value: ir.Value) -> ir.Value:
    """Sum a gradient [b, h, s, e] over the heads of q that share one head of `value` [b, g, s, e]."""
    batch, heads, rows, columns = sizes.dims_of(value)
    count = group_size(gradient, value)
    if count != 1:
        grouped = op.Reshape(gradient, op.sizes([batch, heads, count, rows, columns]), allowzero=1)
        gradient = op.ReduceSum(grouped, constant_axes(op, 2), keepdims=0)
    return cast(op, gradient, dtype_of(value))
