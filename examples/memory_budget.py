"""A memory budget: the same step in half of the activation memory, with the same gradients.

python -m examples.memory_budget
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.observe.allocations import peak_bytes, record


class Block(nn.Module):
    """A feed-forward block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def peak(model: nn.Module, x: torch.Tensor) -> int:
    """Return the peak bytes of activations and temporary tensors in a step."""

    def step() -> None:
        model(x).square().mean().backward()

    step()  # compiles, and allocates the gradients
    return peak_bytes(record(step).allocations)


def main(width: int = 64, rows: int = 1024) -> dict[str, int]:
    """Measure a step without and with a budget; return the peaks in bytes."""
    torch.manual_seed(0)
    network = nn.Sequential(*(Block(width) for _ in range(6)))
    x = torch.randn(rows, width)
    peaks = {"eager": peak(network, x)}
    gradients = {}
    for name, budget in (("onnxtrain", None), ("budget 0.5", 0.5)):
        copied = copy.deepcopy(network)
        copied.zero_grad()
        # A float is a fraction of the step's memory without a budget; an int is a number of bytes.
        model = ORTModule(copied, rng="torch", memory_budget_bytes=budget)
        model(x).square().mean().backward()
        gradients[name] = [parameter.grad.clone() for parameter in copied.parameters()]
        peaks[name] = peak(model, x)
    for name, peak_size in peaks.items():
        print(f"{name:12} {peak_size / 2**20:6.2f} MiB")
    are_equal = all(map(torch.equal, gradients["onnxtrain"], gradients["budget 0.5"]))
    print(f"gradients with and without a budget are {'equal' if are_equal else 'different'}")
    return peaks


if __name__ == "__main__":
    main()
