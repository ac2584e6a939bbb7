"""Losses and distances that PyTorch decomposes into other operators: captured as the same decompositions.

They have no op of their own. The same kernels run in the same order as in eager PyTorch.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, dtype_of, rank_of, type_of
from onnxtrain.ops.body_parts import add_scalar, mul_scalar, promoted
from onnxtrain.ops.loss.pointwise import same_shape
from onnxtrain.ops.loss.reduction import REDUCTIONS
from onnxtrain.ops.registry import capture_call, register_captures


def _same_dtype(*values: ir.Value) -> bool:
    """Return whether all values have one dtype. Otherwise PyTorch promotes at each operator of the decomposition."""
    return len({dtype_of(v) for v in values}) == 1


def _at_least(op: Builder, x: ir.Value, lowest: float) -> ir.Value:
    return capture_call(op, "aten.clamp_min.default", type_of(x), x, lowest)


def _reduced(op: Builder, loss: ir.Value, reduction: int) -> ir.Value:
    if REDUCTIONS[reduction] == "none":
        return loss
    overload = {"mean": "aten.mean.default", "sum": "aten.sum.default"}[REDUCTIONS[reduction]]
    return capture_call(op, overload, TensorType(dtype_of(loss), ()), loss)


def _norm(op: Builder, x: ir.Value, p: float, dim: int, keepdim: bool) -> ir.Value:
    shape = list(type_of(x).shape)
    if keepdim:
        shape[dim] = 1
    else:
        del shape[dim]
    return capture_call(
        op, "aten.linalg_vector_norm.default", TensorType(dtype_of(x), tuple(shape)), x, p, [dim], keepdim
    )


def _l1_loss(op: Builder, x: ir.Value, target: ir.Value, reduction: int = 1) -> Any:
    x, target = promoted(op, x, target)
    return _reduced(op, op.Abs(op.Sub(x, target)), reduction)


def _hinge_embedding_loss(op: Builder, x: ir.Value, target: ir.Value, margin: float = 1.0, reduction: int = 1) -> Any:
    """`x` where target is 1, max(0, margin - x) where it is -1."""
    zero = op.scalar(0, like=x)
    is_one = op.Equal(target, op.scalar(1, like=target))
    is_minus_one = op.Equal(target, op.scalar(-1, like=target))
    distant = _at_least(op, op.Sub(op.scalar(margin, like=x), x), 0)
    loss = op.Add(op.Where(is_one, zero, distant), op.Where(is_minus_one, zero, x))
    return _reduced(op, loss, reduction)


def _margin_ranking_loss(
    op: Builder, first: ir.Value, second: ir.Value, target: ir.Value, margin: float = 0.0, reduction: int = 1
) -> Any:
    """max(0, -target (first - second) + margin)."""
    if not _same_dtype(first, second, target):
        return NotImplemented
    loss = add_scalar(op, op.Mul(op.Neg(target), op.Sub(first, second)), margin)
    return _reduced(op, _at_least(op, loss, 0), reduction)


def _pairwise_distance(
    op: Builder, first: ir.Value, second: ir.Value, p: float = 2, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    """Return the p-norm of first - second + eps over the last axis."""
    if not _same_dtype(first, second):
        return NotImplemented
    return _norm(op, add_scalar(op, op.Sub(first, second), eps), p, -1, keepdim)


def _triplet_margin_loss(
    op: Builder,
    anchor: ir.Value,
    positive: ir.Value,
    negative: ir.Value,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = 1,
) -> Any:
    """max(0, margin + distance to positive - distance to negative)."""
    if not _same_dtype(anchor, positive, negative):
        return NotImplemented
    near = _pairwise_distance(op, anchor, positive, p, eps)
    far = _pairwise_distance(op, anchor, negative, p, eps)
    if swap:
        positive_to_negative = _pairwise_distance(op, positive, negative, p, eps)
        far = capture_call(op, "aten.minimum.default", type_of(far), far, positive_to_negative)
    return _reduced(op, _at_least(op, op.Sub(add_scalar(op, near, margin), far), 0), reduction)


def _poisson_nll_loss(
    op: Builder, x: ir.Value, target: ir.Value, log_input: bool, full: bool, eps: float, reduction: int
) -> Any:
    """exp(x) - target x, or x - target log(x + eps); `full` adds Stirling's approximation of log target!."""
    if not _same_dtype(x, target):
        return NotImplemented
    if log_input:
        loss = op.Sub(op.Exp(x), op.Mul(target, x))
    else:
        loss = op.Sub(x, op.Mul(target, op.Log(add_scalar(op, x, eps))))
    if full:
        stirling = op.Sub(op.Mul(target, op.Log(target)), target)
        stirling = op.Add(stirling, mul_scalar(op, op.Log(mul_scalar(op, target, 2 * math.pi)), 0.5))
        small = op.LessOrEqual(target, op.scalar(1, like=target))
        loss = op.Add(loss, op.Where(small, op.scalar(0, like=stirling), stirling))
    return _reduced(op, loss, reduction)


def _cosine_similarity(op: Builder, first: ir.Value, second: ir.Value, dim: int = 1, eps: float = 1e-8) -> Any:
    """Return the dot product of both, each divided by its norm, clamped to at least eps."""
    if not same_shape(first, second):
        return NotImplemented
    first, second = promoted(op, first, second)  # as PyTorch does
    units = (op.Div(x, _clamped_norm(op, x, dim, eps)) for x in (first, second))
    return capture_call(op, "aten.sum.dim_IntList", op.out[0], op.Mul(*units), [dim])


def _clamped_norm(op: Builder, x: ir.Value, dim: int, eps: float) -> ir.Value:
    """Return the norm, clamped to at least eps. Its gradient ignores the clamp, as in PyTorch."""
    norm = _norm(op, x, 2, dim, True)
    deficit = op.Sub(_at_least(op, norm, eps), norm)
    return op.Add(norm, op.own.Detach(deficit))


_SQUARED_NORM_EPSILON = 1e-12  # PyTorch adds it to squared norms


def _cosine_embedding_loss(
    op: Builder, first: ir.Value, second: ir.Value, target: ir.Value, margin: float = 0.0, reduction: int = 1
) -> Any:
    """1 - cosine where target is 1, max(0, cosine - margin) where it is -1, else 0."""
    axis = rank_of(target)
    result_type = TensorType(dtype_of(first), type_of(target).shape)
    if dtype_of(second) != dtype_of(first) or not rank_of(first) == rank_of(second) == axis + 1:
        return NotImplemented

    def dot(a: ir.Value, b: ir.Value) -> ir.Value:
        return capture_call(op, "aten.sum.dim_IntList", result_type, op.Mul(a, b), [axis])

    squares = (add_scalar(op, dot(x, x), _SQUARED_NORM_EPSILON) for x in (first, second))
    cosine = op.Div(dot(first, second), op.Sqrt(op.Mul(*squares)))
    zero = op.scalar(0, like=cosine)
    is_one = op.Equal(target, op.scalar(1, like=target))
    is_minus_one = op.Equal(target, op.scalar(-1, like=target))
    near = op.Where(is_one, op.Sub(op.scalar(1, like=cosine), cosine), zero)
    far = op.Where(is_minus_one, _at_least(op, add_scalar(op, cosine, -margin), 0), zero)
    return _reduced(op, op.Add(near, far), reduction)


register_captures(
    {
        "aten.l1_loss.default": _l1_loss,
        "aten.hinge_embedding_loss.default": _hinge_embedding_loss,
        "aten.margin_ranking_loss.default": _margin_ranking_loss,
        "aten.pairwise_distance.default": _pairwise_distance,
        "aten.triplet_margin_loss.default": _triplet_margin_loss,
        "aten.poisson_nll_loss.default": _poisson_nll_loss,
        "aten.cosine_similarity.default": _cosine_similarity,
        "aten.cosine_embedding_loss.default": _cosine_embedding_loss,
    }
)
