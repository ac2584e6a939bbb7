"""Selections by masks of the code's own constants are one graph; all others stay data-dependent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.testing import assert_no_worse_than_eager
from tests.thinned import slow_but_every

OUTSIDE = torch.tensor([True, False, True])


class Selecting(nn.Module):
    def __init__(self, select: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.select = select

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.select(self.linear(x), self)
        return result


def mask(*elements: int) -> torch.Tensor:
    return torch.tensor([bool(element) for element in elements])


def written(x: torch.Tensor, module: Selecting) -> torch.Tensor:
    kept = mask(1, 0, 0)
    view = kept.view(3)
    view[1] = True
    return x[:, kept]


def read_before(x: torch.Tensor, module: Selecting) -> torch.Tensor:
    kept = mask(1, 0, 1)
    return x.clone().masked_fill_(kept, 0.5)[:, kept].view(-1, 1, 2)


KNOWN: dict[str, Callable[[torch.Tensor, Selecting], torch.Tensor]] = {
    "columns": lambda x, module: x[:, mask(1, 0, 1)].view(-1, 1, 2),
    "columns by ellipsis": lambda x, module: x[None, ..., mask(1, 0, 1)].view(1, -1, 1, 2),
    "with an int": lambda x, module: x[0, mask(1, 0, 1)].view(1, 2),
    "with a slice": lambda x, module: x[1:, mask(1, 0, 1)].view(-1, 1, 2),
    "none": lambda x, module: x[:, mask(0, 0, 0)],
    "computed": lambda x, module: x[:, ~(torch.arange(3) == 1)].view(-1, 1, 2),
    "square": lambda x, module: (x.T @ x)[torch.ones(3, 3, dtype=torch.bool).tril()].view(2, 3),
    "positions": lambda x, module: x[:, mask(1, 0, 1).nonzero()[:, 0]].view(-1, 1, 2),
    "positions by where": lambda x, module: x[:, torch.where(mask(1, 0, 1))[0]].view(-1, 1, 2),
    "positions as a tuple": lambda x, module: x[:, torch.nonzero(mask(1, 0, 1), as_tuple=True)[0]].view(-1, 1, 2),
    "read before": read_before,
}
UNKNOWN: dict[str, Callable[[torch.Tensor, Selecting], torch.Tensor]] = {
    "buffer": lambda x, module: x[:, module.mask],
    "outside": lambda x, module: x[:, OUTSIDE],
    "written": written,
    "of an argument": lambda x, module: x[:, (x > 0).any(0)],
}


def check(wrapped: ORTModule, module: Selecting, rows: int) -> None:
    x = torch.rand(rows, 3)
    result, eager = wrapped(x), module(x)
    assert result.shape == eager.shape
    assert_no_worse_than_eager("result", result, eager, copy.deepcopy(module).double()(x.double()))


@pytest.mark.parametrize("name", slow_but_every(2, KNOWN))
def test_known_masks_are_one_graph_for_all_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    module = Selecting(KNOWN[name])
    wrapped = ORTModule(module)
    for rows in (4, 6, 3):
        check(wrapped, module, rows)
    assert engine_of(wrapped).captures == 1


@pytest.mark.parametrize("name", UNKNOWN)
def test_masks_that_may_change_are_read_at_each_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    module = Selecting(UNKNOWN[name])
    wrapped = ORTModule(module)
    changed = module.mask if name == "buffer" else OUTSIDE
    before = changed.clone()
    for elements in (before, ~before):
        changed.copy_(elements)
        check(wrapped, module, 4)
    OUTSIDE.copy_(torch.tensor([True, False, True]))


def test_a_mask_of_another_size_is_the_users_error() -> None:
    module = Selecting(lambda x, module: x[:, mask(1, 0, 1, 1)])
    with pytest.raises(IndexError, match="shape of the mask"):
        ORTModule(module)(torch.randn(4, 3))


def test_tensors_are_no_sequences_after_a_capture() -> None:
    ORTModule(Selecting(KNOWN["columns"]))(torch.randn(2, 3))
    assert torch.equal(torch.tensor([torch.tensor(-1)]), torch.tensor([-1]))
