"""A workload: a model, its batches and its loss. Weights are random, as no time depends on them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Forward = Callable[..., Any]  # calls a model, as some variant runs it
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Goals:
    """The goals for onnxtrain in a run.

    Attributes:
        speed: the minimum speedup over each variant.
        share: the minimum share of the step that its GEMMs and convolutions alone take.
    """

    speed: Mapping[str, float] = field(default_factory=dict)
    share: float | None = None


@dataclass(frozen=True)
class Workload:
    """A training step.

    Attributes:
        make_batches: the batches, used cyclically.
        loss: computes a scalar loss from a forward function and a batch.
        items: the number of items of a batch, counted in `unit`.
        rounds: the number of timed rounds.
        cold: whether preparation and compilation are timed too, with empty caches and no warm-up.
        optimized: whether a step includes the optimizer.
        device: "cpu" or "cuda".
        narrow: whether it runs under autocast to bfloat16.
        variants: the names of the variants that run it; (): see `variants.variants_of`.
        max_warm_up_s: after this time the warm-up ends, even if kernels are still compiled.
        repeats: the processes in which first steps of eager and onnxtrain are measured; 0 skips first steps.
        packages: packages that it requires beyond transformers.
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
    variants: tuple[str, ...] = ()
    max_warm_up_s: float = 900.0  # compiling a fused region takes about 6 s of a core, and a model may have ten
    repeats: int = 5  # the import of onnxtrain alone takes 0.47 to 0.78 s on a virtual processor, from minute to minute
    packages: tuple[str, ...] = ()

    def missing(self) -> tuple[str, ...]:
        """Return the required packages that are not installed."""
        return tuple(name for name in self.packages if importlib.util.find_spec(name) is None)


def model_loss(forward: Forward, batch: Batch) -> torch.Tensor:
    """Return the loss computed by a Hugging Face model itself."""
    loss: torch.Tensor = forward(**batch).loss
    return loss


def autocast_loss(forward: Forward, batch: Batch) -> torch.Tensor:
    """Return the loss computed by a Hugging Face model under autocast to bfloat16 on a CPU."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model_loss(forward, batch)


def count_samples(batch: Batch) -> int:
    """Return the number of rows."""
    return next(iter(batch.values())).shape[0]


def count_tokens(batch: Batch) -> int:
    """Return the number of tokens that are not padding."""
    return int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()
