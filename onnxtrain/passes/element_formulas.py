"""What the elements of a value are, as formulas of their indices: masks are built from positions by arithmetic.

    Range(0, n)[i] = i      Unsqueeze(·, 1)[i, j] = i      LessOrEqual(cols, rows)[i, j] = (j - i <= 0)

A formula is exact for all sizes: integers only, and nothing is assumed of a symbolic dimension but that an index is not
negative. Formulas.of` returns None where an op has no entry or its elements are no such formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.values import ONNX, OWN, constant_of, dtype_of, is_float, normalize_axis, rank_of
from onnxtrain.ops import view
from onnxtrain.ops.definition import NodeView


@dataclass(frozen=True)
class Affine:
    """constant + Σ coefficients[axis] * index[axis], an integer."""

    constant: int
    coefficients: tuple[int, ...]

    def __sub__(self, other: Affine) -> Affine:
        pairs = zip(self.coefficients, other.coefficients, strict=True)
        return Affine(self.constant - other.constant, tuple(a - b for a, b in pairs))

    def __add__(self, other: Affine) -> Affine:
        pairs = zip(self.coefficients, other.coefficients, strict=True)
        return Affine(self.constant + other.constant, tuple(a + b for a, b in pairs))

    @property
    def is_constant(self) -> bool:
        """Whether all elements are equal."""
        return not any(self.coefficients)

    @property
    def is_never_negative(self) -> bool:
        """Whether no element is negative, whatever the sizes."""
        return self.constant >= 0 and min(self.coefficients, default=0) >= 0


@dataclass(frozen=True)
class Conditions:
    """True where no term is positive; each term is a formula of the indices."""

    terms: frozenset[Affine]

    @property
    def is_true(self) -> bool:
        """Whether all elements are true."""
        return not self.terms

    @property
    def is_false(self) -> bool:
        """Whether all elements are false."""
        return any(term.is_constant and term.constant > 0 for term in self.terms)


Formula = Affine | Conditions
Of = Callable[[ir.Value], "Formula | None"]
_Entry = Callable[[NodeView, Of], "Formula | None"]
_ENTRIES: dict[tuple[str, str], _Entry] = {}
_DEEPEST = 200  # nodes in a row
_LONGEST_PREFIX = 64  # elements of a part of a Concat that are compared one by one


class Formulas:
    """The formulas of a graph's values, each computed once."""

    def __init__(self) -> None:
        self._found: dict[ir.Value, Formula | None] = {}
        self._depth = 0

    def of(self, value: ir.Value) -> Formula | None:
        """Return the formula of a value's elements; None if it is not known."""
        if value not in self._found:
            self._depth += 1
            found = self._compute(value) if self._depth <= _DEEPEST else None
            self._depth -= 1
            self._found[value] = None if found is None else _normal(found, value)
        return self._found[value]

    def _compute(self, value: ir.Value) -> Formula | None:
        array = constant_of(value)
        if array is not None:
            return _of_array(array)
        node = value.producer()
        entry = None if node is None else _ENTRIES.get((node.domain, node.op_type))
        return None if node is None or entry is None else entry(view(node), self.of)


def _normal(formula: Formula, value: ir.Value) -> Formula | None:
    """Drop the index of each dimension of size 1, which is 0, and conditions that always hold."""
    if isinstance(formula, Affine):
        if len(formula.coefficients) != rank_of(value):
            return None
        ones = [size == 1 for size in sizes.dims_of(value)]
        kept = (0 if one else c for c, one in zip(formula.coefficients, ones, strict=True))
        return Affine(formula.constant, tuple(kept))
    terms = [_normal(term, value) for term in formula.terms]
    if any(term is None for term in terms):
        return None
    open_terms = (t for t in terms if isinstance(t, Affine) and not _is_never_positive(t))
    return Conditions(frozenset(open_terms))


def _is_never_positive(term: Affine) -> bool:
    return term.constant <= 0 and max(term.coefficients, default=0) <= 0


def _of_array(array: np.ndarray[Any, Any]) -> Formula | None:
    if array.size == 0 or array.dtype.kind not in "bi":
        return None
    if array.dtype.kind == "b":
        if not (array.all() or not array.any()):
            return None
        return _truth(bool(array.all()), array.ndim)
    first = int(array.flat[0])
    steps = tuple(int(np.take(array, 1, axis).flat[0]) - first if n > 1 else 0 for axis, n in enumerate(array.shape))
    grid = np.indices(array.shape)
    expected = first + sum((step * index for step, index in zip(steps, grid, strict=True)), np.zeros(array.shape, int))
    return Affine(first, steps) if bool((expected == array).all()) else None


def _truth(value: bool, rank: int) -> Conditions:
    return Conditions(frozenset() if value else frozenset({Affine(1, (0,) * rank)}))


def entry(op_type: str, domain: str = ONNX) -> Callable[[_Entry], _Entry]:
    """Register the formula of an op's output: a function of its node."""

    def register(function: _Entry) -> _Entry:
        _ENTRIES[domain, op_type] = function
        return function

    return register


def _inputs(n: NodeView) -> Sequence[Any]:
    return n.node.inputs


def _integer(value: ir.Value | None) -> int | None:
    """Return the value of an integer constant of one element."""
    array = constant_of(value)
    return int(array.item()) if array is not None and array.size == 1 and array.dtype.kind == "i" else None


def _integers(value: ir.Value | None) -> list[int] | None:
    array = constant_of(value)
    return None if array is None or array.dtype.kind != "i" else [int(x) for x in array.reshape(-1)]


def _affine(of: Of, value: ir.Value) -> Affine | None:
    formula = of(value)
    return formula if isinstance(formula, Affine) else None


def _broadcast(formula: Formula | None, value: ir.Value, out: ir.Value) -> Any:
    """Return the formula of `value` broadcast to the shape of `out`; None if it is not known that it is."""
    if formula is None:
        return None
    rank, shape = rank_of(out), sizes.dims_of(value)
    missing = rank - len(shape)
    if any(size not in (1, wide) for size, wide in zip(shape, sizes.dims_of(out)[missing:], strict=True)):
        return None

    def padded(term: Affine) -> Affine:
        return Affine(term.constant, (0,) * missing + term.coefficients)

    return padded(formula) if isinstance(formula, Affine) else Conditions(frozenset(map(padded, formula.terms)))


def _operands(n: NodeView, of: Of) -> list[Any]:
    """Return the formulas of the inputs, broadcast to the output; None for those that are not known."""
    out = n.node.outputs[0]
    return [None if x is None else _broadcast(of(x), x, out) for x in _inputs(n)]


# Arithmetic and comparisons


@entry("Range")
def _range(n: NodeView, of: Of) -> Formula | None:
    start, _, step = _inputs(n)
    first, delta = _integer(start), _integer(step)
    return None if first is None or delta is None else Affine(first, (delta,))


@entry("ConstantOfShape")
def _constant_of_shape(n: NodeView, of: Of) -> Formula | None:
    value, out = n.node.attributes.get("value"), n.node.outputs[0]
    array = None if value is None else value.as_tensor().numpy()
    if array is None or array.dtype.kind not in "bi":
        return None
    rank = rank_of(out)
    return _truth(bool(array.item()), rank) if array.dtype.kind == "b" else Affine(int(array.item()), (0,) * rank)


@entry("Add")
def _add(n: NodeView, of: Of) -> Formula | None:
    a, b = _operands(n, of)
    return a + b if isinstance(a, Affine) and isinstance(b, Affine) else None


@entry("Sub")
def _sub(n: NodeView, of: Of) -> Formula | None:
    a, b = _operands(n, of)
    return a - b if isinstance(a, Affine) and isinstance(b, Affine) else None


@entry("CumSum")
def _cumsum(n: NodeView, of: Of) -> Formula | None:
    x = _affine(of, _inputs(n)[0])
    return x if x is not None and x.is_constant and x.constant == 0 else None


@entry("Cast")
def _cast(n: NodeView, of: Of) -> Formula | None:
    x, out = _inputs(n)[0], n.node.outputs[0]
    formula = of(x)
    to = dtype_of(out)
    if is_float(to) or formula is None:
        return None
    if isinstance(formula, Affine) and to == ir.DataType.INT64:
        return formula
    if isinstance(formula, Conditions) and to == ir.DataType.BOOL:
        return formula
    if isinstance(formula, Conditions) and (formula.is_true or formula.is_false):
        return Affine(int(formula.is_true), (0,) * rank_of(out))
    return None


def _compare(op_type: str, terms: Callable[[Affine], Sequence[Affine] | None]) -> None:
    """Register a comparison: `terms` maps a - b to formulas that are not positive where it holds; None: not known."""

    @entry(op_type)
    def compared(n: NodeView, of: Of) -> Formula | None:
        a, b = _operands(n, of)
        if not (isinstance(a, Affine) and isinstance(b, Affine)):
            return None
        found = terms(a - b)
        return None if found is None else Conditions(frozenset(found))


def _shifted(x: Affine, by: int) -> Affine:
    return Affine(x.constant + by, x.coefficients)


def _negated(x: Affine) -> Affine:
    return Affine(-x.constant, tuple(-c for c in x.coefficients))


def _equality(difference: Affine, equal: bool) -> Sequence[Affine] | None:
    if not difference.is_constant:
        return None
    holds = (difference.constant == 0) == equal
    return [] if holds else [Affine(1, (0,) * len(difference.coefficients))]


_compare("LessOrEqual", lambda d: [d])
_compare("Less", lambda d: [_shifted(d, 1)])
_compare("GreaterOrEqual", lambda d: [_negated(d)])
_compare("Greater", lambda d: [_shifted(_negated(d), 1)])
_compare("Equal", lambda d: _equality(d, True))


@entry("NotEqual", OWN)
def _not_equal(n: NodeView, of: Of) -> Formula | None:
    a, b = _operands(n, of)
    if not (isinstance(a, Affine) and isinstance(b, Affine)):
        return None
    found = _equality(a - b, False)
    return None if found is None else Conditions(frozenset(found))


@entry("And")
def _and(n: NodeView, of: Of) -> Formula | None:
    a, b = _operands(n, of)
    return Conditions(a.terms | b.terms) if isinstance(a, Conditions) and isinstance(b, Conditions) else None


@entry("Or")
def _or(n: NodeView, of: Of) -> Formula | None:
    a, b = _operands(n, of)
    for x, other in ((a, b), (b, a)):
        if isinstance(x, Conditions) and x.is_true:
            return x
        if isinstance(x, Conditions) and x.is_false and isinstance(other, Conditions):
            return other
    return None


@entry("Not")
def _not(n: NodeView, of: Of) -> Formula | None:
    x = of(_inputs(n)[0])
    if not isinstance(x, Conditions) or not (x.is_true or x.is_false):
        return None
    return _truth(x.is_false, rank_of(n.node.outputs[0]))


# Shapes


def _mapped(formula: Formula | None, axes: Sequence[int | None]) -> Formula | None:
    """Return the formula with axis i of the result taken from axis `axes[i]`; None for a new one."""
    if formula is None:
        return None

    def moved(term: Affine) -> Affine:
        return Affine(term.constant, tuple(0 if a is None else term.coefficients[a] for a in axes))

    return moved(formula) if isinstance(formula, Affine) else Conditions(frozenset(map(moved, formula.terms)))


@entry("Identity")
def _identity(n: NodeView, of: Of) -> Formula | None:
    return of(_inputs(n)[0])


@entry("Unsqueeze")
def _unsqueeze(n: NodeView, of: Of) -> Formula | None:
    x, axes = _inputs(n)[0], _integers(_inputs(n)[1])
    if axes is None:
        return None
    rank = rank_of(n.node.outputs[0])
    added = {normalize_axis(a, rank) for a in axes}
    rest = iter(range(rank_of(x)))
    return _mapped(of(x), [None if i in added else next(rest) for i in range(rank)])


@entry("Squeeze")
def _squeeze(n: NodeView, of: Of) -> Formula | None:
    x, axes = _inputs(n)[0], _integers(_inputs(n)[1] if len(_inputs(n)) > 1 else None)
    if axes is None:
        return None
    removed = {normalize_axis(a, rank_of(x)) for a in axes}
    return _mapped(of(x), [i for i in range(rank_of(x)) if i not in removed])


@entry("Transpose")
def _transpose(n: NodeView, of: Of) -> Formula | None:
    return _mapped(of(_inputs(n)[0]), n.perm) if n.perm is not None else None


@entry("Expand")
def _expand(n: NodeView, of: Of) -> Formula | None:
    x = _inputs(n)[0]
    return _broadcast(of(x), x, n.node.outputs[0])  # type: ignore[no-any-return]


@entry("Slice")
def _slice(n: NodeView, of: Of) -> Formula | None:
    x, starts, _, axes, *steps = _inputs(n)
    formula = _affine(of, x)
    first, along = _integers(starts), _integers(axes)
    step = _integers(steps[0]) if steps else None
    if (
        formula is None
        or first is None
        or along is None
        or min(first) < 0
        or (steps and (not step or set(step) != {1}))
    ):
        return None
    lengths = [sizes.dims_of(x)[axis] for axis in along]
    if any(isinstance(length, int) and start > length for start, length in zip(first, lengths, strict=True)):
        return None  # it is clamped
    shift = sum(start * formula.coefficients[axis] for start, axis in zip(first, along, strict=True))
    return _shifted(formula, shift)


@entry("Concat")
def _concat(n: NodeView, of: Of) -> Formula | None:
    """One formula for all parts: that of the last, if the parts before it are static and follow it too."""
    formulas = [_affine(of, x) for x in _inputs(n) if x is not None]
    axis = normalize_axis(n.axis, rank_of(n.node.outputs[0]))
    lengths = [sizes.dims_of(x)[axis] for x in _inputs(n) if x is not None]
    last = formulas[-1]
    if last is None or any(not isinstance(m, int) or m > _LONGEST_PREFIX for m in lengths[:-1]):
        return None
    offset = sum(int(m) for m in lengths[:-1])
    step = last.coefficients[axis]
    if lengths[-1] == 1 and offset:
        return None  # its normal form has lost the step
    whole = _shifted(last, -step * offset)
    position = 0
    for part, length in zip(formulas[:-1], lengths[:-1], strict=True):
        for i in range(int(length)):
            if part is None or _at(part, axis, i) != _at(whole, axis, position + i):
                return None
        position += int(length)
    return whole


def _at(formula: Affine, axis: int, index: int) -> Affine:
    """Return the formula at an index of one axis."""
    rest = tuple(0 if a == axis else c for a, c in enumerate(formula.coefficients))
    return Affine(formula.constant + index * formula.coefficients[axis], rest)


@entry("Index", OWN)
def _index(n: NodeView, of: Of) -> Formula | None:
    data, *indices = _inputs(n)
    formula, out = _affine(of, data), n.node.outputs[0]
    if formula is None or tuple(n.axes) != tuple(range(rank_of(data))):
        return None
    found = Affine(formula.constant, (0,) * rank_of(out))
    for coefficient, index in zip(formula.coefficients, indices, strict=True):
        positions = _broadcast(_affine(of, index), index, out)
        if coefficient and (positions is None or not positions.is_never_negative):
            return None
        if coefficient:
            found = found + Affine(
                coefficient * positions.constant, tuple(coefficient * c for c in positions.coefficients)
            )
    return found
