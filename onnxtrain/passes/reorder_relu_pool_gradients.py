"""The gradient of a Relu in front of a MaxPool is masked where the pool has its results: there are fewer of them.

    before   y = Relu(x);  p, at = MaxPool(y)        dx = ReluGrad(MaxPoolGrad(dp, at), y)
    after                                            dx = MaxPoolGrad(ReluGrad(dp, p), at)

The same numbers: MaxPoolGrad adds dp where y is p, and is 0 elsewhere. y, the larger one, need not be kept. So it is
where a batch norm applies the Relu, and its gradient op would mask.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import Builder
from onnxtrain.ops import builder, view
from onnxtrain.ops.activation.rectified import RELU_GRAD
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.norm.batch import BATCH_NORM_GRAD
from onnxtrain.ops.pool.window import MAX_POOL_GRAD, pool_of
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.rewriting import nodes_before, only_user, substitute


def reorder_relu_pool_gradients(graph: ir.Graph, changes: Changes) -> None:
    """Moves gradients of Relu in front of those of MaxPool."""
    op = builder(graph)
    for node in list(graph):
        n = view(node)
        masks = n.definition is RELU_GRAD or (n.definition is BATCH_NORM_GRAD and n.y and not n.added)
        behind = n.dy.producer() if masks else None
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
            found = [moved] if n.definition is RELU_GRAD else _without_mask(op, n, moved)
        for old, new in zip(node.outputs, found, strict=True):
            substitute(graph, old, new, [])
        graph.remove([node, behind], safe=True)
        changes.applied.append(f"the gradient of {name} is masked before that of its pool")


def _without_mask(op: Builder, n: NodeView, moved: ir.Value) -> list[ir.Value]:
    """What a batch norm's gradient op gives for the masked gradient `moved`, which is its residual's too."""
    mask = [*n.output_mask[:3], 0]
    *grads, _ = op.ms.BatchNormalizationGrad(
        moved, n.x, n.scale, n.mean, n.inv_std, epsilon=n.epsilon, output_mask=mask
    )
    return [*grads, moved]
