"""Vector norms and the logarithm of a sum of exponentials, over axes.

ReduceL1, ReduceL2, ReduceLogSumExp    as in ONNX; the gradient of a norm of 0 is 0
ReduceLp                               any other order p: (sum of |x|^p)^(1/p), or the number of nonzeros for p = 0
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, dtype_of, rank_of
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.definition import REQUIRED, Call, NodeView
from onnxtrain.ops.reduce.over_axes import (
    Dims,
    axes_from_dim,
    axes_input,
    axes_of,
    define_reduction,
    lower_reduction,
    with_reduced_axes,
)


def _norm(op: Builder, x: ir.Value, order: float, dim: Dims, keepdim: bool) -> Any:
    """Build the vector norm of this order, in the type of PyTorch's output."""
    x = cast(op, x, op.out[0].dtype)
    axes = axes_input(op, axes_from_dim(x, dim))
    if order == 2:
        return op.ReduceL2(x, axes, keepdims=int(keepdim))
    if order == 1:
        return op.ReduceL1(x, axes, keepdims=int(keepdim))
    if order == math.inf:
        return op.own.ReduceMax(op.Abs(x), axes, keepdims=int(keepdim))
    if order == -math.inf:
        return op.own.ReduceMin(op.Abs(x), axes, keepdims=int(keepdim))
    return op.own.ReduceLp(x, axes, p=float(order), keepdims=int(keepdim))


def _capture_vector_norm(
    op: Builder, x: ir.Value, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    return _norm(op, x, ord, dim, keepdim)


def _capture_norm(
    op: Builder, x: ir.Value, p: float | None = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    return _norm(op, x, 2 if p is None else p, dim, keepdim)


def _capture_dist(op: Builder, a: ir.Value, b: ir.Value, p: float = 2) -> Any:
    dtype = op.out[0].dtype
    return _norm(op, op.Sub(cast(op, a, dtype), cast(op, b, dtype)), p, None, False)


def _capture_linalg_norm(
    op: Builder, x: ir.Value, ord: float | None = None, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    axes = 1 if isinstance(dim, int) else rank_of(x) if dim is None else len(dim)
    if ord is not None and axes != 1:
        return NotImplemented  # a matrix norm
    return _norm(op, x, 2 if ord is None else ord, dim, keepdim)


def _lower_norm(order: int) -> Callable[..., Call]:
    def lower(n: NodeView, x: Any, axes: Any) -> Call:
        return Call(torch.linalg.vector_norm, x, order, list(axes_of(n)), bool(n.keepdims))

    return lower


def _l1_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    return op.Mul(op.Sign(n.x), with_reduced_axes(op, n, dy))


def _l2_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    zero, norm = op.scalar(0.0, like=n.x), with_reduced_axes(op, n, n.y)
    direction = op.Where(op.Equal(norm, zero), zero, op.Div(n.x, norm))
    return op.Mul(with_reduced_axes(op, n, dy), direction)


REDUCE_L1 = define_reduction("ReduceL1", {}, _lower_norm(1), _l1_gradient, reads=("x",))
REDUCE_L2 = define_reduction(
    "ReduceL2",
    {
        "aten.linalg_vector_norm.default": _capture_vector_norm,
        "aten.linalg_norm.default": _capture_linalg_norm,
        "aten.dist.default": _capture_dist,
        **dict.fromkeys(
            (
                "aten.norm.Scalar",
                "aten.norm.ScalarOpt_dim",
                "aten.norm.ScalarOpt_dim_dtype",
                "aten.norm.ScalarOpt_dtype",
            ),
            _capture_norm,
        ),
    },
    _lower_norm(2),
    _l2_gradient,
    reads=("x", "y"),
)


# ReduceLp


def _lower_lp(n: NodeView, x: Any, axes: Any) -> Call:
    return Call(torch.linalg.vector_norm, x, n.p, list(axes_of(n)), bool(n.keepdims))


def _lp_body(op: Builder, n: NodeView) -> ir.Value:
    axes, magnitude = axes_input(op, axes_of(n)), op.Abs(n.x)
    if n.p == 0:
        nonzero = op.Cast(op.own.NotEqual(n.x, op.scalar(0, like=n.x)), to=dtype_of(n.x))
        return op.ReduceSum(nonzero, axes, keepdims=n.keepdims)
    total = op.ReduceSum(op.Pow(magnitude, op.scalar(n.p, like=n.x)), axes, keepdims=n.keepdims)
    return op.Pow(total, op.scalar(1 / n.p, like=n.x))


def _lp_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    """Return sign(x) |x|^(p-1) dy / y^(p-1); 0 if the norm, or for p < 1 the element, is 0, as in PyTorch."""
    zero = op.scalar(0, like=n.x)
    if n.p == 0:
        return op.Mul(with_reduced_axes(op, n, dy), op.Mul(n.x, zero))
    norm, power = with_reduced_axes(op, n, n.y), op.scalar(n.p - 1, like=n.x)
    direction = op.Mul(op.Sign(n.x), op.Pow(op.Abs(n.x), power))
    if n.p < 1:
        direction = op.Where(op.Equal(n.x, zero), zero, direction)
    scale = op.Div(with_reduced_axes(op, n, dy), op.Pow(norm, power))
    return op.Mul(direction, op.Where(op.Equal(norm, zero), zero, scale))


REDUCE_LP = define_reduction(
    "ReduceLp",
    {},
    _lower_lp,
    _lp_gradient,
    reads=("x", "y"),
    domain=OWN,
    body=_lp_body,
    attributes={"p": REQUIRED},
)


# ReduceLogSumExp


def _capture_logsumexp(op: Builder, x: ir.Value, dim: Dims, keepdim: bool = False) -> Any:
    x = cast(op, x, op.out[0].dtype)
    return op.ReduceLogSumExp(x, axes_input(op, axes_from_dim(x, dim)), keepdims=int(keepdim))


def _logsumexp_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    """Return dy * softmax(x): NaN for a row of -inf, as in PyTorch."""
    return op.Mul(with_reduced_axes(op, n, dy), op.Exp(op.Sub(n.x, with_reduced_axes(op, n, n.y))))


REDUCE_LOG_SUM_EXP = define_reduction(
    "ReduceLogSumExp",
    dict.fromkeys(("aten.logsumexp.default", "aten.special_logsumexp.default"), _capture_logsumexp),
    lower_reduction(torch.logsumexp),
    _logsumexp_gradient,
    reads=("x", "y"),
)
