"""How a loss is reduced: the attribute `reduction` is "none", "mean" or "sum"; ATen counts 0, 1, 2."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import dtype_of, rank_of
from onnxtrain.ops.fused import total

REDUCTIONS = ("none", "mean", "sum")


def number_of(reduction: str) -> int:
    """What ATen calls it."""
    return REDUCTIONS.index(reduction)


def count_of(op: Builder, x: ir.Value) -> ir.Value:
    """The number of x's elements, in x's type."""
    return op.size(sizes.multiply(1, *sizes.dims_of(x)), dtype_of(x))


def reduced(op: Builder, loss: ir.Value, reduction: str) -> ir.Value:
    """The loss of each element, reduced: the mean of no elements is NaN."""
    if reduction == "none":
        return loss
    summed = total(op, loss, range(rank_of(loss)), keepdims=False)
    if reduction == "sum":
        return summed
    result: ir.Value = op.Div(summed, count_of(op, loss))
    return result


def unreduced(op: Builder, dy: ir.Value, x: ir.Value, reduction: str) -> ir.Value:
    """The cotangent of the loss of each of x's elements, or one for all of them."""
    if reduction != "mean":
        return dy
    result: ir.Value = op.Div(dy, count_of(op, x))
    return result
