"""Attention of sequences one after another (`varlen.py`), by the compiled kernel where it is there.

What is kept tells backward which way forward went: the compiled kernel keeps nothing but the key in the place of the
noise, where ATen's loop keeps the probabilities and the noise.
"""

from __future__ import annotations

import torch

from onnxtrain.ops.attention import compiled
from onnxtrain.ops.attention.scores import Drops, Packed
from onnxtrain.ops.attention.varlen_kernels import score_count, varlen_attention, varlen_attention_backward
from onnxtrain.ops.random.keyed_bits import draw_key, kept_compiled

Tensor = torch.Tensor


def varlen_compiled(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """Gives y and an empty vector, or else the probabilities; see `varlen_attention`."""
    y = compiled.forward_of_sequences(q, k, v, packed)
    return varlen_attention(q, k, v, packed) if y is None else (y, _nothing(q))


def varlen_dropout_compiled(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, dropped: int, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with dropout, and the key or else the noise."""
    key = draw_key()
    y = compiled.forward_of_sequences(q, k, v, packed, Drops(key, dropped, factor))
    if y is not None:
        return y, _nothing(q), key
    noise = _noise(q, packed, key, dropped)
    return *varlen_attention(q, k, v, packed, noise, factor), noise


def varlen_backward_compiled(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    probabilities: Tensor,
    noise: Tensor | None,
    dropped: int,
    factor: float,
) -> tuple[Tensor, ...]:
    """The gradients, by the way that forward went: see `varlen_attention_backward`."""
    if not probabilities.numel() and (noise is None or noise.dtype != torch.bool):
        drops = None if noise is None else Drops(noise, dropped, factor)
        found = compiled.backward_of_sequences(dy, q, k, v, packed, drops)
        if found is not None:
            return found
        noise = None if noise is None else _noise(q, packed, noise, dropped)
    return varlen_attention_backward(dy, q, k, v, packed, probabilities, False, noise, factor)


def _nothing(q: Tensor) -> Tensor:
    return q.new_empty(0, dtype=compiled.sums_type(q))


def _noise(q: Tensor, packed: Packed, key: Tensor, dropped: int) -> Tensor:
    """The mask that the compiled kernel draws, one sequence after another."""
    return kept_compiled(key, score_count(packed, q.size(1)), dropped).view(torch.bool)
