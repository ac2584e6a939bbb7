"""Hoist row selections above the ops that compute the rows.

    before   Slice(LayerNormalization(Linear(x)), 0:1)
    after    LayerNormalization(Linear(Slice(x, 0:1)))

A classifier that reads the first token then computes keys and values of its last layer for all tokens, but queries,
feed-forward and norms for one only. Gather, ShrunkenGather and Slice of one axis move towards the inputs as far as the
axis maps of the ops allow. So do GatherND and advanced indexing that select one token of each sequence, usually the
last before padding: `hidden[arange(batch), last]`.

Refused if the selection is empty, or not provably at most half of the rows. Hoisting stops at values with other users
and at ops that need the whole axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.alias import view_source
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.traversal import replace
from onnxtrain.graph.values import TensorType, constant_of, dtype_of, is_float, normalize_axis, rank_of
from onnxtrain.ops import builder, definition_of, view
from onnxtrain.ops.body_parts import reshaped
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.index.advanced_indexing import INDEX
from onnxtrain.ops.index.gather import GATHER
from onnxtrain.ops.index.gather_nd import GATHER_ND
from onnxtrain.ops.index.unpadding import SHRUNKEN_GATHER
from onnxtrain.ops.matmul import constant_axes
from onnxtrain.ops.reshape.dims import inverse, squeezed, transposed, unsqueezed
from onnxtrain.ops.reshape.rows import permutation_to_front
from onnxtrain.ops.reshape.slicing import SLICE
from onnxtrain.passes.changes import Changes, stopped
from onnxtrain.passes.rewriting import nodes_before, reaches_output
from onnxtrain.passes.rowwise import Axes, with_rows
from onnxtrain.passes.selected_rows import Selection, compute_selected, region_before


def hoist_gathers(graph: ir.Graph, changes: Changes) -> None:
    """Move row selections of `graph` towards its inputs."""
    op = builder(graph)
    for node in reversed(list(graph)):
        selection = _selection(node) if any(is_float(dtype_of(v)) for v in node.outputs) else None
        if isinstance(selection, str):
            changes.refuse(node, selection)
        elif selection is not None and selection.count == 0:
            changes.refuse(node, "it selects no rows, and not every op takes inputs without rows")
        elif selection is not None:
            _hoist(op, selection, changes)


@dataclass
class _SelectedRows(Selection):
    """The `count` rows along one axis that a Slice, Gather or ShrunkenGather selects."""

    node: ir.Node
    axis: int
    count: Size
    reads: Sequence[ir.Value]

    @property
    def axes(self) -> Axes:
        return (self.axis,)

    def along(self, op: Builder, value: ir.Value, axis: int) -> ir.Value:
        n = view(self.node)
        if n.definition is SLICE:
            sliced = TensorType(dtype_of(value), with_rows(sizes.dims_of(value), (axis,), self.count))
            inputs = (value, n.starts, n.ends, constant_axes(op, axis), n.steps)
            result: ir.Value = op.node("", "Slice", inputs, {}, types=[sliced]).outputs[0]
        elif n.definition is GATHER:
            rows = unsqueezed(op, n.rows, 0) if rank_of(n.rows) == 0 else n.rows
            result = op.Gather(value, rows, axis=axis)
        else:
            result = op.ms.ShrunkenGather(value, n.rows, axis=axis)
        return result


@dataclass
class _SelectedTokens(Selection):
    """Tokens of [batch, steps] = `shape` that a node selects by both indices, one for each sequence."""

    node: ir.Node
    shape: Sizes
    count: Size
    reads: Sequence[ir.Value]
    axes: Axes = (0, 1)

    def along(self, op: Builder, value: ir.Value, axis: int) -> ir.Value:
        perm = permutation_to_front(rank_of(value), (axis,))
        x = transposed(op, value, perm)
        tokens = reshaped(op, x, (*self.shape, *sizes.dims_of(x)[1:]))
        return transposed(op, self.over(op, tokens), inverse(perm))

    def over(self, op: Builder, value: ir.Value) -> ir.Value:
        attributes = {name: getattr(view(self.node), name) for name in definition_of(self.node).attributes}
        return op.node(self.node.domain, self.node.op_type, (value, *self.reads), attributes).outputs[0]


def _selection(node: ir.Node) -> _SelectedRows | _SelectedTokens | str | None:
    """Return the selection that a node makes, or why it is not hoisted; None if it selects no rows."""
    n = view(node)
    if n.definition is SLICE:
        return _selected_by_slice(n)
    if n.definition in (INDEX, GATHER_ND):
        return _selected_tokens(n)
    if n.definition not in (GATHER, SHRUNKEN_GATHER) or n.x.producer() is None or rank_of(n.rows) > 1:
        return None
    axis = normalize_axis(n.axis, rank_of(n.x))
    count: Size = 1 if rank_of(n.rows) == 0 else sizes.dims_of(n.rows)[0]
    if n.definition is GATHER and not _is_worthwhile(count, sizes.dims_of(n.x)[axis]):
        return f"{count} of {sizes.dims_of(n.x)[axis]} rows: not proven to be at most half"
    return _SelectedRows(node, axis, count, (n.rows,))


def _selected_tokens(n: NodeView) -> _SelectedTokens | None:
    """Return the tokens that an op selects, if it selects one of each sequence."""
    x, y = n.node.inputs[0], n.node.outputs[0]
    if (
        x is None
        or x.producer() is None
        or rank_of(x) < 2
        or sizes.dims_of(y) != (sizes.dims_of(x)[0], *sizes.dims_of(x)[2:])
    ):
        return None
    if n.definition is INDEX:
        is_token = n.axes == (0, 1) and all(rank_of(v) == 1 for v in n.indices)
    else:
        is_token = rank_of(n.indices) == 2 and sizes.dims_of(n.indices)[1] == 2 - n.batch_dims
    reads = [v for v in n.node.inputs[1:] if v is not None]
    return _SelectedTokens(n.node, sizes.dims_of(x)[:2], sizes.dims_of(y)[0], reads) if is_token else None


def _selected_by_slice(n: NodeView) -> _SelectedRows | str | None:
    if n.x.producer() is None:
        return None
    before, after = sizes.dims_of(n.x), sizes.dims_of(n.node.outputs[0])
    sliced_axes = [axis for axis, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    axes = constant_of(n.axes)
    if len(sliced_axes) != 1 or axes is None or axes.size != 1:
        return None
    (axis,) = sliced_axes
    if not _is_worthwhile(after[axis], before[axis]):
        return f"{after[axis]} of {before[axis]} rows: not proven to be at most half"
    reads = tuple(v for v in n.node.inputs[1:] if v is not None)
    return _SelectedRows(n.node, axis, after[axis], reads)


def _is_worthwhile(count: Size, total: Size) -> bool:
    """Return whether selecting rows is worth a copy: one row of a symbolic number, or at most half of a known one."""
    if isinstance(total, int):
        return isinstance(count, int) and 2 * count <= total
    return count == 1


def _hoist(op: Builder, selection: _SelectedRows | _SelectedTokens, changes: Changes) -> None:
    node = selection.node
    x = node.inputs[0]
    assert x is not None
    if view_source(node, 0, definition_of(node)) is x and reaches_output(node.outputs[0]):
        changes.refuse(node, "its result is a module output, which must remain a view")
        return
    region = region_before(op.graph, {x: selection.axes}, [(node, 0)], selection.reads, len(selection.axes))
    for at, reason in region.ends.items():
        changes.refuse(node, stopped(at, reason))
    if not region.saves_work():
        return
    compute_selected(op, region, selection)
    with nodes_before(op, node):
        result = squeezed(op, x, selection.axes[0]) if rank_of(node.outputs[0]) < rank_of(x) else x
    replace(op.graph, node.outputs[0], result)
    op.graph.remove(node, safe=True)
    changes.applied.append(f"{len(region.nodes)} nodes before {node.name} compute {selection.count} rows along an axis")
