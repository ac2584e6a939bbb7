"""What is timed: a model, a batch of fixed size and the way from both to a loss.

    minilm   tokens[16, 128] ─BERT, 6 layers of width 384, dropout 0.1─▶ loss
    mlp      x[16, 32] ─3 linear layers of width 32, ReLU between them─▶ y[16, 32] ─mean square─▶ loss

Weights are random: a time does not depend on them, and so nothing but transformers is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

Forward = Callable[..., Any]  # what calling a model does, whoever runs it


@dataclass(frozen=True)
class Workload:
    """A training step without the optimizer, which is the same for all contenders."""

    name: str
    title: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], dict[str, torch.Tensor]]
    loss: Callable[[Forward, dict[str, torch.Tensor]], torch.Tensor]
    rounds: int
    warm_up_s: float  # long enough for kernels that are chosen or compiled while training goes on


def _minilm() -> nn.Module:
    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        num_labels=20,
        problem_type="single_label_classification",  # else forward writes it into the config at its first call
    )
    return BertForSequenceClassification(config)


def _minilm_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(1000, 30000, (16, 128))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": torch.randint(0, 20, (16,))}


def _model_loss(forward: Forward, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = forward(**batch).loss
    return loss


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))


def _mlp_batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(16, 32)}


def _mean_square(forward: Forward, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output: torch.Tensor = forward(batch["x"])
    return output.square().mean()


MINILM = Workload(
    name="minilm",
    title="MiniLM, 16 sequences of 128 tokens, dropout 0.1",
    make_model=_minilm,
    make_batch=_minilm_batch,
    loss=_model_loss,
    rounds=30,
    warm_up_s=40,
)
MLP = Workload(
    name="mlp",
    title="MLP of 3 layers of width 32, batch of 16",
    make_model=_mlp,
    make_batch=_mlp_batch,
    loss=_mean_square,
    rounds=3000,
    warm_up_s=20,
)
WORKLOADS = {workload.name: workload for workload in (MINILM, MLP)}
