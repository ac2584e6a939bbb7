"""FusedMatMul: a scale matmul whose operands may be transposed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import MICROSOFT, TensorType, dtype_of, rank_of
from onnxtrain.ops.body_parts import with_attributes
from onnxtrain.ops.constructors import define_by_body, define_pure
from onnxtrain.ops.cost_model import Shapes
from onnxtrain.ops.definition import (
    Call,
    Gradient,
    NodeView,
)
from onnxtrain.ops.interfaces.scalar_factors import SCALAR_FACTORS, ScalarFactor
from onnxtrain.ops.interfaces.stock_kernels import STOCK_KERNELS
from onnxtrain.ops.matmul.candidates import GemmDims, GemmOperands, gemm_dims, matmul_kernels
from onnxtrain.ops.matmul.rules import (
    Grad,
    matmul_flops,
    matmul_function,
    matmul_gradient,
    matmul_shape,
    scale,
    scaled_matmul_call,
    takes_factor,
    transposed_operand,
)
from onnxtrain.ops.reshape.dims import inverse, transposed

# transBatchA and transBatchB move the first axis behind the batch axes, before transA and transB apply.


def _fused_perm(rank: int, trans: int, trans_batch: int) -> list[int]:
    perm = [*range(1, rank - 1), 0, rank - 1] if trans_batch else list(range(rank))
    return [*perm[:-2], perm[-1], perm[-2]] if trans else perm


def _fused_shapes(n: NodeView) -> tuple[list[Size], list[Size]]:
    """Return the shapes of both operands after their transpositions."""
    shapes = []
    for value, trans, trans_batch in ((n.a, n.transA, n.transBatchA), (n.b, n.transB, n.transBatchB)):
        shape = sizes.dims_of(value)
        if len(shape) < 2:
            raise GraphError(
                "FusedMatMul got an operand of too low a rank", expected="rank 2 or more", got=f"{list(shape)}"
            )
        shapes.append([shape[axis] for axis in _fused_perm(len(shape), trans, trans_batch)])
    return shapes[0], shapes[1]


def _transposed_shape(value: ir.Value, trans: int) -> list[Size]:
    shape = sizes.dims_of(value)
    return [shape[axis] for axis in _fused_perm(len(shape), trans, 0)]


def _transpose_matmul_type(n: NodeView) -> Sequence[TensorType]:
    shape = matmul_shape(_transposed_shape(n.a, n.transA), _transposed_shape(n.b, n.transB))
    return (TensorType(dtype_of(n.a), shape),)


def transpose_matmul(a: torch.Tensor, b: torch.Tensor, trans_a: bool, trans_b: bool, alpha: float) -> torch.Tensor:
    y = torch.matmul(a.mT if trans_a else a, b.mT if trans_b else b)
    return y if alpha == 1 else y.mul_(alpha)


def _fused_type(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(dtype_of(n.a), matmul_shape(*_fused_shapes(n))),)


def _fused_axes(n: NodeView) -> str:
    rows, inner = ("k", "m") if n.transA else ("m", "k")
    left = f"{rows} ... {inner}" if n.transBatchA else f"... {rows} {inner}"
    rows, inner = ("n", "k") if n.transB else ("k", "n")
    right = f"{rows} ... {inner}" if n.transBatchB else f"... {rows} {inner}"
    return f"{left}, {right} -> ... m n"


def _fused_body(op: Builder, n: NodeView) -> ir.Value:
    operands = []
    for value, trans, trans_batch in ((n.a, n.transA, n.transBatchA), (n.b, n.transB, n.transBatchB)):
        perm = _fused_perm(rank_of(value), trans, trans_batch)
        operands.append(value if perm == sorted(perm) else op.Transpose(value, perm=perm))
    return scale(op, op.MatMul(*operands), n.alpha)


def _fused_call(n: NodeView, a: Any, b: Any) -> Call:
    first = transposed_operand(a, n.transA, n.transBatchA)
    second = transposed_operand(b, n.transB, n.transBatchB)
    return scaled_matmul_call(matmul_function(*_fused_shapes(n)), a, first, second, n.alpha)


def _fused_operands(n: NodeView, a: Any, b: Any) -> GemmOperands:
    matrices = rank_of(n.a) == 2 and rank_of(n.b) == 2 and not (n.transBatchA or n.transBatchB)
    is_weight_gradient = matrices and n.transA and not n.transB
    return GemmOperands(
        transposed_operand(a, n.transA, n.transBatchA),
        transposed_operand(b, n.transB, n.transBatchB),
        alpha=n.alpha,
        b_is_matrix=rank_of(n.b) == 2,
        weight_gradient=(a, b) if is_weight_gradient else None,
    )


def _fused_dims(n: NodeView, shapes: Shapes) -> GemmDims:
    operands = zip(shapes, (n.transA, n.transB), (n.transBatchA, n.transBatchB), strict=True)
    a, b = (tuple(shape[axis] for axis in _fused_perm(len(shape), *flags)) for shape, *flags in operands)
    return gemm_dims(a, b)


def _fused_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    perms = [_fused_perm(rank_of(v), 0, trans) for v, trans in ((n.a, n.transBatchA), (n.b, n.transBatchB))]
    a, b = (transposed(op, v, perm) for v, perm in zip((n.a, n.b), perms, strict=True))
    gradients = matmul_gradient(op, n, a, b, dy, n.transA, n.transB, n.alpha)
    # A gradient has the batch axes of y: more than those of an operand that was broadcast.
    da, db = (
        None if g is None else transposed(op, g, inverse(_fused_perm(rank_of(g), 0, trans)))
        for g, trans in zip(gradients, (n.transBatchA, n.transBatchB), strict=True)
    )
    return da, db


def _scaled(op: Builder, n: NodeView, number: float) -> Sequence[ir.Value] | None:
    alpha = n.alpha * number
    return with_attributes(op, n, alpha=alpha) if takes_factor(dtype_of(n.a), alpha) else None


FUSED_MATMUL = define_pure(
    MICROSOFT,
    "FusedMatMul",
    ("a", "b"),
    ("y",),
    attributes={"alpha": 1.0, "transA": 0, "transB": 0, "transBatchA": 0, "transBatchB": 0},
    shapes=_fused_type,
    body=_fused_body,
    gradient=(Gradient(_fused_gradient, reads=("a", "b")),),
    kernels=matmul_kernels(_fused_call, _fused_operands, _fused_dims),
    axes=_fused_axes,
    flops=lambda n: matmul_flops(n.y, _fused_shapes(n)[0][-1]),
)


@STOCK_KERNELS.implements(FUSED_MATMUL)
def _has_stock_kernel(n: NodeView) -> bool:
    """Return whether it may run: onnxruntime 1.31 crashes on a transposed batch of size 0."""
    return dtype_of(n.a) == ir.DataType.FLOAT and not n.transBatchA and not n.transBatchB


SCALAR_FACTORS.register(FUSED_MATMUL, lambda n: ScalarFactor(frozenset({"a", "b"}), True, _scaled))


define_by_body(
    "TransposeMatMul",  # FusedMatMul's first name
    ("a", "b"),
    lambda op, n: op.ms.FusedMatMul(n.a, n.b, alpha=n.alpha, transA=n.transA, transB=n.transB),
    lambda n, a, b: Call(transpose_matmul, a, b, bool(n.transA), bool(n.transB), n.alpha),
    domain=MICROSOFT,
    attributes={"alpha": 1.0, "transA": 0, "transB": 0},
    shapes=_transpose_matmul_type,
    axes=lambda n: f"... {'k m' if n.transA else 'm k'}, ... {'n k' if n.transB else 'k n'} -> ... m n",
    flops=lambda n: matmul_flops(n.y, _transposed_shape(n.a, n.transA)[-1]),
)
