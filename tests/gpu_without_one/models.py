"""Models whose kernel launches are counted: layers of published sizes, few of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

BATCH, LENGTH = 8, 512
Make = Callable[[int, float], torch.nn.Module]


def bert(layers: int, dropout: float) -> torch.nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            num_hidden_layers=layers, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
        )
    )


def gpt2(layers: int, dropout: float) -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=layers, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False
        )
    )


def llama(layers: int, dropout: float) -> torch.nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=768,
            num_attention_heads=12,
            num_key_value_heads=4,
            intermediate_size=2048,
            num_hidden_layers=layers,
            vocab_size=32000,
            attention_dropout=dropout,
            use_cache=False,
        )
    )


def t5(layers: int, dropout: float) -> torch.nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(num_layers=layers, dropout_rate=dropout, decoder_start_token_id=0, use_cache=False)
    )


def vit(layers: int, dropout: float) -> torch.nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            num_hidden_layers=layers, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
        )
    )


class _ConvNet(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        blocks = [
            [torch.nn.Conv2d(64, 64, 3, padding=1, bias=False), torch.nn.BatchNorm2d(64), torch.nn.ReLU()]
            for _ in range(layers)
        ]
        self.body = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), *(part for block in blocks for part in block))
        self.head = torch.nn.Linear(64, 10)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(pixel_values).mean((2, 3)))
        return torch.nn.functional.cross_entropy(logits, labels)


def cnn(layers: int, dropout: float) -> torch.nn.Module:
    return _ConvNet(layers)


def tokens() -> dict[str, Any]:
    """A batch of text."""
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def images() -> dict[str, Any]:
    """A batch of images."""
    return {"pixel_values": torch.zeros(BATCH, 3, 224, 224), "labels": torch.zeros(BATCH, dtype=torch.long)}


MODELS: dict[str, tuple[Make, Callable[[], dict[str, Any]]]] = {
    "bert": (bert, tokens),
    "gpt2": (gpt2, tokens),
    "llama": (llama, tokens),
    "t5": (t5, tokens),
    "vit": (vit, images),
    "cnn": (cnn, images),
}
