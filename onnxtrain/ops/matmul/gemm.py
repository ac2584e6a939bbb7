"""Gemm: y = alpha * a @ b + beta * c of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import ONNX, TensorType, dtype_of, rank_of
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.cost_model import Shapes
from onnxtrain.ops.definition import (
    STANDARD,
    Call,
    Gradient,
    NodeView,
)
from onnxtrain.ops.matmul.candidates import GemmDims, GemmOperands, gemm_dims, matmul_kernels
from onnxtrain.ops.matmul.rules import (
    INTEGERS,
    Grad,
    is_exact_attribute,
    matmul_flops,
    matmul_gradient,
    matmul_shape,
    restrict_to_matmul_dtypes,
    scale,
    scaled_matmul_call,
    scaled_sum,
    transposed_operand,
)

# Gemm


def _gemm_type(n: NodeView) -> Sequence[TensorType]:
    if rank_of(n.a) != 2 or rank_of(n.b) != 2:
        raise GraphError(
            "Gemm got an operand that is not a matrix",
            expected="a and b of rank 2",
            got=f"{list(sizes.dims_of(n.a))} and {list(sizes.dims_of(n.b))}",
        )
    a, b = sizes.dims_of(n.a), sizes.dims_of(n.b)
    return (TensorType(dtype_of(n.a), matmul_shape(a[::-1] if n.transA else a, b[::-1] if n.transB else b)),)


def _gemm_axes(n: NodeView) -> str:
    left, right = "k m" if n.transA else "m k", "n k" if n.transB else "k n"
    if n.c is None:
        return f"{left}, {right} -> m n"
    return f"{left}, {right}, {('', 'n', 'm n')[rank_of(n.c)]} -> m n"


def _gemm_call(n: NodeView, a: Any, b: Any, c: Any) -> Call:
    first, second = transposed_operand(a, n.transA, 0), transposed_operand(b, n.transB, 0)
    if c is None:
        return scaled_matmul_call(torch.mm, a, first, second, n.alpha)
    factors = {name: value for name, value in (("beta", n.beta), ("alpha", n.alpha)) if value != 1}
    return Call(torch.addmm, c, first, second, **factors)


def _gemm_operands(n: NodeView, a: Any, b: Any, c: Any) -> GemmOperands | None:
    """The other libraries add an unscaled bias vector only."""
    if n.c is not None and (
        rank_of(n.c) != 1 or sizes.dims_of(n.c) != sizes.dims_of(n.y)[1:] or (n.alpha, n.beta) != (1, 1)
    ):
        return None
    return GemmOperands(
        transposed_operand(a, n.transA, 0),
        transposed_operand(b, n.transB, 0),
        c,
        n.alpha,
        weight_gradient=(a, b) if n.transA and not n.transB and n.c is None else None,
    )


def _gemm_dims(n: NodeView, shapes: Shapes) -> GemmDims:
    a, b = shapes[0], shapes[1]
    return gemm_dims(a[::-1] if n.transA else a, b[::-1] if n.transB else b)


def _gemm_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, ...]:
    da, db = matmul_gradient(op, n, n.a, n.b, dy, n.transA, n.transB, n.alpha)
    dc = scale(op, dy, n.beta) if n.c is not None and n.wants("c") else None
    return (da, db, dc)[: len(n.node.inputs)]


def _capture_addmm(op: Builder, c: ir.Value, a: ir.Value, b: ir.Value, *, beta: Any = 1, alpha: Any = 1) -> Any:
    factors = alpha, beta
    if factors != (1, 1) and (not all(map(is_exact_attribute, factors)) or op.out[0].dtype in INTEGERS):
        return scaled_sum(op, c, beta, op.MatMul(a, b), alpha)
    attributes = {name: None if f == 1 else float(f) for name, f in (("alpha", alpha), ("beta", beta))}
    return op.Gemm(a, b, alpha=attributes["alpha"]) if beta == 0 else op.Gemm(a, b, c, **attributes)


GEMM = define_pure(
    ONNX,
    "Gemm",
    ("a", "b", "c?"),
    ("y",),
    attributes={"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0},
    from_torch={"aten.addmm.default": restrict_to_matmul_dtypes(_capture_addmm)},
    shapes=_gemm_type,
    body=STANDARD,
    gradient=(Gradient(_gemm_gradient, reads=("a", "b")),),
    kernels=matmul_kernels(_gemm_call, _gemm_operands, _gemm_dims),
    axes=_gemm_axes,
    flops=lambda n: matmul_flops(n.y, sizes.dims_of(n.a)[0 if n.transA else 1]),
)
