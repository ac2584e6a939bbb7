"""The gradient of scattering updates into a tensor, by any reduction; the same for elements and for whole slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.graph.builder import Builder
from onnxtrain.ops.definition import NodeView

Grads = tuple[ir.Value | None, None, ir.Value | None]


@dataclass(frozen=True)
class Places:
    """The places of a scatter.

    Attributes:
        gather: x -> what stands at the places.
        scatter: (x, updates, reduction) -> x with the updates at the places.
    """

    gather: Callable[[ir.Value], ir.Value]
    scatter: Callable[[ir.Value, ir.Value, str], ir.Value]


def scatter_gradient(op: Builder, n: NodeView, dy: ir.Value, places: Places) -> Grads:
    """Of y = scatter(x, places, updates), with `reduction` none, add, mul, max or min."""
    if n.reduction in ("max", "min"):
        return _of_extreme(op, n, dy, places)
    if n.reduction == "mul":
        return _of_product(op, n, dy, places)
    dx: ir.Value | None = dy
    if n.reduction == "none" and n.wants("x"):
        dx = places.scatter(dy, op.Expand(op.scalar(0, like=dy), op.shape_of(n.updates)), "none")
    return dx, None, places.gather(dy) if n.wants("updates") else None


def _of_extreme(op: Builder, n: NodeView, dy: ir.Value, places: Places) -> Grads:
    """Elements that are equal to the result share its gradient evenly, as PyTorch does it."""
    one, zero = op.scalar(1, like=dy), op.scalar(0, like=dy)
    kept = op.Where(op.Equal(n.x, n.y), one, zero)
    chosen = op.Where(op.Equal(n.updates, places.gather(n.y)), one, zero)
    share = op.Div(dy, places.scatter(kept, chosen, "add"))
    return op.Mul(kept, share), None, op.Mul(chosen, places.gather(share))


def _of_product(op: Builder, n: NodeView, dy: ir.Value, places: Places) -> Grads:
    """The product of all others: y by the factor, or where the factor is the only 0, the product without it."""
    one, zero = op.scalar(1, like=dy), op.scalar(0, like=dy)
    x = op.Where(op.Equal(n.x, zero), one, n.x)
    dx = op.Div(op.Mul(dy, places.scatter(x, n.updates, "mul")), x)
    is_zero = op.Equal(n.updates, zero)
    nothing = op.Expand(zero, op.shape_of(n.x))
    zeros = places.gather(places.scatter(nothing, op.Where(is_zero, one, zero), "add"))
    only = op.And(is_zero, op.Equal(zeros, one))
    without = places.scatter(n.x, op.Where(only, one, n.updates), "mul")
    others = op.Div(places.gather(op.Mul(dy, n.y)), op.Where(is_zero, one, n.updates))
    return dx, None, op.Where(only, places.gather(op.Mul(dy, without)), others)
