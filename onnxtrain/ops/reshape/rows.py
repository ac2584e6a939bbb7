"""Expressions that read and write rows along an axis, for the bodies of scatter and gradient ops."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import normalize_axis, rank_of
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.reshape.dims import expanded, inverse, moved, transposed, unsqueezed


def zeros(op: Builder, shape: Sequence[Size], dtype: ir.DataType) -> ir.Value:
    return expanded(op, op.scalar(0, dtype), shape)


def permutation_to_front(rank: int, axes: Sequence[int]) -> list[int]:
    """Return the permutation that moves `axes` to the front."""
    return moved(rank, axes, range(len(axes)))


def scatter_rows(
    op: Builder, base: ir.Value, rows: ir.Value, updates: ir.Value, axis: int, reduction: str = "none"
) -> ir.Value:
    """Write `updates` to the rows of `base` along `axis` that the vector `rows` lists, or reduce into these rows."""
    perm = permutation_to_front(rank_of(base), [axis])
    scattered = op.ScatterND(
        transposed(op, base, perm),
        unsqueezed(op, cast(op, rows, ir.DataType.INT64), 1),
        transposed(op, updates, perm),
        reduction=reduction,
    )
    return transposed(op, scattered, inverse(perm))


def arange(op: Builder, count: Size) -> ir.Value:
    """Return 0, 1, … count - 1 as an int64 vector."""
    return op.Range(op.size(0), op.size(count), op.size(1))


def vector_along(op: Builder, value: ir.Value, axis: int, rank: int) -> ir.Value:
    """Reshape a vector to `rank` axes, all of size 1 but `axis`."""
    axis = normalize_axis(axis, rank)
    return unsqueezed(op, value, *(i for i in range(rank) if i != axis))
