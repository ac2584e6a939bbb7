"""Translate PyTorch's symbolic sizes to the graph's: sympy expressions over the dynamic dimensions of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import onnx_ir as ir
import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onnxtrain.errors import UnsupportedOperatorError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import TensorType
from onnxtrain.ops.dtypes import ONNX_DTYPES
from onnxtrain.torch_compat.symbols import functions as torch_functions


def size_of(value: int | torch.SymInt) -> Size:
    """Translate a size of PyTorch to an int or an expression."""
    if isinstance(value, int):
        return value
    static: int | None = value.node.maybe_as_int()
    if static is not None:
        return static
    expr = value.node.expr
    return sizes.from_sympy(_translate(expr if expr.is_Symbol else expr.xreplace(_fixed_expressions(value))))


_FIXED: WeakKeyDictionary[ShapeEnv, tuple[int, dict[Any, Any]]] = WeakKeyDictionary()


def _fixed_expressions(value: torch.SymInt) -> Mapping[Any, Any]:
    """Return the expressions that the export's guards fix to a number, as s0//2 to 1.

    PyTorch replaces symbols only: a result may have size 1 although its argument has size s0//2.
    """
    env = value.node.shape_env
    count, fixed = _FIXED.get(env, (0, {}))
    if count < len(env.guards):
        for guard in env.guards[count:]:
            if isinstance(guard.expr, sympy.Eq):
                left, right = guard.expr.args
                expr, number = (right, left) if left.is_Integer else (left, right)
                if number.is_Integer and not expr.is_Symbol:
                    fixed[expr] = number
        _FIXED[env] = len(env.guards), fixed
    return fixed


def fixed_number(value: torch.SymInt | torch.SymFloat) -> int | float:
    """Evaluate a symbolic number at the example sizes; this makes the dimensions that it depends on static.

    Raises:
        UnsupportedOperatorError: the number depends on tensor values.
    """
    env, symbols = value.node.shape_env, value.node.expr.free_symbols
    if any(symbol.name.startswith(("u", "zuf")) for symbol in symbols):
        raise UnsupportedOperatorError(
            "forward passes a tensor value to an operator that takes a Python number",
            expected="a number that does not depend on tensor values",
            got=str(value),
            todo="the module runs in PyTorch; compute it with tensor operations, or pass it in as a Python number",
        )
    for symbol in symbols:
        env.evaluate_expr(symbol)
    return int(value) if isinstance(value, torch.SymInt) else float(value)


def sizes_of(tensor: torch.Tensor) -> Sizes:
    return tuple(size_of(s) for s in tensor.shape)


def tensor_type(tensor: torch.Tensor) -> TensorType:
    """Return the ONNX dtype and the sizes of a (fake) tensor.

    Raises:
        UnsupportedOperatorError: ONNX has no such dtype.
    """
    if tensor.dtype not in ONNX_DTYPES:
        raise UnsupportedOperatorError(
            "forward computes with a dtype that ONNX does not have",
            expected=", ".join(str(dtype).removeprefix("torch.") for dtype in ONNX_DTYPES),
            got=str(tensor.dtype),
            todo="the module runs in PyTorch; convert the tensor to another dtype",
        )
    return TensorType(ONNX_DTYPES[tensor.dtype], sizes_of(tensor))


def _sympy_equivalents() -> dict[Any, Any]:
    """Return PyTorch's own sympy functions, each with its equivalent in sympy for non-negative sizes."""
    equivalents: dict[Any, Any] = {}
    for name, equivalent in {
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
        function = getattr(torch_functions, name, None)
        if function is not None:
            equivalents[function] = equivalent
    return equivalents


_SYMPY_EQUIVALENTS = _sympy_equivalents()


def _translate(expr: Any) -> Any:
    if expr.is_Symbol:
        return sizes.symbol(expr.name)
    if not expr.args:
        return expr
    arguments = [_translate(a) for a in expr.args]
    rebuild = _SYMPY_EQUIVALENTS.get(type(expr), expr.func)
    return rebuild(*arguments)


def number_from_sizes(op: Builder, expr: Any, element: Callable[[str], ir.Value | None]) -> ir.Value | None:
    """Build a 0-dimensional double that computes a number such as `math.sqrt(x.shape[1])`; None if it cannot.

    Args:
        op: the builder.
        expr: PyTorch's expression for the number.
        element: returns the double for a symbol that is not a size, or None.
    """
    double = ir.DataType.DOUBLE
    function = type(expr).__name__
    if expr.is_number:
        return op.scalar(float(expr), double)
    if expr.is_Symbol:
        return element(expr.name)
    if function == "ToFloat":
        size = sizes.from_sympy(_translate(expr.args[0]))
        return None if any(name.startswith(("u", "zuf")) for name in sizes.symbols(size)) else op.size(size, double)
    node = {"FloatPow": op.Pow, "FloatTrueDiv": op.Div, "Mul": op.Mul, "Add": op.Add}.get(function)
    if function == "IntTrueDiv":
        return number_from_sizes(op, torch_functions.FloatTrueDiv(*map(torch_functions.ToFloat, expr.args)), element)
    operands = [number_from_sizes(op, a, element) for a in expr.args] if node is not None else []
    if node is None or any(o is None for o in operands):
        return None
    result = operands[0]
    for operand in operands[1:]:
        result = node(result, operand)
    return result
