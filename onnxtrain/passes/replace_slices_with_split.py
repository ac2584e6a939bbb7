"""Replace slices that partition an axis of a tensor by one Split.

    before   q = Slice(x, 0:8);  k = Slice(x, 8:16);  v = Slice(x, 16:24)      of x[b, s, 24]
    after    q, k, v = Split(x, [8, 8, 8])

Forward costs the same: all are views. The gradient of each slice is a tensor as large as x, zero outside the slice, and
they must be summed; the gradient of Split is one Concat. A Gather of one or several consecutive rows counts as a slice.

Refused if the slices do not cover the axis. Slices that are module outputs remain the views that they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import constant_of, dtype_of, is_float, normalize_axis, rank_of
from onnxtrain.ops import builder, view
from onnxtrain.ops.index.gather import GATHER
from onnxtrain.ops.reshape.dims import squeezed
from onnxtrain.ops.reshape.join import split
from onnxtrain.ops.reshape.slicing import SLICE, RowRange, row_range_of
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.rewriting import nodes_before, reaches_output, substitute

Pieces = list[tuple[ir.Node, RowRange]]


def replace_slices_with_split(graph: ir.Graph, changes: Changes) -> None:
    """Replace the slices of `graph` that partition an axis of a floating-point tensor."""
    op = builder(graph)
    for x in list(_values(graph)):
        if not is_float(dtype_of(x)) or len(x.uses()) < 2:
            continue
        pieces = _pieces(x)
        for axis in sorted({piece.axis for _, piece in pieces}):
            along_axis = [each for each in pieces if each[1].axis == axis]
            partition = _partition(along_axis, sizes.dims_of(x)[axis])
            if len(partition) > 1:
                _split(op, x, axis, partition)
                changes.applied.append(f"replaced {len(partition)} slices of {x.name} along axis {axis} by a Split")
            elif len(along_axis) > 1:
                changes.refuse(along_axis[0][0], f"{len(along_axis)} slices of {x.name} do not cover its axis {axis}")


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def _pieces(x: ir.Value) -> Pieces:
    """Return the nodes that read consecutive rows of x, with these rows."""
    return [
        (node, piece)
        for node in traversal.users(x)
        if (piece := _row_range(node, x)) is not None and not reaches_output(node.outputs[0])
    ]


def _row_range(node: ir.Node, x: ir.Value) -> RowRange | None:
    n = view(node)
    if n.definition is SLICE:
        return row_range_of(n)
    rows = constant_of(n.rows) if n.definition is GATHER and n.x is x else None
    if rows is None or rows.ndim > 1 or not rows.size:
        return None
    axis = normalize_axis(n.axis, rank_of(x))
    first, *_ = numbers = rows.reshape(-1).tolist()
    if first < 0 or numbers != list(range(first, first + len(numbers))):
        return None
    return RowRange(axis, first, len(numbers))


def _partition(pieces: Pieces, total: Size) -> Pieces:
    """Return pieces that cover all rows exactly once, in order; an empty list if there are none."""
    by_start = {piece.start: (node, piece) for node, piece in pieces}
    partition: Pieces = []
    end: Size = 0
    while end in by_start:
        partition.append(by_start.pop(end))
        end = sizes.add(end, partition[-1][1].length)
    return partition if end == total else []


def _split(op: Builder, x: ir.Value, axis: int, partition: Sequence[tuple[ir.Node, RowRange]]) -> None:
    nodes = {node for node, _ in partition}
    first = next(node for node in op.graph if node in nodes)
    with nodes_before(op, first):
        parts = split(op, x, [piece.length for _, piece in partition], axis)
        results = [
            squeezed(op, y, axis) if rank_of(node.outputs[0]) < rank_of(x) else y
            for (node, _), y in zip(partition, parts, strict=True)
        ]
    for (node, _), y in zip(partition, results, strict=True):
        substitute(op.graph, node.outputs[0], y, [node])
