"""Memory by phase, in the first ten steps and those whose number is a power of two."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from onnxtrain import ORTModule
from onnxtrain.observe import memory
from onnxtrain.observe.memory import log_memory_usage


class Nested(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"none": None, "parts": (x, [self.inner(x)])}


def test_each_phase_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    model = ORTModule(Nested(), statistics="memory")
    for _ in range(18):
        model(torch.ones(1, 2))["parts"][1][0].sum().backward()
    lines = capsys.readouterr().out.splitlines()
    matches = [re.fullmatch(r"Nested step (\d+) (\w+ \w+): .*process \d+ MiB", line) for line in lines]
    assert all(matches), lines
    steps = [*range(10), 16]
    phases = ("before forward", "after forward", "before backward", "after backward")
    assert [(int(m[1]), m[2]) for m in matches if m] == [(step, phase) for step in steps for phase in phases]
    assert model.report().stages  # the wrapper hides nothing


def test_without_gradients_there_is_no_backward(capsys: pytest.CaptureFixture[str]) -> None:
    model = ORTModule(Nested(), statistics="memory")
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_to_a_logger_with_a_modules_own_bytes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    module = torch.nn.BatchNorm1d(2**18)
    module.weight.grad = torch.zeros_like(module.weight)
    log_memory_usage("here", step_info="step 1", logger=logging.getLogger("mine"), module=module)
    assert "step 1 here:" in caplog.text
    assert "parameters 2, gradients 1, buffers 2 MiB" in caplog.text


def test_other_ranks_are_silent_unless_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "rank", lambda: 1)
    log_memory_usage("here")
    assert capsys.readouterr().out == ""
    log_memory_usage("here", rank_0_only=False)
    assert capsys.readouterr().out.startswith("here: ")
