"""Elementwise ops of ONNX Runtime Training: scaled sums and the gradient of Div.

ScaledSum(a, b, c?) -> scale_0 * a + scale_1 * b + scale_2 * c         of tensors of the same shape
BatchScale(x) -> scale_0 * x, scale_1 * x, scale_2 * x                 its gradient
DivGrad(dy, a, b) -> da, db                                            summed to the shapes of a and b
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import MICROSOFT, TensorType, type_of
from onnxtrain.ops.body_parts import mul_scalar
from onnxtrain.ops.constructors import define_by_body, define_pure, no_axes
from onnxtrain.ops.definition import REQUIRED, Call, NodeView, numel

_SCALES: dict[str, Any] = {"scale_0": REQUIRED, "scale_1": REQUIRED, "scale_2": None}


def _factors(n: NodeView) -> list[float]:
    return [f for f in (n.scale_0, n.scale_1, n.scale_2) if f is not None]


def _terms(n: NodeView) -> list[tuple[ir.Value, float]]:
    return list(zip((v for v in n.node.inputs if v is not None), _factors(n), strict=False))


def _sum_body(op: Builder, n: NodeView) -> ir.Value:
    return op.Sum(*(mul_scalar(op, x, factor) for x, factor in _terms(n)))


def scaled_sum(terms: Sequence[torch.Tensor | None], factors: Sequence[float]) -> torch.Tensor:
    first, *others = [t for t in terms if t is not None]
    result = first * factors[0]
    for term, factor in zip(others, factors[1:], strict=False):
        result.add_(term, alpha=factor)
    return result


def _scaled_types(n: NodeView) -> Sequence[TensorType]:
    return [type_of(n.x)] * len(n.node.outputs)


def scaled(x: torch.Tensor, factors: Sequence[float]) -> tuple[torch.Tensor, ...]:
    return tuple(x * factor for factor in factors)


def _count_outputs(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> int:
    return 2 if attributes.get("scale_2") is None else 3


define_by_body(
    "ScaledSum",
    ("a", "b", "c?"),
    _sum_body,
    lambda n, *terms: Call(scaled_sum, terms, _factors(n)),
    domain=MICROSOFT,
    attributes=_SCALES,
    flops=lambda n: sizes.multiply(2 * len(n.node.inputs), numel(n.a)),
)
define_by_body(
    "BatchScale",
    ("x",),
    lambda op, n: [mul_scalar(op, n.x, factor) for factor in _factors(n)],
    lambda n, x: Call(scaled, x, _factors(n)),
    domain=MICROSOFT,
    outputs=("y_0", "y_1", "y_2?"),
    attributes=_SCALES,
    shapes=_scaled_types,
    count_outputs=_count_outputs,
    flops=lambda n: sizes.multiply(len(n.node.outputs), numel(n.x)),
)


# DivGrad


def _div_grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    da = op.Div(n.dy, n.b)
    db = op.Mul(op.Neg(da), op.Div(n.a, n.b))
    return op.own.SumTo(da, op.shape_of(n.a)), op.own.SumTo(db, op.shape_of(n.b))


def div_backward(dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    da = dy / b
    return da.sum_to_size(a.shape), (-da * (a / b)).sum_to_size(b.shape)


define_pure(
    MICROSOFT,
    "DivGrad",
    ("dy", "a", "b"),
    ("da", "db"),
    shapes=lambda n: (type_of(n.a), type_of(n.b)),
    body=_div_grad_body,
    lower=lambda n, dy, a, b: Call(div_backward, dy, a, b),
    axes=no_axes,
    flops=lambda n: sizes.multiply(4, numel(n.dy)),
)
