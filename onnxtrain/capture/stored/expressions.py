"""Conditions on sizes as JSON: `["Ge", ["Symbol", "s0"], ["Integer", 2]]`. Only what is listed here is ever made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy

from onnxtrain.capture.key.fingerprint import NotStorableError
from onnxtrain.torch_compat.symbols import functions

# Kept as they are: sympy would decide some of them from what it knows of their symbols.
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
    """An expression over sizes.

    Raises:
        NotStorableError: there is something in it that is not listed.
    """
    if expr.is_Symbol:
        return ["Symbol", expr.name]
    if expr.is_Integer:
        return ["Integer", int(expr)]
    if expr in (sympy.true, sympy.false):
        return ["Boolean", bool(expr)]
    name = _NAMES.get(type(expr).__name__, type(expr).__name__)
    if _HEADS.get(name) is not type(expr):
        raise NotStorableError(f"a condition on sizes has a {name} in it: {expr}")
    return [name, *map(to_json, expr.args)]


def from_json(parts: Any, symbols: Mapping[str, Any]) -> Any:
    """The expression.

    Raises:
        ValueError: it is none.
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
        raise ValueError(f"{name} is no part of a condition")
    parsed = [from_json(arg, symbols) for arg in args]
    if name in _UNEVALUATED:
        return _HEADS[name](*parsed, evaluate=False)
    return _HEADS[name](*parsed)
