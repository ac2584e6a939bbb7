"""Reading and writing whole rows along an axis, in standard ops: what bodies of scatter and gradient ops share."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import normalize_axis, rank_of
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.reshape.dims import expanded, inverse, moved, transposed, unsqueezed


def zeros(op: Builder, wanted: Sequence[Size], dtype: ir.DataType) -> ir.Value:
    """Zeros of these sizes."""
    return expanded(op, op.scalar(0, dtype), wanted)


def permutation_to_front(rank: int, axes: Sequence[int]) -> list[int]:
    """The permutation that puts `axes` first."""
    return moved(rank, axes, range(len(axes)))


def scatter_rows(
    op: Builder, base: ir.Value, rows: ir.Value, updates: ir.Value, axis: int, reduction: str = "none"
) -> ir.Value:
    """`base` with the rows `rows` (a vector) along `axis` replaced by those of `updates`, or added to."""
    perm = permutation_to_front(rank_of(base), [axis])
    written = op.ScatterND(
        transposed(op, base, perm),
        unsqueezed(op, cast(op, rows, ir.DataType.INT64), 1),
        transposed(op, updates, perm),
        reduction=reduction,
    )
    return transposed(op, written, inverse(perm))


def arange(op: Builder, count: Size) -> ir.Value:
    """0, 1, … count - 1 as an int64 vector."""
    result: ir.Value = op.Range(op.size(0), op.size(count), op.size(1))
    return result


def vector_along(op: Builder, value: ir.Value, axis: int, rank: int) -> ir.Value:
    """A vector as a tensor of `rank` axes, all of size 1 but `axis`."""
    axis = normalize_axis(axis, rank)
    return unsqueezed(op, value, *(i for i in range(rank) if i != axis))
