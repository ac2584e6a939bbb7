"""Softmax, LogSoftmax, and the safe softmax of attention, over one axis.

    Softmax(x) -> y = exp(x - max) / Σ exp(x - max)        LogSoftmax(x) -> y = x - max - log Σ exp(x - max)
    SafeSoftmax(x) -> y                                     as Softmax, but a row of -inf gives 0, not NaN

Gradients read only the output: dx = y * (dy - Σ dy * y), and dx = dy - exp(y) * Σ dy for the logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import MICROSOFT, ONNX, OWN, TensorType, dtype_of, normalize_axis, rank_of, type_of
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.constructors import define_pure, same_as
from onnxtrain.ops.definition import (
    STANDARD,
    Call,
    FromTorch,
    Gradient,
    Kernel,
    NodeView,
    OpDef,
    numel,
)
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.interfaces.fused_regions import FUSIBLE
from onnxtrain.torch_compat import aten_kernels


def _row_axes(n: NodeView) -> str:
    """Return the axis map: all axes map but the normalized one, the same way for both inputs of a gradient op."""
    values = [v for v in n.node.inputs if v is not None]
    rank = rank_of(values[0])
    axis = normalize_axis(n.axis, rank)
    names = " ".join(f"[a{i}]" if i == axis else f"a{i}" for i in range(rank))
    return f"{', '.join([names] * len(values))} -> {names}"


def _capture(domain: str, name: str) -> FromTorch:
    """Return the capture of `softmax(x, dim, dtype)` and `_softmax(x, dim, half_to_float)`, which cast x first."""

    def capture(op: Builder, x: ir.Value, dim: int, dtype: Any = None) -> Any:
        x = cast(op, x, op.out[0].dtype)
        softmax = op.op(domain, name)
        if rank_of(x):
            return softmax(x, axis=dim)
        # PyTorch treats a 0-dimensional tensor as a vector of one element.
        row = op.Reshape(x, op.sizes([1]))
        return op.Reshape(softmax(row, axis=0), op.sizes([]))

    return capture


def _reduced_axis(op: Builder, n: NodeView) -> ir.Value:
    return op.constant([n.axis], ir.DataType.INT64)


def _define_softmax(
    domain: str,
    name: str,
    overloads: Sequence[str],
    body: Any,
    kernels: tuple[Kernel, ...],
    gradient: Callable[[Builder, NodeView, ir.Value], Any],
) -> OpDef:
    op = define_pure(
        domain,
        name,
        ("x",),
        ("y",),
        attributes={"axis": -1},
        from_torch=dict.fromkeys(overloads, _capture(domain, name)),
        shapes=same_as("x"),
        body=body,
        gradient=(Gradient(gradient, reads=("y",)),),
        kernels=kernels,
        axes=_row_axes,
        flops=_flops,
    )
    FUSIBLE.add(op)
    return op


def _flops(n: NodeView) -> Size:
    return sizes.multiply(5, numel(n.node.outputs[0]))


def _softmax_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    return op.ms.SoftmaxGrad_13(dy, n.y, axis=n.axis)


def _log_softmax_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    return op.ms.LogSoftmaxGrad_13(dy, n.y, axis=n.axis)


SOFTMAX = _define_softmax(
    ONNX,
    "Softmax",
    ("aten.softmax.int", "aten._softmax.default"),
    STANDARD,
    (Kernel(lower=lambda n, x: Call(torch.softmax, x, n.axis)),),
    _softmax_gradient,
)

LOG_SOFTMAX = _define_softmax(
    ONNX,
    "LogSoftmax",
    ("aten.log_softmax.int", "aten._log_softmax.default"),
    STANDARD,
    (Kernel(lower=lambda n, x: Call(torch.log_softmax, x, n.axis)),),
    _log_softmax_gradient,
)


# SafeSoftmax


def _safe_softmax_body(op: Builder, n: NodeView) -> ir.Value:
    row_max = op.ReduceMax(n.x, _reduced_axis(op, n), keepdims=1)
    masked = op.Equal(row_max, op.scalar(-math.inf, like=n.x))
    exponentials = op.Exp(op.Sub(n.x, op.Where(masked, op.scalar(0.0, like=n.x), row_max)))
    total = op.ReduceSum(exponentials, _reduced_axis(op, n), keepdims=1)
    return op.Div(exponentials, op.Where(masked, op.scalar(1.0, like=n.x), total))


def safe_softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Compute aten._safe_softmax on a CPU without its three extra passes over x, if no row is -inf throughout.

    The softmax of such a row is NaN, so it is enough to test one element of each row. On a GPU the test would
    synchronize.
    """
    if x.device.type != "cpu":
        return aten_kernels.safe_softmax(x, dim)
    y = torch.softmax(x, dim)
    if y.numel() and y.select(dim, 0).isnan().any():
        return torch.where(x.eq(-math.inf).all(dim, keepdim=True), 0.0, y)
    return y


SAFE_SOFTMAX = _define_softmax(
    OWN,
    "SafeSoftmax",
    ("aten._safe_softmax.default",),
    _safe_softmax_body,
    (Kernel(lower=lambda n, x: Call(safe_softmax, x, n.axis)),),
    _softmax_gradient,
)


# Gradients


def _gradient_type(n: NodeView) -> Sequence[TensorType]:
    return (type_of(n.dy),)


def _define_gradient(name: str, kernel: Callable[..., Any], body: Callable[[Builder, NodeView], ir.Value]) -> OpDef:
    op = define_pure(
        MICROSOFT,
        name,
        ("dy", "y"),
        ("dx",),
        attributes={"axis": -1},
        shapes=_gradient_type,
        body=body,
        lower=lambda n, dy, y: Call(kernel, dy, y, n.axis, TORCH_DTYPES[dtype_of(n.y)]),
        axes=_row_axes,
        flops=_flops,
    )
    FUSIBLE.add(op)
    return op


def _softmax_grad_body(op: Builder, n: NodeView) -> ir.Value:
    total = op.ReduceSum(op.Mul(n.dy, n.y), _reduced_axis(op, n), keepdims=1)
    return op.Mul(n.y, op.Sub(n.dy, total))


def _log_softmax_grad_body(op: Builder, n: NodeView) -> ir.Value:
    total = op.ReduceSum(n.dy, _reduced_axis(op, n), keepdims=1)
    return op.Sub(n.dy, op.Mul(op.Exp(n.y), total))


SOFTMAX_GRAD = _define_gradient("SoftmaxGrad_13", aten_kernels.softmax_grad, _softmax_grad_body)
LOG_SOFTMAX_GRAD = _define_gradient("LogSoftmaxGrad_13", aten_kernels.log_softmax_grad, _log_softmax_grad_body)
