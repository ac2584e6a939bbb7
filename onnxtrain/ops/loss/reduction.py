"""Reductions of losses: the attribute `reduction` is "none", "mean" or "sum"; ATen numbers them 0, 1, 2."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import dtype_of, rank_of
from onnxtrain.ops.body_parts import sum_over

REDUCTIONS = ("none", "mean", "sum")


def aten_reduction(reduction: str) -> int:
    """Return ATen's number of the reduction."""
    return REDUCTIONS.index(reduction)


def element_count(op: Builder, x: ir.Value) -> ir.Value:
    """Return the number of elements of x, in x's dtype."""
    return op.size(sizes.multiply(1, *sizes.dims_of(x)), dtype_of(x))


def reduced(op: Builder, loss: ir.Value, reduction: str) -> ir.Value:
    """Reduce the losses of the elements; the mean of no elements is NaN."""
    if reduction == "none":
        return loss
    summed = sum_over(op, loss, range(rank_of(loss)), keepdims=False)
    if reduction == "sum":
        return summed
    return op.Div(summed, element_count(op, loss))


def unreduced(op: Builder, dy: ir.Value, x: ir.Value, reduction: str) -> ir.Value:
    """Return the cotangent of the elementwise losses of x: of x's shape, or a scalar that holds for all elements."""
    if reduction != "mean":
        return dy
    return op.Div(dy, element_count(op, x))
