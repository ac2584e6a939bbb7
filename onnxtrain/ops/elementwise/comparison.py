"""Comparisons of two tensors, and the predicates IsNaN, IsInf, IsFinite and SignBit."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import MICROSOFT, ONNX, OWN, TensorType, dtype_of, is_float
from onnxtrain.ops.body_parts import as_value, cast
from onnxtrain.ops.constructors import define_binary, define_pure
from onnxtrain.ops.definition import STANDARD, Call, FromTorch, NodeView, OpDef
from onnxtrain.ops.dtypes import comparison_dtype
from onnxtrain.ops.interfaces.commutative import COMMUTATIVE
from onnxtrain.ops.interfaces.cpp import CPP, Elementwise
from onnxtrain.ops.interfaces.element_formulas import (
    ELEMENT_FORMULAS,
    Affine,
    Conditions,
    Formula,
    FormulaOf,
    affine_operands,
)


def _types(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(ir.DataType.BOOL, sizes.broadcast(sizes.dims_of(n.a), sizes.dims_of(n.b))),)


def _capture_comparison(domain: str, name: str, supports_bool: bool) -> FromTorch:
    def capture(op: Builder, a: ir.Value, b: Any) -> Any:
        dtype = comparison_dtype(op, a, b)
        if dtype == ir.DataType.BOOL and not supports_bool:
            a, dtype = cast(op, a, ir.DataType.UINT8), ir.DataType.UINT8
            b = cast(op, b, dtype) if isinstance(b, ir.Value) else int(b)
        return op.op(domain, name)(as_value(op, a, dtype), as_value(op, b, dtype))

    return capture


def _define_comparison(
    name: str,
    torch_names: Sequence[str],
    kernel: Callable[[Any, Any], Any],
    symbol: str,
    *,
    domain: str = ONNX,
    body: Any = STANDARD,
    supports_bool: bool = False,
) -> OpDef:
    """Define a comparison of two tensors of the same element type."""
    overloads = [f"aten.{n}.{overload}" for n in torch_names for overload in ("Tensor", "Scalar")]
    op = define_binary(
        name,
        dict.fromkeys(overloads, _capture_comparison(domain, name, supports_bool)),
        kernel,
        None,
        symbol=symbol,
        domain=domain,
        shapes=_types,
        body=body,
    )
    CPP.register(op, Elementwise(f"{{0}} {symbol} {{1}}"))
    return op


EQUAL = _define_comparison("Equal", ("eq",), operator.eq, "==", supports_bool=True)
NOT_EQUAL = _define_comparison(
    "NotEqual",
    ("ne", "not_equal"),
    operator.ne,
    "!=",
    domain=OWN,
    body=lambda op, n: op.Not(op.Equal(n.a, n.b)),
    supports_bool=True,
)
COMMUTATIVE.add(EQUAL, NOT_EQUAL)
LESS = _define_comparison("Less", ("lt", "less"), operator.lt, "<")
LESS_OR_EQUAL = _define_comparison("LessOrEqual", ("le", "less_equal"), operator.le, "<=")
GREATER = _define_comparison("Greater", ("gt", "greater"), operator.gt, ">")
GREATER_OR_EQUAL = _define_comparison("GreaterOrEqual", ("ge", "greater_equal"), operator.ge, ">=")


def _comparison_formula(op: OpDef, terms: Callable[[Affine], Sequence[Affine] | None]) -> None:
    """Register a comparison: `terms` maps a - b to formulas that are not positive where it holds; None: not known."""

    @ELEMENT_FORMULAS.implements(op)
    def compared(n: NodeView, formula_of: FormulaOf) -> Formula | None:
        pair = affine_operands(n, formula_of)
        conditions = None if pair is None else terms(pair[0] - pair[1])
        return None if conditions is None else Conditions(frozenset(conditions))


def _equality(difference: Affine, equal: bool) -> Sequence[Affine] | None:
    if not difference.is_constant:
        return None
    return [] if (difference.constant == 0) == equal else [Affine(1, (0,) * len(difference.coefficients))]


_comparison_formula(LESS_OR_EQUAL, lambda d: [d])
_comparison_formula(LESS, lambda d: [d.shifted(1)])
_comparison_formula(GREATER_OR_EQUAL, lambda d: [-d])
_comparison_formula(GREATER, lambda d: [(-d).shifted(1)])
_comparison_formula(EQUAL, lambda d: _equality(d, True))
_comparison_formula(NOT_EQUAL, lambda d: _equality(d, False))


# Predicates of one tensor


def _define_predicate(
    name: str,
    torch_name: str,
    kernel: Callable[..., Any],
    *,
    domain: str = ONNX,
    body: Any = STANDARD,
    attributes: dict[str, Any] | None = None,
    from_torch: dict[str, FromTorch] | None = None,
    lower: Callable[..., Call] | None = None,
) -> OpDef:
    """Define an elementwise predicate. Integers are captured as floats, because ONNX's ops do not support them."""

    def capture(op: Builder, x: ir.Value) -> Any:
        return op.op(domain, name)(_as_float(op, x))

    return define_pure(
        domain,
        name,
        ("x",),
        ("y",),
        attributes=attributes or {},
        from_torch={torch_name: capture, **(from_torch or {})},
        shapes=lambda n: (TensorType(ir.DataType.BOOL, sizes.dims_of(n.x)),),
        body=body,
        lower=lower or (lambda n, x: Call(kernel, x)),
        axes=lambda n: "... -> ...",
    )


def _as_float(op: Builder, x: ir.Value) -> ir.Value:
    return x if is_float(dtype_of(x)) else cast(op, x, ir.DataType.FLOAT)


def _isinf_call(n: NodeView, x: Any) -> Call:
    if n.detect_negative and n.detect_positive:
        return Call(torch.isinf, x)
    if n.detect_positive:
        return Call(torch.isposinf, x)
    return Call(torch.isneginf, x) if n.detect_negative else Call(torch.zeros_like, x, dtype=torch.bool)


def _is_finite_body(op: Builder, n: NodeView) -> ir.Value:
    return op.Not(op.Or(op.IsNaN(n.x), op.IsInf(n.x)))


def _sign_bit_body(op: Builder, n: NodeView) -> ir.Value:
    zero = op.scalar(0.0, like=n.x)
    is_negative_zero = op.And(op.Equal(n.x, zero), op.Less(op.Reciprocal(n.x), zero))
    return op.Or(op.Less(n.x, zero), is_negative_zero)


IS_NAN = _define_predicate("IsNaN", "aten.isnan.default", torch.isnan)
CPP.register(IS_NAN, Elementwise("{0} != {0}"))
IS_INF = _define_predicate(
    "IsInf",
    "aten.isinf.default",
    torch.isinf,
    attributes={"detect_negative": 1, "detect_positive": 1},
    from_torch={
        "aten.isposinf.default": lambda op, x: op.IsInf(_as_float(op, x), detect_negative=0),
        "aten.isneginf.default": lambda op, x: op.IsInf(_as_float(op, x), detect_positive=0),
    },
    lower=_isinf_call,
)
IS_FINITE = _define_predicate(
    "IsFinite", "aten.isfinite.default", torch.isfinite, domain=MICROSOFT, body=_is_finite_body
)
SIGN_BIT = _define_predicate("SignBit", "aten.signbit.default", torch.signbit, domain=OWN, body=_sign_bit_body)
