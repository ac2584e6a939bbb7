"""Scores q @ kᵀ of attention: checks of q, k and v, the scores' element type and scale, and the matmuls' gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import dtype_of, rank_of, type_of
from onnxtrain.graph.verify import format_type
from onnxtrain.ops.body_parts import cast, with_attributes
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.interfaces.scalar_factors import ScalarFactor
from onnxtrain.ops.matmul import constant_axes, is_exact_attribute, takes_factor

_HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def score_dtype(dtype: ir.DataType) -> ir.DataType:
    """Return the element type in which scores and their sums are computed, for q of type `dtype`."""
    return ir.DataType.FLOAT if dtype in _HALF else dtype


def check_operand_ranks(n: NodeView, rank: int) -> None:
    """Check that q, k and v of a node have `rank` dimensions.

    Raises:
        GraphError: one of them has another rank.
    """
    if any(rank_of(x) != rank for x in (n.q, n.k, n.v)):
        raise GraphError(
            f"{n.definition.name} supports only one rank of q, k and v",
            expected=f"rank {rank}",
            got=", ".join(format_type(type_of(x)) for x in (n.q, n.k, n.v)),
        )


# Scale


def scale_as_attribute(op: Builder, q: ir.Value, scale: float | None) -> tuple[ir.Value, float | None]:
    """Return q and the value of the attribute `scale`; None is the default, 1/√e.

    A scale that is not exact in float32 multiplies q instead.
    """
    if scale is None or _is_default(scale, sizes.dims_of(q)[-1]):
        return q, None
    if is_exact_attribute(scale):
        return q, float(scale)
    return op.Mul(q, op.scalar(scale, like=q)), 1.0


def _is_default(scale: float, width: Size) -> bool:
    return isinstance(width, int) and width > 0 and math.isclose(scale, 1 / math.sqrt(width), rel_tol=1e-15)


def score_factor(n: NodeView) -> ScalarFactor:
    """Return how factors move through attention: a factor of q or k becomes part of the scale."""
    return ScalarFactor(frozenset({"q", "k"}), False, _with_scaled_scores)


def _with_scaled_scores(op: Builder, n: NodeView, factor: float) -> Sequence[ir.Value] | None:
    width, scale = sizes.dims_of(n.q)[-1], n.scale
    if scale is None:
        if not isinstance(width, int) or not width:
            return None
        scale = 1 / math.sqrt(width)
    scale *= factor
    if _is_default(scale, width):
        return with_attributes(op, n, scale=None)
    return with_attributes(op, n, scale=scale) if takes_factor(dtype_of(n.q), scale) else None


def scale_value(op: Builder, q: ir.Value, scale: float | None, power: float = 1.0) -> ir.Value:
    """Return sign(scale) * |scale| ** power as a 0-dimensional value of q's type; `power` is 1 or 0.5.

    A scale of None is 1/√e for q[..., e].
    """
    width = sizes.dims_of(q)[-1]
    if scale is None and isinstance(width, str):
        exponent = op.scalar(-power / 2, ir.DataType.DOUBLE)
        return cast(op, op.Pow(op.size(width, ir.DataType.DOUBLE), exponent), dtype_of(q))
    number = scale if scale is not None else 1 / math.sqrt(int(width)) if width else math.inf
    return op.scalar(math.copysign(math.sqrt(abs(number)) if power == 0.5 else abs(number), number), like=q)


def scale_number(scale: float | None, q: torch.Tensor) -> float:
    """Return the scale of a kernel's scores; None is 1/√e for q[..., e]."""
    if scale is not None:
        return scale
    return 1 / math.sqrt(q.size(-1)) if q.size(-1) else math.inf


# Softmax


def probabilities_and_logsumexp(op: Builder, scores: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the softmax of masked scores [..., columns] and their logsumexp [...]; both are 0 for a row of -inf."""
    last = constant_axes(op, rank_of(scores) - 1)
    maximum = op.ReduceMax(scores, last, keepdims=1)
    masked = op.Equal(maximum, op.scalar(-math.inf, like=maximum))
    maximum = op.Where(masked, op.scalar(0.0, like=maximum), maximum)
    exponentials = op.Exp(op.Sub(scores, maximum))
    total = op.Where(masked, op.scalar(1.0, like=maximum), op.ReduceSum(exponentials, last, keepdims=1))
    return op.Div(exponentials, total), op.Squeeze(op.Add(op.Log(total), maximum), last)


# Gradients


def apply_dropout_mask(op: Builder, n: NodeView, x: ir.Value) -> ir.Value:
    """Apply the dropout mask of a gradient node to x; return x if the node has none."""
    if n.dropout_mask is None:
        return x
    return op.ms.DropoutGrad(x, n.dropout_mask, n.ratio, op.scalar(True, ir.DataType.BOOL))


def matmul_gradients(
    op: Builder, dscores: ir.Value, p: ir.Value, dy: ir.Value, q: ir.Value, k: ir.Value, scale: float | None
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return dq, and dk and dv for each head of q, of y = p @ v and scores = scale * q @ kᵀ."""
    scaled = op.Mul(dscores, scale_value(op, q, scale))
    return op.MatMul(scaled, k), op.ms.FusedMatMul(scaled, q, transA=1), op.ms.FusedMatMul(p, dy, transA=1)
