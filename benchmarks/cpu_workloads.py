"""The workloads on a CPU. Configurations are small: a step takes milliseconds to a second on two cores.

The goals hold for the kind of machine that the project is developed on.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from benchmarks import models
from benchmarks.workload import Batch, Forward, Goals, Workload, autocast_loss, count_samples, count_tokens, model_loss
from examples.minilm.data import load_corpus, training_batches


def _class_loss(forward: Forward, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(forward(batch["x"]), batch["labels"])


def _mean_square(forward: Forward, batch: Batch) -> torch.Tensor:
    # With a target: if the outputs go to zero, the moments of dead units become denormal, and AdamW takes 2.6 ms
    # instead of 0.7 (width 512, from step 700 on), so that a variant with a longer warm-up looks slower.
    difference: torch.Tensor = forward(batch["x"]) - batch["y"]
    return difference.square().mean()


def _real_lengths() -> list[Batch]:
    """30 batches of 16 paragraphs of Python's reference text, as in the demonstration."""
    from examples.minilm.model import load_tokenizer  # noqa: PLC0415  # brings sentence-transformers: 2 s

    corpus = load_corpus(seed=0)
    return training_batches(corpus, load_tokenizer(), steps=30, batch_size=16, max_length=256, seed=0)


def _twenty_lengths() -> list[Batch]:
    lengths = list(range(16, 256, 12))
    random.Random(0).shuffle(lengths)
    return [models.classified_tokens(16, length) for length in lengths]


def _goals(eager: float, *, compiled: float = 1.0, **more: Any) -> Goals:
    speed = {"eager": eager, "torch.compile": compiled, "torch.compile dynamic": compiled}
    return Goals(speed | more.pop("speed", {}), **more)


_LANGUAGE: dict[str, Any] = {"loss": model_loss, "items": count_tokens}
_SMALL_TRANSFORMER = _goals(1.6)

MINILM = Workload(
    name="minilm",
    title="MiniLM (6 × 384), 16 × 128 tokens, no padding",
    make_model=models.minilm,
    make_batches=lambda: [models.classified_tokens(16, 128)],
    rounds=20,
    goals=_goals(2.1, compiled=2.1, speed={"eager, oneDNN Linears": 1.4}, share=0.6),
    **_LANGUAGE,
)


def _mlp(name: str, layers: int, width: int, batch: int, rounds: int, goals: Goals | None = None) -> Workload:
    return Workload(
        name=name,
        title=f"MLP of {layers} layers of width {width}, batch of {batch}",
        make_model=lambda: models.mlp(width, layers),
        make_batches=lambda: [{"x": torch.randn(batch, width), "y": torch.randn(batch, width)}],
        loss=_mean_square,
        items=count_samples,
        unit="samples",
        rounds=rounds,
        goals=goals or Goals(),
    )


MLP = _mlp("mlp32", 4, 32, 16, 300, _goals(1.3))
_ON_A_CPU = (
    MINILM,
    Workload(
        name="minilm-lengths",
        title="MiniLM, 30 batches of 16 paragraphs of up to 256 tokens",
        make_model=models.minilm,
        make_batches=_real_lengths,
        rounds=30,
        **_LANGUAGE,
    ),
    Workload(
        name="minilm-bf16",
        title="MiniLM, 16 × 128 tokens, autocast to bfloat16",
        make_model=models.minilm,
        make_batches=lambda: [models.classified_tokens(16, 128)],
        rounds=15,
        goals=Goals({"eager": 1.25}),
        narrow=True,
        **_LANGUAGE | {"loss": autocast_loss},
    ),
    Workload(
        name="bert-mlm",
        title="BERT (4 × 256), masked language model, 8 × 128 tokens",
        make_model=models.bert_masked,
        make_batches=lambda: [models.masked_tokens(8, 128)],
        rounds=20,
        **_LANGUAGE,
    ),
    Workload(
        name="gpt2",
        title="GPT-2 (4 × 256), 8 × 128 tokens",
        make_model=models.gpt2,
        make_batches=lambda: [models.next_tokens(8, 128)],
        rounds=25,
        goals=_SMALL_TRANSFORMER,
        **_LANGUAGE,
    ),
    Workload(
        name="llama",
        title="Llama-like (4 × 256), 8 × 128 tokens",
        make_model=models.llama,
        make_batches=lambda: [models.next_tokens(8, 128)],
        rounds=25,
        goals=_SMALL_TRANSFORMER,
        **_LANGUAGE,
    ),
    Workload(
        name="t5",
        title="T5 (3 + 3 × 256), 8 × 64 tokens to 8 × 64",
        make_model=models.t5,
        make_batches=lambda: [models.next_tokens(8, 64)],
        loss=model_loss,
        items=lambda batch: 2 * count_tokens(batch),
        rounds=25,
        goals=_SMALL_TRANSFORMER,
    ),
    Workload(
        name="vit",
        title="ViT (4 × 256), 16 images of 64 × 64 in patches of 8 × 8",
        make_model=models.vit,
        make_batches=lambda: [models.classified_images(16, 64, "pixel_values")],
        loss=model_loss,
        items=count_samples,
        unit="images",
        rounds=25,
        goals=_SMALL_TRANSFORMER,
    ),
    Workload(
        name="cnn",
        title="Residual CNN, 32 images of 32 × 32",
        make_model=models.cnn,
        make_batches=lambda: [models.classified_images(32, 32, "x")],
        loss=_class_loss,
        items=count_samples,
        unit="images",
        rounds=60,
        goals=_goals(1.25),
    ),
    Workload(
        name="lstm",
        title="LSTM of width 256, 16 sequences of 64",
        make_model=models.lstm,
        make_batches=lambda: [{"x": torch.randn(16, 64, 256), "labels": torch.randint(0, 10, (16,))}],
        loss=_class_loss,
        items=count_samples,
        unit="sequences",
        rounds=150,
        goals=Goals({"eager": 1.0}),
    ),
    MLP,
    _mlp("mlp32-small", 3, 32, 16, 300, Goals({"eager": 1.0})),
    _mlp("mlp512", 4, 512, 128, 300),
    Workload(
        name="lengths",
        title="MiniLM, 20 lengths from 16 to 244 tokens, once each, compilation included",
        make_model=models.minilm,
        make_batches=_twenty_lengths,
        rounds=20,
        cold=True,
        goals=_goals(1.8, compiled=5.0),
        **_LANGUAGE,
    ),
)
CPU_WORKLOADS = {workload.name: workload for workload in _ON_A_CPU}
