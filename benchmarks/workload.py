"""What a workload is: a model, its batches, and the way from both to a loss.

Weights are random: no time depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Forward = Callable[..., Any]  # what calling a model does, whoever runs it
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Goals:
    """What onnxtrain is to reach in the same run.

    Attributes:
        speed: the least speedup over each variant.
        share: at least so much of the speed that the step's matrix products alone would allow.
    """

    speed: Mapping[str, float] = field(default_factory=dict)
    share: float | None = None


@dataclass(frozen=True)
class Workload:
    """A training step.

    Attributes:
        make_batches: the batches, used cyclically.
        loss: from what runs the model and a batch, a scalar to differentiate.
        items: how many of `unit` a batch holds.
        rounds: how many times each variant's step is timed.
        cold: nothing is prepared or warmed up before the clock runs, and no cache has anything.
        optimized: whether the optimizer's step belongs to it.
        device: "cpu" or "cuda".
        narrow: whether it runs under autocast to bfloat16.
    """

    name: str
    title: str
    make_model: Callable[[], nn.Module]
    make_batches: Callable[[], list[Batch]]
    loss: Callable[[Forward, Batch], torch.Tensor]
    items: Callable[[Batch], int]
    rounds: int
    unit: str = "tokens"
    goals: Goals = Goals()
    cold: bool = False
    optimized: bool = True
    device: str = "cpu"
    narrow: bool = False


def model_loss(forward: Forward, batch: Batch) -> torch.Tensor:
    """The loss that a Hugging Face model computes itself."""
    loss: torch.Tensor = forward(**batch).loss
    return loss


def count_tokens(batch: Batch) -> int:
    """Those that are no padding."""
    return int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()
