"""Makes one op of an activation and the product that it gates, as feed-forward blocks of Llama and T5 v1.1 have them.

    before   gate ─▶ QuickGelu ─▶ Mul(·, up)         (silu; or a gelu, exact or by its tanh)
    after    GatedActivation(gate, up)

Backward then reads gate and up alone, and computes both gradients in one pass. Refuses where the activation is read
elsewhere too: it would be computed twice.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.values import dtype_of, rank_of
from onnxtrain.ops import builder, view
from onnxtrain.ops.activation.gated import activation_of
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.rewriting import nodes_before, only_user, substitute


def fuse_gated_activations(graph: ir.Graph, changes: Changes) -> None:
    """Replaces every product of an activation and another tensor of its shape and type."""
    ops = builder(graph)
    made = 0
    for node in list(graph):
        found = _activation(node, changes)
        if found is None:
            continue
        inner, up = found
        with nodes_before(ops, node):
            new = ops.own.GatedActivation(inner.inputs[0], up, activation=activation_of(view(inner)))
        substitute(graph, node.outputs[0], new, [node, inner])
        made += 1
    if made:
        changes.applied.append(f"made {made} GatedActivation of an activation and a product")


def _activation(node: ir.Node, changes: Changes) -> tuple[ir.Node, ir.Value] | None:
    """The activation that `node` multiplies by another tensor, and that tensor; None where it does not."""
    if node.op_type != "Mul":
        return None
    first, second = node.inputs
    for x, up in ((first, second), (second, first)):
        inner = None if x is None else x.producer()
        if inner is None or x is None or up is None or not activation_of(view(inner)) or up is x:
            continue
        if rank_of(x) == 0 or sizes.dims_of(x) != sizes.dims_of(up) or dtype_of(x) != dtype_of(up):
            continue
        if only_user(x) is node:
            return inner, up
        changes.refuse(node, f"is no GatedActivation: {x.name} is read elsewhere")
    return None
