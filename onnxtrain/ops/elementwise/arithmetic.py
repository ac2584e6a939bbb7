"""Arithmetic: addition, multiplication, division and remainders, signs, and PyTorch's fused multiply-adds.

Add Sub Mul Div Neg Abs Sign Reciprocal Sum      as in ONNX; Div of integers truncates
Mod(a, b)                 Python's a % b of integers; C's fmod if `fmod` is 1
Remainder(a, b)           Python's a % b of floats, which has the sign of b
FloorDivide(a, b)         Python's a // b, for floats too
TruncDivide(a, b)         trunc(a / b) of floats
Lerp, Addcmul, Addcdiv    as in PyTorch
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, TensorType, dtype_of, is_float, rank_of, type_of
from onnxtrain.ops.body_parts import promoted
from onnxtrain.ops.constructors import define_binary, define_pure, define_unary, elementwise_flops
from onnxtrain.ops.definition import (
    STANDARD,
    Call,
    FromTorch,
    Gradient,
    Infix,
    NodeView,
    OpDef,
)
from onnxtrain.ops.interfaces.commutative import COMMUTATIVE
from onnxtrain.ops.interfaces.cpp import CPP, Elementwise
from onnxtrain.ops.interfaces.element_formulas import ELEMENT_FORMULAS, Formula, FormulaOf, affine_operands
from onnxtrain.ops.interfaces.stock_kernels import STOCK_KERNELS

Grad = ir.Value | None


def zeros_like(op: Builder, value: ir.Value) -> ir.Value:
    """Return zeros of a value's shape: the gradient of a step function, for which PyTorch returns zeros, not None."""
    shape = op.shape_of(value)
    return op.ConstantOfShape(shape, value=ir.tensor([0.0], dtype=dtype_of(value)))


def number_of(value: ir.Value) -> Any:
    """Return a 0-dimensional constant as a Python number, in the precision it was captured with; None otherwise."""
    if value.const_value is None or rank_of(value):
        return None
    return value.meta.get("scalar", value.const_value.numpy().item())


# Add Sub Mul Div


def _capture_arithmetic(name: str, bool_op: str | None = None) -> FromTorch:
    """Capture `aten.add(a, b, alpha=1)` and its variants: promote, scale b, compute; bools by `bool_op`."""

    def capture(op: Builder, a: Any, b: Any, alpha: Any = 1) -> Any:
        is_bool = op.out[0].dtype == ir.DataType.BOOL
        if is_bool and (bool_op is None or alpha not in (1, True)):
            return NotImplemented
        a, b = promoted(op, a, b)
        if is_bool:
            return op.op("", bool_op)(a, b)  # type: ignore[arg-type]  # not None: see above
        if alpha != 1:
            b = op.Mul(b, op.scalar(alpha, like=b))
        return op.op("", name)(a, b)

    return capture


def _capture_rsub(op: Builder, a: Any, b: Any, alpha: Any = 1) -> Any:
    """Capture `rsub(a, b)`: b - alpha * a."""
    a, b = promoted(op, a, b)
    return op.Sub(b, op.Mul(a, op.scalar(alpha, like=a)) if alpha != 1 else a)


def _overloads(*names: str) -> list[str]:
    return [f"aten.{name}.{overload}" for name in names for overload in ("Tensor", "Scalar")]


def _sub_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    return dy, op.Neg(dy) if n.wants("b") else None


def _mul_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    return op.Mul(dy, n.b) if n.wants("a") else None, op.Mul(dy, n.a) if n.wants("b") else None


def _div_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    da = op.Div(dy, n.b) if n.wants("a") else None
    return da, op.Mul(op.Neg(dy), op.Div(n.y, n.b)) if n.wants("b") else None


def _capture_div(op: Builder, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    a, b = promoted(op, a, b)
    if rounding_mode == "floor":
        return op.own.FloorDivide(a, b)
    if rounding_mode == "trunc" and is_float(dtype_of(a)):
        return op.own.TruncDivide(a, b)
    return op.Div(a, b)


def _div_call(n: NodeView, a: Any, b: Any) -> Call:
    if is_float(dtype_of(n.a)):
        return Infix("/", operator.truediv, a, b)
    return Call(torch.div, a, b, rounding_mode="trunc")


ADD = define_binary(
    "Add",
    dict.fromkeys(_overloads("add"), _capture_arithmetic("Add", "Or")),
    operator.add,
    lambda op, n, dy: (dy, dy),
    reads=(),
    symbol="+",
    host_eval=operator.add,
)
CPP.register(ADD, Elementwise("{0} + {1}"))
SUB = define_binary(
    "Sub",
    dict.fromkeys(_overloads("sub", "subtract"), _capture_arithmetic("Sub"))
    | dict.fromkeys(_overloads("rsub"), _capture_rsub),
    operator.sub,
    _sub_gradient,
    reads=(),
    symbol="-",
    host_eval=operator.sub,
)
CPP.register(SUB, Elementwise("{0} - {1}"))
MUL = define_binary(
    "Mul",
    dict.fromkeys(_overloads("mul", "multiply"), _capture_arithmetic("Mul", "And")),
    operator.mul,
    _mul_gradient,
    symbol="*",
    host_eval=operator.mul,
)
COMMUTATIVE.add(ADD, MUL)
CPP.register(MUL, Elementwise("{0} * {1}"))
DIV = define_binary(
    "Div",
    dict.fromkeys(
        [
            *_overloads("div", "divide", "true_divide"),
            *(f"aten.{name}.{operand}_mode" for name in ("div", "divide") for operand in ("Tensor", "Scalar")),
        ],
        _capture_div,
    ),
    operator.truediv,
    _div_gradient,
    reads=("b", "y"),
    lower=_div_call,
    accepts_scalars=True,
    host_eval=operator.floordiv,  # sizes are never negative
)
CPP.register(DIV, Elementwise("{0} / {1}"))


@ELEMENT_FORMULAS.implements(ADD)
def _sum_formula(n: NodeView, formula_of: FormulaOf) -> Formula | None:
    terms = affine_operands(n, formula_of)
    return None if terms is None else terms[0] + terms[1]


@ELEMENT_FORMULAS.implements(SUB)
def _difference_formula(n: NodeView, formula_of: FormulaOf) -> Formula | None:
    terms = affine_operands(n, formula_of)
    return None if terms is None else terms[0] - terms[1]


# Rounded division and remainders


def _zero_gradients(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    return zeros_like(op, n.a) if n.wants("a") else None, zeros_like(op, n.b) if n.wants("b") else None


def _floor_divide_body(op: Builder, n: NodeView) -> ir.Value:
    """Follow PyTorch's algorithm, which is Python's: it does not round a / b before the floor."""
    a, b = n.a, n.b
    if not is_float(dtype_of(a)):
        return op.Div(op.Sub(a, op.Mod(a, b)), b)
    zero, half, one = (op.scalar(v, like=a) for v in (0.0, 0.5, 1.0))
    remainder = op.Mod(a, b, fmod=1)
    quotient = op.Div(op.Sub(a, remainder), b)
    quotient = op.Where(_signs_differ(op, remainder, b), op.Sub(quotient, one), quotient)
    floor = op.Floor(quotient)
    floor = op.Where(op.Greater(op.Sub(quotient, floor), half), op.Add(floor, one), floor)
    signed_zero = op.Mul(op.Div(a, b), zero)
    floor = op.Where(op.Equal(quotient, zero), signed_zero, floor)
    return op.Where(op.Equal(b, zero), op.Div(a, b), floor)


def _signs_differ(op: Builder, remainder: ir.Value, b: ir.Value) -> ir.Value:
    """Return whether a remainder is not 0 and its sign differs from the divisor's."""
    zero = op.scalar(0.0, like=b)
    differ = op.Xor(op.Less(remainder, zero), op.Less(b, zero))
    return op.And(op.Not(op.Equal(remainder, zero)), differ)


FLOOR_DIVIDE = define_binary(
    "FloorDivide",
    {
        "aten.floor_divide.default": lambda op, a, b: op.own.FloorDivide(*promoted(op, a, b)),
        "aten.floor_divide.Scalar": lambda op, a, b: op.own.FloorDivide(*promoted(op, a, b)),
    },
    torch.floor_divide,
    _zero_gradients,
    reads=(),
    domain=OWN,
    body=_floor_divide_body,
    accepts_scalars=True,
    host_eval=operator.floordiv,
)
TRUNC_DIVIDE = define_binary(
    "TruncDivide",
    {},
    torch.div,
    _zero_gradients,
    reads=(),
    domain=OWN,
    body=lambda op, n: op.own.Trunc(op.Div(n.a, n.b)),
    lower=lambda n, a, b: Call(torch.div, a, b, rounding_mode="trunc"),
    accepts_scalars=True,
)


def _fmod_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    return dy, op.Mul(op.Neg(dy), op.own.TruncDivide(n.a, n.b)) if n.wants("b") else None


def _remainder_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    return dy, op.Mul(op.Neg(dy), op.own.FloorDivide(n.a, n.b)) if n.wants("b") else None


def _remainder_body(op: Builder, n: NodeView) -> ir.Value:
    """Add b to fmod(a, b), which has the sign of a, where the signs of the two differ."""
    remainder = op.Mod(n.a, n.b, fmod=1)
    has_wrong_sign = _signs_differ(op, remainder, n.b)
    return op.Where(has_wrong_sign, op.Add(remainder, n.b), remainder)


def _capture_remainder(op: Builder, a: Any, b: Any) -> Any:
    a, b = promoted(op, a, b)
    return op.own.Remainder(a, b) if is_float(dtype_of(a)) else op.Mod(a, b)


def _capture_fmod(op: Builder, a: Any, b: Any) -> Any:
    return op.Mod(*promoted(op, a, b), fmod=1)


MOD = define_binary(
    "Mod",
    dict.fromkeys(_overloads("fmod"), _capture_fmod),
    torch.remainder,
    _fmod_gradient,
    attributes={"fmod": 0},
    lower=lambda n, a, b: Call(torch.fmod if n.fmod else torch.remainder, a, b),
    host_eval=operator.mod,
)
REMAINDER = define_binary(
    "Remainder",
    dict.fromkeys([*_overloads("remainder"), "aten.remainder.Scalar_Tensor"], _capture_remainder),
    torch.remainder,
    _remainder_gradient,
    domain=OWN,
    body=_remainder_body,
    accepts_scalars=True,
)


# One operand


def _host_neg(n: NodeView, x: Any) -> Any:
    return tuple(-v for v in x) if isinstance(x, tuple) else -x


def _sign_body(op: Builder, n: NodeView) -> ir.Value:
    """Return (x > 0) - (x < 0): as in PyTorch, the sign of NaN is 0."""
    zero, dtype = op.scalar(0, like=n.x), dtype_of(n.x)
    return op.Sub(op.Cast(op.Greater(n.x, zero), to=dtype), op.Cast(op.Less(n.x, zero), to=dtype))


def _reciprocal_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    return op.Mul(op.Neg(dy), op.Mul(n.y, n.y))


NEG = define_unary(
    "Neg",
    ("aten.neg.default", "aten.negative.default"),
    torch.neg,
    lambda op, n, dy: op.Neg(dy),
    reads=(),
    host_eval=_host_neg,
)
CPP.register(NEG, Elementwise("-{0}"))
ABS = define_unary(
    "Abs",
    ("aten.abs.default", "aten.absolute.default"),
    torch.abs,
    lambda op, n, dy: op.Mul(dy, op.Sign(n.x)),
)
CPP.register(ABS, Elementwise("{0} < 0 ? -{0} : {0} + 0"))
SIGN = define_unary(
    "Sign",
    ("aten.sign.default", "aten.sgn.default"),
    torch.sign,
    lambda op, n, dy: zeros_like(op, n.x),
    reads=(),
    body=_sign_body,
)
STOCK_KERNELS.register(SIGN, lambda n: not is_float(dtype_of(n.x)))
RECIPROCAL = define_unary(
    "Reciprocal",
    "aten.reciprocal.default",
    torch.reciprocal,
    _reciprocal_gradient,
    reads=("y",),
)
CPP.register(RECIPROCAL, Elementwise("1 / {0}"))


# Several operands


def _broadcast_types(*names: str) -> Any:
    def shapes(n: NodeView) -> Sequence[TensorType]:
        operands = [type_of(getattr(n, name)) for name in names]
        return (TensorType(operands[0].dtype, sizes.broadcast(*(t.shape for t in operands))),)

    return shapes


def broadcast_terms(n: NodeView) -> Sequence[TensorType]:
    """Return the type of the first term in the shape to which all terms broadcast."""
    return (TensorType(dtype_of(n.terms[0]), sizes.broadcast(*map(sizes.dims_of, n.terms))),)


def _sum_call(n: NodeView, terms: Sequence[Any]) -> Call:
    total = terms[0]
    for term in terms[1:]:
        total = Infix("+", operator.add, total, term)
    return total if isinstance(total, Call) else Call(torch.clone, total)


SUM = define_pure(
    "",
    "Sum",
    ("terms...",),
    ("y",),
    shapes=broadcast_terms,
    body=STANDARD,
    gradient=(Gradient(lambda op, n, dy: (dy,) * len(n.terms), ()),),
    lower=_sum_call,
    axes=lambda n: f"{', '.join(['...'] * len(n.terms))} -> ...",
)


def _lerp_body(op: Builder, n: NodeView) -> ir.Value:
    """Return a + w (b - a) for |w| < 0.5, else b - (1 - w) (b - a): the result is exact for w = 0 and w = 1."""
    difference = op.Sub(n.b, n.a)
    one, half = op.scalar(1.0, like=n.a), op.scalar(0.5, like=n.a)
    from_a = op.Add(n.a, op.Mul(n.weight, difference))
    from_b = op.Sub(n.b, op.Mul(difference, op.Sub(one, n.weight)))
    return op.Where(op.Less(op.Abs(n.weight), half), from_a, from_b)


def _lerp_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad, Grad]:
    number, one = number_of(n.weight), op.scalar(1.0, like=dy)
    weight_of_a = op.Sub(one, n.weight) if number is None else op.scalar(1 - number, like=dy)
    da = op.Mul(dy, weight_of_a) if n.wants("a") else None
    dweight = op.Mul(dy, op.Sub(n.b, n.a)) if n.wants("weight") else None
    return da, op.Mul(dy, n.weight) if n.wants("b") else None, dweight


def _lerp_call(n: NodeView, a: Any, b: Any, weight: Any) -> Call:
    number = number_of(n.weight)
    return Call(torch.lerp, a, b, weight if number is None else number)


def _define_ternary(
    name: str,
    torch_names: Sequence[str],
    inputs: tuple[str, str, str],
    capture: FromTorch,
    lower: Any,
    body: Any,
    gradient: Gradient,
    attributes: dict[str, Any] | None = None,
) -> OpDef:
    return define_pure(
        OWN,
        name,
        inputs,
        ("y",),
        attributes=attributes or {},
        from_torch=dict.fromkeys(torch_names, capture),
        shapes=_broadcast_types(*inputs),
        body=body,
        gradient=(gradient,),
        lower=lower,
        axes=lambda n: "..., ..., ... -> ...",
        flops=lambda n: sizes.multiply(3, elementwise_flops(n)),
    )


LERP = _define_ternary(
    "Lerp",
    ("aten.lerp.Tensor", "aten.lerp.Scalar"),
    ("a", "b", "weight"),
    lambda op, a, b, weight: op.own.Lerp(*promoted(op, a, b, weight)),
    _lerp_call,
    _lerp_body,
    Gradient(_lerp_gradient, ("a", "b", "weight")),
)


def _value(op: Builder, n: NodeView) -> ir.Value:
    return op.scalar(n.value, like=n.a)


def _addcmul_body(op: Builder, n: NodeView) -> ir.Value:
    return op.Add(n.a, op.Mul(op.Mul(_value(op, n), n.b), n.c))


def _addcmul_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad, Grad]:
    db = op.Mul(dy, op.Mul(n.c, _value(op, n))) if n.wants("b") else None
    return dy, db, op.Mul(dy, op.Mul(n.b, _value(op, n))) if n.wants("c") else None


def _addcdiv_body(op: Builder, n: NodeView) -> ir.Value:
    return op.Add(n.a, op.Mul(_value(op, n), op.Div(n.b, n.c)))


def _addcdiv_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad, Grad]:
    db = op.Mul(dy, op.Div(_value(op, n), n.c)) if n.wants("b") else None
    if not n.wants("c"):
        return dy, db, None
    return dy, db, op.Mul(op.Neg(dy), op.Div(op.Mul(_value(op, n), n.b), op.Mul(n.c, n.c)))


def _capture_addc(name: str) -> FromTorch:
    def capture(op: Builder, a: Any, b: Any, c: Any, *, value: Any = 1) -> Any:
        if not is_float(op.out[0].dtype):
            return NotImplemented
        return op.op(OWN, name)(*promoted(op, a, b, c), value=float(value))

    return capture


ADDCMUL = _define_ternary(
    "Addcmul",
    ("aten.addcmul.default",),
    ("a", "b", "c"),
    _capture_addc("Addcmul"),
    lambda n, a, b, c: Call(torch.addcmul, a, b, c, value=n.value),
    _addcmul_body,
    Gradient(_addcmul_gradient, ("b", "c")),
    {"value": 1.0},
)
ADDCDIV = _define_ternary(
    "Addcdiv",
    ("aten.addcdiv.default",),
    ("a", "b", "c"),
    _capture_addc("Addcdiv"),
    lambda n, a, b, c: Call(torch.addcdiv, a, b, c, value=n.value),
    _addcdiv_body,
    Gradient(_addcdiv_gradient, ("b", "c")),
    {"value": 1.0},
)
