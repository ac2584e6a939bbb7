"""Cuts a tensor once, where slices of it cover an axis without overlap.

    before   q = Slice(x, 0:8);  k = Slice(x, 8:16);  v = Slice(x, 16:24)      of x[b, s, 24]
    after    q, k, v = Split(x, [8, 8, 8])

Forward costs the same: all are views. The gradient of each slice is a tensor as large as x, zero outside of the slice,
and their sum is one more for each; the gradient of Split is one Concat. A Gather of one row or of neighbours is such a
slice.

Refuses where slices do not cover the axis, and those that the module gives out, as the views that they are.
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
from onnxtrain.ops.reshape.slicing import SLICE, Piece, piece_of
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.rewriting import leaves, nodes_before, substitute

Pieces = list[tuple[ir.Node, Piece]]


def replace_slices_with_split(graph: ir.Graph, changes: Changes) -> None:
    """Replaces slices of `graph` that cover an axis of a floating tensor by one Split."""
    op = builder(graph)
    for x in list(_values(graph)):
        if not is_float(dtype_of(x)) or len(x.uses()) < 2:
            continue
        found = _pieces(x)
        for axis in sorted({piece.axis for _, piece in found}):
            along = [each for each in found if each[1].axis == axis]
            tiles = _tiles(along, sizes.dims_of(x)[axis])
            if len(tiles) > 1:
                _split(op, x, axis, tiles)
                changes.applied.append(f"{x.name} is split once along axis {axis}, in place of {len(tiles)} slices")
            elif len(along) > 1:
                changes.refuse(along[0][0], f"{len(along)} slices of {x.name} do not cover its axis {axis}")


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def _pieces(x: ir.Value) -> Pieces:
    """The nodes that take neighbouring rows of x, and which; first by first in the graph's order."""
    return [
        (node, piece)
        for node in traversal.users(x)
        if (piece := _piece(node, x)) is not None and not leaves(node.outputs[0])
    ]


def _piece(node: ir.Node, x: ir.Value) -> Piece | None:
    n = view(node)
    if n.definition is SLICE:
        return piece_of(n)
    rows = constant_of(n.rows) if n.definition is GATHER and n.x is x else None
    if rows is None or rows.ndim > 1 or not rows.size:
        return None
    axis = normalize_axis(n.axis, rank_of(x))
    first, *_ = numbers = rows.reshape(-1).tolist()
    if first < 0 or numbers != list(range(first, first + len(numbers))):
        return None
    return Piece(axis, first, len(numbers))


def _tiles(pieces: Pieces, total: Size) -> Pieces:
    """Those of the pieces that cover all rows from the first to the last once, in order; none where none do."""
    by_start = {piece.start: (node, piece) for node, piece in pieces}
    tiles: Pieces = []
    at: Size = 0
    while at in by_start:
        tiles.append(by_start.pop(at))
        at = sizes.add(at, tiles[-1][1].length)
    return tiles if at == total else []


def _split(op: Builder, x: ir.Value, axis: int, tiles: Sequence[tuple[ir.Node, Piece]]) -> None:
    nodes = {node for node, _ in tiles}
    first = next(node for node in op.graph if node in nodes)
    with nodes_before(op, first):
        cut = split(op, x, [piece.length for _, piece in tiles], axis)
        rows = [
            squeezed(op, y, axis) if rank_of(node.outputs[0]) < rank_of(x) else y
            for (node, _), y in zip(tiles, cut, strict=True)
        ]
    for (node, _), y in zip(tiles, rows, strict=True):
        substitute(op.graph, node.outputs[0], y, [node])
