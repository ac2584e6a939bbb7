"""Matrix products: MatMul, Gemm, and the two that training adds.

    MatMul(a[..., m, k], b[..., k, n]) -> y[..., m, n]                      and NumPy's 1-D operands
    FusedMatMul(a, b; alpha, transA, transB) -> y = alpha * op(a) @ op(b)   gradients: transposed views, no Transpose
    Linear(x[..., k], w[n, k], b[n]?) -> y[..., n] = x @ wᵀ + b
    Gemm(a[m, k], b[k, n], c?) -> y[m, n] = alpha * a @ b + beta * c

A product y = a @ b has the gradients dy @ bᵀ and aᵀ @ dy; in each form the transposes move into flags.
"""

from onnxtrain.ops.matmul.affine import linear
from onnxtrain.ops.matmul.product import (
    constant_axes,
    is_exact_attribute,
    of_product_types,
    rows_times_matrix,
    takes_factor,
)

__all__ = ["constant_axes", "is_exact_attribute", "linear", "of_product_types", "rows_times_matrix", "takes_factor"]
