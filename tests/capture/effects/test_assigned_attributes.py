"""Attributes that forward sets before it reads them: one graph, and after each call the values that eager leaves."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import FallbackPolicy, ORTModule, prepare
from tests.reference import assert_matches
from tests.thinned import covering, slow_but_every
from tests.zoo.checks import count_captures

WIDTH = 4
SIZES = (5, 2, 7, 2, 5, 1, 0, 3, 5, 5, 5, 5, 2, 5)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.value: Any = None


class SetsSize(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.value = 2 * x.size(0) + 1
        return self.inner(x) * self.value


class SetsAndMultiplies(Base):
    """As Funnel does: the value is read only after it was set."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.value = 1
        for _ in range(3):
            self.value *= 2
        return self.inner(x) * self.value


class SetsConstants(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.value = ("none", None, "text", 0.5, torch.float32)[len(x) % 5]
        return self.inner(x)  # type: ignore[no-any-return]


class SetsInSubmodule(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.length = x.size(0)
        return self.inner(x) / (1 + self.inner.length)


class SetsAtSomeSizes(Base):
    """Where it is not set, the value of an earlier call is read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 3:
            self.value = 2
        return self.inner(x) * (1 if self.value is None else self.value)


class SetsByElements(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.value = "some"
        if not (x > 0).any():
            self.value = "none"
        return self.inner(x)  # type: ignore[no-any-return]


class Block(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.value = x.size(0)
        return x + self.inner(x).tanh()


class SetsInEachBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class SetsConstantInEachBlock(SetsInEachBlock):
    """The blocks differ in what they read from the value that the model sets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            block.factor = 1 + number % 2
            x = block(x) * block.factor
        return x


KINDS = (
    *(SetsSize, SetsAndMultiplies, SetsConstants, SetsInSubmodule, SetsAtSomeSizes, SetsByElements),
    *(SetsInEachBlock, SetsConstantInEachBlock),
)


def values(module: nn.Module) -> Sequence[Any]:
    return [
        m.__dict__.get(name) for m in module.modules() for name in ("value", "length", "factor") if name in m.__dict__
    ]


@pytest.mark.parametrize(("entry_point", "kind"), covering(["ORTModule", "blocks", "stored"], slow_but_every(2, KINDS)))
def test_each_call_leaves_the_values_of_eager(entry_point: str, kind: type[nn.Module], tmp_path: Path) -> None:
    eager = kind()
    for _ in range(2 if entry_point == "stored" else 1):
        module = copy.deepcopy(eager)
        options: dict[str, Any] = {"fallback_policy": FallbackPolicy.FALLBACK_DISABLE}
        if entry_point == "blocks":
            run: Any = prepare(nn.Sequential(nn.Sequential(module, copy.deepcopy(module))), regional=True, **options)[
                0
            ][0]
        else:
            run = ORTModule(module, cache_dir=tmp_path if entry_point == "stored" else None, **options)
        reference = copy.deepcopy(eager)
        for size in SIZES:
            x = torch.randn(size, WIDTH)
            result = run(x)
            assert_matches([result], lambda reference, x: [reference(x)], reference, x)
            reference(x)
            assert values(module) == values(reference)
            assert [type(v) for v in values(module)] == [type(v) for v in values(reference)]


def test_sizes_and_values_before_the_call_need_no_capture() -> None:
    module = ORTModule(SetsSize())
    for number, size in enumerate((5, 2, 7, 2)):
        module.module.value = number
        module(torch.randn(size, WIDTH))
        assert module.module.value == 2 * size + 1
    assert count_captures(module) == 1


def test_modules_that_share_programs_each_have_their_values() -> None:
    first, second = (prepare(nn.Sequential(nn.Sequential(SetsSize(), SetsSize())), regional=True) for _ in range(2))
    first(torch.randn(3, WIDTH))
    second(torch.randn(6, WIDTH))
    first(torch.randn(5, WIDTH))
    assert [m.value for m in (*first[0], *second[0])] == [11, 11, 13, 13]


class ReadsBefore(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        previous = self.value or 0
        self.value = x.size(0)
        return self.inner(x) + previous


class ReadsInDictionary(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        previous = vars(self)["value"] or 0
        self.value = x.size(0)
        return self.inner(x) + previous


class OwnReads(Base):
    """Reads that PyTorch's `__getattribute__` does not see."""

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        previous = self.value or 0
        self.value = x.size(0)
        return self.inner(x) + previous


class SetsTensor(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.value = self.inner(x)
        return self.value.tanh()


@pytest.mark.parametrize("kind", [ReadsBefore, ReadsInDictionary, OwnReads, SetsTensor], ids=lambda kind: kind.__name__)
def test_other_state_is_as_in_eager(kind: type[Base]) -> None:
    eager = kind()
    module = ORTModule(copy.deepcopy(eager))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in (3, 5, 5, 2, 3):
            x = torch.randn(size, WIDTH)
            assert torch.allclose(module(x), eager(x))
            left, expected = module.module.value, eager.value
            assert torch.allclose(left, expected) if isinstance(expected, torch.Tensor) else left == expected
