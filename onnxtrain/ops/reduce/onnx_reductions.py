"""Reductions of ONNX and ONNX Runtime Training that PyTorch writes as several ops.

ReduceLogSum(x, axes)          logarithm of the sum
ReduceSumSquare(x, axes)       sum of squares
ReduceSumTraining(x, axes)     ReduceSum under its ONNX Runtime Training name
ReduceAllL2(xs...)             L2 norm of all elements of all tensors
IsAllFinite(xs...)             whether no element is NaN or infinite
All(x)                         whether every element is true
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import MICROSOFT, TensorType, dtype_of, rank_of
from onnxtrain.ops.body_parts import cast, sum_over
from onnxtrain.ops.constructors import define_by_body, no_axes
from onnxtrain.ops.definition import Call, Method, NodeView, numel
from onnxtrain.ops.dtypes import accumulation_dtype
from onnxtrain.ops.reduce.over_axes import axes_input, axes_of, axis_map, output_types


def _sum(op: Builder, n: NodeView, x: ir.Value) -> ir.Value:
    """Sum x; without axes return x itself: with noop_with_empty_axes ONNX skips the sum, not the elementwise part."""
    axes = axes_of(n)
    return op.ReduceSum(x, axes_input(op, axes), keepdims=n.keepdims) if axes else x


def _define_reduction(
    name: str,
    body: Callable[[Builder, NodeView], ir.Value],
    function: Callable[..., Any],
    domain: str,
) -> None:
    define_by_body(
        name,
        ("x", "axes?"),
        body,
        lambda n, x, axes: Call(function, x, list(axes_of(n)), bool(n.keepdims)),
        domain=domain,
        attributes={"keepdims": 1, "noop_with_empty_axes": 0},
        shapes=output_types,
        axes=axis_map,
        nondiff_inputs=frozenset({"axes"}),
        flops=lambda n: numel(n.x),
    )


def sum_kernel(x: torch.Tensor, axes: Sequence[int], keepdim: bool) -> torch.Tensor:
    """Sum as torch.sum does, but copy x if `axes` is empty; integers keep their type."""
    return x.sum(list(axes), keepdim, dtype=x.dtype) if axes else x.clone()


def log_sum(x: torch.Tensor, axes: Sequence[int], keepdim: bool) -> torch.Tensor:
    return sum_kernel(x, axes, keepdim).log_()


def sum_square(x: torch.Tensor, axes: Sequence[int], keepdim: bool) -> torch.Tensor:
    return sum_kernel(x.square(), axes, keepdim)


_define_reduction("ReduceLogSum", lambda op, n: op.Log(_sum(op, n, n.x)), log_sum, "")
_define_reduction("ReduceSumSquare", lambda op, n: _sum(op, n, op.Mul(n.x, n.x)), sum_square, "")
_define_reduction(
    "ReduceSumTraining",
    lambda op, n: (
        op.ReduceSum(n.x, axes_input(op, axes_of(n)), keepdims=n.keepdims) if axes_of(n) else op.Identity(n.x)
    ),
    sum_kernel,
    MICROSOFT,
)


# Reductions over all elements of several tensors


def _sum_of_all(op: Builder, x: ir.Value) -> ir.Value:
    return sum_over(op, x, range(rank_of(x)), keepdims=False)


def _norm_body(op: Builder, n: NodeView) -> ir.Value:
    dtype = accumulation_dtype(dtype_of(n.xs[0]))
    squares = [_sum_of_all(op, op.Mul(wide, wide)) for wide in (cast(op, x, dtype) for x in n.xs)]
    return op.Sqrt(op.Sum(*squares))


def norm_of_all(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute the L2 norm in float32 or float64, as ONNX Runtime Training does for half-precision gradients."""
    wide = [x if x.dtype == torch.float64 else x.float() for x in xs]
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x) for x in wide]))


define_by_body(
    "ReduceAllL2",
    ("xs...",),
    _norm_body,
    lambda n, xs: Call(norm_of_all, xs),
    domain=MICROSOFT,
    shapes=lambda n: (TensorType(accumulation_dtype(dtype_of(n.xs[0])), ()),),
    axes=no_axes,
    differentiable=False,
)


def _has_nonfinite(op: Builder, n: NodeView, x: ir.Value) -> ir.Value:
    infinite, nan = op.IsInf(x), op.IsNaN(x)
    nonfinite = infinite if n.isinf_only else nan if n.isnan_only else op.Or(infinite, nan)
    return op.own.ReduceAny(nonfinite, keepdims=0)


def _finite_body(op: Builder, n: NodeView) -> ir.Value:
    any_nonfinite = _has_nonfinite(op, n, n.xs[0])
    for x in n.xs[1:]:
        any_nonfinite = op.Or(any_nonfinite, _has_nonfinite(op, n, x))
    return op.Not(any_nonfinite)


def all_finite(xs: Sequence[torch.Tensor], check_inf: bool, check_nan: bool) -> torch.Tensor:
    """Return whether no element is infinite (`check_inf`) or NaN (`check_nan`)."""
    finite = [~((x.isinf() if check_inf else False) | (x.isnan() if check_nan else False)).any() for x in xs]  # type: ignore[union-attr]  # one of them is checked
    return torch.stack(finite).all()


define_by_body(
    "IsAllFinite",
    ("xs...",),
    _finite_body,
    lambda n, xs: Call(all_finite, xs, not n.isnan_only, not n.isinf_only),
    domain=MICROSOFT,
    attributes={"isinf_only": 0, "isnan_only": 0},
    shapes=lambda n: (TensorType(ir.DataType.BOOL, ()),),
    axes=no_axes,
    differentiable=False,
)
define_by_body(
    "All",
    ("x",),
    lambda op, n: op.own.ReduceAll(n.x, keepdims=0),
    lambda n, x: Method("all", x),
    domain=MICROSOFT,
    shapes=lambda n: (TensorType(ir.DataType.BOOL, ()),),
    axes=no_axes,
    differentiable=False,
)
