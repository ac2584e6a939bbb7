"""Collect what one run on fake tensors knows and assumes of data-dependent sizes, such as that of `x[mask]`.

A graph is valid for all sizes that the decisions on elements leave. An operator may assume more when it is traced, as
`u0 >= 2`. That is no restriction if it follows from what is known, or if the operator's kernel checks it, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onnxtrain.torch_compat.pytree import tree_leaves
from onnxtrain.torch_compat.symbols import (
    functions,
    int_oo,
    is_always_true,
    is_data_dependent,
    size_range,
    unreplaced_expression,
)

_SELECTIONS = frozenset({"aten.nonzero.default", "aten.nonzero_numpy.default", "aten.index.Tensor"})
_SPLITS = frozenset({"aten.split_with_sizes.default", "aten.split_with_sizes_copy.default"})
_PICKS = frozenset({"aten.select.int", "aten.select_copy.int"})
_RESHAPES = frozenset(
    f"aten.{name}.default" for name in ("view", "view_copy", "reshape", "_unsafe_view", "_reshape_copy")
)
_EXCHANGES = frozenset(
    f"{domain}.all_to_all_single.default" for domain in ("_c10d_functional", "_c10d_functional_autograd")
)


class DataDependentSizes:
    """The data-dependent sizes of one run.

    Args:
        env: collects what operators assume; None if the run has numbers in place of all data-dependent sizes.
        facts: conditions that hold, over the symbols of the export.
    """

    def __init__(self, env: ShapeEnv | None, facts: Iterable[Any]) -> None:
        self._env = env
        self._unused_facts = list(facts)
        self._assumed: set[Any] = set()  # by the program's assertions
        self._known: set[Any] = set()  # from facts and from checks of kernels
        self._largest: dict[Any, int] = {}

    def use_facts(self, binding: Mapping[Any, Any]) -> None:
        """Let the operators that follow use the facts of which the run has all symbols.

        Args:
            binding: the sizes of this run, by symbols of the export.
        """
        for fact in [f for f in self._unused_facts if f.free_symbols <= binding.keys()]:
            self._unused_facts.remove(fact)
            self._know(fact.xreplace(dict(binding)))

    def assert_condition(self, asserted: Any) -> None:
        """Record a condition that the program asserts."""
        condition = asserted.node.expr if isinstance(asserted, torch.SymBool) else sympy.sympify(bool(asserted))
        self._assumed.add(condition)

    def check_by_kernel(self, node: Node, arguments: Sequence[Any]) -> None:
        """Let the operators that follow use what the kernel of a node checks.

        Raises:
            ValueError: it refuses these sizes. PyTorch would log that as an error.
        """
        for condition in _checked_by_kernel(node, arguments):
            if condition == sympy.false:
                raise ValueError(f"{node.target} refuses these sizes")
            self._know(condition)

    def bound_selected(self, node: Node, arguments: Sequence[Any], result: Any) -> None:
        """Bound the number of elements that a node selects: no more than its mask has."""
        if str(node.target) not in _SELECTIONS:
            return
        masks = [t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)]
        if str(node.target) == "aten.index.Tensor":
            masks = [mask for mask in masks[1:] if mask.dtype in (torch.bool, torch.uint8)]
        sizes = [size for mask in masks for size in mask.shape]
        if all(type(size) is int for size in sizes):
            most = max((math.prod(mask.shape) for mask in masks), default=0)
            for size in symbolic_sizes(result):
                self._largest.setdefault(size.node.expr, most)

    def assumption(self) -> str:
        """Return an assumption that does not follow from what is known; "" if there is none.

        PyTorch checks such an assumption at run time, by an assertion that our graph does not contain.
        """
        quotients = {q: sympy.Dummy(integer=True) for c in self._known for q in c.atoms(functions.FloorDiv)}
        known = {form for c in self._known for form in (c, c.xreplace(quotients), _of_dividend(c))}
        bounds = {**self._sum_bounds(), **bounds_of(known)}
        numbers = {s: sympy.Integer(lower) for s, (lower, upper) in bounds.items() if lower == upper}
        for expr in {e.xreplace(numbers) for e in (self._assumed | self._asserted()) - self._known} - {sympy.true}:
            forms = expr, expr.xreplace(quotients)
            if not any(_holds(form, {s: self._range(s, bounds) for s in form.free_symbols}) for form in forms):
                return str(expr)
        return ""

    def _know(self, condition: Any) -> None:
        self._known.add(condition)
        if self._env is not None and condition.free_symbols:
            before = self._asserted()
            self._env.guard_or_defer_runtime_assert(condition, "known")
            self._known |= self._asserted() - before  # as PyTorch simplifies it

    def _asserted(self) -> set[Any]:
        checks_of = {} if self._env is None else self._env.deferred_runtime_asserts
        return {check.expr for checks in checks_of.values() for check in checks}

    def _sum_bounds(self) -> dict[Any, tuple[int, int | None]]:
        """Return the bounds that follow from u0 + u1 = 5: no size is negative."""
        bounds: dict[Any, tuple[int, int | None]] = {}
        for condition in self._known:
            if isinstance(condition, sympy.Eq):
                total, number = condition.args if condition.args[1].is_Integer else reversed(condition.args)
                if number.is_Integer and all(term.is_Symbol for term in sympy.Add.make_args(total)):
                    bounds.update(dict.fromkeys(total.free_symbols, (0, int(number))))
        return bounds

    def _range(self, symbol: Any, bounds: Mapping[Any, tuple[int, int | None]]) -> Any:
        if self._env is not None and symbol in self._env.var_to_range and not is_data_dependent(symbol):
            return self._env.var_to_range[symbol]
        lower, upper = bounds.get(symbol, (0, None))
        most = [bound for bound in (upper, self._largest.get(symbol)) if bound is not None]
        return size_range(lower, min(most, default=None))


def _of_dividend(condition: Any) -> Any:
    """Return what a lower bound of a quotient says of its dividend: u0 >= 6 for u0//2 >= 3."""
    if isinstance(condition, (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)) and isinstance(
        condition.gts, functions.FloorDiv
    ):
        dividend, divisor = condition.gts.args
        if divisor.is_Integer and divisor > 0 and condition.lts.is_Integer:
            strict = isinstance(condition, (sympy.Gt, sympy.Lt))
            return sympy.Ge(dividend, divisor * (condition.lts + 1 if strict else condition.lts))
    return condition


def _holds(condition: Any, ranges: Mapping[Any, Any]) -> bool:
    """Return whether a condition is true for all sizes in these ranges; the least size is looked at by itself.

    Intervals alone do not tell that `Eq(u0, 0) | (u0 > 0)` is.
    """
    if is_always_true(condition, ranges):
        return True
    if len(ranges) != 1 or not isinstance(condition, sympy.Or):
        return False
    ((symbol, values),) = ranges.items()
    upper = None if values.upper == int_oo else int(values.upper)
    above = {symbol: size_range(int(values.lower) + 1, upper)}
    return is_always_true(condition.xreplace({symbol: values.lower}), {}) and is_always_true(condition, above)


def bounds_of(conditions: Iterable[Any]) -> dict[Any, tuple[int, int | None]]:
    """Return the least and the largest value of each size that is alone in a linear condition, as in 2*u0 > 4.

    Only conditions over one symbol count. The least value is at least 0.
    """
    bounds: dict[Any, tuple[int, int | None]] = {}
    for condition in conditions:
        if not isinstance(condition, Relational) or len(condition.free_symbols) != 1 or isinstance(condition, sympy.Ne):
            continue
        (symbol,) = condition.free_symbols
        difference = sympy.expand(condition.lhs - condition.rhs)
        slope, offset = difference.coeff(symbol, 1), difference.coeff(symbol, 0)
        if not (slope.is_Integer and offset.is_Integer) or slope * symbol + offset != difference:
            continue
        root = sympy.Rational(-offset, slope)
        lower, upper = bounds.get(symbol, (0, None))
        strict = isinstance(condition, (sympy.Gt, sympy.Lt))
        is_lower = isinstance(condition, (sympy.Gt, sympy.Ge)) == (slope > 0)
        if is_lower or isinstance(condition, sympy.Eq):
            lower = max(lower, int(sympy.floor(root)) + 1 if strict else int(sympy.ceiling(root)))
        if not is_lower or isinstance(condition, sympy.Eq):
            most = int(sympy.ceiling(root)) - 1 if strict else int(sympy.floor(root))
            upper = most if upper is None else min(upper, most)
        bounds[symbol] = lower, upper
    return bounds


def symbolic_sizes(value: Any) -> Iterator[torch.SymInt]:
    """Yield the symbolic sizes of a value of a graph: a size, a tensor, or a list of them."""
    if isinstance(value, torch.SymInt):
        yield value
    elif isinstance(value, torch.Tensor):
        for size in value.shape:
            yield from symbolic_sizes(size)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from symbolic_sizes(part)


def _checked_by_kernel(node: Node, arguments: Sequence[Any]) -> Iterator[Any]:
    """Yield the conditions on data-dependent sizes that a node's kernel checks itself, at run time as in eager."""
    target = str(node.target)
    if target in _SPLITS:
        x, parts, axis = (*arguments, 0)[:3]
        yield sympy.Eq(_total(parts), _expression(x.shape[axis]))
    elif target in _EXCHANGES:
        x, _, parts = arguments[:3]
        yield sympy.Eq(_total(parts), _expression(x.shape[0]))
    elif target in _PICKS:
        x, axis, index = arguments[:3]
        if isinstance(index, int) and isinstance(x.shape[axis], torch.SymInt):
            yield sympy.Ge(_expression(x.shape[axis]), index + 1 if index >= 0 else -index)
    elif target in _RESHAPES:
        x, shape = arguments[:2]
        elements = _product(x.shape)
        if any(map(is_data_dependent, elements.free_symbols)):
            given = _product([size for size in shape if not (type(size) is int and size == -1)])
            inferred = any(type(size) is int and size == -1 for size in shape)
            if inferred:
                yield sympy.Eq(functions.Mod(elements, given), 0)
            yield sympy.Eq(elements, given * functions.FloorDiv(elements, given) if inferred else given)


def _product(sizes: Sequence[Any]) -> Any:
    return sympy.Mul(*map(_expression, sizes))  # sympy.prod of none is an int


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def _total(parts: Sequence[Any]) -> Any:
    return sum(unreplaced_expression(part) if isinstance(part, torch.SymInt) else part for part in parts)
