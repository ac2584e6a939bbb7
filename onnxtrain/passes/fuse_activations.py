"""Fuse an activation into the op that produces its input: one pass over memory instead of two.

    before   y = BatchNormInternal(x, …, residual);  z = Relu(y)
    after    z = BatchNormInternal(x, …, residual, activation="Relu")

`FUSED_ACTIVATIONS` has the ops that can apply an activation. Refused if the op's result has other users.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ops import definition_of, view
from onnxtrain.ops.interfaces.fused_activations import FUSED_ACTIVATIONS
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.rewriting import only_user, same_checkpoint, substitute


def fuse_activations(graph: ir.Graph, changes: Changes) -> None:
    """Fuse the activations of `graph` into the nodes before them."""
    fused: dict[str, int] = {}
    for node in list(graph):
        y = node.inputs[0] if len(node.inputs) == 1 else None
        source = None if y is None else y.producer()
        if y is None or source is None or not _activates(source, y, node) or not same_checkpoint(source, node):
            continue
        if only_user(y) is not node:
            changes.refuse(node, f"not fused into {source.op_type}: {y.name} has other users")
            continue
        source.attributes["activation"] = ir.AttrString("activation", node.op_type)
        substitute(graph, node.outputs[0], y, [node])
        fused[source.op_type] = fused.get(source.op_type, 0) + 1
    changes.applied += [f"fused an activation into {count} {name}" for name, count in fused.items()]


def _activates(source: ir.Node, y: ir.Value, node: ir.Node) -> bool:
    """Return whether `source` could apply the activation `node` to its output y, and applies none yet."""
    if definition_of(node) not in (FUSED_ACTIVATIONS.entry(source) or ()) or y.index() != 0:
        return False
    return not (view(source).activation or node.attributes)
