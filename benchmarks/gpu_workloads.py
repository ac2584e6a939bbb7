"""The workloads on a GPU: BERT, GPT-2 and Llama in bfloat16, with dense batches and with padding, and single ops.

    gpu             four layers of the published width; all six end within eight minutes with empty caches
    gpu-large       models of common sizes, all layers
    gpu-ops         single ops
    gpu-rehearsal   those of "gpu", tiny and on the CPU: the same code runs

ONNX Runtime Training measured its kernels for BiasGelu of [256, 128, 768] and Slice of [8, 12, 2048, 1024] and
[8, 12, 1024, 2047]; its BiasGelu took 246 µs before and 132 µs after an optimization, on a V100.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.models import classified_tokens, next_tokens
from benchmarks.variants import COMPILE, CUDA_GRAPHS, EAGER, INDUCTOR, ONNXTRAIN
from benchmarks.workload import Batch, Forward, Workload, count_tokens, model_loss

_IGNORED = -100  # the label of tokens without a loss
_MAX_WARM_UP_S = 120.0  # Inductor's programs of four layers of BERT took 39 s on 16 cores


@dataclass(frozen=True)
class Size:
    """The size of a language model and of its batches.

    Attributes:
        heads: of queries.
        heads_per_key: how many of them share keys and values in Llama.
        gated: the width of Llama's feed-forward layers.
        vocabulary: None is the model's own.
        tied: whether Llama's embedding is its head.
        rows: sequences of a dense batch; a padded one has twice as many.
        batches: with padding.
    """

    layers: int = 4
    width: int = 768
    heads: int = 12
    heads_per_key: int = 3
    gated: int = 2048
    vocabulary: int | None = None
    tied: bool = False
    rows: int = 8
    length: int = 512
    batches: int = 4


_TINY = Size(layers=1, width=24, heads=3, gated=32, vocabulary=96, rows=2, length=16, batches=2)
_LLAMA_1B = Size(layers=16, width=2048, heads=32, heads_per_key=4, gated=8192, vocabulary=128256, tied=True)
VOCABULARIES = {"bert": 30522, "gpt2": 50257, "llama": 32000}


def _bert(size: Size) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=size.vocabulary or VOCABULARIES["bert"],
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
    )
    return transformers.BertForMaskedLM(config).bfloat16()


def _gpt2(size: Size) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=size.vocabulary or VOCABULARIES["gpt2"],
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config).bfloat16()


def _llama(size: Size) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=size.vocabulary or VOCABULARIES["llama"],
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // size.heads_per_key,
        intermediate_size=size.gated,
        tie_word_embeddings=size.tied,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).bfloat16()


_MODELS: dict[str, tuple[str, Callable[[Size], nn.Module]]] = {
    "bert": ("BERT", _bert),
    "gpt2": ("GPT-2", _gpt2),
    "llama": ("Llama", _llama),
}


def _labels(model: str, tokens: torch.Tensor) -> torch.Tensor:
    """Label the tokens themselves; those of BERT for 15 % of the tokens."""
    return tokens.masked_fill(torch.rand(tokens.shape) >= 0.15, _IGNORED) if model == "bert" else tokens.clone()


def _dense(model: str, size: Size) -> list[Batch]:
    tokens = torch.randint(1, size.vocabulary or VOCABULARIES[model], (size.rows, size.length))
    return [{"input_ids": tokens, "labels": _labels(model, tokens)}]


def _padded(model: str, size: Size) -> list[Batch]:
    """Make batches of sequences whose lengths are log-normal, a quarter of the longest in the median."""
    batches = []
    for _ in range(size.batches):
        rows = 2 * size.rows
        lengths = torch.randn(rows).mul(0.7).add(math.log(size.length / 4)).exp().long().clamp(2, size.length)
        mask = (torch.arange(size.length) < lengths[:, None]).long()
        tokens = torch.randint(1, size.vocabulary or VOCABULARIES[model], (rows, size.length)) * mask
        labels = _labels(model, tokens).masked_fill(mask == 0, _IGNORED)
        batches.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return batches


def _gpu_workload(name: str, title: str, **fields: Any) -> Workload:
    """Return a workload: the training of a language model on a GPU, apart from the fields that are given."""
    language_model: dict[str, Any] = {
        "loss": model_loss,
        "items": count_tokens,
        "rounds": 40,
        "device": "cuda",
        "variants": (EAGER, ONNXTRAIN, INDUCTOR, CUDA_GRAPHS, COMPILE),
    }
    return Workload(name=name, title=title, **{**language_model, **fields})


def _training(model: str, kind: str, make_batches: Callable[[str, Size], list[Batch]], rehearsal: bool) -> Workload:
    title, make = _MODELS[model]
    size = _TINY if rehearsal else Size()
    rows = size.rows if kind == "dense" else 2 * size.rows
    padding = "" if kind == "dense" else ", padded sequences"
    return _gpu_workload(
        f"{model}-{kind}{'-rehearsal' if rehearsal else ''}",
        f"{title}, {size.layers} layers of width {size.width}, bfloat16, {rows} × {size.length} tokens{padding}",
        make_model=functools.partial(make, size),
        make_batches=functools.partial(make_batches, model, size),
        device="cpu" if rehearsal else "cuda",
        max_warm_up_s=_MAX_WARM_UP_S,
        repeats=0,
    )


_KINDS = {"dense": _dense, "padded": _padded}  # dense first: what is begun late may be skipped
GPU = tuple(_training(model, kind, make, False) for kind, make in _KINDS.items() for model in _MODELS)
GPU_REHEARSAL = tuple(_training(model, kind, make, True) for kind, make in _KINDS.items() for model in _MODELS)


def _bert_large() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        num_labels=20,
        problem_type="single_label_classification",
    )
    return transformers.BertForSequenceClassification(config).bfloat16()


class _BiasGelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(256, 128, 768, dtype=torch.float16))
        self.bias = nn.Parameter(torch.randn(768, dtype=torch.float16))

    def forward(self) -> torch.Tensor:
        return nn.functional.gelu(self.x + self.bias)


class _Slice(nn.Module):
    def __init__(self, shape: tuple[int, ...], axis: int, start: int, length: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(shape, dtype=torch.float16))
        self.cut = (axis, start, length)

    def forward(self) -> torch.Tensor:
        return self.x.narrow(*self.cut) * 1  # a slice alone would be a view


def _sum(forward: Forward, batch: Batch) -> torch.Tensor:
    output: torch.Tensor = forward()
    return output.sum()


def _single_op(name: str, title: str, make_model: Callable[[], nn.Module]) -> Workload:
    return _gpu_workload(
        name,
        f"{title}, float16, without optimizer",
        make_model=make_model,
        make_batches=lambda: [{}],
        loss=_sum,
        items=lambda batch: 1,
        unit="calls",
        rounds=300,
        optimized=False,
        variants=(EAGER, ONNXTRAIN, COMPILE),
    )


GPU_LARGE = (
    _gpu_workload(
        "bert-large",
        "BERT-large, bfloat16, 32 × 128 tokens",
        make_model=_bert_large,
        make_batches=lambda: [classified_tokens(32, 128)],
    ),
    _gpu_workload(
        "gpt2-medium",
        "GPT-2 medium, bfloat16, 8 × 512 tokens",
        make_model=functools.partial(_gpt2, Size(layers=24, width=1024, heads=16)),
        make_batches=lambda: [next_tokens(8, 512, VOCABULARIES["gpt2"])],
    ),
    _gpu_workload(
        "llama-1b",
        "Llama of 1.2 billion parameters, bfloat16, 4 × 512 tokens",
        make_model=functools.partial(_llama, _LLAMA_1B),
        make_batches=lambda: [next_tokens(4, 512, 128256)],
    ),
)
GPU_OPS = (
    _single_op("bias-gelu", "BiasGelu of [256, 128, 768]", _BiasGelu),
    _single_op(
        "slice-rows", "Slice 1:2048 of axis 2 of [8, 12, 2048, 1024]", lambda: _Slice((8, 12, 2048, 1024), 2, 1, 2047)
    ),
    _single_op(
        "slice-columns",
        "Slice 0:1024 of axis 3 of [8, 12, 1024, 2047]",
        lambda: _Slice((8, 12, 1024, 2047), 3, 0, 1024),
    ),
)
GPU_GROUPS = {"gpu": GPU, "gpu-large": GPU_LARGE, "gpu-ops": GPU_OPS, "gpu-rehearsal": GPU_REHEARSAL}
GPU_WORKLOADS = {workload.name: workload for group in GPU_GROUPS.values() for workload in group}
