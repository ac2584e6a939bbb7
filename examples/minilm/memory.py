"""The peak memory of one step: what forward and backward hold on top of parameters, gradients and optimizer state."""

from __future__ import annotations

import torch

from benchmarks import peak_memory
from examples.minilm.data import Batch


def peak_bytes(model: torch.nn.Module, batch: Batch) -> int:
    """Return the peak of one forward and backward.

    The gradients are there before, and are added to: what is counted are activations and temporary tensors.
    """

    def step() -> None:
        model(**batch).loss.backward()

    step()
    peak = peak_memory.peak_bytes(step)
    model.zero_grad()
    return peak
