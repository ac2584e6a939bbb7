"""Variance and standard deviation over axes.

ReduceVar(x, axes)      sum((x - mean x)^2) / max(count - correction, 0)
ReduceStd(x, axes)      its root; the gradient is 0 where it is 0
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, dtype_of
from onnxtrain.ops.constructors import always
from onnxtrain.ops.definition import Call, FromTorch, NodeView
from onnxtrain.ops.reduce.over_axes import (
    Dims,
    axes_input,
    axes_of,
    count_of,
    dims_of,
    in_single,
    reduction,
    restored,
)


def _degrees(op: Builder, n: NodeView, dtype: ir.DataType) -> ir.Value:
    """Count - correction."""
    count = count_of(n)
    if isinstance(count, int):
        return op.scalar(count - n.correction, dtype)
    result: ir.Value = op.Sub(op.size(count, dtype), op.scalar(n.correction, dtype))
    return result


def _centered(op: Builder, n: NodeView) -> ir.Value:
    result: ir.Value = op.Sub(n.x, op.ReduceMean(n.x, axes_input(op, axes_of(n)), keepdims=1))
    return result


def _var_body(op: Builder, n: NodeView) -> ir.Value:
    distance = _centered(op, n)
    total = op.ReduceSum(op.Mul(distance, distance), axes_input(op, axes_of(n)), keepdims=n.keepdims)

    def divided(value: ir.Value) -> ir.Value:
        dtype = dtype_of(value)
        return op.Div(value, op.Max(_degrees(op, n, dtype), op.scalar(0.0, dtype)))  # type: ignore[no-any-return]

    return in_single(op, total, divided)


def _var_slope(op: Builder, n: NodeView, dvar: ir.Value) -> ir.Value:
    """2 / (count - correction) * dvar * (x - mean x)."""

    def scaled(value: ir.Value) -> ir.Value:
        dtype = dtype_of(value)
        return op.Mul(op.Div(op.scalar(2.0, dtype), _degrees(op, n, dtype)), value)  # type: ignore[no-any-return]

    return op.Mul(restored(op, n, in_single(op, dvar, scaled)), _centered(op, n))  # type: ignore[no-any-return]


def _std_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    zero, two = op.scalar(0.0, like=dy), op.scalar(2.0, like=dy)
    slope = op.Div(dy, op.Mul(n.y, two))
    return _var_slope(op, n, op.Where(op.Equal(n.y, zero), zero, slope))


def _call(function: Any) -> Any:
    def lower(n: NodeView, x: Any, axes: Any) -> Call:
        return Call(function, x, list(axes_of(n)), correction=n.correction, keepdim=bool(n.keepdims))

    return lower


def _reduced(op: Builder, name: str, x: ir.Value, dim: Dims, correction: float, keepdim: bool) -> Any:
    axes = axes_input(op, dims_of(x, dim))
    return op.op(OWN, name)(x, axes, correction=float(correction), keepdims=int(keepdim))


def _overloads(name: str, word: str) -> dict[str, FromTorch]:
    """Var or std, alone and with the mean."""

    def corrected(
        op: Builder, x: ir.Value, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
    ) -> Any:
        return _reduced(op, name, x, dim, 1 if correction is None else correction, keepdim)

    def over_dim(op: Builder, x: ir.Value, dim: Dims, unbiased: bool = True, keepdim: bool = False) -> Any:
        return _reduced(op, name, x, dim, int(unbiased), keepdim)

    def over_all(op: Builder, x: ir.Value, unbiased: bool = True) -> Any:
        return _reduced(op, name, x, None, int(unbiased), False)

    def and_mean(alone: FromTorch) -> FromTorch:
        def capture(op: Builder, x: ir.Value, dim: Any = None, *rest: Any, **named: Any) -> Any:
            over = None if isinstance(dim, bool) else dim  # the overload without dim has `unbiased` there
            keepdim = named.get("keepdim", rest[1] if len(rest) > 1 else False)
            mean = op.ReduceMean(x, axes_input(op, dims_of(x, over)), keepdims=int(keepdim))
            spread = alone(op, x, *(() if dim is None else (dim,)), *rest, **named)
            return spread, mean

        return capture

    kinds: dict[str, FromTorch] = {"correction": corrected, "dim": over_dim, "default": over_all}
    alone = {f"aten.{word}.{kind}": capture for kind, capture in kinds.items()}
    return alone | {f"aten.{word}_mean.{kind}": and_mean(capture) for kind, capture in kinds.items()}


REDUCE_VAR = reduction(
    "ReduceVar",
    _overloads("ReduceVar", "var"),
    _call(torch.var),
    _var_slope,
    reads=("x",),
    domain=OWN,
    body=_var_body,
    native_ok=always,
    attributes={"correction": 1.0},
)
REDUCE_STD = reduction(
    "ReduceStd",
    _overloads("ReduceStd", "std"),
    _call(torch.std),
    _std_gradient,
    reads=("x", "y"),
    domain=OWN,
    body=lambda op, n: op.Sqrt(_var_body(op, n)),
    native_ok=always,
    attributes={"correction": 1.0},
)
