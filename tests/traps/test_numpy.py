"""Numpy arrays that forward reads change in place, which no version of a tensor counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.testing import assert_no_worse_than_eager
from tests.thinned import slow_except

GLOBAL = np.array([1.0, 2.0, 3.0])
TABLE = {"a": np.array([1.0, 2.0, 3.0])}
SETTINGS = SimpleNamespace(weights=np.array([1.0, 2.0, 3.0]))


class Reads(nn.Module):
    def __init__(self, read: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.array = np.array([1.0, 0.0, 1.0])
        self.arrays = [np.array([1.0, 2.0, 3.0])]
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self, self.linear(x))


def times(x: torch.Tensor, array: Any) -> torch.Tensor:
    return x * torch.from_numpy(array).to(x.dtype)


READS: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], Callable[[Any], Any]]] = {
    "attribute": (lambda m, x: times(x, m.array), lambda m: m.array),
    "copied": (lambda m, x: x * torch.tensor(m.array, dtype=x.dtype), lambda m: m.array),
    "list": (lambda m, x: times(x, m.arrays[0]), lambda m: m.arrays[0]),
    "global": (lambda m, x: times(x, GLOBAL), lambda m: GLOBAL),
    "global dict": (lambda m, x: times(x, TABLE["a"]), lambda m: TABLE["a"]),
    "attribute of an object": (lambda m, x: times(x, SETTINGS.weights), lambda m: SETTINGS.weights),
    "element": (lambda m, x: x * float(GLOBAL[1]), lambda m: GLOBAL),
    "mask": (lambda m, x: x[:, torch.from_numpy(m.array > 0)], lambda m: m.array),
    "positions": (lambda m, x: x[:, m.array.astype(np.int64)], lambda m: m.array),
}


@pytest.mark.parametrize(
    "name", slow_except(READS, "attribute", "global", "global dict", "element", "mask", "positions")
)
def test_an_array_that_changes_in_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    read, array_of = READS[name]
    module = Reads(read)
    wrapped = ORTModule(module)
    array = array_of(module)
    before = array.copy()
    try:
        for elements in (before, np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 2.0]), before):
            array[:] = elements
            exact = copy.deepcopy(module).double()
            x = torch.randn(4, 3)
            assert_no_worse_than_eager(name, wrapped(x), module(x), exact(x.double()))
    finally:
        array[:] = before
