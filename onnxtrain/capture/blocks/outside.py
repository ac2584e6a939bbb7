"""The state outside of its arguments, its module and the trace that a block could change or read.

state = outside.state();  block(x);  outside.state() == state      forward changed nothing that later code can read
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from onnxtrain.capture.key.surroundings import Reference, Surroundings
from onnxtrain.capture.structure import Identity, constant_key

_CONSTANTS = (bool, int, float, complex, str, bytes)


class Outside:
    """The globals, closures and other objects that forward can reach, and the events that a capture counts.

    Args:
        surroundings: what forward can reach.
        counts: return the numbers of events of a trace that a copy of a block would not repeat.
        count_tensors: returns the number of tensors that forward has created.
        holds_tensors: whether forward still refers to a tensor that it has created since there were this many, other
            than these tensors and the values of these nodes.
    """

    def __init__(
        self,
        surroundings: Surroundings,
        counts: Sequence[Callable[[], int]],
        count_tensors: Callable[[], int],
        holds_tensors: Callable[[int, Sequence[torch.Tensor], Sequence[torch.fx.Node]], bool],
    ) -> None:
        self._counts = counts
        self._values = [_Value(reference) for reference in surroundings.references]
        # A copy would not repeat an assignment of forward, nor read the next value.
        self._may_change = bool(surroundings.writes) or any(map(_is_iterator, self._values))
        self._version = 0
        self.count_tensors = count_tensors
        self.holds_tensors = holds_tensors

    def state(self) -> Hashable:
        """Return a key that differs from earlier ones if something has changed."""
        if self._may_change:
            return Identity(object())
        self._version += sum(value.update() for value in self._values)
        return self._version, *(count() for count in self._counts)


class _Value:
    """The value that a reference had when it was last read."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self.value: Any = reference.value
        self._contents = _contents(self.value)

    def update(self) -> bool:
        """Read the value again; return whether it has changed."""
        value = self._reference.read()
        if value is self.value:
            before, self._contents = self._contents, _contents(value)
            if len(before) != len(self._contents):
                return True
            return any(a is not b for a, b in zip(before, self._contents, strict=True))
        is_equal = type(value) in _CONSTANTS and constant_key(value) == constant_key(self.value)
        self.value, self._contents = value, _contents(value)
        return not is_equal


def _contents(value: Any) -> tuple[Any, ...]:
    """Return the contents of a container that can change; () for any other value."""
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    return tuple(value) if isinstance(value, (list, set)) else ()


def _is_iterator(value: _Value) -> bool:
    return hasattr(type(value.value), "__next__")
