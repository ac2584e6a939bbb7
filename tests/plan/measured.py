"""Models whose memory is predicted and measured, and the measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

from onnxtrain.observe.allocations import peak_bytes, record

Batch = dict[str, torch.Tensor]
_VOCABULARY = 300
_CLASSES = 5


def minilm() -> torch.nn.Module:
    config = transformers.BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=_CLASSES,
        problem_type="single_label_classification",
    )
    return transformers.BertForSequenceClassification(config)


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=_VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def t5() -> torch.nn.Module:
    config = transformers.T5Config(
        vocab_size=_VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


class ConvNet(torch.nn.Module):
    """Convolutions with batch norms, and a pool between them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(
            *_convolution(3, 16), *_convolution(16, 16), torch.nn.MaxPool2d(2), *_convolution(16, 32)
        )
        self.classes = torch.nn.Linear(32, _CLASSES)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.classes(self.features(images).mean((2, 3)))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def _convolution(before: int, after: int) -> tuple[torch.nn.Module, ...]:
    return (
        torch.nn.Conv2d(before, after, 3, padding=1, bias=False),
        torch.nn.BatchNorm2d(after),
        torch.nn.ReLU(),
    )


def words(batch: int, length: int) -> Batch:
    """Tokens that are their own labels."""
    tokens = torch.randint(10, _VOCABULARY, (batch, length))
    return {"input_ids": tokens, "labels": tokens.clone()}


def sentences(batch: int, length: int) -> Batch:
    tokens = torch.randint(10, _VOCABULARY, (batch, length))
    labels = torch.randint(0, _CLASSES, (batch,))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def images(batch: int, length: int) -> Batch:
    return {"images": torch.randn(batch, 3, length, length), "labels": torch.randint(0, _CLASSES, (batch,))}


MODELS: Mapping[str, tuple[Callable[[], torch.nn.Module], Callable[[int, int], Batch]]] = {
    "minilm": (minilm, sentences),
    "gpt2": (gpt2, words),
    "t5": (t5, words),
    "cnn": (ConvNet, images),
}


def model_and_batches(name: str) -> tuple[torch.nn.Module, Callable[[int, int], Batch]]:
    """Return a model in train mode, always with the same parameters, and the function that makes its batches."""
    make, batch = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().train(), batch


def step(run: Callable[..., Any], batch: Batch, seed: int = 1) -> Any:
    """Forward and backward; gives the output, which is held until the end."""
    torch.manual_seed(seed)
    output = run(**batch)
    output["loss"].backward()
    return output


def peak_of(run: Callable[[], object]) -> int:
    """The most bytes that PyTorch has given out at a time during the second `run`: the first may capture."""
    run()
    return peak_bytes(record(run).allocations)
