"""Save the logits instead of the log-probabilities of a cross entropy for backward.

    before   loss, log_prob, w = SoftmaxCrossEntropyLossInternal(scores, labels)
             dscores = SoftmaxCrossEntropyLossInternalGrad(dloss, log_prob, labels, w)
    after    loss, peak, log_sum, w = CrossEntropy(scores, labels)
             dscores = CrossEntropyGrad(dloss, scores, peak, log_sum, labels, w)

The logits of a vocabulary are the largest tensor of a language model, and log_prob, which is as large, is no longer
written and read. If the module returns its logits, as transformers' models do, saving them costs no memory.
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
    """Replace SoftmaxCrossEntropyLossInternal by CrossEntropy."""
    op = builder(graph)
    for node in list(graph):
        n = view(node)
        if n.definition is not CROSS_ENTROPY:
            continue
        if n.log_prob is not None and is_used(n.log_prob):
            changes.refuse(node, f"its log-probabilities {n.log_prob.name} have users")
            continue
        if dtype_of(n.scores) not in _WIDE or n.output_type not in (None, int(dtype_of(n.scores))):
            changes.refuse(node, f"its logits are {dtype_of(n.scores).name}, its loss is computed in another type")
            continue
        if _is_rounded_from_double(n.scores):
            changes.refuse(node, "its logits were rounded from float64: results must match eager to the last bit")
            continue
        with nodes_before(op, node):
            loss, _, _, total = op.own.CrossEntropy(
                n.scores, n.labels, n.weights, n.ignore_index, reduction=n.reduction
            )
        if n.total_weight is not None and is_used(n.total_weight):
            substitute(graph, n.total_weight, total, [])
        substitute(graph, node.outputs[0], loss, [node])
        changes.applied.append("saves the logits of a cross entropy instead of log-probabilities")


def _is_rounded_from_double(scores: ir.Value) -> bool:
    """Return whether the logits are (a view of) a cast from float64, as in transformers' losses of a float64 model."""
    node = scores.producer()
    while node is not None:
        definition = view(node).definition
        source = view_source(node, scores.index() or 0, definition)
        if source is None:
            return definition is CAST and dtype_of(view(node).x) == ir.DataType.DOUBLE
        scores, node = source, source.producer()
    return False
