"""Masks in bits under `rng="torch"`: no bit of a result changes, and less is held."""

from __future__ import annotations

import torch
from torch import nn

from onnxtrain import ORTModule
from tests.plan.measured import peak_of

ROWS = 512


def outcome(**options: object) -> tuple[list[torch.Tensor], int, str]:
    """Loss and gradients, the peak of a step, the report."""
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

    return [t.clone() for t in step()], peak_of(step), str(model.report())


def test_no_bit_changes_and_less_is_held() -> None:
    found, peak, report = outcome(recompute_cheap=False)
    expected, before, _ = outcome(recompute_cheap=False, disabled_passes=("pack_masks",))
    assert all(map(torch.equal, found, expected))
    assert peak <= before - ROWS * 33 * 7 // 8  # of one mask; the other is in bytes while it is read
    assert "keeps the mask of 2 Dropouts in bits" in report
