"""Joins the last linear layer and its cross entropy, so that the scores are never held whole.

    before   loss = CrossEntropy(Reshape(Linear(x[b, s, h], w[c, h])), labels)
    after    loss = LinearCrossEntropy(Reshape(x), w, labels)

The scores of a vocabulary, their softmax and its gradient are each larger than all else that a step keeps; the op
computes them for some rows at a time. What stands between layer and loss must leave rows and classes as they are, or
pick rows: views, slices of steps, a cast to a wider type.

Refuses where others read the scores or the log probabilities: outputs of the module are read, label smoothing reads all
classes. Scores of few classes stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, constant_of, dtype_of, is_float, normalize_axes, rank_of
from onnxtrain.ops import builder, view
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.elementwise.copies import CAST, CLONE, IDENTITY
from onnxtrain.ops.loss.cross_entropy import CROSS_ENTROPY, NEGATIVE_LOG_LIKELIHOOD
from onnxtrain.ops.matmul.affine import LINEAR
from onnxtrain.ops.matmul.matmul import MATMUL
from onnxtrain.ops.reshape.dims import SQUEEZE, UNSQUEEZE, transposed
from onnxtrain.ops.reshape.shape import RESHAPE, reshaped
from onnxtrain.ops.reshape.slicing import SLICE
from onnxtrain.passes.changes import Changes, stopped
from onnxtrain.passes.rewriting import nodes_before, only_user, substitute

FEWEST_CLASSES = 4096  # below, the scores of a thousand rows take less than 16 MB
_SAME_ROWS = (RESHAPE, SQUEEZE, UNSQUEEZE, CLONE, IDENTITY)
_PRODUCTS = (LINEAR, MATMUL)


def chunk_losses(graph: ir.Graph, changes: Changes) -> None:
    """Joins each cross entropy of `graph` with the linear layer that gives its scores."""
    op = builder(graph)
    for node in list(graph):
        n = view(node)
        if n.definition not in (CROSS_ENTROPY, NEGATIVE_LOG_LIKELIHOOD) or not _is_vocabulary(node.inputs[0]):
            continue
        found = _found(n)
        if isinstance(found, str):
            changes.refuse(node, found)
            continue
        changes.applied.append(f"{node.name} never holds all scores of its {sizes.dims_of(n.scores)[1]} classes")
        _join(op, n, found)


def _is_vocabulary(scores: ir.Value | None) -> bool:
    assert scores is not None
    classes = sizes.dims_of(scores)[1] if rank_of(scores) > 1 else 1
    return isinstance(classes, int) and classes >= FEWEST_CLASSES


@dataclass(frozen=True)
class _Found:
    """Where scores come from.

    Attributes:
        product: Linear or MatMul.
        slices: what picks rows of the scores, from the product to the loss.
    """

    product: NodeView
    slices: tuple[NodeView, ...]


def _found(n: NodeView) -> _Found | str:
    """The product behind a loss, or why the two are not joined."""
    if n.definition is NEGATIVE_LOG_LIKELIHOOD:
        return "all log probabilities are computed before it, as label smoothing needs them"
    if rank_of(n.scores) != 2:
        return "its scores have more than two axes"
    if n.reduction == "none":
        return "its loss is not reduced: there is one for each row"
    if n.output_type is not None:
        return "its loss has another type than its scores"
    if any(v is not None and v.uses() for v in (n.log_prob, n.total_weight)) or n.log_prob.is_graph_output():
        return f"its log probabilities {n.log_prob.name} are read"
    if n.ignore_index is not None and constant_of(n.ignore_index) is None:
        return "which label it ignores is not known before the graph runs"
    return _walked(n)


def _walked(n: NodeView) -> _Found | str:
    value, reader, slices = n.scores, n.node, list[NodeView]()
    while True:
        if only_user(value) is not reader:
            return f"its scores {value.name} are read elsewhere too: keep_outputs can name the outputs that are read"
        reader = value.producer()
        if reader is None:
            return f"its scores {value.name} are given to the graph"
        at = view(reader)
        if at.definition in _PRODUCTS:
            break
        if not _keeps_classes(at):
            return stopped(reader, "its scores are no linear layer's alone")
        if at.definition is SLICE:
            slices.insert(0, at)
        value = reader.inputs[0]
    weight = at.w if at.definition is LINEAR else at.b
    x = at.x if at.definition is LINEAR else at.a
    if rank_of(weight) != 2 or rank_of(x) < 2:
        return stopped(reader, "it does not multiply rows by a matrix")
    return _Found(at, tuple(slices))


def _keeps_classes(n: NodeView) -> bool:
    """Whether the node gives all classes of the rows of its first input, or of some of them, in their order."""
    x, y = n.node.inputs[0], n.node.outputs[0]
    if x is None or rank_of(x) < 2 or rank_of(y) < 2 or sizes.dims_of(x)[-1] != sizes.dims_of(y)[-1]:
        return False
    if n.definition is CAST:
        return is_float(dtype_of(x)) and dtype_of(y).itemsize >= dtype_of(x).itemsize
    if n.definition is SLICE:
        axes = constant_of(n.axes)
        return axes is not None and rank_of(x) - 1 not in normalize_axes(axes.tolist(), rank_of(x))
    return n.definition in _SAME_ROWS


def _join(op: Builder, n: NodeView, found: _Found) -> None:
    product, loss = found.product, n.loss
    linear = product.definition is LINEAR
    x = product.x if linear else product.a
    dtype = dtype_of(n.scores)
    ignored = constant_of(n.ignore_index)
    with nodes_before(op, n.node):
        for cut in found.slices:
            x = _with_rows(op, x, cut.x)  # views between two slices count rows otherwise
            fewer = TensorType(dtype_of(x), (*sizes.dims_of(cut.node.outputs[0])[:-1], sizes.dims_of(x)[-1]))
            x = op.node("", "Slice", (x, *cut.node.inputs[1:]), {}, types=[fewer]).outputs[0]
        rows = _with_rows(op, x, n.scores)
        new = op.own.LinearCrossEntropy(
            rows,
            product.w if linear else transposed(op, product.b, [1, 0]),
            product.b if linear else None,
            n.labels,
            n.weights,
            reduction=n.reduction,
            ignore_index=None if ignored is None else int(ignored),
            output_type=None if dtype == dtype_of(rows) else int(dtype),
        )
    substitute(op.graph, loss, new, [n.node])


def _with_rows(op: Builder, x: ir.Value, scores: ir.Value) -> ir.Value:
    """x[.., h] under the sizes that scores[.., c] of it have."""
    return reshaped(op, x, (*sizes.dims_of(scores)[:-1], sizes.dims_of(x)[-1]))
