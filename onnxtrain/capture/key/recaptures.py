"""Count recaptures, and refuse a value that changes so often that recapturing would be slower than PyTorch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from onnxtrain.capture.key.key import ModuleState
from onnxtrain.capture.key.surroundings import Surroundings
from onnxtrain.errors import CaptureError

_FREE_RECAPTURES = 4  # per value, however often it changes
_CALLS_PER_RECAPTURE = 16  # on average, beyond those
_EXPECTED = f"at most {_FREE_RECAPTURES} changes, or one in {_CALLS_PER_RECAPTURE} calls"


class ChangingStateError(CaptureError):
    """A value that forward reads or sets changes too often to be recaptured each time."""


class ChangingNumberError(CaptureError):
    """A Python number among the arguments changes too often to be recaptured each time."""


class ChangingItemError(CaptureError):
    """A number that Python reads of a tensor changes too often to be recaptured each time."""


class Recaptures:
    """The recaptures of one module, by the value that had changed."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._recaptures: dict[tuple[str, str], tuple[int, int]] = {}  # by fact: count, first call
        self._numbers: dict[str, tuple[set[Any], int]] = {}  # by argument: values, first call
        self._answers: dict[str, tuple[int, int]] = {}  # by source location: wrong assumptions, first call
        self._items: dict[str, tuple[set[Any], int]] = {}  # by source location: values, first call

    def count(self, state: ModuleState, call: int) -> None:
        """Count a recapture in the call of index `call`, because the module has changed from `state`.

        Raises:
            ChangingStateError: the same value has changed too often.
        """
        change = state.first_change(self._module)
        if change is None:
            return
        count, first_call = self._recaptures.get(change, (0, call))
        if count >= _FREE_RECAPTURES and call - first_call < _CALLS_PER_RECAPTURE * count:
            name, owner = change
            raise ChangingStateError(
                f"forward reads or sets {name} of {owner}, which changes every few calls, and each value needs its own "
                "graph",
                where=Surroundings(self._module, state.reads).source_location(name),
                expected=_EXPECTED,
                got=f"{count + 1} changes in {call - first_call + 1} calls",
                todo="pass the value to forward as a tensor, or keep it in a registered buffer and change it in place",
            )
        self._recaptures[change] = (count + 1, first_call)

    def count_numbers(self, constants: Mapping[str, Any], call: int) -> None:
        """Count a capture in the call of index `call`, with these constants among the arguments.

        Raises:
            ChangingNumberError: a number among them has had too many values.
        """
        for path, value in constants.items():
            if type(value) not in (int, float):
                continue
            if got := _count(self._numbers, path, value, call):
                raise ChangingNumberError(
                    "a Python number among the arguments changes every few calls, and each value needs its own graph",
                    expected=_EXPECTED,
                    got=f"{type(value).__name__} {path}: {got}",
                    todo="pass the number as a tensor",
                )

    def may_assume_again(self, where: str, call: int) -> bool:
        """Count a wrong assumption on a branch at `where` in the call of index `call`; return whether it is seldom."""
        count, first_call = self._answers.get(where, (0, call))
        self._answers[where] = (count + 1, first_call)
        return count < _FREE_RECAPTURES or call - first_call >= _CALLS_PER_RECAPTURE * count

    def count_items(self, numbers: Mapping[str, Hashable], call: int) -> None:
        """Count a capture in the call of index `call`, in which Python read these numbers of tensors.

        Raises:
            ChangingItemError: a line has read too many values.
        """
        for where, value in numbers.items():
            if got := _count(self._items, where, value, call):
                raise ChangingItemError(
                    "Python reads a number of a tensor that changes every few calls, and each needs its own graph",
                    where=where,
                    expected=_EXPECTED,
                    got=got,
                    todo="the module runs in PyTorch; compute with the tensor instead, for example with a mask",
                )


def _count(values_of: dict[str, tuple[set[Any], int]], name: str, value: Hashable, call: int) -> str:
    """Count a value; return how often it has changed if that is too often, else ""."""
    values, first_call = values_of.setdefault(name, (set(), call))
    if value in values:
        return ""
    count = len(values) - 1  # the first is not a recapture
    if count >= _FREE_RECAPTURES and call - first_call < _CALLS_PER_RECAPTURE * count:
        return f"{count + 1} changes in {call - first_call + 1} calls"
    values.add(value)
    return ""
