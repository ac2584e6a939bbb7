"""Matmul ops: ONNX's MatMul and Gemm, ONNX Runtime's FusedMatMul, and Linear.

    MatMul(a[..., m, k], b[..., k, n]) -> y[..., m, n]                      and 1-D operands, as in NumPy
    FusedMatMul(a, b; alpha, transA, transB) -> y = alpha * op(a) @ op(b)   transposed operands without Transpose nodes
    Linear(x[..., k], w[n, k], b[n]?) -> y[..., n] = x @ wᵀ + b
    Gemm(a[m, k], b[k, n], c?) -> y[m, n] = alpha * a @ b + beta * c

The gradients of y = a @ b are dy @ bᵀ and aᵀ @ dy; the transpositions become the flags transA and transB.
"""

from onnxtrain.ops.matmul.rules import (
    constant_axes,
    is_exact_attribute,
    restrict_to_matmul_dtypes,
    rows_times_matrix,
    takes_factor,
)

__all__ = ["constant_axes", "is_exact_attribute", "restrict_to_matmul_dtypes", "rows_times_matrix", "takes_factor"]
