"""Convert conditions on sizes to JSON and back: `["Ge", ["Symbol", "s0"], ["Integer", 2]]`.

Only the classes listed here are instantiated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy

from onnxtrain.capture.key.fingerprint import NotStorableError
from onnxtrain.torch_compat.symbols import functions

# Loaded with evaluate=False: sympy would simplify some of them to true or false by its assumptions on the symbols.
_UNEVALUATED = {name: getattr(sympy, name) for name in ("Eq", "Ne", "Lt", "Le", "Gt", "Ge", "Not", "And", "Or")}
_NAMES = {
    "Equality": "Eq",
    "Unequality": "Ne",
    "StrictLessThan": "Lt",
    "LessThan": "Le",
    "StrictGreaterThan": "Gt",
    "GreaterThan": "Ge",
}
_HEADS: Mapping[str, Any] = {
    **_UNEVALUATED,
    **{name: getattr(sympy, name) for name in ("Add", "Mul", "Max", "Min", "Pow", "Mod")},
    **{
        name: getattr(functions, name)
        for name in ("FloorDiv", "CleanDiv", "PythonMod", "Mod")
        if name in dir(functions)
    },
}


def to_json(expr: Any) -> list[Any]:
    """Convert an expression of sizes to JSON.

    Raises:
        NotStorableError: the expression contains a class that is not listed.
    """
    if expr.is_Symbol:
        return ["Symbol", expr.name]
    if expr.is_Integer:
        return ["Integer", int(expr)]
    if expr in (sympy.true, sympy.false):
        return ["Boolean", bool(expr)]
    name = _NAMES.get(type(expr).__name__, type(expr).__name__)
    if _HEADS.get(name) is not type(expr):
        raise NotStorableError(f"a condition on sizes contains the unsupported function {name}: {expr}")
    return [name, *map(to_json, expr.args)]


def from_json(parts: Any, symbols: Mapping[str, Any]) -> Any:
    """Convert JSON to an expression.

    Args:
        parts: the JSON.
        symbols: the symbols by name.

    Raises:
        ValueError: the JSON names a class that is not listed.
    """
    name, *args = parts
    match name:
        case "Symbol":
            return symbols[args[0]]
        case "Integer":
            return sympy.Integer(int(args[0]))
        case "Boolean":
            return sympy.true if args[0] else sympy.false
    if name not in _HEADS:
        raise ValueError(f"expected Symbol, Integer, Boolean or one of {', '.join(_HEADS)}, got {name}")
    parsed = [from_json(arg, symbols) for arg in args]
    if name in _UNEVALUATED:
        return _HEADS[name](*parsed, evaluate=False)
    return _HEADS[name](*parsed)
