"""Access PyTorch's symbolic sizes: sympy expressions with PyTorch's own functions and ranges."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, cast

import sympy
import torch
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanAtom, BooleanFunction
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onnxtrain.torch_compat.fake_tensors import FakeTensorMode
from onnxtrain.torch_compat.internal import Internal, required

functions: types.ModuleType = required(
    "sympy_functions",
    lambda: importlib.import_module("torch.utils._sympy.functions"),
    "symbolic sizes contain functions (FloorDiv, Mod, FloatTrueDiv) that guards and graphs must compute",
    check=lambda part: part.FloorDiv(sympy.Integer(7), sympy.Integer(2)) == 3,
    fallback=types.ModuleType("functions"),
)


int_oo: Any = required(
    "int_oo",
    lambda: importlib.import_module("torch.utils._sympy.numbers").int_oo,
    "the upper bound of an unbounded size",
    check=lambda part: bool(part > sympy.Integer(2) ** 64),
    fallback=sympy.oo,
)


PythonPrinter: Any = required(
    "python_printer",
    lambda: importlib.import_module("torch.utils._sympy.printers").PythonPrinter,
    "prints the Python source of guards from symbolic sizes",
    check=lambda part: part().doprint(sympy.Integer(3)) == "3",
)


_PYTHON_EXPRESSIONS = (  # Python evaluates them as sympy does
    *(
        sympy.Symbol,
        sympy.Integer,
        sympy.Float,
        sympy.Add,
        sympy.Mul,
        sympy.Max,
        sympy.Min,
        Relational,
        BooleanFunction,
        BooleanAtom,
    ),
    *(
        getattr(functions, name)
        for name in ("FloorDiv", "Mod", "PythonMod", "CleanDiv", "Max", "Min")
        if hasattr(functions, name)
    ),
)


def python_source(expr: Any) -> str:
    """Spell an expression of integer arithmetic as Python; return "" for any other."""
    if not all(isinstance(part, _PYTHON_EXPRESSIONS) for part in sympy.preorder_traversal(expr)):
        return ""
    return f"({PythonPrinter().doprint(expr)})"


def _find_kinds() -> tuple[Any, Any, Any]:
    symbol = importlib.import_module("torch.utils._sympy.symbol")
    return symbol.symbol_is_type, symbol.SymT.UNBACKED_INT, symbol.SymT.UNBACKED_FLOAT


_KINDS = required(
    "symbol_kinds",
    _find_kinds,
    "tells symbols whose values depend on tensor elements (nonzero) from those of dimensions; no public function does",
    check=lambda part: part[0](sympy.Symbol("u0"), part[1]) and not part[0](sympy.Symbol("s0"), part[1]),
    fallback=(lambda symbol, kind: False, None, None),
)


def is_data_dependent(symbol: sympy.Symbol) -> bool:
    """Return whether a symbol stands for a size that depends on tensor elements, as that of `x.nonzero()` does."""
    return bool(_KINDS[0](symbol, _KINDS[1]))


def is_float_item(symbol: sympy.Symbol) -> bool:
    """Return whether a symbol stands for an item of a floating-point tensor that Python reads."""
    return bool(_KINDS[0](symbol, _KINDS[2]))


def _find_bounds() -> tuple[Any, Any]:
    ranges = importlib.import_module("torch.utils._sympy.value_ranges")
    return ranges.ValueRanges, ranges.bound_sympy


_RANGES = required(
    "value_ranges",
    _find_bounds,
    "a capture with data-dependent sizes is valid if all assumptions on them follow from their ranges",
    check=lambda part: part[1](sympy.Symbol("u0") + 1, {sympy.Symbol("u0"): part[0](0, 5)}) == part[0](1, 6),
    fallback=(None, None),
)


def size_range(lower: int, largest: int | None) -> Any:
    """Return the range of a size; a largest of None stands for no upper bound."""
    return _RANGES[0](lower, int_oo if largest is None else largest)


def bound_float(number: Any, lower: float, upper: float) -> None:
    """Let a ShapeEnv know the range of a data-dependent number, such as a sample of [0, 1)."""
    if _RANGES[0] is not None and isinstance(number, torch.SymFloat):
        ends = sympy.Float(lower), sympy.Float(upper)
        number.node.shape_env.var_to_range[number.node.expr] = _RANGES[0](*ends)


def is_always_true(expr: Any, ranges: Mapping[Any, Any]) -> bool:
    """Return whether a condition is true for all values of its symbols in these ranges."""
    return bool(_RANGES[1](expr, ranges) == _RANGES[0].wrap(sympy.true))


def symbolic_value(env: ShapeEnv, symbol: Any) -> torch.SymInt | torch.SymFloat:
    """Return the number that a symbol of `env` stands for."""
    if symbol.is_integer:
        return torch.SymInt(SymNode(symbol, env, int, None))
    return torch.SymFloat(SymNode(symbol, env, float, None))


def _example() -> Any:
    """Make the node of a size that is statically 3."""
    return SymNode(sympy.Integer(3), ShapeEnv(), int, 3)


@functools.cache
def _environment_without_replacements() -> Any:
    return ShapeEnv()


def _expression_as_traced(node: Any) -> Any:
    """Read the expression from a copy of the node, in whose environment no symbol equals another."""
    return node.with_shape_env(_environment_without_replacements()).expr


def _keeps_replaced_symbols(read: Callable[[Any], Any]) -> bool:
    """Return whether the expression of a size has its own symbol after a guard that it equals another size."""
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
    a, b = (cast(torch.SymInt, mode.from_tensor(torch.empty(3), static_shapes=False).shape[0]) for _ in range(2))
    before = read(a.node), read(b.node)
    is_replaced = bool(a == b) and a.node.expr == b.node.expr  # the comparison adds a guard
    return is_replaced and (read(a.node), read(b.node)) == before and before[0] != before[1]


node_expression = Internal[Callable[[Any], Any]](
    "node_expression",
    lambda: attrgetter("_expr"),
    why="the expression as traced; the public property replaces equal symbols, whose equality guards would then miss",
    fallback=_expression_as_traced,
    cost="a capture takes somewhat longer",
    check=lambda read: read(_example()) == 3,
    agrees=_keeps_replaced_symbols,
).get()


def unreplaced_expression(size: torch.SymInt) -> Any:
    """Return the expression of a size as it was traced, without replaced symbols."""
    return node_expression(size.node)


hint_of = Internal[Callable[[Any], Any]](
    "hint_of",
    lambda: attrgetter("_hint"),
    why="the example value of a size's node, read at each operation on sizes; the public property computes it",
    fallback=attrgetter("hint"),
    cost="a capture takes somewhat longer",
    check=lambda read: read(_example()) == 3,
).get()


def _evaluate_statically(env: Any, expr: Any) -> Any:
    return env._maybe_evaluate_static(expr)


static_value = Internal[Callable[[Any, Any], Any]](
    "static_value",
    lambda: _evaluate_statically,
    why="evaluates an expression from what is statically known of sizes, without a guard",
    fallback=lambda env, expr: None,
    cost="fewer composite operators are decomposed and fewer gradients traced: they run as ATen nodes",
    check=lambda part: bool(part(ShapeEnv(), sympy.true)),
).get()
