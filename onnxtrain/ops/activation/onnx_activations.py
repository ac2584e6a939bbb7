"""Activations of ONNX's own domain that PyTorch has under another name, or composes of several operators.

Celu              max(0, x) + min(0, alpha * (exp(x / alpha) - 1))               https://arxiv.org/abs/1704.07483
Softsign          x / (1 + |x|)
Swish             x * sigmoid(alpha * x)
ThresholdedRelu   x where x > alpha, 0 elsewhere
Shrink            x + bias where x < -lambd, x - bias where x > lambd, 0 between
Hardmax           1 at the first maximum along an axis, 0 elsewhere; not differentiable
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import normalize_axis, rank_of
from onnxtrain.ops.activation.constructors import not_double
from onnxtrain.ops.body_parts import add_scalar
from onnxtrain.ops.constructors import define_by_body, never
from onnxtrain.ops.definition import Call, Infix, NodeView, numel
from onnxtrain.ops.interfaces.stock_kernels import STOCK_KERNELS


def _swish_call(n: NodeView, x: Any) -> Call:
    if n.alpha == 1:
        return Call(torch.nn.functional.silu, x)
    return Infix("*", torch.mul, x, Call(torch.sigmoid, Infix("*", torch.mul, x, n.alpha)))


define_by_body(
    "Celu",
    ("x",),
    lambda op, n: op.own.Celu(n.x, alpha=n.alpha),
    lambda n, x: Call(torch.celu, x, n.alpha),
    attributes={"alpha": 1.0},
)
define_by_body(
    "Softsign",
    ("x",),
    lambda op, n: op.Div(n.x, add_scalar(op, op.Abs(n.x), 1)),
    lambda n, x: Call(torch.nn.functional.softsign, x),
)
SWISH = define_by_body(
    "Swish",
    ("x",),
    lambda op, n: op.ms.QuickGelu(n.x, alpha=n.alpha),
    _swish_call,
    attributes={"alpha": 1.0},
)
STOCK_KERNELS.register(SWISH, never)  # exported graphs have an earlier opset
THRESHOLDED_RELU = define_by_body(
    "ThresholdedRelu",
    ("x",),
    lambda op, n: op.own.Threshold(n.x, threshold=n.alpha, value=0.0),
    lambda n, x: Call(torch.nn.functional.threshold, x, n.alpha, 0.0),
    attributes={"alpha": 1.0},
)
STOCK_KERNELS.register(THRESHOLDED_RELU, not_double)


# Shrink


def _shrink_body(op: Builder, n: NodeView) -> ir.Value:
    zero = op.scalar(0, like=n.x)
    above = op.Where(op.Greater(n.x, op.scalar(n.lambd, like=n.x)), add_scalar(op, n.x, -n.bias), zero)
    below = op.Less(n.x, op.scalar(-n.lambd, like=n.x))
    return op.Where(below, add_scalar(op, n.x, n.bias), above)


def shrink(x: torch.Tensor, bias: float, lambd: float) -> torch.Tensor:
    """Compute ONNX's Shrink: PyTorch's softshrink for bias = lambd, hardshrink for bias = 0."""
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, 0.0))


SHRINK = define_by_body(
    "Shrink",
    ("x",),
    _shrink_body,
    lambda n, x: Call(shrink, x, n.bias, n.lambd),
    attributes={"bias": 0.0, "lambd": 0.5},
    flops=lambda n: sizes.multiply(3, numel(n.x)),
)
STOCK_KERNELS.register(SHRINK, not_double)


# Hardmax


def _hardmax_axes(n: NodeView) -> str:
    rank = rank_of(n.x)
    reduced = normalize_axis(n.axis, rank)
    axes = " ".join(f"[a{i}]" if i == reduced else f"a{i}" for i in range(rank))
    return f"{axes} -> {axes}"


def _hardmax_body(op: Builder, n: NodeView) -> ir.Value:
    axis = normalize_axis(n.axis, rank_of(n.x))
    indices = op.own.ArgMax(n.x, axis=axis, keepdims=1)
    return op.ScatterElements(
        op.Expand(op.scalar(0, like=n.x), op.shape_of(n.x)),
        indices,
        op.Expand(op.scalar(1, like=n.x), op.shape_of(indices)),
        axis=axis,
    )


def hardmax(x: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.zeros_like(x).scatter_(axis, x.argmax(axis, keepdim=True), 1) if x.numel() else torch.zeros_like(x)


define_by_body(
    "Hardmax",
    ("x",),
    _hardmax_body,
    lambda n, x: Call(hardmax, x, n.axis),
    attributes={"axis": -1},
    axes=_hardmax_axes,
    differentiable=False,
)
