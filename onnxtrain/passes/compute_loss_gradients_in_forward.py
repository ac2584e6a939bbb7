"""Compute the gradients of a chunked loss in forward, where its logits are available.

    before   loss = LinearCrossEntropy(x, w, labels);          dx, dw = LinearCrossEntropyGrad(dloss, x, w, labels)
    after    loss, dx1, dw1 = LinearCrossEntropy(..);          dx, dw = dloss * dx1, dloss * dw1

This saves one of three GEMMs, because backward would recompute the logits; gradients of the size of x and w are saved
for backward instead.

Refused in float16: GradScaler scales dloss to keep small gradients from underflowing, and would scale too late here.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import traversal
from onnxtrain.graph.values import dtype_of, set_type
from onnxtrain.ops import builder, view
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.loss.linear_cross_entropy import LINEAR_CROSS_ENTROPY, LINEAR_CROSS_ENTROPY_GRAD
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.rewriting import nodes_before, substitute


def compute_loss_gradients_in_forward(graph: ir.Graph, changes: Changes) -> None:
    """Move the gradients of each chunked loss of a joint graph into its forward node."""
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
            changes.refuse(node, "its gradients are float16 and would underflow without the scale of GradScaler")
            continue
        _move(graph, loss, n)
        changes.applied.append(f"{loss.name} computes its gradients in forward")


def _move(graph: ir.Graph, loss: ir.Node, backward: NodeView) -> None:
    op = builder(graph)
    name = loss.outputs[0].name
    loss.attributes["gradients"] = ir.AttrInt64s("gradients", list(backward.output_mask))
    loss.resize_outputs(len(LINEAR_CROSS_ENTROPY.outputs))
    for value, output_type in zip(loss.outputs, LINEAR_CROSS_ENTROPY.output_types(loss), strict=True):
        set_type(value, output_type)
    replacements = []
    with nodes_before(op, backward.node):
        for old, unscaled in zip(backward.node.outputs, loss.outputs[1:], strict=True):
            unscaled.name = f"{name}/{LINEAR_CROSS_ENTROPY.output_name(unscaled.index() or 0)}"
            if traversal.is_used(old):
                replacements.append((old, op.Mul(unscaled, cast(op, backward.dy, dtype_of(unscaled)))))
    for old, new in replacements:
        substitute(graph, old, new, [])
    graph.remove(backward.node, safe=True)
