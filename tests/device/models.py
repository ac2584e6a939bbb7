"""Models whose training is compared with eager PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Batch = tuple[torch.Tensor, ...]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


class Cnn(nn.Module):
    """Strided, grouped, depthwise and dilated convolution, overlapping and ceiled pools, BatchNorm after each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.grouped = nn.Conv2d(8, 16, 3, padding=2, dilation=2, groups=4)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
        self.second_norm = nn.BatchNorm2d(16)
        self.average = nn.AvgPool2d(3, 1, 1)
        self.ceiled = nn.MaxPool2d(2, 2, ceil_mode=True)
        self.classify = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.norm(self.first(x))))
        x = torch.relu(self.grouped(x))
        x = self.ceiled(self.average(torch.relu(self.second_norm(self.depthwise(x)))))
        logits: torch.Tensor = self.classify(x.mean((2, 3)))
        return logits


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.position = nn.Parameter(torch.randn(1, 16, 32) * 0.1)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classify = nn.Linear(32, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classify(self.encoder(self.embed(ids) + self.position[:, : ids.shape[1]]).mean(1))
        return logits


class Recurrent(nn.Module):
    """Two layers of both directions over embedded words, then the states after the last step."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 12)
        self.rnn = kind(12, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.classify = nn.Linear(64, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, last = self.rnn(self.embed(ids))
        last = last[0] if isinstance(last, tuple) else last
        logits: torch.Tensor = self.classify(torch.cat([states.mean(1), last[-1], last[0]], -1))
        return logits


class MiniLmHead(nn.Module):
    """MiniLM's architecture, small and with random weights, frozen; a head on the mean of its states is trained."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=500,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.bert = BertModel(config, add_pooling_layer=False).requires_grad_(False)
        self.head = nn.Linear(48, 10)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(states.dtype)
        logits: torch.Tensor = self.head((states * weights).sum(1) / weights.sum(1))
        return logits


def _images(shape: tuple[int, ...]) -> Callable[[torch.Generator], Batch]:
    return lambda g: (torch.randn(shape, generator=g), torch.randint(0, 10, shape[:1], generator=g))


def _tokens(g: torch.Generator) -> Batch:
    return torch.randint(0, 50, (8, 12), generator=g), torch.randint(0, 10, (8,), generator=g)


def _sentences(g: torch.Generator) -> Batch:
    mask = torch.ones(8, 12, dtype=torch.long)
    mask[::2, 8:] = 0
    ids, labels = _tokens(g)
    return ids, mask, labels


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Batch], tuple[str, ...]]] = {
    "mlp": (mlp, _images((32, 64)), ("x",)),
    "cnn": (Cnn, _images((8, 3, 28, 28)), ("x",)),
    "transformer": (Transformer, _tokens, ("ids",)),
    "lstm": (lambda: Recurrent(nn.LSTM), _tokens, ("ids",)),
    "gru": (lambda: Recurrent(nn.GRU), _tokens, ("ids",)),
    "minilm-head": (MiniLmHead, _sentences, ("input_ids", "attention_mask")),
}
# A GRU goes the LSTM's ways: its tests run with the slow ones.
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name == "gru" else []) for name in MODELS]


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().train()


def batches(name: str, count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [MODELS[name][1](generator) for _ in range(count)]


def export(module: nn.Module, inputs: Batch, names: tuple[str, ...], path: Any, exporter: str) -> None:
    """Exports by PyTorch's TorchScript exporter ("torchscript") or by the newer one ("dynamo")."""
    if exporter == "torchscript":
        torch.onnx.export(
            module,
            inputs,
            path,
            dynamo=False,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            input_names=list(names),
            output_names=["logits"],
            dynamic_axes={name: {0: "batch"} for name in (*names, "logits")},
        )
        return
    torch.onnx.export(
        module,
        inputs,
        path,
        dynamo=True,
        optimize=False,  # it would fold BatchNorm into Conv and merge equal weights
        input_names=list(names),
        output_names=["logits"],
        dynamic_shapes=tuple({0: torch.export.Dim("batch")} for _ in names),
        verbose=False,
        external_data=False,
    )
