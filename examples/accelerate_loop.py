"""Hugging Face accelerate: prepare the model in place before accelerator.prepare.

pip install '.[trainers]'
python -m examples.accelerate_loop              or: accelerate launch -m examples.accelerate_loop
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn

import onnxtrain


class Recurrent(nn.Module):
    """Predict the next value of a sequence at each step."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(x)
        return self.out(hidden)


def waves(count: int, steps: int = 30) -> torch.utils.data.TensorDataset:
    """Return sine waves of random frequency and phase, and the same waves one step later."""
    frequency, phase = 0.2 + 0.5 * torch.rand(count, 1), 6.3 * torch.rand(count, 1)
    wave = torch.sin(frequency * torch.arange(steps + 1) + phase)[..., None]
    return torch.utils.data.TensorDataset(wave[:, :-1], wave[:, 1:])


def main(epochs: int = 4) -> list[float]:
    """Train; return the loss of each optimizer step."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = onnxtrain.prepare(Recurrent())  # the only change
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(waves(512), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for epoch in range(epochs):
        for x, target in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), target)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                losses.append(loss.item())
        accelerator.print(f"epoch {epoch}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
