"""Lets a chunked loss give its gradients in forward, where its scores are at hand.

    before   loss = LinearCrossEntropy(x, w, labels);          dx, dw = LinearCrossEntropyGrad(dloss, x, w, labels)
    after    loss, dx1, dw1 = LinearCrossEntropy(..);          dx, dw = dloss * dx1, dloss * dw1

One matrix product of three is saved: backward would compute the scores again. Gradients of the size of x and w are kept
instead.

Refuses in float16: GradScaler scales dloss so that small gradients do not become 0, and here it would come too late.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import traversal
from onnxtrain.graph.values import dtype_of, set_type
from onnxtrain.ops import builder, view
from onnxtrain.ops.constructors import cast
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.loss.linear_cross_entropy import LINEAR_CROSS_ENTROPY, LINEAR_CROSS_ENTROPY_GRAD
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.rewriting import nodes_before, substitute


def compute_loss_gradients_in_forward(graph: ir.Graph, changes: Changes) -> None:
    """Moves the gradients of each chunked loss of a joint graph into its forward node."""
    losses = {
        tuple(node.inputs): node
        for node in graph
        if view(node).definition is LINEAR_CROSS_ENTROPY and not any(view(node).gradients)
    }
    for node in list(graph):
        n = view(node)
        loss = losses.get(tuple(node.inputs[1:])) if n.definition is LINEAR_CROSS_ENTROPY_GRAD else None
        if loss is None:
            continue
        if dtype_of(n.x) == ir.DataType.FLOAT16:
            changes.refuse(node, "its gradients are float16: those of a scaled loss must be computed from it")
            continue
        _move(graph, loss, n)
        changes.applied.append(f"{loss.name} gives its gradients with the loss")


def _move(graph: ir.Graph, loss: ir.Node, backward: NodeView) -> None:
    op = builder(graph)
    name = loss.outputs[0].name
    loss.attributes["gradients"] = ir.AttrInt64s("gradients", list(backward.output_mask))
    loss.resize_outputs(len(LINEAR_CROSS_ENTROPY.outputs))
    for value, found in zip(loss.outputs, LINEAR_CROSS_ENTROPY.output_types(loss), strict=True):
        set_type(value, found)
    moved = []
    with nodes_before(op, backward.node):
        for old, kept in zip(backward.node.outputs, loss.outputs[1:], strict=True):
            kept.name = f"{name}/{LINEAR_CROSS_ENTROPY.output_name(kept.index() or 0)}"
            if traversal.is_used(old):
                moved.append((old, op.Mul(kept, cast(op, backward.dy, dtype_of(kept)))))
    for old, new in moved:
        substitute(graph, old, new, [])
    graph.remove(backward.node, safe=True)
