"""Forward sees and changes its arguments as in eager; also modules that contain an ORTModule."""

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from tests.reference import assert_matches
from tests.thinned import slow_except


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x)
        return result


class Outer(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(x))
        return result


def data() -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


class Scales(Inner):
    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return super().forward(x) * factor


@pytest.mark.parametrize("kind", slow_except([int, float], float))
def test_a_number_that_changes_in_each_call_causes_few_captures_and_one_warning(kind: type) -> None:
    ours = ORTModule(Scales())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(30):
            factor = kind(number)
            assert_matches(ours(data(), factor), ours.module, data(), factor)
    assert engine_of(ours).captures == 5
    assert sum("a Python number among the arguments changes" in str(w.message) for w in caught) == 1


# A module that contains an ORTModule


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_reaches_the_wrapped_module(assign: bool) -> None:
    eager, ours = Outer(Inner()), Outer(ORTModule(Inner()))
    assert str(ours.load_state_dict(eager.state_dict(), assign=assign)) == "<All keys matched successfully>"
    assert_matches(ours(data()), eager, data())
    state = eager.state_dict()
    state.pop("body.linear.weight")
    state["body.surplus"] = torch.ones(1)
    assert str(ours.load_state_dict(state, strict=False)) == str(eager.load_state_dict(state, strict=False))


def test_a_nested_ortmodule_is_captured_with_the_outer_one() -> None:
    eager = Outer(Inner())
    ours = ORTModule(Outer(ORTModule(copy.deepcopy(eager.body))))
    ours.load_state_dict(eager.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_matches(ours(data()), eager, data())
    assert engine_of(ours.module.body).captures == 0


def test_the_compile_method() -> None:
    ours = ORTModule(Inner())
    eager = copy.deepcopy(ours.module)
    ours.compile(backend="eager")
    assert_matches(ours(data()), eager, data())
    assert_matches(copy.deepcopy(ours)(data()), eager, data())


# Arguments


def test_forward_reads_the_order_of_its_kwargs() -> None:
    class Model(Inner):
        def forward(self, **kwargs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            y = kwargs["a"]
            for value in kwargs.values():
                y = self.linear(y + value)
            return y

    eager = Model()
    ours = ORTModule(copy.deepcopy(eager))
    for _ in range(4):
        for kwargs in ({"b": data() * 2, "a": data()}, {"a": data(), "b": data() * 2}):
            assert_matches(ours(**kwargs), lambda module, kwargs: module(**kwargs), eager, kwargs)


@dataclasses.dataclass
class Batch:
    a: torch.Tensor
    n: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        self.a = self.a * 2
        self.n = 7


def test_dataclasses_are_not_initialized_again() -> None:
    class Model(Inner):
        def forward(self, batch: Batch) -> Batch:  # type: ignore[override]
            return Batch(self.linear(batch.a) * batch.n)

    eager = Model()
    ours = ORTModule(copy.deepcopy(eager))

    def call(module: nn.Module, x: torch.Tensor, n: int) -> dict[str, Any]:
        batch = Batch(x)
        batch.n = n
        return vars(module(batch))

    for n in (7, 3):
        assert_matches(call(ours, data(), n), call, eager, data(), n)


CHANGES: dict[str, Callable[[dict[str, Any], torch.Tensor], Any]] = {
    "entry added": lambda d, y: d.update(h=y),
    "entry removed": lambda d, y: d.pop("a"),
    "entry replaced": lambda d, y: d.update(a=y),
    "appended to a list": lambda d, y: d["b"].append(y),
}


@pytest.mark.parametrize("name", CHANGES)
def test_forward_changes_a_container(name: str) -> None:
    class Model(Inner):
        def forward(self, d: dict[str, Any]) -> torch.Tensor:  # type: ignore[override]
            y: torch.Tensor = self.linear(d["a"])
            CHANGES[name](d, y)
            return y * 2

    eager = Model()
    ours = ORTModule(copy.deepcopy(eager))

    def call(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        changed: dict[str, Any] = {"a": x, "b": []}
        return module(changed), changed

    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            got = call(ours, data())
        assert_matches(got, call, eager, data())
        mine, theirs = got[1], call(eager, data())[1]
        assert list(mine) == list(theirs)
        for value, expected in zip([*mine.values(), *mine["b"]], [*theirs.values(), *theirs["b"]], strict=True):
            assert type(value) is type(expected)
