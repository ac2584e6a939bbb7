"""Linear: y = x @ wᵀ + b, with the weight stored as torch.nn.Linear stores it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, TensorType, dtype_of, rank_of
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.cost_model import Shapes
from onnxtrain.ops.definition import (
    Call,
    Gradient,
    NodeView,
)
from onnxtrain.ops.interfaces.scalar_factors import SCALAR_FACTORS, ScalarFactor
from onnxtrain.ops.matmul.candidates import GemmDims, GemmOperands, gemm_dims, matmul_kernels
from onnxtrain.ops.matmul.rules import (
    Grad,
    as_rows,
    constant_axes,
    matmul_flops,
    matmul_shape,
    restrict_to_matmul_dtypes,
    rows_times_matrix,
    transposed_operand,
)


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    """F.linear with the GEMM that it uses in eager training, where w requires a gradient; see `rows_times_matrix`."""
    if x.dim() < 3 or x.is_contiguous():
        return torch.nn.functional.linear(x, w, b)
    y = rows_times_matrix(x, w.t())
    return y if b is None else y.add_(b)


# Linear


def _linear_type(n: NodeView) -> Sequence[TensorType]:
    x, w = sizes.dims_of(n.x), sizes.dims_of(n.w)
    if len(w) != 2 or (n.b is not None and rank_of(n.b) != 1):
        bias = "" if n.b is None else f" and b{list(sizes.dims_of(n.b))}"
        raise GraphError(
            "the weight or bias of Linear has the wrong rank", expected="w[n, k] and b[n]", got=f"w{list(w)}{bias}"
        )
    return (TensorType(dtype_of(n.x), (*matmul_shape(x, (w[1], w[0])),)),)


def _linear_body(op: Builder, n: NodeView) -> ir.Value:
    y: ir.Value = op.MatMul(n.x, op.Transpose(n.w, perm=[1, 0]))
    return y if n.b is None else op.Add(y, n.b)


def _linear_call(n: NodeView, x: Any, w: Any, b: Any) -> Call:
    return Call(torch.nn.functional.linear if rank_of(n.x) < 3 else linear, x, w, b)


def _linear_operands(n: NodeView, x: Any, w: Any, b: Any) -> GemmOperands | None:
    return None if rank_of(n.x) == 1 else GemmOperands(x, transposed_operand(w, 1, 0), b)


def _linear_dims(n: NodeView, shapes: Shapes) -> GemmDims:
    return gemm_dims(shapes[0], shapes[1][::-1])


def _linear_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, ...]:
    rows = as_rows(op, dy)
    # dw first: x is freed before dx is allocated.
    dw = op.ms.FusedMatMul(rows, as_rows(op, n.x), transA=1) if n.wants("w") else None
    db = op.ReduceSum(rows, constant_axes(op, 0), keepdims=0) if n.b is not None and n.wants("b") else None
    dx = None
    if n.wants("x"):
        dx = op.MatMul(rows, n.w)
        dx = dx if rank_of(n.x) == 2 else op.Reshape(dx, op.shape_of(n.x), allowzero=1)
    return (dx, dw, db)[: len(n.node.inputs)]


def _capture_linear(op: Builder, x: ir.Value, w: ir.Value, b: ir.Value | None = None) -> Any:
    if rank_of(w) == 1:
        y = op.MatMul(x, w)
    elif b is not None and sizes.dims_of(b) == sizes.dims_of(w)[:1]:
        return op.own.Linear(x, w, b)
    else:
        y = op.own.Linear(x, w)
    return y if b is None else op.Add(y, b)


LINEAR = define_pure(
    OWN,
    "Linear",
    ("x", "w", "b?"),
    ("y",),
    from_torch={"aten.linear.default": restrict_to_matmul_dtypes(_capture_linear)},
    shapes=_linear_type,
    body=_linear_body,
    gradient=(Gradient(_linear_gradient, reads=("x", "w")),),
    kernels=matmul_kernels(_linear_call, _linear_operands, _linear_dims),
    axes=lambda n: f"... k, n k{', n' * (n.b is not None)} -> ... n",
    flops=lambda n: matmul_flops(n.y, sizes.dims_of(n.x)[-1]),
)
SCALAR_FACTORS.register(LINEAR, lambda n: ScalarFactor(frozenset({"x"}), True, None) if n.b is None else None)
