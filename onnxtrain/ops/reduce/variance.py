"""Variance and standard deviation over axes.

ReduceVar(x, axes)      sum((x - mean x)^2) / max(count - correction, 0)
ReduceStd(x, axes)      the square root of ReduceVar; its gradient is 0 at 0
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, dtype_of
from onnxtrain.ops.definition import Call, Effects, FromTorch, Gradient, Kernel, NodeView, OpDef, numel
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.reduce.over_axes import (
    Dims,
    axes_from_dim,
    axes_input,
    axes_of,
    axis_map,
    count_of,
    define_reduction,
    in_float32,
    output_types,
    with_reduced_axes,
)
from onnxtrain.ops.reduce.sums import mean_gradient
from onnxtrain.ops.registry import define


def _degrees_of_freedom(op: Builder, n: NodeView, dtype: ir.DataType) -> ir.Value:
    """Return count - correction."""
    count = count_of(n)
    if isinstance(count, int):
        return op.scalar(count - n.correction, dtype)
    return op.Sub(op.size(count, dtype), op.scalar(n.correction, dtype))


def _centered(op: Builder, n: NodeView) -> ir.Value:
    return op.Sub(n.x, op.ReduceMean(n.x, axes_input(op, axes_of(n)), keepdims=1))


def _var_body(op: Builder, n: NodeView) -> ir.Value:
    deviation = _centered(op, n)
    total = op.ReduceSum(op.Mul(deviation, deviation), axes_input(op, axes_of(n)), keepdims=n.keepdims)

    def divided(value: ir.Value) -> ir.Value:
        dtype = dtype_of(value)
        return op.Div(value, op.Max(_degrees_of_freedom(op, n, dtype), op.scalar(0.0, dtype)))

    return in_float32(op, total, divided)


def _var_gradient(op: Builder, n: NodeView, dvar: ir.Value) -> ir.Value:
    """Return 2 / (count - correction) * dvar * (x - mean x)."""

    def scaled(value: ir.Value) -> ir.Value:
        dtype = dtype_of(value)
        return op.Mul(op.Div(op.scalar(2.0, dtype), _degrees_of_freedom(op, n, dtype)), value)

    return op.Mul(with_reduced_axes(op, n, in_float32(op, dvar, scaled)), _centered(op, n))


def _std_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    zero, two = op.scalar(0.0, like=dy), op.scalar(2.0, like=dy)
    slope = op.Div(dy, op.Mul(n.y, two))
    return _var_gradient(op, n, op.Where(op.Equal(n.y, zero), zero, slope))


def _lower_with_correction(function: Any) -> Any:
    def lower(n: NodeView, x: Any, axes: Any) -> Call:
        return Call(function, x, list(axes_of(n)), correction=n.correction, keepdim=bool(n.keepdims))

    return lower


def _reduce(op: Builder, name: str, x: ir.Value, dim: Dims, correction: float, keepdim: bool) -> Any:
    axes = axes_input(op, axes_from_dim(x, dim))
    return op.op(OWN, name)(x, axes, correction=float(correction), keepdims=int(keepdim))


def _from_torch(name: str, torch_name: str) -> dict[str, FromTorch]:
    """Return the captures of the overloads of var, std, var_mean or std_mean."""

    def with_correction(
        op: Builder, x: ir.Value, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
    ) -> Any:
        return _reduce(op, name, x, dim, 1 if correction is None else correction, keepdim)

    def over_dim(op: Builder, x: ir.Value, dim: Dims, unbiased: bool = True, keepdim: bool = False) -> Any:
        return _reduce(op, name, x, dim, int(unbiased), keepdim)

    def over_all(op: Builder, x: ir.Value, unbiased: bool = True) -> Any:
        return _reduce(op, name, x, None, int(unbiased), False)

    return {
        f"aten.{torch_name}.correction": with_correction,
        f"aten.{torch_name}.dim": over_dim,
        f"aten.{torch_name}.default": over_all,
    }


REDUCE_VAR = define_reduction(
    "ReduceVar",
    _from_torch("ReduceVar", "var"),
    _lower_with_correction(torch.var),
    _var_gradient,
    reads=("x",),
    domain=OWN,
    body=_var_body,
    attributes={"correction": 1.0},
)
REDUCE_STD = define_reduction(
    "ReduceStd",
    _from_torch("ReduceStd", "std"),
    _lower_with_correction(torch.std),
    _std_gradient,
    reads=("x", "y"),
    domain=OWN,
    body=lambda op, n: op.Sqrt(_var_body(op, n)),
    attributes={"correction": 1.0},
)


def _define_with_mean(
    name: str, torch_name: str, function: Any, body: Any, gradient: Any, reads: tuple[str, ...]
) -> OpDef:
    """Define a variance or standard deviation with the mean as a second output."""

    def body_with_mean(op: Builder, n: NodeView) -> tuple[ir.Value, ir.Value]:
        return body(op, n), op.ReduceMean(n.x, axes_input(op, axes_of(n)), keepdims=n.keepdims)

    def rule(op: Builder, n: NodeView, dy: ir.Value | None, dmean: ir.Value | None) -> tuple[ir.Value | None, ...]:
        terms = [] if dy is None else [gradient(op, n, dy)]
        if dmean is not None:
            terms.append(mean_gradient(op, n, dmean))
        return (op.Add(*terms) if len(terms) == 2 else terms[0], None)[: len(n.node.inputs)]

    op = define(
        OpDef(
            domain=OWN,
            name=name,
            inputs=("x", "axes?"),
            outputs=("y", "mean"),
            attributes={"keepdims": 1, "noop_with_empty_axes": 0, "correction": 1.0},
            from_torch=_from_torch(name, torch_name),
            shapes=lambda n: (*output_types(n), *output_types(n)),
            body=body_with_mean,
            gradient=(Gradient(rule, reads),),
            nondiff_inputs=frozenset({"axes"}),
            kernels=(Kernel(lower=_lower_with_correction(function)),),
            axes=lambda n: f"{axis_map(n)}, {axis_map(n).split('->')[1]}",
            effects=Effects.NONE,
            aliases={},
        )
    )
    FLOPS.register(op, lambda n: sizes.multiply(4, numel(n.x)))
    return op


REDUCE_VAR_MEAN = _define_with_mean("ReduceVarMean", "var_mean", torch.var_mean, _var_body, _var_gradient, ("x",))
REDUCE_STD_MEAN = _define_with_mean(
    "ReduceStdMean",
    "std_mean",
    torch.std_mean,
    lambda op, n: op.Sqrt(_var_body(op, n)),
    _std_gradient,
    ("x", "y"),
)
