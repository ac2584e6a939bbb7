"""Cross entropy whose log-probabilities only its gradient reads keeps its scores in their place.

    before   loss, log_prob, w = SoftmaxCrossEntropyLossInternal(scores, labels)
             dscores = SoftmaxCrossEntropyLossInternalGrad(dloss, log_prob, labels, w)
    after    loss, peak, log_sum, w = CrossEntropy(scores, labels)
             dscores = CrossEntropyGrad(dloss, scores, peak, log_sum, labels, w)

The scores of a vocabulary are the largest tensor of a language model, and log_prob is as large: it is neither written
nor read now. Where the module returns its scores, as transformers' models do, nothing is kept that was not there.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.alias import view_source
from onnxtrain.graph.traversal import is_used
from onnxtrain.graph.values import dtype_of
from onnxtrain.ops import builder, view
from onnxtrain.ops.elementwise.copies import CAST
from onnxtrain.ops.loss.cross_entropy import CROSS_ENTROPY
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.rewriting import nodes_before, substitute

_WIDE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def save_logits_for_backward(graph: ir.Graph, changes: Changes) -> None:
    """Puts CrossEntropy in the place of SoftmaxCrossEntropyLossInternal."""
    op = builder(graph)
    for node in list(graph):
        n = view(node)
        if n.definition is not CROSS_ENTROPY:
            continue
        if n.log_prob is not None and is_used(n.log_prob):
            changes.refuse(node, f"its log-probabilities {n.log_prob.name} are read")
            continue
        if dtype_of(n.scores) not in _WIDE or n.output_type not in (None, int(dtype_of(n.scores))):
            changes.refuse(node, f"it computes {dtype_of(n.scores).name} in another type")
            continue
        if _was_rounded(n.scores):
            changes.refuse(node, "its scores were rounded from float64: who computes there compares to the last bit")
            continue
        with nodes_before(op, node):
            loss, _, _, total = op.own.CrossEntropy(
                n.scores, n.labels, n.weights, n.ignore_index, reduction=n.reduction
            )
        if n.total_weight is not None and is_used(n.total_weight):
            substitute(graph, n.total_weight, total, [])
        substitute(graph, node.outputs[0], loss, [node])
        changes.applied.append("a cross entropy keeps scores and no log-probabilities")


def _was_rounded(scores: ir.Value) -> bool:
    """Whether scores are a view of what was cast from float64, as transformers' losses of a float64 model are."""
    node = scores.producer()
    while node is not None:
        definition = view(node).definition
        source = view_source(node, scores.index() or 0, definition)
        if source is None:
            return definition is CAST and dtype_of(view(node).x) == ir.DataType.DOUBLE
        scores, node = source, source.producer()
    return False
