"""A module that cannot be captured as one graph runs as graphs of its largest submodules that can."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain.frontend.hierarchical_module import HierarchicalORTModule
from onnxtrain.frontend.ort_module import engine_of
from tests.reference import assert_matches, with_gradients
from tests.thinned import slow_except


class Decides(nn.Module):
    """Cannot be captured, and has no submodules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.rand(()) + 1 > 0 else x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.norm(self.linear(x).relu()) * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.named = nn.ModuleDict({"one": Block()})
        self.shared = self.blocks[0]
        self.decides = nn.Sequential(nn.Linear(4, 4), Decides())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, scale=1.0 + number)
        x = self.shared(x)
        x = self.named["one"](self.decides(x))
        return x.sum() + self.blocks[1].linear.weight.sum()


def step(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return with_gradients(module(x), dict(module.named_parameters()))


def test_the_largest_submodules_are_captured_and_results_equal_eager(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onnxtrain")
    plain = Net()
    model = HierarchicalORTModule(copy.deepcopy(plain))
    keys = list(plain.state_dict())
    for batch in (3, 5):
        x = torch.randn(batch, 4)
        assert_matches(step(model, x), step, plain, x)
    assert list(model.state_dict()) == keys
    parts = {
        name: engine_of(part).captures
        for name, part in (
            ("blocks.0", model.blocks[0]),
            ("blocks.1", model.blocks[1]),
            ("named.one", model.named["one"]),
            ("decides", model.decides),
            ("decides.0", model.decides[0]),
            ("decides.1", model.decides[1]),
        )
    }
    assert model.shared is model.blocks[0]
    # The shared block is called with and without an argument.
    assert parts == {"blocks.0": 2, "blocks.1": 1, "named.one": 1, "decides": 0, "decides.0": 1, "decides.1": 0}
    for name in ("Net", "Sequential", "Decides"):
        assert caplog.text.count(f"{name} cannot be captured as one graph") == 1


def test_a_module_that_can_be_captured_stays_one_graph() -> None:
    model = HierarchicalORTModule(Block())
    model(torch.randn(2, 4)).sum().backward()
    assert engine_of(model).captures == 1
    assert type(model.module.linear) is nn.Linear


COPIED: dict[str, Callable[[HierarchicalORTModule], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("how", slow_except(COPIED, "pickle"))
def test_copies_run_as_the_original(how: str) -> None:
    model = HierarchicalORTModule(Net())
    x = torch.randn(2, 4)
    expected = model(x)
    again = COPIED[how](model)
    assert torch.equal(again(x), expected)
    assert again.__dict__["_divided"]


def test_errors_of_the_model_are_raised_unchanged() -> None:
    model = HierarchicalORTModule(Net())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 5))


def test_the_time_of_the_first_call_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onnxtrain")
    model = HierarchicalORTModule(Net())
    for _ in range(2):
        model(torch.randn(3, 4)).backward()
    lines = [r.message for r in caplog.records if "initialisation took" in r.message]
    assert len(lines) == 1
    assert lines[0].startswith("Net: ")
