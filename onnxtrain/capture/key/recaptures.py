"""A value that changes every few calls: to capture the module for each would take longer than to run it in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from onnxtrain.capture.key.key import ModuleState
from onnxtrain.capture.key.surroundings import Surroundings
from onnxtrain.errors import CaptureError

_FREE = 4  # captures for one value that are made in any case
_CALLS_EACH = 16  # calls that each further one has to serve, on average


class ChangingStateError(CaptureError):
    """Something that forward reads changes too often for captures."""


class ChangingNumberError(CaptureError):
    """A Python number among the arguments changes too often for captures."""


class Recaptures:
    """Counts the captures of one module by what had changed."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._made: dict[tuple[str, str], tuple[int, int]] = {}  # how many, and the number of the call of the first
        self._numbers: dict[str, tuple[set[Any], int]] = {}  # the values, and the number of the call of the first

    def count(self, state: ModuleState, call: int) -> None:
        """The module is not in this state any more, and is to be captured again, at the call of this number.

        Raises:
            ChangingStateError: what changed has done so too often.
        """
        change = state.change(self._module)
        if change is None:
            return
        made, first = self._made.get(change, (0, call))
        if made >= _FREE and call - first < _CALLS_EACH * made:
            name, where = change
            raise ChangingStateError(
                f"forward reads {name} of {where}, which changes every few calls: each value needs a graph of its own",
                where=Surroundings(self._module, state.reads).line(name),
                todo="pass the value to forward as a tensor, or keep it in a registered buffer, and change it in place",
            )
        self._made[change] = (made + 1, first)

    def count_numbers(self, constants: Mapping[str, Any], call: int) -> None:
        """The module is to be captured, at the call of this number, with these constants among its arguments.

        Raises:
            ChangingNumberError: a number among them has had too many values.
        """
        for path, value in constants.items():
            if type(value) not in (int, float):
                continue
            values, first = self._numbers.setdefault(path, (set(), call))
            if value in values:
                continue
            made = len(values) - 1  # after the first
            if made >= _FREE and call - first < _CALLS_EACH * made:
                raise ChangingNumberError(
                    "a Python number among the arguments changes every few calls: each value needs a graph of its own",
                    got=f"{type(value).__name__} {path}",
                    todo="pass the number as a tensor",
                )
            values.add(value)
