"""Units of one graph under a memory budget, each for calls up to some sizes.

sizes of a call ──is there a unit for these or larger sizes?──yes──> it runs
                    └─no─> a unit is planned for slightly larger sizes
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir
import torch

from onnxtrain.errors import MemoryBudgetError
from onnxtrain.execute.boundary import Unit
from onnxtrain.graph import sizes
from onnxtrain.plan.recompute import RecomputeChoice

_STEPS = 8  # units at most from a size to its double, if sizes grow


class SizedUnits:
    """See the module's docstring. Threads may call it at the same time."""

    def __init__(
        self,
        inputs: Sequence[ir.Value],
        choose: Callable[[Mapping[str, int]], RecomputeChoice],
        make_unit: Callable[[RecomputeChoice], Unit],
    ) -> None:
        """Make no unit yet.

        Args:
            inputs: those of the graph.
            choose: chooses what backward recomputes, from the integer of each symbol; may raise MemoryBudgetError.
            make_unit: makes the unit for a choice.
        """
        self._choose, self._make_unit = choose, make_unit
        self._sources = {
            size: (index, axis)
            for index, value in enumerate(inputs)
            for axis, size in enumerate(sizes.dims_of(value))
            if isinstance(size, str) and size.isidentifier()
        }
        self._planned: list[tuple[dict[str, int], Unit]] = []
        self._units: dict[tuple[frozenset[str], bool], Unit] = {}
        self._by_sizes: dict[tuple[int, ...], Unit] = {}
        self._lock = threading.Lock()

    def unit(self, tensors: Sequence[torch.Tensor]) -> Unit:
        """Return the unit for a call.

        Raises:
            MemoryBudgetError: no choice meets the budget at these sizes.
        """
        key = tuple(tensors[index].size(axis) for index, axis in self._sources.values())
        unit = self._by_sizes.get(key)
        if unit is None:
            symbol_values = dict(zip(self._sources, key, strict=True))
            with self._lock:
                unit = self._by_sizes[key] = self._planned_unit(symbol_values) or self._plan_unit(symbol_values)
        return unit

    def _planned_unit(self, symbol_values: dict[str, int]) -> Unit | None:
        """Return the unit for the smallest planned sizes that are large enough; None if there is none."""
        fitting = [(sum(most.values()), unit) for most, unit in self._planned if _covers(most, symbol_values)]
        return min(fitting, key=lambda pair: pair[0])[1] if fitting else None

    def _plan_unit(self, symbol_values: dict[str, int]) -> Unit:
        most = {name: _rounded_up(size) for name, size in symbol_values.items()} if self._planned else symbol_values
        try:
            choice = self._choose(most)
        except MemoryBudgetError:
            if most == symbol_values:
                raise
            most = symbol_values
            choice = self._choose(symbol_values)
        key = choice.values, choice.early
        if key not in self._units:
            self._units[key] = self._make_unit(choice)
        unit = self._units[key]
        self._planned.append((most, unit))
        return unit


def _covers(most: Mapping[str, int], symbol_values: Mapping[str, int]) -> bool:
    return all(size <= most[name] for name, size in symbol_values.items())


def _rounded_up(size: int) -> int:
    """Round up to the next of the `_STEPS` sizes between two powers of two."""
    step: int = max(2 ** (max(size, 1).bit_length() - 1) // _STEPS, 1)
    return -(-size // step) * step
