"""Fuse the last linear layer with its cross entropy, so that the full logits are never materialized.

    before   loss = CrossEntropy(Reshape(Linear(x[b, s, h], w[c, h])), labels)
    after    loss = LinearCrossEntropy(Reshape(x), w, labels)

The logits of a vocabulary, their softmax and its gradient are each larger than everything else that a step saves; the
fused op computes them in chunks of rows. The ops between layer and loss must keep rows and classes, or select rows:
views, slices of time steps, a cast to a wider type.

Refused if logits or log-probabilities have other users (a module output; label smoothing, which reads all classes).
Logits of few classes stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, constant_of, dtype_of, is_float, normalize_axes, rank_of
from onnxtrain.ops import builder, view
from onnxtrain.ops.body_parts import reshaped
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.loss.cross_entropy import CROSS_ENTROPY, NEGATIVE_LOG_LIKELIHOOD
from onnxtrain.ops.matmul.linear import LINEAR
from onnxtrain.ops.matmul.matmul import MATMUL
from onnxtrain.ops.reshape.dims import transposed
from onnxtrain.ops.reshape.slicing import SLICE
from onnxtrain.passes.changes import Changes, stopped
from onnxtrain.passes.rewriting import nodes_before, only_user, substitute

MIN_CLASSES = 4096  # with fewer, the logits of a thousand rows take less than 16 MB
_MATMULS = (LINEAR, MATMUL)


def chunk_losses(graph: ir.Graph, changes: Changes) -> None:
    """Fuse each cross entropy of `graph` with the linear layer that computes its logits."""
    op = builder(graph)
    for node in list(graph):
        n = view(node)
        if n.definition not in (CROSS_ENTROPY, NEGATIVE_LOG_LIKELIHOOD) or not _is_vocabulary(node.inputs[0]):
            continue
        head = _match_head(n)
        if isinstance(head, str):
            changes.refuse(node, head)
            continue
        classes = sizes.dims_of(n.scores)[1]
        changes.applied.append(f"{node.name} computes the logits of its {classes} classes in chunks of rows")
        _fuse(op, n, head)


def _is_vocabulary(scores: ir.Value | None) -> bool:
    assert scores is not None
    classes = sizes.dims_of(scores)[1] if rank_of(scores) > 1 else 1
    return isinstance(classes, int) and classes >= MIN_CLASSES


@dataclass(frozen=True)
class _Head:
    """The layer that computes the logits of a loss.

    Attributes:
        layer: Linear or MatMul.
        slices: the nodes that select rows of the logits, from the layer to the loss.
    """

    layer: NodeView
    slices: tuple[NodeView, ...]


def _match_head(n: NodeView) -> _Head | str:
    """Return the layer before a loss, or why the two are not fused."""
    if n.definition is NEGATIVE_LOG_LIKELIHOOD:
        return "label smoothing needs all log-probabilities"
    if rank_of(n.scores) != 2:
        return "its logits have more than two dimensions"
    if n.reduction == "none":
        return 'its loss is not reduced (reduction="none")'
    if n.output_type is not None:
        return "its loss and its logits have different element types"
    if any(v is not None and v.uses() for v in (n.log_prob, n.total_weight)) or n.log_prob.is_graph_output():
        return f"its log-probabilities {n.log_prob.name} have users"
    if n.ignore_index is not None and constant_of(n.ignore_index) is None:
        return "its ignore_index is not a constant"
    return _walk_to_layer(n)


def _walk_to_layer(n: NodeView) -> _Head | str:
    value, user, slices = n.scores, n.node, list[NodeView]()
    while True:
        if only_user(value) is not user:
            return f"its logits {value.name} have other users: keep_outputs can name the outputs that are used"
        user = value.producer()
        if user is None:
            return f"its logits {value.name} are an input of the graph"
        at = view(user)
        if at.definition in _MATMULS:
            break
        if not _keeps_classes(at):
            return stopped(user, "not an op that keeps the classes of a linear layer")
        if at.definition is SLICE:
            slices.insert(0, at)
        value = user.inputs[0]
    weight = at.w if at.definition is LINEAR else at.b
    x = at.x if at.definition is LINEAR else at.a
    if rank_of(weight) != 2 or rank_of(x) < 2:
        return stopped(user, "it does not multiply rows by a matrix")
    return _Head(at, tuple(slices))


def _keeps_classes(n: NodeView) -> bool:
    """Return whether the node keeps the class dimension of its first input, and its rows or a slice of them."""
    x, y = n.node.inputs[0], n.node.outputs[0]
    if x is None or rank_of(x) < 2 or rank_of(y) < 2 or sizes.dims_of(x)[-1] != sizes.dims_of(y)[-1]:
        return False
    if n.definition is SLICE:
        axes = constant_of(n.axes)
        return axes is not None and rank_of(x) - 1 not in normalize_axes(axes.tolist(), rank_of(x))
    return n.definition.is_transparent and is_float(dtype_of(x)) and dtype_of(y).itemsize >= dtype_of(x).itemsize


def _fuse(op: Builder, n: NodeView, head: _Head) -> None:
    layer, loss = head.layer, n.loss
    linear = layer.definition is LINEAR
    x = layer.x if linear else layer.a
    dtype = dtype_of(n.scores)
    ignored = constant_of(n.ignore_index)
    with nodes_before(op, n.node):
        for selection in head.slices:
            x = _with_rows_of(op, x, selection.x)  # views between two slices may reshape the rows
            sliced = TensorType(dtype_of(x), (*sizes.dims_of(selection.node.outputs[0])[:-1], sizes.dims_of(x)[-1]))
            x = op.node("", "Slice", (x, *selection.node.inputs[1:]), {}, types=[sliced]).outputs[0]
        rows = _with_rows_of(op, x, n.scores)
        new = op.own.LinearCrossEntropy(
            rows,
            layer.w if linear else transposed(op, layer.b, [1, 0]),
            layer.b if linear else None,
            n.labels,
            n.weights,
            reduction=n.reduction,
            ignore_index=None if ignored is None else int(ignored),
            output_type=None if dtype == dtype_of(rows) else int(dtype),
        )
    substitute(op.graph, loss, new, [n.node])


def _with_rows_of(op: Builder, x: ir.Value, logits: ir.Value) -> ir.Value:
    """Reshape x[.., h] to the leading dimensions of logits[.., c]."""
    return reshaped(op, x, (*sizes.dims_of(logits)[:-1], sizes.dims_of(x)[-1]))
