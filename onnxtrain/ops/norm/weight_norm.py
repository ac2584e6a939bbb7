"""Weight norm: a weight as the product of a direction and a magnitude.

    WeightNorm(v[o, i], g[o, 1]) -> w[o, i], norm[o, 1]        w = v * g / norm, norm = |v| over all axes but `dim`

With dim=-1 the norm is over all of v, and g and norm are 0-dimensional.

Source: Salimans and Kingma 2016, https://arxiv.org/abs/1602.07868 (eq. 2, 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Sizes
from onnxtrain.graph.values import OWN, TensorType, dtype_of, rank_of, type_of
from onnxtrain.ops.body_parts import cast, sum_over
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import Call, Gradient, Kernel, NodeView, numel
from onnxtrain.ops.dtypes import accumulation_dtype
from onnxtrain.ops.gradient_masks import apply_output_mask, first_cotangent
from onnxtrain.torch_compat import aten_kernels

aten = torch.ops.aten


def _norm_axes(n: NodeView) -> list[int]:
    """Return the axes over which the norm is computed."""
    return [axis for axis in range(rank_of(n.v)) if axis != n.dim]


def _norm_shape(v: ir.Value, dim: int) -> Sizes:
    shape = sizes.dims_of(v)
    return () if dim == -1 else tuple(s if axis == dim else 1 for axis, s in enumerate(shape))


def _types(n: NodeView) -> Sequence[TensorType]:
    return type_of(n.v), TensorType(accumulation_dtype(dtype_of(n.v)), _norm_shape(n.v, n.dim))


def _sum_to_norm_shape(op: Builder, n: NodeView, x: ir.Value) -> ir.Value:
    return sum_over(op, x, _norm_axes(n), keepdims=n.dim != -1)


def _body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    dtype = accumulation_dtype(dtype_of(n.v))
    v = cast(op, n.v, dtype)
    norm = op.Sqrt(_sum_to_norm_shape(op, n, op.Mul(v, v)))
    return cast(op, op.Mul(v, op.Div(cast(op, n.g, dtype), norm)), dtype_of(n.v)), norm


def _gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> list[ir.Value | None]:
    dw = first_cotangent(n, cotangents)
    grads = op.own.WeightNormGrad(dw, n.v, n.g, n.norm, dim=n.dim)
    return apply_output_mask(grads, (1, 1), n)


def _is_fused(n: NodeView, device: str) -> bool:
    """Return whether PyTorch's fused kernels apply.

    `dim` is the first or the last axis, and the dtype is not float16.
    """
    return n.dim in (0, rank_of(n.v) - 1) and dtype_of(n.v) != ir.DataType.FLOAT16


def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's fused kernel."""
    return aten_kernels.weight_norm(v.contiguous(), g.contiguous(), dim)


def weight_norm_by_aten(v: torch.Tensor, g: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's decomposition, which it runs where it has no fused kernel."""
    norm = torch.norm_except_dim(v.contiguous(), 2, dim)
    return v * (g / norm), norm


def weight_norm_backward(dw: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norm: torch.Tensor, dim: int) -> Any:
    """PyTorch's fused backward kernel."""
    return aten_kernels.weight_norm_grad(dw.contiguous(), v.contiguous(), g.contiguous(), norm, dim)


def weight_norm_backward_by_aten(
    dw: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norm: torch.Tensor, axes: list[int], keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of `weight_norm_by_aten`."""
    dg = (dw * v).sum(axes, keepdim) / norm
    return (dw - v * (dg / norm)) * (g / norm), dg


def _capture(op: Builder, v: ir.Value, g: ir.Value, dim: int = 0) -> Any:
    if sizes.dims_of(g) != _norm_shape(v, dim) or dtype_of(g) != dtype_of(v):
        return NotImplemented  # no module does this: it stays an ATen node
    return op.own.WeightNorm(v, g, dim=dim)[0]


define_pure(
    OWN,
    "WeightNorm",
    ("v", "g"),
    ("w", "norm"),
    attributes={"dim": 0},
    from_torch={"aten._weight_norm.default": _capture},
    shapes=_types,
    body=_body,
    gradient=(Gradient(_gradient, reads=("v", "g", "norm")),),
    kernels=(Kernel(lower=lambda n, v, g: Call(weight_norm, v, g, n.dim), applies=_is_fused),),
    lower=lambda n, v, g: Call(weight_norm_by_aten, v, g, n.dim),
    axes=lambda n: _axes(n, "V G -> V G"),
    flops=lambda n: sizes.multiply(3, numel(n.v)),
)


def _axes(n: NodeView, pattern: str) -> str:
    rank = rank_of(n.v)
    axes_of = {
        "V": " ".join("o" if axis == n.dim else f"[i{axis}]" for axis in range(rank)),
        "G": " ".join("o" if axis == n.dim else "1" for axis in range(rank)) if n.dim != -1 else "",
    }
    left, right = (part.split() for part in pattern.split("->"))
    return f"{', '.join(axes_of[w] for w in left)} -> {', '.join(axes_of[w] for w in right)}"


# WeightNormGrad(dw, v, g, norm) -> dv, dg
#     dg = sum(dw * v) / norm        dv = (dw - v * dg / norm) * g / norm


def _grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    dtype = accumulation_dtype(dtype_of(n.v))
    dw, v, g = (cast(op, x, dtype) for x in (n.dw, n.v, n.g))
    dg = op.Div(_sum_to_norm_shape(op, n, op.Mul(dw, v)), n.norm)
    dv = op.Mul(op.Sub(dw, op.Mul(v, op.Div(dg, n.norm))), op.Div(g, n.norm))
    return cast(op, dv, dtype_of(n.v)), cast(op, dg, dtype_of(n.g))


define_pure(
    OWN,
    "WeightNormGrad",
    ("dw", "v", "g", "norm"),
    ("dv", "dg"),
    attributes={"dim": 0},
    shapes=lambda n: (type_of(n.v), type_of(n.g)),
    body=_grad_body,
    kernels=(
        Kernel(lower=lambda n, dw, v, g, norm: Call(weight_norm_backward, dw, v, g, norm, n.dim), applies=_is_fused),
    ),
    lower=lambda n, dw, v, g, norm: Call(weight_norm_backward_by_aten, dw, v, g, norm, _norm_axes(n), n.dim != -1),
    axes=lambda n: _axes(n, "V V G G -> V G"),
    flops=lambda n: sizes.multiply(6, numel(n.v)),
)
