"""Dropout masks packed into bits under `rng="torch"`: results are bitwise equal, and less memory is held."""

from __future__ import annotations

import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from tests.plan.measured import peak_of

ROWS = 512


def outcome(**options: object) -> tuple[list[torch.Tensor], int, int, str]:
    """Loss and gradients, the bytes that a plan keeps for backward, the measured peak of a step, the report."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 33), nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.7), nn.Linear(33, 2))
    model = ORTModule(net, rng="torch", **options)
    x = torch.randn(ROWS, 8)

    def step() -> list[torch.Tensor]:
        torch.manual_seed(1)
        net.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]

    tensors = [t.clone() for t in step()]
    plan, _ = engine_of(model).newest().timeline()
    return tensors, plan.kept, peak_of(step), str(model.report())


def test_no_bit_changes_and_less_is_held() -> None:
    tensors, kept, peak, report = outcome(recompute="none")
    expected, kept_before, peak_before, _ = outcome(recompute="none", disabled_passes=("pack_dropout_masks",))
    assert all(map(torch.equal, tensors, expected))
    assert kept == kept_before - 2 * ROWS * 33 * 7 // 8
    assert peak < peak_before
    assert "saves 2 dropout masks as bits" in report
