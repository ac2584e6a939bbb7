"""A plain PyTorch loop: one line wraps the model; optimizer, clipping, schedule, autocast and checkpoint are unchanged.

python -m examples.plain_loop
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

from onnxtrain import ORTModule


class Classifier(nn.Module):
    """Two hidden layers with dropout."""

    def __init__(self, features: int = 20, width: int = 64, classes: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(features, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width), nn.GELU()
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x)), labels)


def batches(steps: int, size: int = 32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of samples around four random centres, with the index of each sample's centre."""
    centres = torch.randn(4, 20)
    labels = torch.randint(0, 4, (steps, size))
    return [(centres[batch] + 0.5 * torch.randn(size, 20), batch) for batch in labels]


def main(steps: int = 60) -> list[float]:
    """Train; return the loss of each step."""
    torch.manual_seed(0)
    model = ORTModule(Classifier())  # the only change to the loop
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for step, (x, labels) in enumerate(batches(steps)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step:3}  loss {losses[-1]:.3f}")

    checkpoint = Path(tempfile.mkdtemp()) / "model.pt"
    torch.save(model.state_dict(), checkpoint)  # the keys of the wrapped module
    Classifier().load_state_dict(torch.load(checkpoint))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, saved to {checkpoint}")
    return losses


if __name__ == "__main__":
    main()
