"""The workloads on a GPU: models of common sizes in bfloat16, and single ops.

ONNX Runtime Training measured its kernels for BiasGelu of [256, 128, 768] and Slice of [8, 12, 2048, 1024] and
[8, 12, 1024, 2047]; its BiasGelu took 246 µs before and 132 µs after an optimization, on a V100.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.models import classified_tokens, next_tokens
from benchmarks.workload import Batch, Forward, Workload, count_tokens, model_loss


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


def _gpt2_medium() -> nn.Module:
    config = transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False)
    return transformers.GPT2LMHeadModel(config).bfloat16()


def _llama_1b() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=128256,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).bfloat16()


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
    return Workload(
        name=name,
        title=f"{title}, float16, without optimizer",
        make_model=make_model,
        make_batches=lambda: [{}],
        loss=_sum,
        items=lambda batch: 1,
        unit="calls",
        rounds=300,
        optimized=False,
        device="cuda",
    )


_LANGUAGE: dict[str, Any] = {"loss": model_loss, "items": count_tokens, "device": "cuda", "rounds": 40}
_ON_A_GPU = (
    Workload(
        name="bert-large",
        title="BERT-large, bfloat16, 32 × 128 tokens",
        make_model=_bert_large,
        make_batches=lambda: [classified_tokens(32, 128)],
        **_LANGUAGE,
    ),
    Workload(
        name="gpt2-medium",
        title="GPT-2 medium, bfloat16, 8 × 512 tokens",
        make_model=_gpt2_medium,
        make_batches=lambda: [next_tokens(8, 512, 50257)],
        **_LANGUAGE,
    ),
    Workload(
        name="llama-1b",
        title="Llama of 1.2 billion parameters, bfloat16, 4 × 512 tokens",
        make_model=_llama_1b,
        make_batches=lambda: [next_tokens(4, 512, 128256)],
        **_LANGUAGE,
    ),
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
GPU_WORKLOADS = {workload.name: workload for workload in _ON_A_GPU}
