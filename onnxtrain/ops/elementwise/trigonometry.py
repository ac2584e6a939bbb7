"""Trigonometric and hyperbolic functions, their inverses, and the error function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN
from onnxtrain.ops.body_parts import promoted
from onnxtrain.ops.constructors import define_binary, define_unary
from onnxtrain.ops.definition import NodeView, OpDef
from onnxtrain.ops.interfaces.cpp import CPP, Elementwise

Grad = ir.Value | None
Derivative = Callable[[Builder, NodeView], ir.Value]


def _define_function(
    name: str,
    kernel: Any,
    derivative: Derivative,
    *,
    aliases: Sequence[str] = (),
    reads: str = "x",
) -> OpDef:
    """Define y = f(x) with dx = dy * f'(x); `derivative` builds f'(x) from the value that `reads` names."""
    names = [f"aten.{n}.default" for n in (name.lower(), *aliases)]
    return define_unary(
        name,
        names,
        kernel,
        lambda op, n, dy: op.Mul(dy, derivative(op, n)),
        reads=(reads,),
    )


def _square_plus(op: Builder, value: ir.Value, sign: int, offset: int) -> ir.Value:
    """Return sign * value^2 + offset; `sign` is 1 or -1."""
    square = op.Mul(op.Neg(value) if sign < 0 else value, value)
    return op.Add(square, op.scalar(offset, like=value))


SIN = _define_function("Sin", torch.sin, lambda op, n: op.Cos(n.x))
CPP.register(SIN, Elementwise("std::sin({0})"))
COS = _define_function("Cos", torch.cos, lambda op, n: op.Neg(op.Sin(n.x)))
CPP.register(COS, Elementwise("std::cos({0})"))
_define_function("Tan", torch.tan, lambda op, n: _square_plus(op, n.y, 1, 1), reads="y")
_define_function("Asin", torch.asin, lambda op, n: op.own.Rsqrt(_square_plus(op, n.x, -1, 1)), aliases=("arcsin",))
_define_function(
    "Acos",
    torch.acos,
    lambda op, n: op.Neg(op.own.Rsqrt(_square_plus(op, n.x, -1, 1))),
    aliases=("arccos",),
)
_define_function("Sinh", torch.sinh, lambda op, n: op.Cosh(n.x))
_define_function("Cosh", torch.cosh, lambda op, n: op.Sinh(n.x))
_define_function("Asinh", torch.asinh, lambda op, n: op.own.Rsqrt(_square_plus(op, n.x, 1, 1)), aliases=("arcsinh",))
_define_function(
    "Acosh",
    torch.acosh,
    lambda op, n: op.own.Rsqrt(_square_plus(op, n.x, 1, -1)),
    aliases=("arccosh",),
)


def _atan_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    return op.Div(dy, _square_plus(op, n.x, 1, 1))


def _atanh_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    return op.Div(dy, _square_plus(op, n.x, -1, 1))


def _erf_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    exponential = op.Exp(op.Neg(op.Mul(n.x, n.x)))
    return op.Mul(op.Mul(exponential, op.scalar(2 / math.sqrt(math.pi), like=n.x)), dy)


ATAN = define_unary("Atan", ("aten.atan.default", "aten.arctan.default"), torch.atan, _atan_gradient)
ATANH = define_unary("Atanh", ("aten.atanh.default", "aten.arctanh.default"), torch.atanh, _atanh_gradient)
ERF = define_unary(
    "Erf",
    ("aten.erf.default", "aten.special_erf.default"),
    torch.erf,
    _erf_gradient,
)
CPP.register(ERF, Elementwise("std::erf({0})"))


# Atan2(a, b): the angle of the point (b, a)


def _is_negative(op: Builder, value: ir.Value) -> ir.Value:
    """Return whether the sign bit is set; the reciprocal of -0.0 is negative."""
    zero = op.scalar(0.0, like=value)
    minus_zero = op.And(op.Equal(value, zero), op.Less(op.Reciprocal(value), zero))
    return op.Or(op.Less(value, zero), minus_zero)


def _atan2_body(op: Builder, n: NodeView) -> ir.Value:
    """Compute the angle of (|b|, |a|), in the first quadrant, and reflect it into the quadrant of (b, a)."""
    zero = op.scalar(0.0, like=n.a)
    abs_a, abs_b = op.Abs(n.a), op.Abs(n.b)
    angle = op.Atan(op.Div(abs_a, abs_b))
    angle = op.Where(op.And(op.IsInf(n.a), op.IsInf(n.b)), op.scalar(math.pi / 4, like=n.a), angle)
    angle = op.Where(op.And(op.Equal(abs_a, zero), op.Equal(abs_b, zero)), zero, angle)
    angle = op.Where(_is_negative(op, n.b), op.Sub(op.scalar(math.pi, like=n.a), angle), angle)
    return op.Where(_is_negative(op, n.a), op.Neg(angle), angle)


def _atan2_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    sum_of_squares, zero = op.Add(op.Mul(n.a, n.a), op.Mul(n.b, n.b)), op.scalar(0.0, like=n.a)
    inverse = op.Where(op.Equal(sum_of_squares, zero), zero, op.Reciprocal(sum_of_squares))
    da = op.Mul(op.Mul(dy, n.b), inverse) if n.wants("a") else None
    return da, op.Mul(op.Mul(dy, op.Neg(n.a)), inverse) if n.wants("b") else None


ATAN2 = define_binary(
    "Atan2",
    {
        "aten.atan2.default": lambda op, a, b: op.own.Atan2(*promoted(op, a, b)),
        "aten.arctan2.default": lambda op, a, b: op.own.Atan2(*promoted(op, a, b)),
    },
    torch.atan2,
    _atan2_gradient,
    domain=OWN,
    body=_atan2_body,
)
