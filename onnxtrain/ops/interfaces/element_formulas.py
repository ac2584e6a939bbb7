"""The elements of an op's output as formulas of their indices, for `passes/element_formulas.py`.

    Range(0, n)[i] = i      Unsqueeze(·, 1)[i, j] = i      LessOrEqual(cols, rows)[i, j] = (j - i <= 0)

A formula is exact for all sizes: it has integers only, and assumes nothing of a symbolic dimension except that an index
is not negative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.values import constant_of, rank_of
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.interfaces import OpInterface


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

    def __neg__(self) -> Affine:
        return Affine(-self.constant, tuple(-c for c in self.coefficients))

    def shifted(self, by: int) -> Affine:
        """Return self + by."""
        return Affine(self.constant + by, self.coefficients)

    def at(self, axis: int, index: int) -> Affine:
        """Return the formula at an index of one axis."""
        rest = tuple(0 if a == axis else c for a, c in enumerate(self.coefficients))
        return Affine(self.constant + index * self.coefficients[axis], rest)

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
FormulaOf = Callable[[ir.Value], "Formula | None"]
# From the node and the formulas of its inputs, that of its first output; None: it has none, or it is not known.
ELEMENT_FORMULAS = OpInterface[Callable[[NodeView, FormulaOf], "Formula | None"]]("element formulas")


def truth(value: bool, rank: int) -> Conditions:
    """Return the formula of elements that are all true, or all false."""
    return Conditions(frozenset() if value else frozenset({Affine(1, (0,) * rank)}))


def integers(value: ir.Value | None) -> list[int] | None:
    """Return the elements of an integer constant."""
    array = constant_of(value)
    return None if array is None or array.dtype.kind != "i" else [int(x) for x in array.reshape(-1)]


def affine(formula_of: FormulaOf, value: ir.Value) -> Affine | None:
    """Return the formula of integer elements."""
    formula = formula_of(value)
    return formula if isinstance(formula, Affine) else None


def broadcast(formula: Formula | None, value: ir.Value, out: ir.Value) -> Any:
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


def operands(n: NodeView, formula_of: FormulaOf) -> list[Any]:
    """Return the formulas of the inputs, broadcast to the output; None for those that are not known."""
    out = n.node.outputs[0]
    return [None if x is None else broadcast(formula_of(x), x, out) for x in n.node.inputs]


def affine_operands(n: NodeView, formula_of: FormulaOf) -> tuple[Affine, Affine] | None:
    """Return the formulas of two inputs of integers, broadcast to the output."""
    a, b = operands(n, formula_of)
    return (a, b) if isinstance(a, Affine) and isinstance(b, Affine) else None


def mapped(formula: Formula | None, axes: Sequence[int | None]) -> Formula | None:
    """Return the formula with axis i of the result taken from axis `axes[i]`; None for a new one."""
    if formula is None:
        return None

    def moved(term: Affine) -> Affine:
        return Affine(term.constant, tuple(0 if a is None else term.coefficients[a] for a in axes))

    return moved(formula) if isinstance(formula, Affine) else Conditions(frozenset(map(moved, formula.terms)))
