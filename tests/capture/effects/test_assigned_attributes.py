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


class SetsTensor(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.value = self.inner(x)
        return self.value.tanh()


class SetsState(Base):
    """As the recurrent layers of RecurrentGemma without a cache."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.value = None
        hidden: torch.Tensor = self.inner(x)
        state = torch.zeros_like(hidden) if self.value is None else self.value
        self.value = (state + hidden.tanh()).sum(0)
        return hidden


class SetsLists(Base):
    """As the caches of Wan's autoencoder, which are empty after the call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.value, self.factor = [None] * 2, [0]
        for layer in self.inner:
            self.value[self.factor[0]] = x
            self.factor[0] += 1
            x = layer(x)
        x = x + self.value[0] * self.value[1]
        self.value, self.factor = [None] * 2, [0]
        return x


class SetsListOfTensors(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = [layer(x) for layer in self.inner]
        self.value = [*hidden, x.size(0)]
        self.factor = hidden[0], None
        return hidden[0] + hidden[1]


class ReadsConfiguration(Base):
    """As the models of diffusers, whose `__getattr__` first looks for the name among the attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.configuration = {"width": WIDTH}

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__["configuration"] and name not in self.__dict__:
            return self.__dict__["configuration"][name]
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.value = [x.size(0)]
        return self.inner(x) * self.width  # type: ignore[no-any-return]


KINDS = (
    ReadsConfiguration,
    *(SetsTensor, SetsState, SetsLists, SetsListOfTensors),
    *(SetsSize, SetsAndMultiplies, SetsConstants, SetsInSubmodule, SetsAtSomeSizes, SetsByElements),
    *(SetsInEachBlock, SetsConstantInEachBlock),
)


def values(module: nn.Module) -> Sequence[Any]:
    return [
        m.__dict__.get(name) for m in module.modules() for name in ("value", "length", "factor") if name in m.__dict__
    ]


def assert_same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(got, torch.Tensor):
        torch.testing.assert_close(got, expected)
    elif isinstance(got, list | tuple):
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected


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
            with torch.no_grad():  # only leaves can be copied with the module
                reference(x)
            assert_same(list(values(module)), list(values(reference)))


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


class ReadsInGetattr(Base):
    """Reads a value of the previous call, or all values, in `__getattr__`."""

    reads: Any = staticmethod(lambda attributes: attributes.get("value"))

    def __getattr__(self, name: str) -> Any:
        return type(self).reads(self.__dict__) or 0 if name == "previous" else super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        previous = self.previous
        self.value = x.size(0)
        return self.inner(x) + previous  # type: ignore[no-any-return]


class ReadsItemsInGetattr(ReadsInGetattr):
    reads = staticmethod(lambda attributes: dict(attributes)["value"])


class ReadsMergedInGetattr(ReadsInGetattr):
    reads = staticmethod(lambda attributes: {**attributes}["value"])


class ReadsValuesInGetattr(ReadsInGetattr):
    reads = staticmethod(lambda attributes: sum(v for v in attributes.values() if type(v) is int))


class OwnReads(Base):
    """Reads that PyTorch's `__getattribute__` does not see."""

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        previous = self.value or 0
        self.value = x.size(0)
        return self.inner(x) + previous


class SetsTensorAtSomeSizes(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 3:
            self.value = self.inner(x).sum(0)
        return self.inner(x) * (1 if self.value is None else self.value)  # type: ignore[no-any-return]


SHARED = [1, 2]


class SetsSharedList(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.value = SHARED
        return self.inner(x) * self.value[1]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "kind",
    [
        *(ReadsBefore, ReadsInDictionary, ReadsInGetattr, ReadsItemsInGetattr, ReadsMergedInGetattr),
        *(ReadsValuesInGetattr, OwnReads, SetsTensorAtSomeSizes, SetsSharedList),
    ],
    ids=lambda kind: kind.__name__,
)
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
            assert (left is SHARED) == (expected is SHARED)


class ReturnsWhatItSets(Base):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.value = self.inner(x)
        self.state = self.value.tanh()
        return self.value, self.value.sum()


@pytest.mark.parametrize("kept", [None, ("1",)])
def test_gradients_flow_through_tensors_that_are_set(kept: tuple[str] | None) -> None:
    eager = ReturnsWhatItSets().double()
    ours = ORTModule(copy.deepcopy(eager), fallback_policy=FallbackPolicy.FALLBACK_DISABLE, keep_outputs=kept)
    for size in (3, 5):
        x = torch.randn(size, WIDTH, dtype=torch.float64)
        gradients = []
        for module, inner in ((ours, ours.module), (eager, eager)):
            value, total = module(x)
            assert kept or inner.value is value
            loss = (inner.value * inner.state).sum() + total.square()
            state = inner.state
            first = torch.autograd.grad(loss, list(inner.parameters()), create_graph=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                second = torch.autograd.grad(sum(g.square().sum() for g in first), list(inner.parameters()))
            assert inner.state is state
            gradients.append((first, second))
        torch.testing.assert_close(*gradients)
    assert count_captures(ours) == 1
