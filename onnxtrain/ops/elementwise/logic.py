"""Logic of truth values and of bits.

PyTorch's `&` is And on truth values and BitwiseAnd on integers; `logical_and` makes truth values of its operands first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph.builder import Builder
from onnxtrain.ops.constructors import as_value, binary, cast, unary
from onnxtrain.ops.definition import FromTorch, OpDef


def _logical(name: str) -> FromTorch:
    def capture(op: Builder, *operands: ir.Value) -> Any:
        return op.op("", name)(*(cast(op, x, ir.DataType.BOOL) for x in operands))

    return capture


def _bitwise(name: str) -> FromTorch:
    """`aten.bitwise_and` and its like, on truth values the logical op."""

    def capture(op: Builder, *operands: Any) -> Any:
        dtype = op.out[0].dtype
        prefix = "" if dtype == ir.DataType.BOOL else "Bitwise"
        return op.op("", prefix + name)(*(as_value(op, x, dtype) for x in operands))

    return capture


def _two(name: str, kernel: Callable[[Any, Any], Any], symbol: str) -> tuple[OpDef, OpDef]:
    """Defines And and BitwiseAnd, or their like."""
    word, cpp = name.lower(), f"{{0}} {symbol} {{1}}"
    kinds = [f"aten.bitwise_{word}.{kind}" for kind in ("Tensor", "Scalar", "Scalar_Tensor")]
    kinds += [f"aten.__{word}__.{kind}" for kind in ("Tensor", "Scalar")]
    of_bools, of_bits = {f"aten.logical_{word}.default": _logical(name)}, dict.fromkeys(kinds, _bitwise(name))
    logical = binary(name, of_bools, kernel, None, symbol=symbol, since_version=7, commutative=True, cpp_expression=cpp)
    bitwise = binary(
        f"Bitwise{name}", of_bits, kernel, None, symbol=symbol, since_version=18, commutative=True, cpp_expression=cpp
    )
    return logical, bitwise


AND, BITWISE_AND = _two("And", operator.and_, "&")
OR, BITWISE_OR = _two("Or", operator.or_, "|")
XOR, BITWISE_XOR = _two("Xor", operator.xor, "^")
NOT = unary("Not", {"aten.logical_not.default": _logical("Not")}, torch.logical_not, None, cpp_expression="!{0}")
BITWISE_NOT = unary(
    "BitwiseNot", {"aten.bitwise_not.default": _bitwise("Not")}, torch.bitwise_not, None, since_version=18
)
