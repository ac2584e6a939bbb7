"""Custom autograd functions under a budget: forward runs again if its author allows it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onnxtrain import ORTModule
from onnxtrain.observe.allocations import peak_bytes, record
from tests.reference import assert_matches

WIDTH = 32


class _Cubed(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        _Cubed.calls += 1
        ctx.save_for_backward(x, x * x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, square = ctx.saved_tensors
        return gradient * (3 * square + 0 * x)


class Declared(_Cubed):
    recomputable = True


class Block(nn.Module):
    def __init__(self, function: type[_Cubed]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.function.apply(self.linear(x).tanh())
        return y


class Regions(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for block in self:
            input = checkpoint(block, input, use_reentrant=False)
        return input


def net(function: type[_Cubed], kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    return kind(*[Block(function) for _ in range(6)])


def step(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    module.zero_grad()
    module(x).square().mean().backward()
    return [p.grad for p in module.parameters()]


def forwards(module: nn.Module, x: torch.Tensor) -> int:
    """Count how often a function's forward runs in one step."""
    step(module, x)
    before = _Cubed.calls
    step(module, x)
    return _Cubed.calls - before


def test_a_declared_function_runs_again_within_a_budget() -> None:
    eager, x = net(Declared), torch.randn(65, WIDTH)
    ours = ORTModule(copy.deepcopy(eager), rng="torch", memory_budget_bytes=0.7)
    assert forwards(ours, x) > 6
    assert_matches(step(ours, x), step, eager, x)


def test_any_other_function_runs_once() -> None:
    x = torch.randn(64, WIDTH)
    assert forwards(ORTModule(net(_Cubed), rng="torch", memory_budget_bytes=0.9), x) == 6


def test_its_saved_tensors_are_not_kept_in_a_checkpoint() -> None:
    """In eager's regions all of it runs again; here what is declared."""
    x, peaks = torch.randn(256, WIDTH), []
    for function in (_Cubed, Declared):
        ours = ORTModule(net(function, Regions), rng="torch")
        assert forwards(ours, x) == 6 + 6 * (function is Declared)
        peaks.append(peak_bytes(record(lambda ours=ours: ours(x).square().mean().backward()).allocations))
    assert peaks[1] < 0.7 * peaks[0]
    eager = net(Declared, Regions)
    assert_matches(step(ORTModule(copy.deepcopy(eager)), x), step, eager, x)
