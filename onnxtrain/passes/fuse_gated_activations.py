"""Fuse an activation with the multiplication that it gates, as in the feed-forward blocks of Llama and T5 v1.1.

    before   gate ─▶ QuickGelu ─▶ Mul(·, up)         (SiLU, or exact or tanh GELU)
    after    GatedActivation(gate, up)

Backward then reads only gate and up, and computes both gradients in one pass. Refused if the activation has other
users: it would be computed twice.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.values import dtype_of, rank_of
from onnxtrain.ops import builder, definition_of, view
from onnxtrain.ops.activation.gated import activation_of
from onnxtrain.ops.elementwise.arithmetic import MUL
from onnxtrain.passes.changes import Changes, counted
from onnxtrain.passes.rewriting import nodes_before, only_user, substitute


def fuse_gated_activations(graph: ir.Graph, changes: Changes) -> None:
    """Replace every product of an activation and another tensor of its shape and type."""
    op = builder(graph)
    fused = 0
    for node in list(graph):
        gate = _gate(node, changes)
        if gate is None:
            continue
        activation, up = gate
        with nodes_before(op, node):
            new = op.own.GatedActivation(activation.inputs[0], up, activation=activation_of(view(activation)))
        substitute(graph, node.outputs[0], new, [node, activation])
        fused += 1
    if fused:
        changes.applied.append(f"fused {counted(fused, 'gated activation')}")


def _gate(node: ir.Node, changes: Changes) -> tuple[ir.Node, ir.Value] | None:
    """Return the activation that `node` multiplies by another tensor, and that tensor; None for any other node."""
    if definition_of(node) is not MUL:
        return None
    first, second = node.inputs
    for x, up in ((first, second), (second, first)):
        activation = None if x is None else x.producer()
        if activation is None or x is None or up is None or not activation_of(view(activation)) or up is x:
            continue
        if rank_of(x) == 0 or sizes.dims_of(x) != sizes.dims_of(up) or dtype_of(x) != dtype_of(up):
            continue
        if only_user(x) is node:
            return activation, up
        changes.refuse(node, f"not fused into GatedActivation: {x.name} has other users")
    return None
