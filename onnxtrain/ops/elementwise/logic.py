"""Logical and bitwise ops.

PyTorch's `&` is And for bools and BitwiseAnd for integers; `logical_and` converts its operands to bool first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import rank_of
from onnxtrain.ops.body_parts import as_value, cast
from onnxtrain.ops.constructors import define_binary, define_unary
from onnxtrain.ops.definition import FromTorch, NodeView, OpDef
from onnxtrain.ops.interfaces.commutative import COMMUTATIVE
from onnxtrain.ops.interfaces.cpp import CPP, Elementwise
from onnxtrain.ops.interfaces.element_formulas import ELEMENT_FORMULAS, Conditions, Formula, FormulaOf, operands, truth


def _capture_logical(name: str) -> FromTorch:
    def capture(op: Builder, *operands: ir.Value) -> Any:
        return op.op("", name)(*(cast(op, x, ir.DataType.BOOL) for x in operands))

    return capture


def _capture_bitwise(name: str) -> FromTorch:
    """Capture `aten.bitwise_and` and its variants, for bools as the logical op."""

    def capture(op: Builder, *operands: Any) -> Any:
        dtype = op.out[0].dtype
        prefix = "" if dtype == ir.DataType.BOOL else "Bitwise"
        return op.op("", prefix + name)(*(as_value(op, x, dtype) for x in operands))

    return capture


def _define_logical_and_bitwise(name: str, kernel: Callable[[Any, Any], Any], symbol: str) -> tuple[OpDef, OpDef]:
    """Define a logical op, such as And, and its bitwise counterpart, such as BitwiseAnd."""
    word = name.lower()
    overloads = [f"aten.bitwise_{word}.{overload}" for overload in ("Tensor", "Scalar", "Scalar_Tensor")]
    overloads += [f"aten.__{word}__.{overload}" for overload in ("Tensor", "Scalar")]
    logical = define_binary(
        name,
        {f"aten.logical_{word}.default": _capture_logical(name)},
        kernel,
        None,
        symbol=symbol,
    )
    bitwise = define_binary(
        f"Bitwise{name}",
        dict.fromkeys(overloads, _capture_bitwise(name)),
        kernel,
        None,
        symbol=symbol,
    )
    COMMUTATIVE.add(logical, bitwise)
    CPP.implements(logical, bitwise)(Elementwise(f"{{0}} {symbol} {{1}}"))
    return logical, bitwise


AND, BITWISE_AND = _define_logical_and_bitwise("And", operator.and_, "&")
OR, BITWISE_OR = _define_logical_and_bitwise("Or", operator.or_, "|")
XOR, BITWISE_XOR = _define_logical_and_bitwise("Xor", operator.xor, "^")
NOT = define_unary("Not", {"aten.logical_not.default": _capture_logical("Not")}, torch.logical_not, None)
CPP.register(NOT, Elementwise("!{0}"))
BITWISE_NOT = define_unary("BitwiseNot", {"aten.bitwise_not.default": _capture_bitwise("Not")}, torch.bitwise_not, None)


@ELEMENT_FORMULAS.implements(AND)
def _and_formula(n: NodeView, formula_of: FormulaOf) -> Formula | None:
    a, b = operands(n, formula_of)
    return Conditions(a.terms | b.terms) if isinstance(a, Conditions) and isinstance(b, Conditions) else None


@ELEMENT_FORMULAS.implements(OR)
def _or_formula(n: NodeView, formula_of: FormulaOf) -> Formula | None:
    a, b = operands(n, formula_of)
    for x, other in ((a, b), (b, a)):
        if isinstance(x, Conditions) and x.is_true:
            return x
        if isinstance(x, Conditions) and x.is_false and isinstance(other, Conditions):
            return other
    return None


@ELEMENT_FORMULAS.implements(NOT)
def _not_formula(n: NodeView, formula_of: FormulaOf) -> Formula | None:
    x = formula_of(n.x)
    return truth(x.is_false, rank_of(n.y)) if isinstance(x, Conditions) and (x.is_true or x.is_false) else None
