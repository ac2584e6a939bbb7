"""Scaled dot-product attention with dropout that saves its logsumexp, for PyTorch's kernels for a GPU.

    FlashAttentionDropout(q, k, v, mask?, ratio, training_mode) -> y[b, h, l, d], logsumexp[b, h, l], rng_state[2]

It computes what FlashAttention does (`flash.py`); of the probabilities, dropout drops the share `ratio`. rng_state
determines which: on a GPU it is the state of the generator (`gpu_kernels.py`), else a key (`keyed_bits.py`). The
gradient is FlashAttentionGrad. Source: Dao 2023, https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, dtype_of
from onnxtrain.ops.attention import gpu_kernels
from onnxtrain.ops.attention.constructors import check_dropout_inputs, define_attention
from onnxtrain.ops.attention.flash import (
    dropped,
    forward_types,
    on_gpu,
    operands_and_scores,
    score_options,
)
from onnxtrain.ops.attention.flash_formula import drop_by_key, formula
from onnxtrain.ops.attention.kernel_arguments import DropoutOptions, ScoreOptions
from onnxtrain.ops.attention.scores import probabilities_and_logsumexp, score_dtype
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.constructors import no_axes
from onnxtrain.ops.definition import Call, Kernel, NodeView
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.gradient_masks import first_cotangent
from onnxtrain.ops.random import keyed_bits
from onnxtrain.ops.random.dropout import drop_ratio, dropout_scale
from onnxtrain.ops.random.keyed_dropout import drop_count

Tensor = torch.Tensor

_OPERANDS = ("q", "k", "v", "mask?")


def _types(n: NodeView) -> Sequence[TensorType]:
    check_dropout_inputs(n)
    return *forward_types(n), TensorType(ir.DataType.INT64, (2,))


def _body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    _, _, v, scores = operands_and_scores(op, n)
    key = op.own.DropoutKey()
    p, logsumexp = probabilities_and_logsumexp(op, scores)
    return cast(op, op.MatMul(dropped(op, n, p, key), v), dtype_of(n.q)), logsumexp, key


def _gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> list[ir.Value | None]:
    if n.mask is not None and n.wants("mask"):
        raise GraphError(
            "the mask of FlashAttentionDropout is not differentiable",
            expected="a mask that needs no gradient",
            got="a mask whose gradient is needed",
        )
    gradients = op.own.FlashAttentionGrad(
        first_cotangent(n, cotangents), n.q, n.k, n.v, n.mask, n.y, n.logsumexp, n.rng_state,
        op.scalar(drop_ratio(n), ir.DataType.DOUBLE), scale=n.scale, is_causal=n.is_causal or None,
    )  # fmt: skip
    return [*gradients, *[None] * (len(n.node.inputs) - 3)]


def attention_dropout(
    q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, count: int, keep_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the logsumexp and a new key, which determines the dropout mask; by a formula, on any device."""
    key = keyed_bits.sample_key().to(q.device)
    return *formula(q, k, v, options, drop_by_key(DropoutOptions(key, count, keep_scale))), key


def _lower_gpu(n: NodeView, q: Any, k: Any, v: Any, mask: Any, *_: Any) -> Call:
    return Call(gpu_kernels.attention, q, k, v, score_options(n, mask), drop_ratio(n))


def _lower(n: NodeView, q: Any, k: Any, v: Any, mask: Any, *_: Any) -> Call:
    keep_scale = dropout_scale(drop_count(n) / keyed_bits.DROP_LEVELS, TORCH_DTYPES[score_dtype(dtype_of(n.q))])
    return Call(attention_dropout, q, k, v, score_options(n, mask), drop_count(n), keep_scale)


define_attention(
    "FlashAttentionDropout",
    _OPERANDS,
    ("y", "logsumexp", "rng_state"),
    dropout=True,
    reads=("q", "k", "v", "mask", "y", "logsumexp", "rng_state"),
    types=_types,
    body=_body,
    gradient=_gradient,
    nondiff_operands=frozenset({"mask"}),
    kernels=(Kernel(lower=_lower_gpu, applies=on_gpu), Kernel(lower=_lower)),
    axes=no_axes,  # the index of a probability determines whether it is dropped
    columns=lambda n: sizes.dims_of(n.k)[2],
    attributes={"scale": None, "is_causal": 0},
)
