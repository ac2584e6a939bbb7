"""The reductions of ScatterElements and ScatterND, and the gradient for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.graph.builder import Builder
from onnxtrain.ops.definition import NodeView

Grads = tuple[ir.Value | None, None, ir.Value | None]

TORCH_REDUCTIONS = {"mul": "prod", "max": "amax", "min": "amin"}  # scatter_reduce's names for those of ai.onnx


@dataclass(frozen=True)
class IndexedAccess:
    """Builds gathers and scatters at the indices of a scatter node.

    Attributes:
        gather: x -> the elements of x at the indices.
        scatter: (x, updates, reduction) -> x with the updates at the indices.
    """

    gather: Callable[[ir.Value], ir.Value]
    scatter: Callable[[ir.Value, ir.Value, str], ir.Value]


def scatter_gradient(op: Builder, n: NodeView, dy: ir.Value, access: IndexedAccess) -> Grads:
    """Return the gradients of x and updates in y = scatter(x, indices, updates)."""
    if n.reduction in ("max", "min"):
        return _extreme_gradient(op, n, dy, access)
    if n.reduction == "mul":
        return _product_gradient(op, n, dy, access)
    dx: ir.Value | None = dy
    if n.reduction == "none" and n.wants("x"):
        dx = access.scatter(dy, op.Expand(op.scalar(0, like=dy), op.shape_of(n.updates)), "none")
    return dx, None, access.gather(dy) if n.wants("updates") else None


def _extreme_gradient(op: Builder, n: NodeView, dy: ir.Value, access: IndexedAccess) -> Grads:
    """Divide dy evenly among the elements that are equal to the result, as PyTorch does."""
    one, zero = op.scalar(1, like=dy), op.scalar(0, like=dy)
    x_is_result = op.Where(op.Equal(n.x, n.y), one, zero)
    update_is_result = op.Where(op.Equal(n.updates, access.gather(n.y)), one, zero)
    share = op.Div(dy, access.scatter(x_is_result, update_is_result, "add"))
    return op.Mul(x_is_result, share), None, op.Mul(update_is_result, access.gather(share))


def _product_gradient(op: Builder, n: NodeView, dy: ir.Value, access: IndexedAccess) -> Grads:
    """Multiply dy by the product of all other factors.

    That product is y divided by the factor; for a factor that is the only 0, the product without it.
    """
    one, zero = op.scalar(1, like=dy), op.scalar(0, like=dy)
    x = op.Where(op.Equal(n.x, zero), one, n.x)
    dx = op.Div(op.Mul(dy, access.scatter(x, n.updates, "mul")), x)
    is_zero = op.Equal(n.updates, zero)
    zeros = op.Expand(zero, op.shape_of(n.x))
    zero_count = access.gather(access.scatter(zeros, op.Where(is_zero, one, zero), "add"))
    is_only_zero = op.And(is_zero, op.Equal(zero_count, one))
    product_of_others = access.scatter(n.x, op.Where(is_only_zero, one, n.updates), "mul")
    quotient = op.Div(access.gather(op.Mul(dy, n.y)), op.Where(is_zero, one, n.updates))
    return dx, None, op.Where(is_only_zero, access.gather(op.Mul(dy, product_of_others)), quotient)
