"""Cumulative products.

    CumProd(x) -> y                      y[k] = product of x[0..k] along an axis
    CumProdGrad(dy, x, y) -> dx          dx[i] = sum over k >= i of dy[k] * product of x[0..k] without x[i]

ONNX has CumProd from opset 26 on, without a gradient. The bodies reduce a triangular mask: n^2 elements for an axis of
size n, and n^3 for the gradient, which is exact at zeros, too. The kernels take n steps.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, dtype_of, rank_of, type_of
from onnxtrain.ops.body_parts import cast, int64_vector
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import Call, Gradient, NodeView, numel
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.reshape.dims import unsqueezed
from onnxtrain.ops.reshape.movement import axis_of, checked_axis
from onnxtrain.ops.reshape.rows import arange


def _axes(n: NodeView) -> str:
    axis = axis_of(n, n.x)
    names = " ".join(f"[a{i}]" if i == axis else f"a{i}" for i in range(rank_of(n.x)))
    return f"{', '.join([names] * len(n.node.inputs))} -> {names}"


def _capture(op: Builder, x: ir.Value, dim: int, *, dtype: Any = None) -> Any:
    x = cast(op, x, op.out[0].dtype)
    if not rank_of(x):
        return op.Identity(x)
    return op.own.CumProd(x, axis=checked_axis(dim, rank_of(x), "the axis of cumprod"))


def _swap_with_last(op: Builder, n: NodeView, x: ir.Value) -> ir.Value:
    """Swap the node's axis of x with the last one."""
    perm = list(range(rank_of(x)))
    perm[axis_of(n, x)], perm[-1] = perm[-1], perm[axis_of(n, x)]
    return x if axis_of(n, x) == rank_of(x) - 1 else op.Transpose(x, perm=perm)


def _triangle(op: Builder, n: NodeView, relation: str) -> ir.Value:
    """Return the mask [i, k] of k < i or k <= i (`relation`: Less or LessOrEqual)."""
    indices = arange(op, sizes.dims_of(n.x)[axis_of(n, n.x)])
    return op.op("", relation)(unsqueezed(op, indices, 0), unsqueezed(op, indices, 1))


def _body(op: Builder, n: NodeView) -> ir.Value:
    rows = unsqueezed(op, _swap_with_last(op, n, n.x), rank_of(n.x) - 1)
    factors = op.Where(_triangle(op, n, "LessOrEqual"), rows, op.scalar(1, like=n.x))
    return _swap_with_last(op, n, op.ReduceProd(factors, int64_vector(op, [rank_of(n.x)]), keepdims=0))


def _grad_body(op: Builder, n: NodeView) -> ir.Value:
    """Multiply, for each i and k, the elements before i by those after i up to k."""
    one, zero = op.scalar(1, like=n.x), op.scalar(0, like=n.x)
    rank = rank_of(n.x)
    x, dy = (unsqueezed(op, _swap_with_last(op, n, v), rank - 1) for v in (n.x, n.dy))
    k = int64_vector(op, [rank])  # not negative: onnxruntime's result for an empty tensor is wrong then
    before = op.ReduceProd(op.Where(_triangle(op, n, "Less"), x, one), k, keepdims=0)
    is_after = op.Not(_triangle(op, n, "LessOrEqual"))
    after = op.own.CumProd(op.Where(is_after, x, one), axis=rank)
    depends = op.Not(_triangle(op, n, "Less"))
    total = op.ReduceSum(op.Where(depends, op.Mul(dy, after), zero), k, keepdims=0)
    return _swap_with_last(op, n, op.Mul(total, before))


def _gradient(op: Builder, n: NodeView, dy: ir.Value) -> Any:
    return op.own.CumProdGrad(dy, n.x, n.y, axis=axis_of(n, n.x))


def cumprod_backward(dy: torch.Tensor, x: torch.Tensor, dim: int, y: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.cumprod_backward.default(dy, x, dim, y)


define_pure(
    OWN,
    "CumProd",
    ("x",),
    ("y",),
    attributes={"axis": -1},
    from_torch={"aten.cumprod.default": _capture},
    shapes=lambda n: (type_of(n.x),),
    body=_body,
    gradient=(Gradient(_gradient, reads=("x", "y")),),
    lower=lambda n, x: Call(torch.cumprod, x, axis_of(n, n.x), dtype=TORCH_DTYPES[dtype_of(n.x)]),
    axes=_axes,
    flops=lambda n: numel(n.x),
)
define_pure(
    OWN,
    "CumProdGrad",
    ("dy", "x", "y"),
    ("dx",),
    attributes={"axis": -1},
    shapes=lambda n: (type_of(n.x),),
    body=_grad_body,
    lower=lambda n, dy, x, y: Call(cumprod_backward, dy, x, axis_of(n, n.x), y),
    axes=_axes,
    flops=lambda n: sizes.multiply(4, numel(n.x)),
)
