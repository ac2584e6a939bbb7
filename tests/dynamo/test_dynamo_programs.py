"""Small programs under the backend of torch.compile: outputs of all kinds, changed inputs, modes, autograd's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from onnxtrain.frontend import dynamo
from tests.dynamo.test_dynamo import Keeps
from tests.thinned import slow_but_every

WIDTH = 8


@pytest.fixture(autouse=True)
def fresh_cache() -> Iterator[None]:
    torch.compiler.reset()
    dynamo._ENGINES.clear()
    yield
    torch.compiler.reset()


class Program(nn.Module):
    has_graphs = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))


class BreaksInALoop(Program):
    has_graphs = False  # torch.compile leaves a function with a break inside a loop to Python

    def forward(self, x: torch.Tensor) -> Any:
        for _ in range(3):
            x = self.first(x).tanh()
            if x.sum().item() > 1e6:
                x = x * 2
        return self.second(x)


class TwoFunctions(Program):
    def forward(self, x: torch.Tensor) -> Any:
        return Keeps.apply(self.first(x), 3.0) + Keeps.apply(self.second(x), 3.0)


class Checkpointed(Program):
    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(lambda y: self.second(self.dropout(self.first(y)).relu()), x, use_reentrant=False) + x


class NestedAutocast(Program):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.first(x)
            with torch.autocast("cpu", enabled=False):
                y = self.second(y.float())
            return self.second(y), y


class ManyKinds(Program):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.first(x)
        integers = (x * 10).long()
        parts = {"half": y[:, :4], "turned": y.t(), "of input": x[0]}
        return (
            parts,
            [None, 3, "text", y.sum().item()],
            (integers, x > 0, integers.float() @ self.second.weight, y.double()),
        )


class ChangesItsInput(Program):
    def forward(self, x: torch.Tensor) -> Any:
        x.mul_(2.0)
        self.calls += 1
        return self.first(x) * self.calls


class ReadsTheModes(Program):
    def forward(self, x: torch.Tensor) -> Any:
        factor = (2 if torch.is_grad_enabled() else 3) + (5 if self.training else 0)
        with torch.no_grad():
            kept = self.second(x)
        return self.first(x) * kept * factor, kept.detach()


class PicksRows(Program):
    def forward(self, x: torch.Tensor) -> Any:
        chosen = (x[:, 0] > 0).nonzero().squeeze(1)
        return self.first(x[chosen]).sum(0) + self.second(x).mean(0), self.first(x[:0]).sum()


PROGRAMS = (
    BreaksInALoop, TwoFunctions, Checkpointed, NestedAutocast, ManyKinds, ChangesItsInput, ReadsTheModes, PicksRows,
)  # fmt: skip


def results(run: Any, module: nn.Module, x: torch.Tensor, training: bool, grad: bool) -> tuple[Any, list[Any]]:
    """The structure of the output; its leaves, the input afterwards, all gradients and buffers."""
    module.zero_grad()
    module.train(training)
    leaf = x.clone().requires_grad_(grad and not isinstance(module, ChangesItsInput))
    torch.manual_seed(7)
    with torch.set_grad_enabled(grad):
        output = run(leaf)
    leaves, structure = pytree.tree_flatten(output)
    ends = [t.double().square().sum() for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    if ends:
        torch.stack(ends).sum().backward()
    return structure, [*leaves, leaf.detach(), leaf.grad, *(p.grad for p in module.parameters()), *module.buffers()]


@pytest.mark.parametrize("make", slow_but_every(3, PROGRAMS), ids=lambda make: make.__name__)
def test_it_equals_eager(make: type[Program]) -> None:
    torch.manual_seed(0)
    eager = make()
    ours = copy.deepcopy(eager)
    run = torch.compile(ours, backend="onnxtrain", options={"rng": "torch", "kernels": "pytorch"})
    for rows, training, grad in ((4, True, True), (4, False, True), (5, False, False), (3, True, True)):
        x = torch.randn(rows, WIDTH)
        structure, expected = results(eager, eager, x, training, grad)
        got_structure, got = results(run, ours, x, training, grad)
        assert got_structure == structure
        for mine, theirs in zip(got, expected, strict=True):
            if not isinstance(theirs, torch.Tensor):
                assert mine == theirs
                continue
            assert mine.requires_grad == theirs.requires_grad
            assert torch.equal(mine, theirs)
    assert (dynamo.captures() > 0) == make.has_graphs
