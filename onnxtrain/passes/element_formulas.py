"""Express the elements of values as formulas of their indices: masks are built from positions by arithmetic.

Each op has its own formula (`ops/interfaces/element_formulas.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.values import constant_of, rank_of
from onnxtrain.ops import view
from onnxtrain.ops.interfaces.element_formulas import ELEMENT_FORMULAS, Affine, Conditions, Formula, truth

_DEEPEST = 200  # nodes in a row


class Formulas:
    """The formulas of a graph's values, each computed once."""

    def __init__(self) -> None:
        self._formulas: dict[ir.Value, Formula | None] = {}
        self._depth = 0

    def formula_of(self, value: ir.Value) -> Formula | None:
        """Return the formula of a value's elements; None if it is not known."""
        if value not in self._formulas:
            self._depth += 1
            formula = self._compute(value) if self._depth <= _DEEPEST else None
            self._depth -= 1
            self._formulas[value] = None if formula is None else _normal(formula, value)
        return self._formulas[value]

    def _compute(self, value: ir.Value) -> Formula | None:
        array = constant_of(value)
        if array is not None:
            return _of_array(array)
        node = value.producer()
        entry = None if node is None else ELEMENT_FORMULAS.entry(node)
        return None if node is None or entry is None else entry(view(node), self.formula_of)


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
        return truth(bool(array.all()), array.ndim)
    first = int(array.flat[0])
    steps = tuple(int(np.take(array, 1, axis).flat[0]) - first if n > 1 else 0 for axis, n in enumerate(array.shape))
    grid = np.indices(array.shape)
    expected = first + sum((step * index for step, index in zip(steps, grid, strict=True)), np.zeros(array.shape, int))
    return Affine(first, steps) if bool((expected == array).all()) else None
