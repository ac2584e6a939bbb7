"""Apply the gradient of a Relu before that of the MaxPool after it, on the smaller tensor.

    before   y = Relu(x);  p, at = MaxPool(y)        dx = ReluGrad(MaxPoolGrad(dp, at), y)
    after                                            dx = MaxPoolGrad(ReluGrad(dp, p), at)

The results are identical: MaxPoolGrad adds dp where y is p, and is 0 elsewhere. The larger tensor y need not be saved.
The same holds for a batch norm with a fused Relu, whose gradient op would apply the mask.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import Builder
from onnxtrain.ops import builder, view
from onnxtrain.ops.activation.rectified import RELU_GRAD
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.norm.batch_norm import BATCH_NORM_GRAD
from onnxtrain.ops.pool.window import MAX_POOL_GRAD, max_pool_of
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.rewriting import nodes_before, only_user, substitute


def reorder_relu_pool_gradients(graph: ir.Graph, changes: Changes) -> None:
    """Move gradients of Relu before those of MaxPool."""
    op = builder(graph)
    for node in list(graph):
        n = view(node)
        masks = n.definition is RELU_GRAD or (n.definition is BATCH_NORM_GRAD and n.y and not n.added)
        before = n.dy.producer() if masks else None
        if before is None or view(before).definition is not MAX_POOL_GRAD:
            continue
        pool_grad, pool, name = view(before), max_pool_of(view(before)), n.y.name
        if pool is None or pool.x is not n.y:
            changes.refuse(node, f"{name} is not the input of the pool")
            continue
        if only_user(n.dy) is not node:
            changes.refuse(node, f"the gradient {n.dy.name} has other users")
            continue
        with nodes_before(op, node):
            masked = op.ms.ReluGrad(pool_grad.dy, pool.y)
            attributes = {name: getattr(pool_grad, name) for name in MAX_POOL_GRAD.attributes}
            dy = op.ms.MaxPoolGrad(masked, pool_grad.indices, pool_grad.shape, **attributes)
            results = [dy] if n.definition is RELU_GRAD else _batch_norm_grad(op, n, dy)
        for old, new in zip(node.outputs, results, strict=True):
            substitute(graph, old, new, [])
        graph.remove([node, before], safe=True)
        changes.applied.append(f"applies the Relu gradient of {name} before that of its pool")


def _batch_norm_grad(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value]:
    """Return the gradients of a batch norm for the masked gradient `dy`, which is also the gradient of its residual."""
    mask = [*n.output_mask[:3], 0]
    *grads, _ = op.ms.BatchNormalizationGrad(dy, n.x, n.scale, n.mean, n.inv_std, epsilon=n.epsilon, output_mask=mask)
    return [*grads, dy]
