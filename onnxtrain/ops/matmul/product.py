"""What all matrix products share: types, shapes, gradients and sums."""

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
from onnxtrain.ops.constructors import as_value
from onnxtrain.ops.definition import (
    Call,
    FromTorch,
    Method,
    NodeView,
    Property,
    numel,
)

Grad = ir.Value | None


# The element types of ai.onnx MatMul that PyTorch has as well.
INTEGERS = frozenset({ir.DataType.INT32, ir.DataType.INT64})
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def of_product_types(convert: FromTorch) -> FromTorch:
    """Restricts a conversion to the element types that ONNX multiplies; other calls stay ATen nodes."""

    def capture(op: Builder, *arguments: Any, **keywords: Any) -> Any:
        return convert(op, *arguments, **keywords) if op.out[0].dtype in INTEGERS | _FLOATS else NotImplemented

    return capture


def is_exact_attribute(number: Any) -> bool:
    """Whether this is a number that survives as an ONNX attribute, which holds it in float32."""
    return isinstance(number, (int, float)) and float(np.float32(number)) == number


def constant_axes(op: Builder, *axes: int) -> ir.Value:
    """Axes as the input of Unsqueeze, Squeeze and reductions."""
    return op.constant(list(axes), ir.DataType.INT64)


def as_rows(op: Builder, value: ir.Value) -> ir.Value:
    """`value` as a matrix: all axes but the last one flattened."""
    if rank_of(value) == 2:
        return value
    *leading, last = sizes.dims_of(value)
    result: ir.Value = op.Reshape(value, op.sizes([sizes.multiply(*leading), last]), allowzero=1)
    return result


def product_shape(a: Sequence[Size], b: Sequence[Size]) -> Sizes:
    """NumPy's shape of a @ b."""
    if not a or not b:
        raise GraphError("a matrix product needs operands of one dimension or more", got=f"{list(a)} @ {list(b)}")
    inner_a, inner_b = a[-1], b[-2] if len(b) > 1 else b[0]
    if isinstance(inner_a, int) and isinstance(inner_b, int) and inner_a != inner_b:
        raise GraphError("the inner sizes of a matrix product differ", got=f"{list(a)} @ {list(b)}")
    rows = a[-2:-1] if len(a) > 1 else ()
    columns = b[-1:] if len(b) > 1 else ()
    return (*sizes.broadcast(a[:-2], b[:-2]), *rows, *columns)


def product_flops(y: ir.Value, inner: Size) -> Size:
    return sizes.multiply(2, inner, numel(y))


def rows_times_matrix(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a[..., m, k] @ b[k, n] as one product.

    Where `a` cannot be viewed as a matrix, torch.matmul multiplies each of its matrices by b, as here no tensor
    requires a gradient; in eager PyTorch, where b does, it copies `a`.
    """
    if a.is_contiguous():
        return torch.matmul(a, b)
    return torch.mm(a.flatten(0, -2), b).view(a.shape[:-1] + b.shape[1:])


def product_function(a: Sequence[Size], b: Sequence[Size]) -> Callable[..., Any]:
    """The torch function for operands of these shapes: torch.matmul finds the same one, in a microsecond or two."""
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


def seen(argument: Any, trans: int, trans_batch: int) -> Any:
    """A view of an operand as it is multiplied."""
    if trans_batch:
        argument = Method("movedim", argument, 0, -2)
    if trans:
        argument = Property("mT", argument)
    return argument


def product_call(function: Callable[..., Any], a: Any, first: Any, second: Any, alpha: float) -> Call:
    """Calls for alpha * first @ second, by one of PyTorch's products; `a` is an operand, of the result's type."""
    if alpha == 1:
        return Call(function, first, second)
    if function is not torch.mm and function is not torch.bmm:
        return Call(torch.mul, Call(function, first, second), alpha)
    scaling = torch.addmm if function is torch.mm else torch.baddbmm
    # beta=0: the first operand only lends its element type.
    return Call(scaling, Method("new_empty", a, ()), first, second, beta=0, alpha=alpha)


def product_of(op: Builder, a: ir.Value, b: ir.Value, trans_a: int, trans_b: int, alpha: float) -> ir.Value:
    result: ir.Value
    if not trans_a and not trans_b and alpha == 1:
        result = op.MatMul(a, b)
    else:
        result = op.ms.FusedMatMul(
            a, b, alpha=None if alpha == 1 else alpha, transA=trans_a or None, transB=trans_b or None
        )
    return result


def product_gradient(
    op: Builder,
    n: NodeView,
    a: ir.Value,
    b: ir.Value,
    dy: ir.Value,
    trans_a: int = 0,
    trans_b: int = 0,
    alpha: float = 1.0,
) -> tuple[Grad, Grad]:
    """Of y = alpha * op(a) @ op(b), both of two dimensions or more; a gradient has the batch axes of y."""
    da = db = None
    if n.wants("b"):  # a weight's first: `a` is freed before memory for its gradient is taken
        # As rows: one product instead of a batch of them and their sum.
        left, right = (as_rows(op, a), as_rows(op, dy)) if rank_of(b) == 2 and not trans_a else (a, dy)
        if trans_b:
            db = product_of(op, right, left, 1, trans_a, alpha)
        else:
            db = product_of(op, left, right, 1 - trans_a, 0, alpha)
    if n.wants("a"):
        if trans_a:
            da = product_of(op, b, dy, trans_b, 1, alpha)
        else:
            da = product_of(op, dy, b, 0, 1 - trans_b, alpha)
    return da, db


def scaled(op: Builder, value: ir.Value, factor: Any) -> ir.Value:
    """`value` times the alpha or beta of an ATen call: a number, or a size used as one."""
    if factor == 1:
        return value
    result: ir.Value = op.Mul(value, as_value(op, factor, dtype_of(value)))
    return result


def takes_factor(dtype: ir.DataType, number: float) -> bool:
    """Whether a number may become an attribute: it is held in float32, exact enough but for float64."""
    return dtype != ir.DataType.DOUBLE or is_exact_attribute(number)


def sum_with(op: Builder, base: ir.Value, beta: Any, product: ir.Value, alpha: Any) -> Any:
    """The sum beta * base + alpha * product; where beta is 0 PyTorch does not read base."""
    product = scaled(op, product, alpha)
    if beta == 0:
        return op.Expand(product, op.sizes(op.out[0].shape)) if sizes.dims_of(product) != op.out[0].shape else product
    return op.Add(scaled(op, base, beta), product)
