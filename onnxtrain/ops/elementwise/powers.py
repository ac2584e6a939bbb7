"""Powers, roots, exponentials and logarithms.

As in PyTorch, the derivative of a^0 by a is 0, and so is the derivative of 0^b by b for b >= 0.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, constant_of, dtype_of, is_float
from onnxtrain.ops.body_parts import cast, promoted
from onnxtrain.ops.constructors import define_binary, define_unary
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.elementwise.arithmetic import number_of, zeros_like
from onnxtrain.ops.interfaces.cpp import CPP, Array, Elementwise, Source, UnsupportedError

Grad = ir.Value | None
_POW_TYPES = frozenset(
    {
        ir.DataType.FLOAT,
        ir.DataType.DOUBLE,
        ir.DataType.FLOAT16,
        ir.DataType.BFLOAT16,
        ir.DataType.INT32,
        ir.DataType.INT64,
    }
)


# Pow


def _capture_pow(op: Builder, a: Any, b: Any) -> Any:
    if op.out[0].dtype not in _POW_TYPES:
        return NotImplemented
    return op.Pow(*promoted(op, a, b))


def _base_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    """Return dy * (b * a^(b - 1)), and 0 where b is 0."""
    exponent = number_of(n.b)
    if exponent == 0:
        return zeros_like(op, n.a)
    if exponent == 1:
        return dy
    if exponent is not None:
        power = n.a if exponent == 2 else op.Pow(n.a, op.scalar(exponent - 1, like=n.a))
        return op.Mul(dy, op.Mul(power, op.scalar(exponent, like=n.a)))
    b = cast(op, n.b, dtype_of(n.a))  # ONNX allows different types of a and b
    zero, one = op.scalar(0.0, like=b), op.scalar(1.0, like=b)
    gradient = op.Mul(dy, op.Mul(b, op.Pow(n.a, op.Sub(b, one))))
    return op.Where(op.Equal(b, zero), zero, gradient)


def _exponent_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    """Return dy * (y * log a), and 0 where a is 0 and b >= 0."""
    base = number_of(n.a)
    if base is not None and base > 0:
        return op.Mul(dy, op.Mul(n.y, op.scalar(math.log(base), like=n.y)))
    zero = op.scalar(0.0, like=n.b)
    is_constant = op.And(op.Equal(n.a, zero), op.GreaterOrEqual(n.b, zero))
    return op.Mul(dy, op.Where(is_constant, zero, op.Mul(n.y, op.Log(n.a))))


def _pow_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    return _base_gradient(op, n, dy) if n.wants("a") else None, _exponent_gradient(op, n, dy) if n.wants("b") else None


POW = define_binary(
    "Pow",
    {
        "aten.pow.Tensor_Tensor": _capture_pow,
        "aten.pow.Tensor_Scalar": _capture_pow,
        "aten.pow.Scalar": _capture_pow,
        "aten.float_power.Tensor_Tensor": _capture_pow,
        "aten.float_power.Tensor_Scalar": _capture_pow,
        "aten.float_power.Scalar": _capture_pow,
        "aten.square.default": lambda op, x: _capture_pow(op, x, 2),
    },
    torch.pow,
    _pow_gradient,
    reads=("a", "b", "y"),
    accepts_scalars=True,
)


@CPP.implements(POW)
def _pow_in_cpp(source: Source, n: NodeView, inputs: list[Array]) -> list[Array]:
    exponent = constant_of(n.b)
    if exponent is None or exponent.size != 1 or not is_float(inputs[0].dtype):
        raise UnsupportedError("a power that is not a constant")
    expressions = {2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", 0.5: "std::sqrt({0})", -1.0: "1 / {0}"}
    expression = expressions.get(float(exponent.item()))
    if expression is None:
        raise UnsupportedError(f"a power of {exponent.item()}")
    return Elementwise(expression)(source, n, inputs[:1])


# Roots


def _sqrt_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    return op.Div(dy, op.Mul(n.y, op.scalar(2, like=n.y)))


def _rsqrt_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    cubed = op.Pow(n.y, op.scalar(3, like=n.y))
    return op.Mul(op.Mul(dy, op.scalar(-0.5, like=dy)), cubed)


SQRT = define_unary(
    "Sqrt",
    "aten.sqrt.default",
    torch.sqrt,
    _sqrt_gradient,
    reads=("y",),
)
CPP.register(SQRT, Elementwise("std::sqrt({0})"))
RSQRT = define_unary(
    "Rsqrt",
    "aten.rsqrt.default",
    torch.rsqrt,
    _rsqrt_gradient,
    reads=("y",),
    domain=OWN,
    body=lambda op, n: op.Reciprocal(op.Sqrt(n.x)),
)


# Exponentials


def _expm1_body(op: Builder, n: NodeView) -> ir.Value:
    """Return (u - 1) * x / log u with u = exp x (Kahan), which is accurate for small x, where u - 1 cancels."""
    one, minus_one = op.scalar(1.0, like=n.x), op.scalar(-1.0, like=n.x)
    u = op.Exp(n.x)
    u_minus_one = op.Sub(u, one)
    kahan = op.Div(op.Mul(u_minus_one, n.x), op.Log(u))
    kahan = op.Where(op.Or(op.Equal(u_minus_one, minus_one), op.IsInf(u)), u_minus_one, kahan)
    return op.Where(op.Equal(u, one), n.x, kahan)


def _expm1_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    return op.Mul(dy, op.Add(n.y, op.scalar(1, like=n.y)))


def _exp2_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    return op.Mul(op.Mul(dy, n.y), op.scalar(math.log(2), like=dy))


EXP = define_unary(
    "Exp",
    "aten.exp.default",
    torch.exp,
    lambda op, n, dy: op.Mul(dy, n.y),
    reads=("y",),
)
CPP.register(EXP, Elementwise("std::exp({0})"))
EXPM1 = define_unary(
    "Expm1",
    ("aten.expm1.default", "aten.special_expm1.default"),
    torch.expm1,
    _expm1_gradient,
    reads=("y",),
    domain=OWN,
    body=_expm1_body,
)
EXP2 = define_unary(
    "Exp2",
    ("aten.exp2.default", "aten.special_exp2.default"),
    torch.exp2,
    _exp2_gradient,
    reads=("y",),
    domain=OWN,
    body=lambda op, n: op.Pow(op.scalar(2.0, like=n.x), n.x),
)


# Logarithms


def _log1p_body(op: Builder, n: NodeView) -> ir.Value:
    """Return log u * x / (u - 1) with u = 1 + x (Kahan), which is accurate for small x, which u loses to rounding."""
    one = op.scalar(1.0, like=n.x)
    u = op.Add(n.x, one)
    kahan = op.Div(op.Mul(op.Log(u), n.x), op.Sub(u, one))
    kahan = op.Where(op.IsInf(u), op.Log(u), kahan)
    return op.Where(op.Equal(u, one), n.x, kahan)


def _log1p_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    return op.Div(dy, op.Add(n.x, op.scalar(1, like=n.x)))


def _define_logarithm(name: str, log_of_base: float, kernel: Any) -> None:
    """Define a logarithm whose base has no ONNX op."""

    def body(op: Builder, n: NodeView) -> ir.Value:
        return op.Mul(op.Log(n.x), op.scalar(1 / log_of_base, like=n.x))

    def gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
        return op.Div(dy, op.Mul(n.x, op.scalar(log_of_base, like=n.x)))

    define_unary(name, f"aten.{name.lower()}.default", kernel, gradient, domain=OWN, body=body)


LOG = define_unary(
    "Log",
    "aten.log.default",
    torch.log,
    lambda op, n, dy: op.Div(dy, n.x),
)
CPP.register(LOG, Elementwise("std::log({0})"))
LOG1P = define_unary(
    "Log1p",
    ("aten.log1p.default", "aten.special_log1p.default"),
    torch.log1p,
    _log1p_gradient,
    domain=OWN,
    body=_log1p_body,
)
_define_logarithm("Log2", 0.6931471805599453, torch.log2)
_define_logarithm("Log10", 2.3025850929940456, torch.log10)  # log 10 as in PyTorch's gradient


def _logaddexp_body(op: Builder, n: NodeView) -> ir.Value:
    """Return max(a, b) + log1p(exp(-|a - b|)); for a = b = ±inf that is NaN, and a is returned instead."""
    maximum = op.Max(n.a, n.b)
    minus_distance = op.Neg(op.Abs(op.Sub(n.a, n.b)))
    is_same_infinity = op.And(op.IsInf(n.a), op.Equal(n.a, n.b))
    log_sum = op.Add(maximum, op.own.Log1p(op.Exp(minus_distance)))
    return op.Where(is_same_infinity, n.a, log_sum)


def _logaddexp_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    def share(operand: ir.Value, other: ir.Value) -> Any:
        return op.Div(dy, op.Add(op.Exp(op.Sub(other, operand)), op.scalar(1, like=dy)))

    return share(n.a, n.b) if n.wants("a") else None, share(n.b, n.a) if n.wants("b") else None


LOG_ADD_EXP = define_binary(
    "LogAddExp",
    {"aten.logaddexp.default": lambda op, a, b: op.own.LogAddExp(*promoted(op, a, b))},
    torch.logaddexp,
    _logaddexp_gradient,
    domain=OWN,
    body=_logaddexp_body,
)
