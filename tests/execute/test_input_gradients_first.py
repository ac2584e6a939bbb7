"""`early_gradients="inputs"`: gradients of inputs come before those of parameters, which a later backward computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from onnxtrain import ORTModule
from onnxtrain.execute.early_gradients import StagedRun
from onnxtrain.frontend.ort_module import engine_of

WIDTH = 6


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]


def sides() -> tuple[nn.Module, nn.Module, ORTModule]:
    """Eager; ours, and the module of whose parameters it makes gradients."""
    torch.manual_seed(0)
    eager = nn.Sequential(Stage(), Stage())
    ours = copy.deepcopy(eager)
    return eager, ours, ORTModule(ours, early_gradients="inputs")


def batch(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(3, WIDTH, requires_grad=True), torch.randn(3, WIDTH)


def gradients(module: nn.Module) -> list[Any]:
    return [p.grad for p in module.parameters()]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="before, PyTorch's schedules refuse custom autograd functions")
def test_a_zero_bubble_stage_computes_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches: input gradients of both, then weight gradients of both, as a schedule may order them."""
    stages: list[int] = []
    advance = StagedRun.advance

    def recorded(run: StagedRun) -> Any:
        stages.append(run.stage)
        return advance(run)

    monkeypatch.setattr(StagedRun, "advance", recorded)
    eager, mine, subject = sides()
    results = []
    for runs, module in ((eager, eager), (subject, mine)):
        waiting, inputs = [], []
        for seed in (1, 2):
            x, cotangent = batch(seed)
            y = runs(x)
            waiting.append(stage_backward_input([y], [cotangent], [x], module.parameters())[1])
            assert gradients(module) == [None] * 8
            inputs.append(x.grad)
        for groups in waiting:
            stage_backward_weight(module.parameters(), groups)
        results.append([*inputs, *gradients(module)])
    assert all(map(torch.equal, *results))
    assert stages == [0, 0, 1, 1]
    (backward,) = engine_of(subject).newest().unit._backwards.values()
    first, second = (program.part for program in backward.program.programs)  # type: ignore[attr-defined]  # is staged
    assert not set(first.nodes) & set(second.nodes)
    assert sum(node.op_type in ("MatMul", "Gemm", "FusedMatMul") for node in first.nodes) == 4  # one for each layer


def test_a_whole_backward_is_eagers() -> None:
    eager, mine, subject = sides()
    results = []
    for runs, module in ((eager, eager), (subject, mine)):
        x, cotangent = batch()
        runs(x).backward(cotangent)
        results.append([x.grad, *gradients(module)])
    assert all(map(torch.equal, *results))


def test_the_same_cotangent_gives_the_same_gradient_again() -> None:
    """Only a backward that wants no gradient of an input goes on where the last one stopped."""
    eager, _, subject = sides()
    x, cotangent = batch()
    (expected,) = torch.autograd.grad(eager(x), x, cotangent)
    y = subject(x)
    for _ in range(2):
        (got,) = torch.autograd.grad(y, x, cotangent, retain_graph=True)
        assert torch.equal(got, expected)


def test_a_changed_cotangent_is_not_taken_for_the_old_one() -> None:
    eager, mine, subject = sides()
    results = []
    for runs, module in ((eager, eager), (subject, mine)):
        x, cotangent = batch()
        y = runs(x)
        torch.autograd.grad(y, x, cotangent, retain_graph=True)
        cotangent.mul_(3)
        results.append(torch.autograd.grad(y, list(module.parameters()), cotangent))
    assert all(map(torch.equal, *results))
