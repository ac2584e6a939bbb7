"""Units of one graph that fit into a number of bytes, each up to some sizes.

sizes of a call ──is there a unit for these or larger ones?──yes──> it
                      └─no─> another is planned, for sizes a little larger
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

_STEPS = 8  # from a size to its double: so often at most a growing size is planned for


class SizedUnits:
    """See the module's docstring. May be called by several threads."""

    def __init__(
        self,
        inputs: Sequence[ir.Value],
        choose: Callable[[Mapping[str, int]], RecomputeChoice],
        make: Callable[[RecomputeChoice], Unit],
    ) -> None:
        """Notes how units are made.

        Args:
            inputs: of the graph.
            choose: from the integer of each size, what backward computes again; raises MemoryBudgetError.
            make: the unit for a choice.
        """
        self._choose, self._make = choose, make
        self._places = {
            size: (index, axis)
            for index, value in enumerate(inputs)
            for axis, size in enumerate(sizes.dims_of(value))
            if isinstance(size, str) and size.isidentifier()
        }
        self._planned: list[tuple[dict[str, int], Unit]] = []
        self._units: dict[tuple[frozenset[str], bool], Unit] = {}
        self._known: dict[tuple[int, ...], Unit] = {}
        self._lock = threading.Lock()

    def unit(self, tensors: Sequence[torch.Tensor]) -> Unit:
        """The unit for a call. Raises MemoryBudgetError where none fits."""
        key = tuple(tensors[index].size(axis) for index, axis in self._places.values())
        found = self._known.get(key)
        if found is None:
            known = dict(zip(self._places, key, strict=True))
            with self._lock:
                found = self._known[key] = self._found(known) or self._new(known)
        return found

    def _found(self, known: dict[str, int]) -> Unit | None:
        """The unit that was planned for the least sizes of those that are large enough."""
        fitting = [(sum(most.values()), unit) for most, unit in self._planned if _covers(most, known)]
        return min(fitting, key=lambda pair: pair[0])[1] if fitting else None

    def _new(self, known: dict[str, int]) -> Unit:
        most = {name: _rounded_up(size) for name, size in known.items()} if self._planned else known
        try:
            choice = self._choose(most)
        except MemoryBudgetError:
            if most == known:
                raise
            most = known
            choice = self._choose(known)
        key = choice.values, choice.early
        if key not in self._units:
            self._units[key] = self._make(choice)
        unit = self._units[key]
        self._planned.append((most, unit))
        return unit


def _covers(most: Mapping[str, int], known: Mapping[str, int]) -> bool:
    return all(size <= most[name] for name, size in known.items())


def _rounded_up(size: int) -> int:
    """Up to the next of `_STEPS` sizes between two powers of two."""
    step: int = max(2 ** (max(size, 1).bit_length() - 1) // _STEPS, 1)
    return -(-size // step) * step
