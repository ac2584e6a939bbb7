"""Matrix products: MatMul, Gemm, and the two that training adds.

    MatMul(a[..., m, k], b[..., k, n]) -> y[..., m, n]                      and NumPy's 1-D operands
    FusedMatMul(a, b; alpha, transA, transB) -> y = alpha * op(a) @ op(b)   gradients: transposed views, no Transpose
    Linear(x[..., k], w[n, k], b[n]?) -> y[..., n] = x @ wᵀ + b
    Gemm(a[m, k], b[k, n], c?) -> y[m, n] = alpha * a @ b + beta * c

A product y = a @ b has the gradients dy @ bᵀ and aᵀ @ dy; in each form the transposes move into flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import MICROSOFT, ONNX, OWN, TensorType, dtype_of, rank_of
from onnxtrain.ops.composite import composite
from onnxtrain.ops.constructors import always, as_value
from onnxtrain.ops.definition import (
    STANDARD,
    Call,
    Effects,
    FromTorch,
    Gradient,
    Kernel,
    Method,
    NodeView,
    OpDef,
    Property,
    numel,
)
from onnxtrain.ops.registry import define
from onnxtrain.ops.reshape.dims import inverse, transposed

Grad = ir.Value | None

# The element types of ai.onnx MatMul that PyTorch has as well.
_INTEGERS = frozenset({ir.DataType.INT32, ir.DataType.INT64})
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def of_product_types(convert: FromTorch) -> FromTorch:
    """Restricts a conversion to the element types that ONNX multiplies; other calls stay ATen nodes."""

    def capture(op: Builder, *arguments: Any, **keywords: Any) -> Any:
        return convert(op, *arguments, **keywords) if op.out[0].dtype in _INTEGERS | _FLOATS else NotImplemented

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
    *leading, last = sizes.of(value)
    result: ir.Value = op.Reshape(value, op.sizes([sizes.multiply(*leading), last]), allowzero=1)
    return result


# Shapes, axes and flops


def _product_shape(a: Sequence[Size], b: Sequence[Size]) -> Sizes:
    """NumPy's shape of a @ b."""
    if not a or not b:
        raise GraphError("a matrix product needs operands of one dimension or more", got=f"{list(a)} @ {list(b)}")
    inner_a, inner_b = a[-1], b[-2] if len(b) > 1 else b[0]
    if isinstance(inner_a, int) and isinstance(inner_b, int) and inner_a != inner_b:
        raise GraphError("the inner sizes of a matrix product differ", got=f"{list(a)} @ {list(b)}")
    rows = a[-2:-1] if len(a) > 1 else ()
    columns = b[-1:] if len(b) > 1 else ()
    return (*sizes.broadcast(a[:-2], b[:-2]), *rows, *columns)


def _product_flops(y: ir.Value, inner: Size) -> Size:
    return sizes.multiply(2, inner, numel(y))


def _matmul_type(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(dtype_of(n.a), _product_shape(sizes.of(n.a), sizes.of(n.b))),)


def _matmul_axes(n: NodeView) -> str:
    left = "k" if rank_of(n.a) == 1 else "... m k"
    right = "k" if rank_of(n.b) == 1 else "... k n"
    rows = " m" if rank_of(n.a) > 1 else ""
    columns = " n" if rank_of(n.b) > 1 else ""
    batch = "..." if "..." in left + right else ""
    return f"{left}, {right} -> {batch}{rows}{columns}"


# Kernels


def rows_times_matrix(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a[..., m, k] @ b[k, n] as one product.

    Where `a` cannot be viewed as a matrix, torch.matmul multiplies each of its matrices by b, as here no tensor
    requires a gradient; in eager PyTorch, where b does, it copies `a`.
    """
    if a.is_contiguous():
        return torch.matmul(a, b)
    return torch.mm(a.flatten(0, -2), b).view(a.shape[:-1] + b.shape[1:])


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    """As F.linear where w requires a gradient, see `rows_times_matrix`."""
    if x.dim() < 3 or x.is_contiguous():
        return torch.nn.functional.linear(x, w, b)
    y = rows_times_matrix(x, w.t())
    return y if b is None else y.add_(b)


def _product_function(a: Sequence[Size], b: Sequence[Size]) -> Callable[..., Any]:
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


# MatMul


def _matmul_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    rank_a, rank_b = rank_of(n.a), rank_of(n.b)
    if rank_a == 1 and rank_b == 1:
        return op.Mul(dy, n.b) if n.wants("a") else None, op.Mul(dy, n.a) if n.wants("b") else None
    if rank_a == 1:
        return _row_vector_gradient(op, n, dy)
    if rank_b == 1:
        return _column_vector_gradient(op, n, dy)
    return _product_gradient(op, n, n.a, n.b, dy)


def _row_vector_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    """Of a[k] @ b[..., k, n] -> y[..., n]."""
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
    """Of a[..., m, k] @ b[k] -> y[..., m]."""
    da = db = None
    if n.wants("a"):
        da = op.Mul(op.Unsqueeze(dy, constant_axes(op, rank_of(dy))), n.b)
    if n.wants("b"):
        flat = dy if rank_of(dy) == 1 else op.Reshape(dy, op.sizes([numel(dy)]), allowzero=1)
        db = op.MatMul(flat, as_rows(op, n.a))
    return da, db


def _product(op: Builder, a: ir.Value, b: ir.Value, trans_a: int, trans_b: int, alpha: float) -> ir.Value:
    result: ir.Value
    if not trans_a and not trans_b and alpha == 1:
        result = op.MatMul(a, b)
    else:
        result = op.ms.FusedMatMul(
            a, b, alpha=None if alpha == 1 else alpha, transA=trans_a or None, transB=trans_b or None
        )
    return result


def _product_gradient(
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
    if n.wants("a"):
        if trans_a:
            da = _product(op, b, dy, trans_b, 1, alpha)
        else:
            da = _product(op, dy, b, 0, 1 - trans_b, alpha)
    if n.wants("b"):
        if rank_of(b) == 2 and not trans_a:
            a, dy = as_rows(op, a), as_rows(op, dy)  # one product instead of a batch of them and their sum
        if trans_b:
            db = _product(op, dy, a, 1, trans_a, alpha)
        else:
            db = _product(op, a, dy, 1 - trans_a, 0, alpha)
    return da, db


def _capture_matmul(op: Builder, a: ir.Value, b: ir.Value) -> Any:
    return op.MatMul(a, b)


def _capture_outer(op: Builder, a: ir.Value, b: ir.Value) -> Any:
    return op.Mul(op.Unsqueeze(a, constant_axes(op, 1)), op.Unsqueeze(b, constant_axes(op, 0)))


def _scaled(op: Builder, value: ir.Value, factor: Any) -> ir.Value:
    """`value` times the alpha or beta of an ATen call: a number, or a size used as one."""
    if factor == 1:
        return value
    result: ir.Value = op.Mul(value, as_value(op, factor, dtype_of(value)))
    return result


def _sum_with(op: Builder, base: ir.Value, beta: Any, product: ir.Value, alpha: Any) -> Any:
    """The sum beta * base + alpha * product; where beta is 0 PyTorch does not read base."""
    product = _scaled(op, product, alpha)
    if beta == 0:
        return op.Expand(product, op.sizes(op.out[0].shape)) if sizes.of(product) != op.out[0].shape else product
    return op.Add(_scaled(op, base, beta), product)


def _capture_baddbmm(op: Builder, base: ir.Value, a: ir.Value, b: ir.Value, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if is_exact_attribute(alpha) and op.out[0].dtype not in _INTEGERS:
        return _sum_with(op, base, beta, _product(op, a, b, 0, 0, alpha), 1)
    return _sum_with(op, base, beta, op.MatMul(a, b), alpha)


def _capture_addbmm(op: Builder, base: ir.Value, a: ir.Value, b: ir.Value, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _sum_with(op, base, beta, op.ReduceSum(op.MatMul(a, b), constant_axes(op, 0), keepdims=0), alpha)


def _capture_addmv(op: Builder, base: ir.Value, a: ir.Value, b: ir.Value, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _sum_with(op, base, beta, op.MatMul(a, b), alpha)


def _capture_addr(op: Builder, base: ir.Value, a: ir.Value, b: ir.Value, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _sum_with(op, base, beta, _capture_outer(op, a, b), alpha)


_MATMUL_CAPTURES: Mapping[str, FromTorch] = {
    "aten.matmul.default": _capture_matmul,
    "aten.mm.default": _capture_matmul,
    "aten.bmm.default": _capture_matmul,
    "aten.mv.default": _capture_matmul,
    "aten.dot.default": _capture_matmul,
    "aten.vdot.default": _capture_matmul,  # conjugates complex operands, which do not come here
    "aten.outer.default": _capture_outer,
    "aten.ger.default": _capture_outer,
    "aten.baddbmm.default": _capture_baddbmm,
    "aten.addbmm.default": _capture_addbmm,
    "aten.addmv.default": _capture_addmv,
    "aten.addr.default": _capture_addr,
}

MATMUL = define(
    OpDef(
        domain=ONNX,
        name="MatMul",
        inputs=("a", "b"),
        outputs=("y",),
        attributes={},
        since=13,
        from_torch={name: of_product_types(convert) for name, convert in _MATMUL_CAPTURES.items()},
        shapes=_matmul_type,
        body=STANDARD,
        native_ok=always,
        gradient=(Gradient(_matmul_gradient, reads=("a", "b")),),
        stops=frozenset(),
        kernels=(Kernel(lower=lambda n, a, b: Call(_product_function(sizes.of(n.a), sizes.of(n.b)), a, b)),),
        axes=_matmul_axes,
        effects=Effects.NONE,
        aliases={},
        flops=lambda n: _product_flops(n.y, sizes.of(n.a)[-1]),
        host=None,
    )
)


# FusedMatMul: transBatchA and transBatchB move the first axis behind the batch axes, before transA and transB.


def _fused_perm(rank: int, trans: int, trans_batch: int) -> list[int]:
    perm = [*range(1, rank - 1), 0, rank - 1] if trans_batch else list(range(rank))
    return [*perm[:-2], perm[-1], perm[-2]] if trans else perm


def _fused_shapes(n: NodeView) -> tuple[list[Size], list[Size]]:
    """The shapes of both operands as they are multiplied."""
    found = []
    for value, trans, trans_batch in ((n.a, n.transA, n.transBatchA), (n.b, n.transB, n.transBatchB)):
        shape = sizes.of(value)
        if len(shape) < 2:
            raise GraphError("FusedMatMul multiplies tensors of two dimensions or more", got=f"{list(shape)}")
        found.append([shape[axis] for axis in _fused_perm(len(shape), trans, trans_batch)])
    return found[0], found[1]


def _seen_shape(value: ir.Value, trans: int) -> list[Size]:
    shape = sizes.of(value)
    return [shape[axis] for axis in _fused_perm(len(shape), trans, 0)]


def transpose_matmul(a: torch.Tensor, b: torch.Tensor, trans_a: bool, trans_b: bool, alpha: float) -> torch.Tensor:
    product = torch.matmul(a.mT if trans_a else a, b.mT if trans_b else b)
    return product if alpha == 1 else product.mul_(alpha)


def _fused_type(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(dtype_of(n.a), _product_shape(*_fused_shapes(n))),)


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
    return _scaled(op, op.MatMul(*operands), n.alpha)


def _seen(argument: Any, trans: int, trans_batch: int) -> Any:
    """A view of an operand as it is multiplied."""
    if trans_batch:
        argument = Method("movedim", argument, 0, -2)
    if trans:
        argument = Property("mT", argument)
    return argument


def _fused_call(n: NodeView, a: Any, b: Any) -> Call:
    first = _seen(a, n.transA, n.transBatchA)
    second = _seen(b, n.transB, n.transBatchB)
    function = _product_function(*_fused_shapes(n))
    if n.alpha == 1:
        return Call(function, first, second)
    if function is not torch.mm and function is not torch.bmm:
        return Call(torch.mul, Call(function, first, second), n.alpha)
    scaling = torch.addmm if function is torch.mm else torch.baddbmm
    # beta=0: the first operand only lends its element type.
    return Call(scaling, Method("new_empty", a, ()), first, second, beta=0, alpha=n.alpha)


def _fused_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    perms = [_fused_perm(rank_of(v), 0, trans) for v, trans in ((n.a, n.transBatchA), (n.b, n.transBatchB))]
    a, b = (transposed(op, v, perm) for v, perm in zip((n.a, n.b), perms, strict=True))
    found = _product_gradient(op, n, a, b, dy, n.transA, n.transB, n.alpha)
    # The batch axes of a gradient are those of y: more than the operand's, where it was broadcast.
    da, db = (
        None if g is None else transposed(op, g, inverse(_fused_perm(rank_of(g), 0, trans)))
        for g, trans in zip(found, (n.transBatchA, n.transBatchB), strict=True)
    )
    return da, db


FUSED_MATMUL = define(
    OpDef(
        domain=MICROSOFT,
        name="FusedMatMul",
        inputs=("a", "b"),
        outputs=("y",),
        attributes={"alpha": 1.0, "transA": 0, "transB": 0, "transBatchA": 0, "transBatchB": 0},
        since=1,
        from_torch={},
        shapes=_fused_type,
        body=_fused_body,
        # onnxruntime 1.31 ends the process where a transposed batch has size 0.
        native_ok=lambda n: dtype_of(n.a) == ir.DataType.FLOAT and not n.transBatchA and not n.transBatchB,
        gradient=(Gradient(_fused_gradient, reads=("a", "b")),),
        stops=frozenset(),
        kernels=(Kernel(lower=_fused_call),),
        axes=_fused_axes,
        effects=Effects.NONE,
        aliases={},
        flops=lambda n: _product_flops(n.y, _fused_shapes(n)[0][-1]),
        host=None,
    )
)


composite(
    "TransposeMatMul",  # FusedMatMul's first name
    ("a", "b"),
    lambda op, n: op.ms.FusedMatMul(n.a, n.b, alpha=n.alpha, transA=n.transA, transB=n.transB),
    lambda n, a, b: Call(transpose_matmul, a, b, bool(n.transA), bool(n.transB), n.alpha),
    domain=MICROSOFT,
    attributes={"alpha": 1.0, "transA": 0, "transB": 0},
    shapes=lambda n: (
        TensorType(dtype_of(n.a), _product_shape(_seen_shape(n.a, n.transA), _seen_shape(n.b, n.transB))),
    ),
    axes=lambda n: f"... {'k m' if n.transA else 'm k'}, ... {'n k' if n.transB else 'k n'} -> ... m n",
    flops=lambda n: _product_flops(n.y, _seen_shape(n.a, n.transA)[-1]),
)


# Linear


def _linear_type(n: NodeView) -> Sequence[TensorType]:
    x, w = sizes.of(n.x), sizes.of(n.w)
    if len(w) != 2 or (n.b is not None and rank_of(n.b) != 1):
        raise GraphError("Linear takes w[n, k] and b[n]", got=f"w{list(w)}")
    return (TensorType(dtype_of(n.x), (*_product_shape(x, (w[1], w[0])),)),)


def _linear_body(op: Builder, n: NodeView) -> ir.Value:
    product: ir.Value = op.MatMul(n.x, op.Transpose(n.w, perm=[1, 0]))
    result: ir.Value = product if n.b is None else op.Add(product, n.b)
    return result


def _linear_call(n: NodeView, x: Any, w: Any, b: Any) -> Call:
    return Call(torch.nn.functional.linear if rank_of(n.x) < 3 else linear, x, w, b)


def _linear_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, ...]:
    rows = as_rows(op, dy)
    dx = None
    if n.wants("x"):
        dx = op.MatMul(rows, n.w)
        dx = dx if rank_of(n.x) == 2 else op.Reshape(dx, op.shape_of(n.x), allowzero=1)
    found = (
        dx,
        op.ms.FusedMatMul(rows, as_rows(op, n.x), transA=1) if n.wants("w") else None,
        op.ReduceSum(rows, constant_axes(op, 0), keepdims=0) if n.b is not None and n.wants("b") else None,
    )
    return found[: len(n.node.inputs)]


def _capture_linear(op: Builder, x: ir.Value, w: ir.Value, b: ir.Value | None = None) -> Any:
    if rank_of(w) == 1:
        product = op.MatMul(x, w)
    elif b is not None and sizes.of(b) == sizes.of(w)[:1]:
        return op.own.Linear(x, w, b)
    else:
        product = op.own.Linear(x, w)
    return product if b is None else op.Add(product, b)


LINEAR = define(
    OpDef(
        domain=OWN,
        name="Linear",
        inputs=("x", "w", "b?"),
        outputs=("y",),
        attributes={},
        since=1,
        from_torch={"aten.linear.default": of_product_types(_capture_linear)},
        shapes=_linear_type,
        body=_linear_body,
        native_ok=lambda n: False,
        gradient=(Gradient(_linear_gradient, reads=("x", "w")),),
        stops=frozenset(),
        kernels=(Kernel(lower=_linear_call),),
        axes=lambda n: f"... k, n k{', n' * (n.b is not None)} -> ... n",
        effects=Effects.NONE,
        aliases={},
        flops=lambda n: _product_flops(n.y, sizes.of(n.x)[-1]),
        host=None,
    )
)


# Gemm


def _gemm_type(n: NodeView) -> Sequence[TensorType]:
    if rank_of(n.a) != 2 or rank_of(n.b) != 2:
        raise GraphError("Gemm multiplies matrices", got=f"{list(sizes.of(n.a))} and {list(sizes.of(n.b))}")
    a, b = sizes.of(n.a), sizes.of(n.b)
    return (TensorType(dtype_of(n.a), _product_shape(a[::-1] if n.transA else a, b[::-1] if n.transB else b)),)


def _gemm_axes(n: NodeView) -> str:
    left, right = "k m" if n.transA else "m k", "n k" if n.transB else "k n"
    if n.c is None:
        return f"{left}, {right} -> m n"
    return f"{left}, {right}, {('', 'n', 'm n')[rank_of(n.c)]} -> m n"


def _gemm_call(n: NodeView, a: Any, b: Any, c: Any) -> Call:
    first, second = _seen(a, n.transA, 0), _seen(b, n.transB, 0)
    if c is None:
        if n.alpha == 1:
            return Call(torch.mm, first, second)
        return Call(torch.addmm, Method("new_empty", a, ()), first, second, beta=0, alpha=n.alpha)
    factors = {name: value for name, value in (("beta", n.beta), ("alpha", n.alpha)) if value != 1}
    return Call(torch.addmm, c, first, second, **factors)


def _gemm_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, ...]:
    da, db = _product_gradient(op, n, n.a, n.b, dy, n.transA, n.transB, n.alpha)
    found = da, db, _scaled(op, dy, n.beta) if n.c is not None and n.wants("c") else None
    return found[: len(n.node.inputs)]


def _capture_addmm(op: Builder, c: ir.Value, a: ir.Value, b: ir.Value, *, beta: Any = 1, alpha: Any = 1) -> Any:
    factors = alpha, beta
    plain = factors == (1, 1)
    if not plain and (not all(map(is_exact_attribute, factors)) or op.out[0].dtype in _INTEGERS):
        return _sum_with(op, c, beta, op.MatMul(a, b), alpha)
    attributes = {name: None if f == 1 else float(f) for name, f in (("alpha", alpha), ("beta", beta))}
    return op.Gemm(a, b, alpha=attributes["alpha"]) if beta == 0 else op.Gemm(a, b, c, **attributes)


GEMM = define(
    OpDef(
        domain=ONNX,
        name="Gemm",
        inputs=("a", "b", "c?"),
        outputs=("y",),
        attributes={"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0},
        since=13,
        from_torch={"aten.addmm.default": of_product_types(_capture_addmm)},
        shapes=_gemm_type,
        body=STANDARD,
        native_ok=always,
        gradient=(Gradient(_gemm_gradient, reads=("a", "b")),),
        stops=frozenset(),
        kernels=(Kernel(lower=_gemm_call),),
        axes=_gemm_axes,
        effects=Effects.NONE,
        aliases={},
        flops=lambda n: _product_flops(n.y, sizes.of(n.a)[0 if n.transA else 1]),
        host=None,
    )
)
