"""PyTorch's symbolic sizes as ours: sympy expressions over one symbol per dynamic dimension of the inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import sympy
import torch

from onnxtrain.errors import UnsupportedOperatorError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import TensorType
from onnxtrain.ops.dtypes import ONNX_DTYPES
from onnxtrain.torch_compat.symbols import functions as torch_functions


def size_of(value: int | torch.SymInt) -> Size:
    """A size as PyTorch knows it, as an int or an expression."""
    if isinstance(value, int):
        return value
    known = value.node.maybe_as_int()
    return known if known is not None else sizes.from_sympy(_translate(value.node.expr))


def fixed_number(value: torch.SymInt | torch.SymFloat) -> int | float:
    """The number that the example sizes give, which are fixed by that.

    Raises:
        UnsupportedOperatorError: it follows from elements of a tensor.
    """
    env, symbols = value.node.shape_env, value.node.expr.free_symbols
    if any(symbol.name.startswith(("u", "zuf")) for symbol in symbols):
        raise UnsupportedOperatorError(
            "forward passes an element of a tensor to an operator that takes a number",
            got=str(value),
            todo="compute it with tensor operations, or pass it in as a Python number",
        )
    for symbol in symbols:
        env.evaluate_expr(symbol)
    return int(value) if isinstance(value, torch.SymInt) else float(value)


def sizes_of(tensor: torch.Tensor) -> Sizes:
    return tuple(size_of(s) for s in tensor.shape)


def tensor_type(tensor: torch.Tensor) -> TensorType:
    """The element type and sizes of a (fake) tensor.

    Raises:
        UnsupportedOperatorError: ONNX has no such element type.
    """
    if tensor.dtype not in ONNX_DTYPES:
        raise UnsupportedOperatorError("forward computes with an element type that ONNX lacks", got=str(tensor.dtype))
    return TensorType(ONNX_DTYPES[tensor.dtype], sizes_of(tensor))


def _functions() -> dict[Any, Any]:
    """PyTorch's own sympy functions, and what they are in plain sympy for non-negative sizes."""
    plain: dict[Any, Any] = {}
    for name, meaning in {
        "FloorDiv": lambda a, b: sympy.floor(a / b),
        "CleanDiv": lambda a, b: sympy.floor(a / b),
        "CeilDiv": lambda a, b: sympy.floor((a + b - 1) / b),
        "CeilToInt": sympy.ceiling,
        "FloorToInt": sympy.floor,
        "TruncToInt": sympy.floor,
        "IntTrueDiv": lambda a, b: a / b,
        "Mod": sympy.Mod,
        "PythonMod": sympy.Mod,
        "PowByNatural": lambda a, b: a**b,
        "Max": sympy.Max,
        "Min": sympy.Min,
        "Identity": lambda a: a,
        "ToFloat": lambda a: a,
    }.items():
        found = getattr(torch_functions, name, None)
        if found is not None:
            plain[found] = meaning
    return plain


_PLAIN = _functions()


def _translate(expr: Any) -> Any:
    if expr.is_Symbol:
        return sizes.symbol(expr.name)
    if not expr.args:
        return expr
    arguments = [_translate(a) for a in expr.args]
    rebuild = _PLAIN.get(type(expr), expr.func)
    return rebuild(*arguments)


def number_from_sizes(op: Builder, expr: Any, element: Callable[[str], ir.Value | None]) -> ir.Value | None:
    """A 0-dimensional double that computes a number from sizes, as `math.sqrt(x.shape[1])`; None where it cannot.

    `element` gives the double that a symbol stands for which is no size.
    """
    double = ir.DataType.DOUBLE
    head = type(expr).__name__
    if expr.is_number:
        return op.scalar(float(expr), double)
    if expr.is_Symbol:
        return element(expr.name)
    if head == "ToFloat":
        size = sizes.from_sympy(_translate(expr.args[0]))
        return None if any(name.startswith(("u", "zuf")) for name in sizes.symbols(size)) else op.size(size, double)
    node = {"FloatPow": op.Pow, "FloatTrueDiv": op.Div, "Mul": op.Mul, "Add": op.Add}.get(head)
    if head == "IntTrueDiv":
        return number_from_sizes(op, torch_functions.FloatTrueDiv(*map(torch_functions.ToFloat, expr.args)), element)
    operands = [number_from_sizes(op, a, element) for a in expr.args] if node is not None else []
    if node is None or any(o is None for o in operands):
        return None
    total = operands[0]
    for operand in operands[1:]:
        total = node(total, operand)
    return total
