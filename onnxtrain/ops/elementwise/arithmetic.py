"""Sums, products, quotients and remainders, signs, and the fused multiply-adds.

Add Sub Mul Div Neg Abs Sign Reciprocal Sum      as in ONNX; Div of integers truncates
Mod(a, b)                 integers: Python's %; with fmod=1 C's fmod
Remainder(a, b)           floats: Python's %: the sign of b
FloorDivide(a, b)         floor(a / b), exact for floats as in Python's //
TruncDivide(a, b)         trunc(a / b) of floats
Lerp, Addcmul, Addcdiv    PyTorch's
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
from onnxtrain.ops.constructors import always, binary, elementwise_flops, never, promoted, unary
from onnxtrain.ops.definition import (
    STANDARD,
    Call,
    Effects,
    FromTorch,
    Gradient,
    Infix,
    Kernel,
    NodeView,
    OpDef,
)
from onnxtrain.ops.registry import define

Grad = ir.Value | None


def zeros_like(op: Builder, value: ir.Value) -> ir.Value:
    """Zeros of a value's shape: the gradient of a step function, which PyTorch gives as zeros and not as none."""
    shape = op.shape_of(value)
    result: ir.Value = op.ConstantOfShape(shape, value=ir.tensor([0.0], dtype=dtype_of(value)))
    return result


def number_of(value: ir.Value) -> Any:
    """The Python number that a 0-dimensional constant stands for; None for any other value."""
    if value.const_value is None or rank_of(value):
        return None
    return value.meta.get("scalar", value.const_value.numpy().item())


# Add Sub Mul Div


def _arithmetic(name: str, on_bool: str | None = None) -> FromTorch:
    """`aten.add(a, b, alpha=1)` and its like: promote, scale b, compute. `on_bool` is what it is for truth values."""

    def capture(op: Builder, a: Any, b: Any, alpha: Any = 1) -> Any:
        logical = op.out[0].dtype == ir.DataType.BOOL
        if logical and (on_bool is None or alpha not in (1, True)):
            return NotImplemented
        a, b = promoted(op, a, b)
        if logical:
            return op.op("", on_bool)(a, b)  # type: ignore[arg-type]  # not None: see above
        if alpha != 1:
            b = op.Mul(b, op.scalar(alpha, like=b))
        return op.op("", name)(a, b)

    return capture


def _reversed(op: Builder, a: Any, b: Any, alpha: Any = 1) -> Any:
    """`rsub(a, b)`: b - alpha * a."""
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


def _quotient(op: Builder, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
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


ADD = binary(
    "Add",
    dict.fromkeys(_overloads("add"), _arithmetic("Add", "Or")),
    operator.add,
    lambda op, n, dy: (dy, dy),
    reads=(),
    symbol="+",
    since_version=14,
    host_eval=operator.add,
    commutative=True,
    cpp_expression="{0} + {1}",
)
SUB = binary(
    "Sub",
    dict.fromkeys(_overloads("sub", "subtract"), _arithmetic("Sub")) | dict.fromkeys(_overloads("rsub"), _reversed),
    operator.sub,
    _sub_gradient,
    reads=(),
    symbol="-",
    since_version=14,
    host_eval=operator.sub,
    cpp_expression="{0} - {1}",
)
MUL = binary(
    "Mul",
    dict.fromkeys(_overloads("mul", "multiply"), _arithmetic("Mul", "And")),
    operator.mul,
    _mul_gradient,
    symbol="*",
    since_version=14,
    host_eval=operator.mul,
    commutative=True,
    cpp_expression="{0} * {1}",
)
DIV = binary(
    "Div",
    dict.fromkeys(
        [
            *_overloads("div", "divide", "true_divide"),
            *(f"aten.{name}.{kind}_mode" for name in ("div", "divide") for kind in ("Tensor", "Scalar")),
        ],
        _quotient,
    ),
    operator.truediv,
    _div_gradient,
    reads=("b", "y"),
    lower=_div_call,
    accepts_scalars=True,
    since_version=14,
    host_eval=operator.floordiv,  # sizes are never negative
    cpp_expression="{0} / {1}",
)


# Rounded quotients and remainders


def _no_slope(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    return zeros_like(op, n.a) if n.wants("a") else None, zeros_like(op, n.b) if n.wants("b") else None


def _floor_divide_body(op: Builder, n: NodeView) -> ir.Value:
    """PyTorch's own steps, which are those of Python's //: a quotient that was rounded up is not one too large."""
    a, b = n.a, n.b
    if not is_float(dtype_of(a)):
        return op.Div(op.Sub(a, op.Mod(a, b)), b)  # type: ignore[no-any-return]
    zero, half, one = (op.scalar(v, like=a) for v in (0.0, 0.5, 1.0))
    rest = op.Mod(a, b, fmod=1)
    whole = op.Div(op.Sub(a, rest), b)
    whole = op.Where(_signs_differ(op, rest, b), op.Sub(whole, one), whole)
    floor = op.Floor(whole)
    floor = op.Where(op.Greater(op.Sub(whole, floor), half), op.Add(floor, one), floor)
    signed_zero = op.Mul(op.Div(a, b), zero)
    floor = op.Where(op.Equal(whole, zero), signed_zero, floor)
    return op.Where(op.Equal(b, zero), op.Div(a, b), floor)  # type: ignore[no-any-return]


def _signs_differ(op: Builder, rest: ir.Value, b: ir.Value) -> ir.Value:
    """Whether a remainder that is not 0 and its divisor have different signs."""
    zero = op.scalar(0.0, like=b)
    differ = op.Xor(op.Less(rest, zero), op.Less(b, zero))
    result: ir.Value = op.And(op.Not(op.Equal(rest, zero)), differ)
    return result


FLOOR_DIVIDE = binary(
    "FloorDivide",
    {
        "aten.floor_divide.default": lambda op, a, b: op.own.FloorDivide(*promoted(op, a, b)),
        "aten.floor_divide.Scalar": lambda op, a, b: op.own.FloorDivide(*promoted(op, a, b)),
    },
    torch.floor_divide,
    _no_slope,
    reads=(),
    domain=OWN,
    body=_floor_divide_body,
    accepts_scalars=True,
    host_eval=operator.floordiv,
)
TRUNC_DIVIDE = binary(
    "TruncDivide",
    {},
    torch.div,
    _no_slope,
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
    """Fmod has the sign of a; where b's sign differs, one b more."""
    rest = op.Mod(n.a, n.b, fmod=1)
    return op.Where(_signs_differ(op, rest, n.b), op.Add(rest, n.b), rest)  # type: ignore[no-any-return]


def _capture_remainder(op: Builder, a: Any, b: Any) -> Any:
    a, b = promoted(op, a, b)
    return op.own.Remainder(a, b) if is_float(dtype_of(a)) else op.Mod(a, b)


def _capture_fmod(op: Builder, a: Any, b: Any) -> Any:
    return op.Mod(*promoted(op, a, b), fmod=1)


MOD = binary(
    "Mod",
    dict.fromkeys(_overloads("fmod"), _capture_fmod),
    torch.remainder,
    _fmod_gradient,
    attributes={"fmod": 0},
    lower=lambda n, a, b: Call(torch.fmod if n.fmod else torch.remainder, a, b),
    since_version=13,
    host_eval=operator.mod,
)
REMAINDER = binary(
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
    """(x > 0) - (x < 0), as PyTorch: NaN has the sign 0."""
    zero, dtype = op.scalar(0, like=n.x), dtype_of(n.x)
    return op.Sub(op.Cast(op.Greater(n.x, zero), to=dtype), op.Cast(op.Less(n.x, zero), to=dtype))  # type: ignore[no-any-return]


def _reciprocal_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    return op.Mul(op.Neg(dy), op.Mul(n.y, n.y))  # type: ignore[no-any-return]


NEG = unary(
    "Neg",
    ("aten.neg.default", "aten.negative.default"),
    torch.neg,
    lambda op, n, dy: op.Neg(dy),
    reads=(),
    since_version=13,
    host_eval=_host_neg,
    cpp_expression="-{0}",
)
ABS = unary(
    "Abs",
    ("aten.abs.default", "aten.absolute.default"),
    torch.abs,
    lambda op, n, dy: op.Mul(dy, op.Sign(n.x)),
    since_version=13,
    cpp_expression="{0} < 0 ? -{0} : {0} + 0",
)
SIGN = unary(
    "Sign",
    ("aten.sign.default", "aten.sgn.default"),
    torch.sign,
    lambda op, n, dy: zeros_like(op, n.x),
    reads=(),
    since_version=13,
    body=_sign_body,
    ort_compatible=lambda n: not is_float(dtype_of(n.x)),
)
RECIPROCAL = unary(
    "Reciprocal",
    "aten.reciprocal.default",
    torch.reciprocal,
    _reciprocal_gradient,
    reads=("y",),
    since_version=13,
    cpp_expression="1 / {0}",
)


# Several operands


def _broadcast(*names: str) -> Any:
    def shapes(n: NodeView) -> Sequence[TensorType]:
        operands = [type_of(getattr(n, name)) for name in names]
        return (TensorType(operands[0].dtype, sizes.broadcast(*(t.shape for t in operands))),)

    return shapes


def _sum_type(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(dtype_of(n.terms[0]), sizes.broadcast(*map(sizes.dims_of, n.terms))),)


def _sum_call(n: NodeView, terms: Sequence[Any]) -> Call:
    total = terms[0]
    for term in terms[1:]:
        total = Infix("+", operator.add, total, term)
    return total if isinstance(total, Call) else Call(torch.clone, total)


SUM = define(
    OpDef(
        domain="",
        name="Sum",
        inputs=("terms...",),
        outputs=("y",),
        attributes={},
        since_version=13,
        from_torch={},
        shapes=_sum_type,
        body=STANDARD,
        ort_compatible=always,
        gradient=(Gradient(lambda op, n, dy: (dy,) * len(n.terms), ()),),
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=_sum_call),),
        axes=lambda n: f"{', '.join(['...'] * len(n.terms))} -> ...",
        effects=Effects.NONE,
        aliases={},
        flops=elementwise_flops,
        host_eval=None,
    )
)


def _lerp_body(op: Builder, n: NodeView) -> ir.Value:
    """A + w (b - a) where w is small, b - (1 - w) (b - a) where it is large: exact at both ends."""
    difference = op.Sub(n.b, n.a)
    one, half = op.scalar(1.0, like=n.a), op.scalar(0.5, like=n.a)
    near = op.Add(n.a, op.Mul(n.weight, difference))
    far = op.Sub(n.b, op.Mul(difference, op.Sub(one, n.weight)))
    return op.Where(op.Less(op.Abs(n.weight), half), near, far)  # type: ignore[no-any-return]


def _lerp_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad, Grad]:
    number, one = number_of(n.weight), op.scalar(1.0, like=dy)
    rest = op.Sub(one, n.weight) if number is None else op.scalar(1 - number, like=dy)
    da = op.Mul(dy, rest) if n.wants("a") else None
    dweight = op.Mul(dy, op.Sub(n.b, n.a)) if n.wants("weight") else None
    return da, op.Mul(dy, n.weight) if n.wants("b") else None, dweight


def _lerp_call(n: NodeView, a: Any, b: Any, weight: Any) -> Call:
    number = number_of(n.weight)
    return Call(torch.lerp, a, b, weight if number is None else number)


def _ternary(
    name: str,
    torch_names: Sequence[str],
    inputs: tuple[str, str, str],
    capture: FromTorch,
    lower: Any,
    body: Any,
    gradient: Gradient,
    attributes: dict[str, Any] | None = None,
) -> OpDef:
    return define(
        OpDef(
            domain=OWN,
            name=name,
            inputs=inputs,
            outputs=("y",),
            attributes=attributes or {},
            since_version=1,
            from_torch=dict.fromkeys(torch_names, capture),
            shapes=_broadcast(*inputs),
            body=body,
            ort_compatible=never,
            gradient=(gradient,),
            nondiff_inputs=frozenset(),
            kernels=(Kernel(lower=lower),),
            axes=lambda n: "..., ..., ... -> ...",
            effects=Effects.NONE,
            aliases={},
            flops=lambda n: sizes.multiply(3, elementwise_flops(n)),
            host_eval=None,
        )
    )


LERP = _ternary(
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
    return op.Add(n.a, op.Mul(op.Mul(_value(op, n), n.b), n.c))  # type: ignore[no-any-return]


def _addcmul_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad, Grad]:
    db = op.Mul(dy, op.Mul(n.c, _value(op, n))) if n.wants("b") else None
    return dy, db, op.Mul(dy, op.Mul(n.b, _value(op, n))) if n.wants("c") else None


def _addcdiv_body(op: Builder, n: NodeView) -> ir.Value:
    return op.Add(n.a, op.Mul(_value(op, n), op.Div(n.b, n.c)))  # type: ignore[no-any-return]


def _addcdiv_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad, Grad]:
    db = op.Mul(dy, op.Div(_value(op, n), n.c)) if n.wants("b") else None
    if not n.wants("c"):
        return dy, db, None
    return dy, db, op.Mul(op.Neg(dy), op.Div(op.Mul(_value(op, n), n.b), op.Mul(n.c, n.c)))


def _fused(name: str) -> FromTorch:
    def capture(op: Builder, a: Any, b: Any, c: Any, *, value: Any = 1) -> Any:
        if not is_float(op.out[0].dtype):
            return NotImplemented
        return op.op(OWN, name)(*promoted(op, a, b, c), value=float(value))

    return capture


ADDCMUL = _ternary(
    "Addcmul",
    ("aten.addcmul.default",),
    ("a", "b", "c"),
    _fused("Addcmul"),
    lambda n, a, b, c: Call(torch.addcmul, a, b, c, value=n.value),
    _addcmul_body,
    Gradient(_addcmul_gradient, ("b", "c")),
    {"value": 1.0},
)
ADDCDIV = _ternary(
    "Addcdiv",
    ("aten.addcdiv.default",),
    ("a", "b", "c"),
    _fused("Addcdiv"),
    lambda n, a, b, c: Call(torch.addcdiv, a, b, c, value=n.value),
    _addcdiv_body,
    Gradient(_addcdiv_gradient, ("b", "c")),
    {"value": 1.0},
)
