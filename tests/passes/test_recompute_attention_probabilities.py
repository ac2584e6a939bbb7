"""Attention that saves no probabilities: where the graph has it, and what it saves for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from onnxtrain import ORTModule
from onnxtrain.ops.attention import compiled_kernels
from tests.machines import Describe
from tests.ops.captures import FunctionModule

HEADS, LENGTH, WIDTH = 3, 40, 8


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.softmax(q @ k.mT, -1), 0.25) @ v


def compiled(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return the unit of a step."""
    ours = ORTModule(FunctionModule(attend), recompute="none", **options)
    ours(*(torch.randn(2, HEADS, LENGTH, WIDTH).to(dtype).requires_grad_() for _ in range(3)))
    return ours.__dict__["_engine"].newest().unit


def kinds(unit: Any) -> set[str]:
    return {node.op_type for node in unit.forward.part.nodes}


@pytest.mark.compiler
def test_backward_reads_a_key_instead_of_probabilities_and_mask(described_machine: Describe) -> None:
    assert compiled_kernels.LIBRARIES[torch.float32].wait()  # on this machine, not on one that another test describes
    described_machine("avx2")
    unit = compiled()
    assert {"MemoryEfficientAttention", "DropoutKey"} <= kinds(unit)
    kept = unit.backward_source.parts.kept
    assert not [value.name for value in kept if list(value.shape)[-2:] == [LENGTH, LENGTH]]


@pytest.mark.parametrize(
    ("machine", "dtype", "options"),
    [
        ("no-compiler", torch.float32, {}),
        ("avx2", torch.float16, {}),
        ("avx512-bf16", torch.bfloat16, {}),
        ("avx2", torch.float32, {"kernels": "pytorch"}),
        ("avx2", torch.float32, {"disabled_passes": ("recompute_attention_probabilities",)}),
    ],
    ids=str,
)
def test_operators_save_probabilities(
    machine: str, dtype: torch.dtype, options: dict[str, Any], described_machine: Describe
) -> None:
    described_machine(machine)
    assert "ScaledDotProductAttentionDropout" in kinds(compiled(dtype, **options))
