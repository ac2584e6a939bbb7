"""MatMul: numpy.matmul of matrices, batches of matrices and vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import ONNX, TensorType, dtype_of, rank_of
from onnxtrain.ops.body_parts import promoted
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import (
    STANDARD,
    Call,
    FromTorch,
    Gradient,
    NodeView,
    numel,
)
from onnxtrain.ops.interfaces.scalar_factors import SCALAR_FACTORS, ScalarFactor
from onnxtrain.ops.matmul.candidates import GemmOperands, gemm_dims, matmul_kernels
from onnxtrain.ops.matmul.rules import (
    INTEGERS,
    Grad,
    as_rows,
    build_matmul,
    constant_axes,
    is_exact_attribute,
    matmul_flops,
    matmul_function,
    matmul_gradient,
    matmul_shape,
    restrict_to_matmul_dtypes,
    scaled_sum,
    takes_factor,
)


def _matmul_type(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(dtype_of(n.a), matmul_shape(sizes.dims_of(n.a), sizes.dims_of(n.b))),)


def _matmul_axes(n: NodeView) -> str:
    left = "k" if rank_of(n.a) == 1 else "... m k"
    right = "k" if rank_of(n.b) == 1 else "... k n"
    rows = " m" if rank_of(n.a) > 1 else ""
    columns = " n" if rank_of(n.b) > 1 else ""
    batch = "..." if "..." in left + right else ""
    return f"{left}, {right} -> {batch}{rows}{columns}"


def _matmul_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    rank_a, rank_b = rank_of(n.a), rank_of(n.b)
    if rank_a == 1 and rank_b == 1:
        return op.Mul(dy, n.b) if n.wants("a") else None, op.Mul(dy, n.a) if n.wants("b") else None
    if rank_a == 1:
        return _row_vector_gradient(op, n, dy)
    if rank_b == 1:
        return _column_vector_gradient(op, n, dy)
    return matmul_gradient(op, n, n.a, n.b, dy)


def _row_vector_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    """Return the gradients of y[..., n] = a[k] @ b[..., k, n]."""
    da = db = None
    last = rank_of(dy) - 1
    if n.wants("a"):
        if rank_of(n.b) == 2:
            da = op.MatMul(n.b, dy)
        else:
            da = op.Squeeze(op.MatMul(n.b, op.Unsqueeze(dy, constant_axes(op, last + 1))), constant_axes(op, last + 1))
    if n.wants("b"):
        db = op.Mul(op.Unsqueeze(n.a, constant_axes(op, 1)), op.Unsqueeze(dy, constant_axes(op, last)))
    return da, db


def _column_vector_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    """Return the gradients of y[..., m] = a[..., m, k] @ b[k]."""
    da = db = None
    if n.wants("a"):
        da = op.Mul(op.Unsqueeze(dy, constant_axes(op, rank_of(dy))), n.b)
    if n.wants("b"):
        flat = dy if rank_of(dy) == 1 else op.Reshape(dy, op.sizes([numel(dy)]), allowzero=1)
        db = op.MatMul(flat, as_rows(op, n.a))
    return da, db


def _capture_matmul(op: Builder, a: ir.Value, b: ir.Value) -> Any:
    return op.MatMul(a, b)


def _capture_outer(op: Builder, a: ir.Value, b: ir.Value) -> Any:
    a, b = promoted(op, a, b)
    return op.Mul(op.Unsqueeze(a, constant_axes(op, 1)), op.Unsqueeze(b, constant_axes(op, 0)))


def _capture_baddbmm(op: Builder, base: ir.Value, a: ir.Value, b: ir.Value, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if is_exact_attribute(alpha) and op.out[0].dtype not in INTEGERS:
        return scaled_sum(op, base, beta, build_matmul(op, a, b, 0, 0, alpha), 1)
    return scaled_sum(op, base, beta, op.MatMul(a, b), alpha)


def _capture_addbmm(op: Builder, base: ir.Value, a: ir.Value, b: ir.Value, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if not dtype_of(base) == dtype_of(a) == dtype_of(b):  # eager accepts mixed dtypes for an empty batch
        return NotImplemented
    return scaled_sum(op, base, beta, op.ReduceSum(op.MatMul(a, b), constant_axes(op, 0), keepdims=0), alpha)


def _capture_addmv(op: Builder, base: ir.Value, a: ir.Value, b: ir.Value, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if sizes.dims_of(a)[0] == 0:  # PyTorch then returns base's shape, even if base is larger
        return NotImplemented
    return scaled_sum(op, base, beta, op.MatMul(a, b), alpha)


def _capture_addr(op: Builder, base: ir.Value, a: ir.Value, b: ir.Value, *, beta: Any = 1, alpha: Any = 1) -> Any:
    base, a, b = promoted(op, base, a, b)
    return scaled_sum(op, base, beta, _capture_outer(op, a, b), alpha)


def _call(n: NodeView, a: Any, b: Any) -> Call:
    return Call(matmul_function(sizes.dims_of(n.a), sizes.dims_of(n.b)), a, b)


def _operands(n: NodeView, a: Any, b: Any) -> GemmOperands | None:
    if rank_of(n.a) == 1 or rank_of(n.b) == 1:
        return None
    return GemmOperands(a, b, b_is_matrix=rank_of(n.b) == 2)


_MATMUL_CAPTURES: Mapping[str, FromTorch] = {
    "aten.matmul.default": _capture_matmul,
    "aten.mm.default": _capture_matmul,
    "aten.bmm.default": _capture_matmul,
    "aten.mv.default": _capture_matmul,
    "aten.dot.default": _capture_matmul,
    "aten.vdot.default": _capture_matmul,  # conjugates complex operands, which are not captured
    "aten.outer.default": _capture_outer,
    "aten.ger.default": _capture_outer,
    "aten.baddbmm.default": _capture_baddbmm,
    "aten.addbmm.default": _capture_addbmm,
    "aten.addmv.default": _capture_addmv,
    "aten.addr.default": _capture_addr,
}


def _factor(n: NodeView) -> ScalarFactor | None:
    if rank_of(n.a) < 2 or rank_of(n.b) < 2:
        return None
    return ScalarFactor(frozenset({"a", "b"}), True, _scaled)


def _scaled(op: Builder, n: NodeView, number: float) -> Sequence[ir.Value] | None:
    return (build_matmul(op, n.a, n.b, 0, 0, number),) if takes_factor(dtype_of(n.a), number) else None


MATMUL = define_pure(
    ONNX,
    "MatMul",
    ("a", "b"),
    ("y",),
    from_torch={name: restrict_to_matmul_dtypes(convert) for name, convert in _MATMUL_CAPTURES.items()},
    shapes=_matmul_type,
    body=STANDARD,
    gradient=(Gradient(_matmul_gradient, reads=("a", "b")),),
    kernels=matmul_kernels(_call, _operands, lambda n, shapes: gemm_dims(shapes[0], shapes[1])),
    axes=_matmul_axes,
    flops=lambda n: matmul_flops(n.y, sizes.dims_of(n.a)[-1]),
)
SCALAR_FACTORS.register(MATMUL, _factor)
