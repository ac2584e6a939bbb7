"""Cases of the elementwise ops, with PyTorch's functions as references."""

import operator
from collections.abc import Callable
from typing import Any

import torch

from onnxtrain.graph.values import MICROSOFT, OWN
from tests.op_case import OpCase, Spec

FLOATS = torch.float32, torch.float64


def unary_case(
    name: str, reference: Callable[..., Any], low: float = -2.0, high: float = 2.0, domain: str = "", **options: Any
) -> OpCase:
    return OpCase(domain, name, (Spec("b s", low=low, high=high),), reference, **{"specials": True, **options})


def binary_case(
    name: str,
    reference: Callable[..., Any],
    domain: str = "",
    a: Spec | None = None,
    b: Spec | None = None,
    **options: Any,
) -> OpCase:
    """Return a case of binary_case operands, which by default have the same shape."""
    inputs = (a or Spec("b s h"), b or Spec("b s h"))
    return OpCase(domain, name, inputs, reference, **{"specials": True, **options})


def integer_case(name: str, reference: Callable[..., Any], domain: str = "", **options: Any) -> OpCase:
    a, b = Spec("b s", "int64", -9, 9), Spec("s", "int64", 1, 5)
    return OpCase(domain, name, (a, b), reference, label="int64", **options)


def logical_case(name: str, reference: Callable[..., Any]) -> OpCase:
    return OpCase("", name, (Spec("b s", "bool"), Spec("s", "bool")), reference)


def divisors(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return divisors of either sign whose quotients are not close to integer_case."""
    multiples = torch.randint(1, 4, shape, generator=generator) * 4
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return ((multiples + 1.375) * sign).to(dtype)


def tied(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return elements among five values, of which many are equal."""
    return torch.randint(-2, 3, shape, generator=generator).to(dtype) / 2


BIAS = Spec("h")
TIED = Spec("b s h", make=tied)
SCALAR = Spec("", value=0.3)

ARITHMETIC = [
    binary_case("Add", operator.add),
    binary_case("Add", operator.add, b=BIAS, label="bias"),
    binary_case("Add", operator.add, b=SCALAR, label="scalar"),
    binary_case("Add", operator.add, a=Spec("b 1 h"), b=Spec("s 1"), label="both-broadcast"),
    integer_case("Add", operator.add),
    binary_case("Sub", operator.sub),
    binary_case("Sub", operator.sub, a=SCALAR, label="from-scalar"),
    binary_case("Sub", operator.sub, a=BIAS, label="bias"),
    binary_case("Mul", operator.mul),
    binary_case("Mul", operator.mul, b=BIAS, label="bias"),
    binary_case("Mul", operator.mul, b=SCALAR, label="scalar"),
    binary_case("Div", operator.truediv),
    binary_case("Div", operator.truediv, b=Spec("b s 1", low=0.5), label="row"),
    binary_case("Div", operator.truediv, a=SCALAR, label="of-scalar"),
    integer_case("Div", lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    binary_case("FloorDivide", lambda a, b: torch.div(a, b, rounding_mode="floor"), OWN),
    binary_case("FloorDivide", lambda a, b: torch.div(a, b, rounding_mode="floor"), OWN, a=TIED, b=TIED, label="ties"),
    integer_case("FloorDivide", torch.floor_divide, OWN),
    binary_case("TruncDivide", lambda a, b: torch.div(a, b, rounding_mode="trunc"), OWN),
    integer_case("Mod", torch.remainder),
    binary_case("Mod", torch.fmod, attributes={"fmod": 1}, a=Spec("b s", low=-9, high=9), b=Spec("s", make=divisors)),
    binary_case("Remainder", torch.remainder, OWN, a=Spec("b s", low=-9, high=9), b=Spec("s", make=divisors)),
    binary_case("Remainder", torch.remainder, OWN, a=TIED, b=TIED, label="ties"),
    unary_case("Neg", torch.neg),
    unary_case("Abs", torch.abs),
    unary_case("Sign", torch.sign),
    unary_case("Reciprocal", torch.reciprocal),
    OpCase("", "Sum", (Spec("b s"), Spec("s"), Spec("b 1")), lambda a, b, c: a + b + c),
    OpCase(OWN, "Lerp", (Spec("b s"), Spec("b s"), Spec("b 1", low=0.0, high=1.0)), torch.lerp, specials=True),
    OpCase(
        OWN,
        "Addcmul",
        (Spec("b s"), Spec("s"), Spec("b 1")),
        lambda a, b, c: torch.addcmul(a, b, c, value=0.3),
        attributes={"value": 0.3},
    ),
    OpCase(
        OWN,
        "Addcdiv",
        (Spec("b s"), Spec("s"), Spec("b 1", low=0.5)),
        lambda a, b, c: torch.addcdiv(a, b, c, value=-0.1),
        attributes={"value": -0.1},
    ),
]

POWERS = [
    *(
        OpCase(
            "",
            "Pow",
            (Spec("b s"), Spec("", value=exponent)),
            lambda a, b, e=exponent: a**e,
            label=f"to-{exponent}",
            specials=True,
        )
        for exponent in (0.0, 1.0, 2.0, 3.0, -1.0)
    ),
    OpCase("", "Pow", (Spec("b s", low=0.1), Spec("", value=0.5)), lambda a, b: a**0.5, label="root"),
    OpCase("", "Pow", (Spec("", value=2.5), Spec("b s")), lambda a, b: 2.5**b, label="of-scalar"),
    OpCase("", "Pow", (Spec("", value=0.0), Spec("b s", make=tied)), lambda a, b: 0.0**b, label="of-zero"),
    OpCase("", "Pow", (Spec("b s", low=0.1), Spec("s")), torch.pow),
    OpCase(
        "",
        "Pow",
        (Spec("b s", make=lambda *x: tied(*x).abs()), Spec("b s", make=lambda *x: tied(*x).abs())),
        torch.pow,
        label="zeros",
    ),
    OpCase("", "Pow", (Spec("b s", "int64"), Spec("", "int64", value=3)), torch.pow, label="int64"),
    unary_case("Sqrt", torch.sqrt, 0.1),
    unary_case("Rsqrt", torch.rsqrt, 0.1, domain=OWN),
    unary_case("Exp", torch.exp),
    unary_case("Expm1", torch.expm1, domain=OWN),
    unary_case("Expm1", torch.expm1, -1e-3, 1e-3, domain=OWN, label="small"),
    unary_case("Exp2", torch.exp2, domain=OWN),
    unary_case("Log", torch.log, 0.1),
    unary_case("Log1p", torch.log1p, -0.9, domain=OWN),
    unary_case("Log1p", torch.log1p, -1e-3, 1e-3, domain=OWN, label="small"),
    unary_case("Log2", torch.log2, 0.1, domain=OWN),
    unary_case("Log10", torch.log10, 0.1, domain=OWN),
    binary_case("LogAddExp", torch.logaddexp, OWN, b=Spec("s h")),
]

TRIGONOMETRY = [
    unary_case("Sin", torch.sin),
    unary_case("Cos", torch.cos),
    unary_case("Tan", torch.tan, -1.2, 1.2),
    unary_case("Asin", torch.asin, -0.9, 0.9),
    unary_case("Acos", torch.acos, -0.9, 0.9),
    unary_case("Atan", torch.atan),
    unary_case("Sinh", torch.sinh),
    unary_case("Cosh", torch.cosh),
    unary_case("Asinh", torch.asinh),
    unary_case("Acosh", torch.acosh, 1.1, 3.0),
    unary_case("Atanh", torch.atanh, -0.9, 0.9),
    unary_case("Erf", torch.erf),
    binary_case("Atan2", torch.atan2, OWN),
    binary_case("Atan2", torch.atan2, OWN, a=TIED, b=TIED, label="axes"),
]

ROUNDING = [
    unary_case("Floor", torch.floor),
    unary_case("Ceil", torch.ceil),
    unary_case("Round", torch.round),
    unary_case("Trunc", torch.trunc, domain=OWN),
    OpCase("", "Round", (Spec("b s", make=tied),), torch.round, label="halves"),
]

COMPARISON = [
    case
    for name, domain, function in (
        ("Equal", "", torch.eq),
        ("NotEqual", OWN, torch.ne),
        ("Less", "", torch.lt),
        ("LessOrEqual", "", torch.le),
        ("Greater", "", torch.gt),
        ("GreaterOrEqual", "", torch.ge),
    )
    for case in (
        binary_case(name, function, domain, a=TIED, b=Spec("s h", make=tied)),
        binary_case(name, function, domain, b=Spec("", value=0.5), label="scalar"),
        integer_case(name, function, domain),
    )
] + [
    unary_case("IsNaN", torch.isnan),
    unary_case("IsInf", torch.isinf),
    unary_case("IsInf", torch.isposinf, attributes={"detect_negative": 0}, label="positive"),
    unary_case("IsInf", torch.isneginf, attributes={"detect_positive": 0}, label="negative"),
    unary_case("IsFinite", torch.isfinite, domain=MICROSOFT),
    unary_case("SignBit", torch.signbit, domain=OWN),
]

LOGIC = [
    logical_case("And", torch.logical_and),
    logical_case("Or", torch.logical_or),
    logical_case("Xor", torch.logical_xor),
    OpCase("", "Not", (Spec("b s", "bool"),), torch.logical_not),
    integer_case("BitwiseAnd", torch.bitwise_and),
    integer_case("BitwiseOr", torch.bitwise_or),
    integer_case("BitwiseXor", torch.bitwise_xor),
    OpCase("", "BitwiseNot", (Spec("b s", "int64"),), torch.bitwise_not),
]

LOW, HIGH = Spec("", value=-0.5), Spec("", value=1.0)
SELECTION = [
    OpCase("", "Where", (Spec("b 1", "bool"), Spec("b s"), Spec("s")), torch.where, specials=True),
    OpCase("", "Where", (Spec("b s", "bool"), Spec("b s"), SCALAR), torch.where, label="scalar"),
    binary_case("Max", torch.maximum, a=TIED, b=Spec("s h", make=tied)),
    binary_case("Max", torch.maximum, label="specials"),
    binary_case("Min", torch.minimum, a=TIED, b=Spec("s h", make=tied)),
    binary_case("Min", torch.minimum, label="specials"),
    OpCase("", "Clip", (Spec("b s", make=tied), LOW, HIGH), lambda x, a, b: x.clamp(-0.5, 1.0)),
    OpCase("", "Clip", (Spec("b s"), LOW, HIGH), lambda x, a, b: x.clamp(-0.5, 1.0), specials=True, label="specials"),
    OpCase("", "Clip", (Spec("b s"), LOW), lambda x, a: x.clamp(min=-0.5), label="min"),
    OpCase("", "Clip", (Spec("b s"), None, HIGH), lambda x, a, b: x.clamp(max=1.0), label="max"),
    OpCase(
        "",
        "Clip",
        (Spec("b s"), LOW, Spec("", value=float("inf"))),
        lambda x, a, b: x.clamp(-0.5),
        specials=True,
        label="inf",
    ),
    OpCase("", "Clip", (Spec("b s"), HIGH, LOW), lambda x, a, b: x.clamp(1.0, -0.5), label="crossed"),
    OpCase(OWN, "Clamp", (TIED, Spec("s h", make=tied), Spec("h", make=tied)), torch.clamp),
    OpCase(OWN, "Clamp", (Spec("b s"), Spec("b s"), Spec("b s")), torch.clamp, specials=True, label="specials"),
    OpCase(OWN, "Clamp", (Spec("b s"), Spec("s")), lambda x, low: x.clamp(min=low), label="min"),
    OpCase(OWN, "Clamp", (Spec("b s"), None, Spec("b 1")), lambda x, _, high: x.clamp(max=high), label="max"),
    unary_case("NanToNum", torch.nan_to_num, domain=OWN),
    unary_case(
        "NanToNum",
        lambda x: torch.nan_to_num(x, 1.5, 2.5, -3.5),
        domain=OWN,
        attributes={"nan": 1.5, "posinf": 2.5, "neginf": -3.5},
        label="given",
    ),
]

COPIES = [
    OpCase("", "Cast", (Spec("b s"),), lambda x: x.to(torch.float64), attributes={"to": 11}, label="double"),
    OpCase("", "Cast", (Spec("b s"),), lambda x: x.to(torch.float32), attributes={"to": 1}, label="float"),
    OpCase("", "Cast", (Spec("b s", high=9.0),), lambda x: x.to(torch.int64), attributes={"to": 7}, label="int64"),
    OpCase(
        "",
        "Cast",
        (Spec("b s", make=tied),),
        lambda x: x.to(torch.bool),
        attributes={"to": 9},
        label="bool",
        specials=True,
    ),
    OpCase(
        "", "Cast", (Spec("b s", "int64", -300, 300),), lambda x: x.to(torch.uint8), attributes={"to": 2}, label="wrap"
    ),
    unary_case("Identity", torch.clone),
    unary_case("Clone", torch.clone, domain=OWN),
    OpCase(
        OWN,
        "Clone",
        (Spec("b s h w"),),
        lambda x: x.clone(memory_format=torch.channels_last),
        {"memory_format": "channels_last"},
        label="channels-last",
    ),
    unary_case("Detach", torch.detach, domain=OWN),
    OpCase(OWN, "Overwritten", (Spec("b s h"), Spec("b s h")), lambda old, new: old.clone().copy_(new)),
]


SIGNED_ZEROS = Spec(
    "b s h", make=lambda s, d, g: torch.tensor([0.0, -0.0, 1.5, -2.0, 3.0])[torch.randint(5, s, generator=g)].to(d)
)
SPECIAL = [
    unary_case("Erfc", torch.erfc, domain=OWN),
    unary_case("Sinc", torch.sinc, domain=OWN),
    OpCase(OWN, "Sinc", (Spec("b s", make=lambda s, d, g: torch.zeros(s, dtype=d)),), torch.sinc, label="zero"),
    unary_case("Entr", torch.special.entr, low=0.1, domain=OWN),
    binary_case("XLogY", torch.xlogy, OWN, b=Spec("s h", low=0.1)),
    binary_case("XLogY", torch.xlogy, OWN, a=SIGNED_ZEROS, b=Spec("b s h", low=0.1), label="zeros"),
    binary_case("XLog1PY", torch.special.xlog1py, OWN, b=Spec("b s h", low=-0.9)),
    binary_case("Hypot", torch.hypot, OWN, specials=False),
    binary_case("CopySign", torch.copysign, OWN, b=SIGNED_ZEROS),
    binary_case("FMax", torch.fmax, OWN),
    binary_case("FMax", torch.fmax, OWN, a=SIGNED_ZEROS, b=SIGNED_ZEROS, label="ties"),
    binary_case("FMin", torch.fmin, OWN),
    OpCase("", "Pow", (Spec("b s", low=0.2), Spec("s", "int64", 0, 4)), lambda a, b: a**b, label="int-exponent"),
]

CASES = [
    *SPECIAL,
    *ARITHMETIC,
    *POWERS,
    *TRIGONOMETRY,
    *ROUNDING,
    *COMPARISON,
    *LOGIC,
    *SELECTION,
    *COPIES,
]
