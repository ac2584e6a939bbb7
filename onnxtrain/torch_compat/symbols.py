"""PyTorch's symbolic sizes: expressions of sympy, with functions and ranges of PyTorch's own."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import sympy
import torch
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onnxtrain.torch_compat.internal import Internal, required

functions: types.ModuleType = required(
    "sympy_functions",
    lambda: importlib.import_module("torch.utils._sympy.functions"),
    "symbolic sizes hold functions (FloorDiv, Mod, FloatTrueDiv) that guards and graphs compute in their own words",
    check=lambda found: found.FloorDiv(sympy.Integer(7), sympy.Integer(2)) == 3,
    without=types.ModuleType("functions"),
)


int_oo: Any = required(
    "int_oo",
    lambda: importlib.import_module("torch.utils._sympy.numbers").int_oo,
    "the upper bound of a size that has none",
    check=lambda found: bool(found > sympy.Integer(2) ** 64),
    without=sympy.oo,
)


PythonPrinter: Any = required(
    "python_printer",
    lambda: importlib.import_module("torch.utils._sympy.printers").PythonPrinter,
    "guards are Python source made from symbolic sizes",
    check=lambda found: found().doprint(sympy.Integer(3)) == "3",
)


def _find_kinds() -> tuple[Any, Any, Any]:
    symbol = importlib.import_module("torch.utils._sympy.symbol")
    kinds = symbol.SymT
    return symbol.symbol_is_type, kinds.UNBACKED_INT, (kinds.UNBACKED_INT, kinds.UNBACKED_FLOAT)


_KINDS = required(
    "symbol_kinds",
    _find_kinds,
    "tells symbols whose values only tensor elements determine (nonzero) from those of dimensions; no public question",
    check=lambda found: found[0](sympy.Symbol("u0"), found[1]) and not found[0](sympy.Symbol("s0"), found[1]),
    without=(lambda symbol, kind: False, None, None),
)


def is_data_dependent(symbol: sympy.Symbol) -> bool:
    """Whether a symbol stands for a size that only tensor elements determine, as that of `x.nonzero()`."""
    return bool(_KINDS[0](symbol, _KINDS[1]))


def has_data_dependent_symbols(env: ShapeEnv) -> bool:
    """Whether a shape environment holds an int or float that only tensor elements determine."""
    return any(_KINDS[0](symbol, _KINDS[2]) for symbol in env.var_to_range)


def _find_bounds() -> tuple[Any, Any]:
    ranges = importlib.import_module("torch.utils._sympy.value_ranges")
    return ranges.ValueRanges, ranges.bound_sympy


_RANGES = required(
    "value_ranges",
    _find_bounds,
    "a capture with data-dependent sizes is right where all that was assumed of them follows from their ranges",
    check=lambda found: found[1](sympy.Symbol("u0") + 1, {sympy.Symbol("u0"): found[0](0, 5)}) == found[0](1, 6),
    without=(None, None),
)


def size_range(largest: int | None = None) -> Any:
    """The range of a size of which nothing is known but its upper bound, if that is."""
    return _RANGES[0](0, int_oo if largest is None else largest)


def is_always_true(expr: Any, ranges: Mapping[Any, Any]) -> bool:
    """Whether a condition holds for all values in these ranges of its symbols."""
    return bool(_RANGES[1](expr, ranges) == _RANGES[0].wrap(sympy.true))


def _example() -> Any:
    """The node of a size that is known to be 3."""
    return SymNode(sympy.Integer(3), ShapeEnv(), int, 3)


node_expression = Internal[Callable[[Any], Any]](
    "node_expression",
    lambda: attrgetter("_expr"),
    why="the expression as traced; the public one replaces symbols by what they were found equal to, which adds guards",
    without=attrgetter("expr"),
    cost="modules that fix a size of an input run in PyTorch",
    check=lambda read: read(_example()) == 3,
).get()


def unreplaced_expression(size: torch.SymInt) -> Any:
    """The expression of a size as it was traced."""
    return node_expression(size.node)


hint_of = Internal[Callable[[Any], Any]](
    "hint_of",
    lambda: attrgetter("_hint"),
    why="the example value of a size's node, read at each operation on sizes; the public property computes",
    without=attrgetter("hint"),
    cost="a capture takes somewhat longer",
    check=lambda read: read(_example()) == 3,
).get()


def _statically(env: Any, expr: Any) -> Any:
    return env._maybe_evaluate_static(expr)


static_value = Internal[Callable[[Any, Any], Any]](
    "static_value",
    lambda: _statically,
    why="whether an expression follows from what is known of sizes, without a guard",
    without=lambda env, expr: None,
    cost="fewer composite operators are decomposed and fewer gradients traced: they run as ATen nodes",
    check=lambda found: bool(found(ShapeEnv(), sympy.true)),
).get()
