"""The models of `test_surroundings`, and the state outside of them that they read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.capture.key import surroundings_other as other

SCALE = 1.5
NAME = "sum"
SIZES = (1, 2)
FLAG = True
WEIGHTS = [1.0, [2.0]]
TABLE = {"a": 0.5, "function": torch.relu}
CHOSEN = {"a"}
TENSOR = torch.full((3,), 0.25, dtype=torch.float64)
TENSORS = {"a": [torch.full((3,), 0.75, dtype=torch.float64)]}


class Inner:
    def __init__(self) -> None:
        self.shift = 0.125
        self.tensor = torch.full((3,), 1.25, dtype=torch.float64)


class Config:
    rate = 2.0

    def __init__(self) -> None:
        self.inner = Inner()
        self.step = 0  # no code of the model names it

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.rate

    @property
    def half(self) -> float:
        return 0.5

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.0625


class Derived(Config):
    pass


@dataclass(slots=True)
class Slots:
    bias: float = 0.25
    factors: list[float] = field(default_factory=lambda: [1.0, 2.0])


class Switches:
    on = 1.0


config, derived, slots = Config(), Derived(), Slots()
layer = torch.nn.Linear(3, 3).double().requires_grad_(False)
teacher = torch.nn.Sequential(layer, torch.nn.Dropout(1.0)).eval()


def closure(by: float) -> Callable[..., Any]:
    table = [torch.full((3,), 0.5, dtype=torch.float64)]

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * by + table[0]

    return inner


from_closure = closure(1.25)
partial = functools.partial(torch.mul, other=torch.full((3,), 2.0, dtype=torch.float64))


def with_defaults(x: torch.Tensor, plus: float = 0.5, *, times: float = 1.0) -> torch.Tensor:
    return x * times + plus


def innermost() -> float:
    return SCALE


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * innermost()


@torch.no_grad()
def decorated() -> float:
    return Switches.on


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.function = with_defaults


class Values(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * SCALE * SIZES[1] + WEIGHTS[0] * WEIGHTS[1][0] + TABLE["a"]  # type: ignore[index, operator]
        x = x if FLAG and "b" not in CHOSEN else x * 2
        return x.sum(1) if NAME == "sum" else x.mean(1)


class Objects(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = config(derived.times(config.times(self.first(x))))
        return x + config.inner.shift + config.half + slots.bias * slots.factors[1] + decorated()


class Functions(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from tests.capture.key.surroundings_other import WITHIN

        x = TABLE["function"](helper(self.first(x)))  # type: ignore[operator]
        x = from_closure(x) + self.function(x) + partial(x) * min(SIZES)
        return x * other.FACTOR + other.Settings.shift + other.function(x) + WITHIN


class Tensors(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + TENSOR * TENSORS["a"][0] + config.inner.tensor
        return from_closure(x) + teacher(x)
