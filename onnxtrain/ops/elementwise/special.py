"""Special functions of PyTorch that have no ONNX op.

Erfc(x)                1 - erf(x); PyTorch's kernel is accurate for large x too, the body is not
Sinc(x)                sin(pi x) / (pi x), and 1 at 0
Entr(x)                -x log x, 0 at 0 and -inf below
XLogY(a, b)            a log b, and 0 where a is 0
XLog1PY(a, b)          a log(1 + b), and 0 where a is 0
Hypot(a, b)            sqrt(a^2 + b^2)
CopySign(a, b)         |a| with the sign of b
FMax(a, b), FMin       the maximum and minimum that ignore NaN; if a = b, a gets the gradient
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, dtype_of, is_float
from onnxtrain.ops.body_parts import add_scalar, cast, mul_scalar, promoted
from onnxtrain.ops.constructors import define_binary, define_unary
from onnxtrain.ops.definition import FromTorch, NodeView
from onnxtrain.ops.elementwise.copies import overwritten
from onnxtrain.ops.registry import register_captures

Grad = ir.Value | None


def _zero(op: Builder, like: ir.Value) -> ir.Value:
    return op.scalar(0, like=like)


# Functions of one operand


def _erfc_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    exponential = op.Exp(op.Neg(op.Mul(n.x, n.x)))
    return op.Mul(mul_scalar(op, exponential, -2 / math.sqrt(math.pi)), dy)


def _erfc_body(op: Builder, n: NodeView) -> ir.Value:
    return op.Sub(op.scalar(1, like=n.x), op.Erf(n.x))


def _sinc_body(op: Builder, n: NodeView) -> ir.Value:
    angle, one = mul_scalar(op, n.x, math.pi), op.scalar(1, like=n.x)
    at_zero = op.Equal(n.x, _zero(op, n.x))
    return op.Where(at_zero, one, op.Div(op.Sin(angle), op.Where(at_zero, one, angle)))


def _sinc_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    """Return dy * (pi x cos(pi x) - sin(pi x)) / (pi x^2), and 0 at 0."""
    angle, at_zero = mul_scalar(op, n.x, math.pi), op.Equal(n.x, _zero(op, n.x))
    numerator = op.Sub(op.Mul(angle, op.Cos(angle)), op.Sin(angle))
    derivative = op.Div(numerator, op.Mul(angle, n.x))
    return op.Mul(dy, op.Where(at_zero, _zero(op, n.x), derivative))


def _entr_body(op: Builder, n: NodeView) -> ir.Value:
    zero = _zero(op, n.x)
    entropy = op.Where(op.Equal(n.x, zero), zero, op.Mul(op.Neg(n.x), op.Log(n.x)))
    return op.Where(op.Less(n.x, zero), op.scalar(-math.inf, like=n.x), entropy)


def _entr_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    return op.Mul(dy, op.Neg(add_scalar(op, op.Log(n.x), 1)))


define_unary(
    "Erfc", ("aten.erfc.default", "aten.special_erfc.default"), torch.erfc, _erfc_gradient, domain=OWN, body=_erfc_body
)
define_unary(
    "Sinc", ("aten.sinc.default", "aten.special_sinc.default"), torch.sinc, _sinc_gradient, domain=OWN, body=_sinc_body
)
define_unary("Entr", "aten.special_entr.default", torch.special.entr, _entr_gradient, domain=OWN, body=_entr_body)


# Functions of two operands


def _capture_binary(name: str) -> FromTorch:
    def capture(op: Builder, a: Any, b: Any) -> Any:
        return op.op(OWN, name)(*promoted(op, a, b)) if is_float(op.out[0].dtype) else NotImplemented

    return capture


def _overloads(name: str, *overloads: str) -> dict[str, FromTorch]:
    return dict.fromkeys((f"aten.{overload}" for overload in overloads), _capture_binary(name))


_XLOG = ("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other")
_SPECIAL = ("default", "self_scalar", "other_scalar")


def _x_log(log: Callable[[Builder, ir.Value], ir.Value], argument: Callable[[Builder, ir.Value], ir.Value]) -> Any:
    """Return the body and the gradient of a * log(b); `argument` builds the logarithm's argument from b."""

    def body(op: Builder, n: NodeView) -> ir.Value:
        is_zero = op.And(op.Equal(n.a, _zero(op, n.a)), op.Not(op.IsNaN(n.b)))
        return op.Where(is_zero, _zero(op, n.a), op.Mul(n.a, log(op, n.b)))

    def gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
        is_constant = op.And(op.Equal(n.a, _zero(op, n.a)), op.LessOrEqual(argument(op, n.b), _zero(op, n.b)))
        da = op.Mul(dy, op.Where(is_constant, _zero(op, n.a), log(op, n.b))) if n.wants("a") else None
        return da, op.Div(op.Mul(dy, n.a), argument(op, n.b)) if n.wants("b") else None

    return body, gradient


_XLOGY, _XLOGY_GRADIENT = _x_log(lambda op, b: op.Log(b), lambda op, b: b)
_XLOG1PY, _XLOG1PY_GRADIENT = _x_log(lambda op, b: op.own.Log1p(b), lambda op, b: add_scalar(op, b, 1))
define_binary("XLogY", _overloads("XLogY", *_XLOG), torch.xlogy, _XLOGY_GRADIENT, domain=OWN, body=_XLOGY)
define_binary(
    "XLog1PY",
    _overloads("XLog1PY", *(f"special_xlog1py.{overload}" for overload in _SPECIAL)),
    torch.special.xlog1py,
    _XLOG1PY_GRADIENT,
    domain=OWN,
    body=_XLOG1PY,
)


def _hypot_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    da, db = (op.Mul(dy, op.Div(getattr(n, side), n.y)) if n.wants(side) else None for side in ("a", "b"))
    return da, db


define_binary(
    "Hypot",
    _overloads("Hypot", "hypot.default"),
    torch.hypot,
    _hypot_gradient,
    reads=("a", "b", "y"),
    domain=OWN,
    body=lambda op, n: op.Sqrt(op.Add(op.Mul(n.a, n.a), op.Mul(n.b, n.b))),
)


def _copysign_body(op: Builder, n: NodeView) -> ir.Value:
    """Return -|a| where b < 0 or b is -0.0, whose reciprocal is negative; |a| elsewhere."""
    zero, magnitude = _zero(op, n.b), op.Abs(n.a)
    minus_zero = op.And(op.Equal(n.b, zero), op.Less(op.Reciprocal(n.b), zero))
    is_negative = op.Or(op.Less(n.b, zero), minus_zero)
    return op.Where(is_negative, op.Neg(magnitude), magnitude)


def _copysign_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
    zero = _zero(op, n.a)
    ratio = op.Where(op.Equal(n.a, zero), zero, op.Div(n.y, n.a))
    return op.Mul(dy, ratio), mul_scalar(op, dy, 0) if n.wants("b") else None


define_binary(
    "CopySign",
    _overloads("CopySign", "copysign.Tensor", "copysign.Scalar"),
    torch.copysign,
    _copysign_gradient,
    reads=("a", "y"),
    domain=OWN,
    body=_copysign_body,
)


def _define_nan_ignoring_extreme(name: str, kernel: Any, *, is_max: bool) -> None:
    """Define FMax or FMin."""

    def is_a(op: Builder, n: NodeView) -> ir.Value:
        """Return whether a is the result."""
        wins = op.GreaterOrEqual(n.a, n.b) if is_max else op.LessOrEqual(n.a, n.b)
        return op.Or(wins, op.IsNaN(n.b))

    def gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad]:
        chosen, zero = is_a(op, n), _zero(op, dy)
        da = op.Where(chosen, dy, zero) if n.wants("a") else None
        return da, op.Where(chosen, zero, dy) if n.wants("b") else None

    def body(op: Builder, n: NodeView) -> ir.Value:
        return op.Where(is_a(op, n), n.a, n.b)

    define_binary(name, _overloads(name, f"{name.lower()}.default"), kernel, gradient, domain=OWN, body=body)


_define_nan_ignoring_extreme("FMax", torch.fmax, is_max=True)
_define_nan_ignoring_extreme("FMin", torch.fmin, is_max=False)


# Functions that are captured as several ops


def _logit(op: Builder, x: ir.Value, eps: float | None = None) -> Any:
    """Capture logit(x) = log(x / (1 - x)), with x clipped to [eps, 1 - eps]."""
    x = cast(op, x, op.out[0].dtype)
    if eps is not None:
        x = op.Clip(x, op.scalar(eps, like=x), op.scalar(1 - eps, like=x))
    return op.Log(op.Div(x, op.Sub(op.scalar(1, like=x), x)))


def _round_decimals(op: Builder, x: ir.Value, *, decimals: int) -> Any:
    if not is_float(dtype_of(x)):
        return NotImplemented
    factor = 10.0 ** abs(decimals)
    if decimals < 0:
        return mul_scalar(op, op.Round(op.Div(x, op.scalar(factor, like=x))), factor)
    return op.Div(op.Round(mul_scalar(op, x, factor)), op.scalar(factor, like=x))


def _convert_angle(factor: float) -> FromTorch:
    """Capture `deg2rad` and `rad2deg`."""
    return lambda op, x: mul_scalar(op, cast(op, x, op.out[0].dtype), factor)


def _frac(op: Builder, x: ir.Value) -> Any:
    return op.Sub(x, op.own.Trunc(x))


def _logaddexp2(op: Builder, a: ir.Value, b: ir.Value) -> Any:
    """Capture log2(2^a + 2^b) by LogAddExp, which has base e."""
    a, b = (mul_scalar(op, v, math.log(2)) for v in promoted(op, a, b))
    return mul_scalar(op, op.own.LogAddExp(a, b), 1 / math.log(2))


def _angle(op: Builder, x: ir.Value) -> ir.Value:
    """Capture the angle of real numbers: pi below 0, NaN for NaN, 0 elsewhere. Its gradient is zeros."""
    wide = cast(op, x, op.out[0].dtype)
    angle = op.Where(op.Less(wide, _zero(op, wide)), op.scalar(math.pi, like=wide), _zero(op, wide))
    return overwritten(op, x, op.Where(op.IsNaN(wide), op.own.Detach(wide), angle))


register_captures(
    {
        "aten.angle.default": _angle,
        "aten.deg2rad.default": _convert_angle(math.pi / 180),
        "aten.rad2deg.default": _convert_angle(180 / math.pi),
        "aten.frac.default": _frac,
        "aten.logaddexp2.default": _logaddexp2,
        "aten.logit.default": _logit,
        "aten.special_logit.default": _logit,
        "aten.round.decimals": _round_decimals,
    }
)
