"""Rules that all matmul ops share: dtypes, shapes, gradients, calls and scale sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import dtype_of, rank_of
from onnxtrain.ops.body_parts import as_value
from onnxtrain.ops.definition import (
    Call,
    FromTorch,
    Method,
    NodeView,
    Property,
    numel,
)

Grad = ir.Value | None


# The dtypes of ai.onnx MatMul that PyTorch supports too.
INTEGERS = frozenset({ir.DataType.INT32, ir.DataType.INT64})
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def restrict_to_matmul_dtypes(convert: FromTorch) -> FromTorch:
    """Restrict a conversion to the dtypes of ONNX's MatMul; calls with other dtypes stay ATen nodes."""

    def capture(op: Builder, *arguments: Any, **keywords: Any) -> Any:
        return convert(op, *arguments, **keywords) if op.out[0].dtype in INTEGERS | _FLOATS else NotImplemented

    return capture


def is_exact_attribute(number: Any) -> bool:
    """Return whether this is a number that an ONNX attribute, which is a float32, represents exactly."""
    return isinstance(number, (int, float)) and float(np.float32(number)) == number


def constant_axes(op: Builder, *axes: int) -> ir.Value:
    """Return axes as the input of Unsqueeze, Squeeze and reductions."""
    return op.constant(list(axes), ir.DataType.INT64)


def as_rows(op: Builder, value: ir.Value) -> ir.Value:
    """`value` as a matrix: all axes but the last one flattened."""
    if rank_of(value) == 2:
        return value
    *leading, last = sizes.dims_of(value)
    return op.Reshape(value, op.sizes([sizes.multiply(*leading), last]), allowzero=1)


def matmul_shape(a: Sequence[Size], b: Sequence[Size]) -> Sizes:
    """Return NumPy's shape of a @ b."""
    if not a or not b:
        raise GraphError(
            "matmul got a scalar operand", expected="operands of rank 1 or more", got=f"{list(a)} @ {list(b)}"
        )
    inner_a, inner_b = a[-1], b[-2] if len(b) > 1 else b[0]
    if isinstance(inner_a, int) and isinstance(inner_b, int) and inner_a != inner_b:
        raise GraphError(
            "matmul got operands whose inner dimensions differ",
            expected="a[..., m, k] @ b[..., k, n]",
            got=f"{list(a)} @ {list(b)}",
        )
    rows = a[-2:-1] if len(a) > 1 else ()
    columns = b[-1:] if len(b) > 1 else ()
    return (*sizes.broadcast(a[:-2], b[:-2]), *rows, *columns)


def matmul_flops(y: ir.Value, inner: Size) -> Size:
    return sizes.multiply(2, inner, numel(y))


def rows_times_matrix(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a[..., m, k] @ b[k, n] as one GEMM, as in eager training.

    If `a` cannot be viewed as a matrix, torch.matmul copies it when b requires a gradient, as in eager training. No
    tensor requires a gradient here, so torch.matmul would multiply the matrices of `a` by b one by one.
    """
    if a.is_contiguous():
        return torch.matmul(a, b)
    return torch.mm(a.flatten(0, -2), b).view(a.shape[:-1] + b.shape[1:])


def matmul_function(a: Sequence[Size], b: Sequence[Size]) -> Callable[..., Any]:
    """Return the torch function for operands of these shapes; torch.matmul takes 1 to 2 us to select the same one."""
    match len(a), len(b):
        case 2, 2:
            return torch.mm
        case 2, 1:
            return torch.mv
        case 1, 1:
            return torch.dot
        case 3, 3 if a[0] == b[0]:
            return torch.bmm
        case _, 2 if len(a) > 2:
            return rows_times_matrix
    return torch.matmul


def transposed_operand(argument: Any, trans: int, trans_batch: int) -> Any:
    """Return the view of an operand that FusedMatMul multiplies: see its attributes transA and transBatchA."""
    if trans_batch:
        argument = Method("movedim", argument, 0, -2)
    if trans:
        argument = Property("mT", argument)
    return argument


def scaled_matmul_call(function: Callable[..., Any], a: Any, first: Any, second: Any, alpha: float) -> Call:
    """Call `function` for alpha * first @ second; `a` is an operand of the result's dtype."""
    if alpha == 1:
        return Call(function, first, second)
    if function is not torch.mm and function is not torch.bmm:
        return Call(torch.mul, Call(function, first, second), alpha)
    scaling = torch.addmm if function is torch.mm else torch.baddbmm
    # beta=0: only the dtype of the first operand is used.
    return Call(scaling, Method("new_empty", a, ()), first, second, beta=0, alpha=alpha)


def build_matmul(op: Builder, a: ir.Value, b: ir.Value, trans_a: int, trans_b: int, alpha: float) -> ir.Value:
    result: ir.Value
    if not trans_a and not trans_b and alpha == 1:
        result = op.MatMul(a, b)
    else:
        result = op.ms.FusedMatMul(
            a, b, alpha=None if alpha == 1 else alpha, transA=trans_a or None, transB=trans_b or None
        )
    return result


def matmul_gradient(
    op: Builder,
    n: NodeView,
    a: ir.Value,
    b: ir.Value,
    dy: ir.Value,
    trans_a: int = 0,
    trans_b: int = 0,
    alpha: float = 1.0,
) -> tuple[Grad, Grad]:
    """Return the gradients of y = alpha * op(a) @ op(b), of rank 2 or more; a gradient has the batch axes of y."""
    da = db = None
    if n.wants("b"):  # the weight's gradient first: `a` is freed before its own gradient is allocated
        # Flattened to rows: one GEMM instead of a batched one and a sum over the batch.
        left, right = (as_rows(op, a), as_rows(op, dy)) if rank_of(b) == 2 and not trans_a else (a, dy)
        if trans_b:
            db = build_matmul(op, right, left, 1, trans_a, alpha)
        else:
            db = build_matmul(op, left, right, 1 - trans_a, 0, alpha)
    if n.wants("a"):
        if trans_a:
            da = build_matmul(op, b, dy, trans_b, 1, alpha)
        else:
            da = build_matmul(op, dy, b, 0, 1 - trans_b, alpha)
    return da, db


def scale(op: Builder, value: ir.Value, factor: Any) -> ir.Value:
    """`value` times the alpha or beta of an ATen call: a number or a symbolic size."""
    if factor == 1:
        return value
    return op.Mul(value, as_value(op, factor, dtype_of(value)))


def takes_factor(dtype: ir.DataType, number: float) -> bool:
    """Return whether a float32 attribute holds this factor precisely enough: always, except for float64 values."""
    return dtype != ir.DataType.DOUBLE or is_exact_attribute(number)


def scaled_sum(op: Builder, base: ir.Value, beta: Any, addend: ir.Value, alpha: Any) -> Any:
    """Return the sum beta * base + alpha * addend; if beta is 0, base is not read, as in PyTorch."""
    addend = scale(op, addend, alpha)
    if beta == 0:
        return op.Expand(addend, op.sizes(op.out[0].shape)) if sizes.dims_of(addend) != op.out[0].shape else addend
    return op.Add(scale(op, base, beta), addend)
