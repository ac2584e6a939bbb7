"""Adds the residual where Dropout writes: one pass over memory, and not two.

    before   y = KeyedDropout(x, key);  h = Add(residual, y)
    after    h = KeyedDropout(x, key, residual)

Backward stays as it was: the residual's gradient is h's, and that of x comes from the key. Refuses where y is read
elsewhere too: it would be computed twice.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.values import type_of
from onnxtrain.ops import builder, view
from onnxtrain.ops.keyed_dropout import KEYED_DROPOUT
from onnxtrain.passes.changes import Changes, counted
from onnxtrain.passes.rewriting import nodes_before, only_user, substitute


def fuse_residuals(graph: ir.Graph, changes: Changes) -> None:
    """Makes one op of every sum of a KeyedDropout and another tensor of its shape and type."""
    op = builder(graph)
    done = 0
    for node in list(graph):
        found = _dropout(node, changes)
        if found is None:
            continue
        dropout, residual = found
        n = view(dropout)
        with nodes_before(op, node):
            h = op.own.KeyedDropout(n.x, n.key, residual, dropped=n.dropped)
        substitute(graph, node.outputs[0], h, [node, dropout])
        done += 1
    if done:
        changes.made.append(f"adds the residual in {counted(done, 'KeyedDropout')}")


def _dropout(node: ir.Node, changes: Changes) -> tuple[ir.Node, ir.Value] | None:
    """The KeyedDropout to which `node` adds another tensor, and that tensor; None where it does not."""
    if node.op_type != "Add":
        return None
    first, second = node.inputs
    for y, residual in ((second, first), (first, second)):
        if y is None or residual is None or y is residual or type_of(y) != type_of(residual):
            continue
        dropout = y.producer()
        if dropout is None or view(dropout).definition is not KEYED_DROPOUT or view(dropout).residual is not None:
            continue
        if only_user(y) is node:
            return dropout, residual
        changes.refuse(node, f"is no sum within a KeyedDropout: {y.name} is read elsewhere")
    return None
