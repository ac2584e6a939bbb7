"""A custom autograd function inside the graph: quantized weights with a straight-through gradient.

python -m examples.custom_function
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onnxtrain import ORTModule


class Rounded(torch.autograd.Function):
    """Round to multiples of `step`; pass the gradient through for values within the limits."""

    recomputable = True  # no side effects: under a memory budget forward may run again

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, step: float, limit: float) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.limit = limit
        return (weight.clamp(-limit, limit) / step).round() * step

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return gradient * (weight.abs() <= ctx.limit), None, None


class RoundedLinear(nn.Linear):
    """A linear layer that computes with rounded weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, Rounded.apply(self.weight, 0.125, 1.0), self.bias)


def main(steps: int = 150) -> list[float]:
    """Train; return the loss of each step."""
    torch.manual_seed(0)
    network = nn.Sequential(RoundedLinear(10, 32), nn.Tanh(), RoundedLinear(32, 1))
    model = ORTModule(network)  # Rounded needs no registration
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x = torch.randn(64, 10)
        loss = nn.functional.mse_loss(model(x), x[:, :3].sum(1, keepdim=True).sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step:3}  loss {losses[-1]:.3f}")
    levels = Rounded.apply(network[0].weight, 0.125, 1.0).unique()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the first layer uses {len(levels)} values")
    return losses


if __name__ == "__main__":
    main()
