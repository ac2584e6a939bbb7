"""The gradient of a Relu in front of a MaxPool is masked where the pool has its results: there are fewer of them.

    before   y = Relu(x);  p, at = MaxPool(y)        dx = ReluGrad(MaxPoolGrad(dp, at), y)
    after                                            dx = MaxPoolGrad(ReluGrad(dp, p), at)

The same numbers: MaxPoolGrad adds dp where y is p, and is 0 elsewhere. y, the larger one, need not be kept.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ops import builder, view
from onnxtrain.ops.activation.rectified import RELU_GRAD
from onnxtrain.ops.pool.window import MAX_POOL_GRAD, pool_of
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.rewriting import nodes_before, only_user, substitute


def mask_pooled_gradients(graph: ir.Graph, changes: Changes) -> None:
    """Moves gradients of Relu in front of those of MaxPool."""
    op = builder(graph)
    for node in list(graph):
        n = view(node)
        behind = n.dy.producer() if n.definition is RELU_GRAD else None
        if behind is None or view(behind).definition is not MAX_POOL_GRAD:
            continue
        backward, pool, name = view(behind), pool_of(view(behind)), n.y.name
        if pool is None or pool.x is not n.y:
            changes.refuse(node, f"{name} is not what the pool reads")
            continue
        if only_user(n.dy) is not node:
            changes.refuse(node, f"the gradient {n.dy.name} has another reader")
            continue
        with nodes_before(op, node):
            masked = op.ms.ReluGrad(backward.dy, pool.y)
            how = {name: getattr(backward, name) for name in MAX_POOL_GRAD.attributes}
            moved = op.ms.MaxPoolGrad(masked, backward.indices, backward.shape, **how)
        substitute(graph, node.outputs[0], moved, [node, behind])
        changes.made.append(f"the gradient of {name} is masked before that of its pool")
