"""Attention of packed sequences (`varlen.py`): the compiled kernel, with `varlen_aten.py` as the fallback.

Backward sees from the saved tensors which of the two ran forward: the compiled kernel saves only the key, in place of
the dropout mask; the fallback saves the probabilities and the dropout mask.
"""

from __future__ import annotations

import torch

from onnxtrain.ops.attention import compiled_kernels
from onnxtrain.ops.attention.kernel_arguments import DropoutOptions, PackedSequences
from onnxtrain.ops.attention.varlen_aten import score_count, varlen_attention, varlen_attention_backward
from onnxtrain.ops.random.keyed_bits import keep_mask_compiled, sample_key

Tensor = torch.Tensor


def varlen_compiled(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor]:
    """Return y and an empty vector, or the probabilities of the fallback; see `varlen_attention`."""
    y = compiled_kernels.forward_varlen(q, k, v, packed)
    return varlen_attention(q, k, v, packed) if y is None else (y, _empty(q))


def varlen_dropout_compiled(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, drop_count: int, keep_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `varlen_compiled` with dropout; the third output is the key, or the dropout mask of the fallback."""
    key = sample_key()
    y = compiled_kernels.forward_varlen(q, k, v, packed, DropoutOptions(key, drop_count, keep_scale))
    if y is not None:
        return y, _empty(q), key
    dropout_mask = _dropout_mask(q, packed, key, drop_count)
    return *varlen_attention(q, k, v, packed, dropout_mask, keep_scale), dropout_mask


def varlen_backward_compiled(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequences,
    probabilities: Tensor,
    dropout_mask: Tensor | None,
    drop_count: int,
    keep_scale: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of `varlen_attention_backward`, by the kernel that belongs to the one that ran forward."""
    if not probabilities.numel() and (dropout_mask is None or dropout_mask.dtype != torch.bool):
        dropout = None if dropout_mask is None else DropoutOptions(dropout_mask, drop_count, keep_scale)
        gradients = compiled_kernels.backward_varlen(dy, q, k, v, packed, dropout)
        if gradients is not None:
            return gradients
        dropout_mask = None if dropout_mask is None else _dropout_mask(q, packed, dropout_mask, drop_count)
    return varlen_attention_backward(dy, q, k, v, packed, probabilities, False, dropout_mask, keep_scale)


def _empty(q: Tensor) -> Tensor:
    return q.new_empty(0, dtype=compiled_kernels.logsumexp_dtype(q))


def _dropout_mask(q: Tensor, packed: PackedSequences, key: Tensor, drop_count: int) -> Tensor:
    """Return the mask that the compiled kernel draws from a key: bool, sequence by sequence."""
    return keep_mask_compiled(key, score_count(packed, q.size(1)), drop_count).view(torch.bool)
