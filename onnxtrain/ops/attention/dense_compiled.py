"""Attention with saved probabilities (`dense.py`): the compiled kernel, with `dense_aten.py` as the fallback.

Backward sees from the saved tensors which of the two ran forward: the compiled kernel returns the logsumexp [b, h, l]
in place of the probabilities, and the key [2] in place of the dropout mask.
"""

from __future__ import annotations

import torch

from onnxtrain.ops.attention import compiled_kernels
from onnxtrain.ops.attention.dense_aten import attend, attend_backward
from onnxtrain.ops.attention.kernel_arguments import DropoutOptions, ScoreOptions
from onnxtrain.ops.random.keyed_bits import keep_mask_compiled, sample_key

Tensor = torch.Tensor


def attend_compiled(q: Tensor, k: Tensor, v: Tensor, scores: ScoreOptions, contiguous: bool) -> tuple[Tensor, Tensor]:
    """Return y and the logsumexp, or the probabilities of the fallback; see `attend`.

    With `contiguous`, y is contiguous as eager's is; otherwise its memory may be in the order [b, l, h, d].
    """
    return compiled_kernels.forward(q, k, v, scores, None, contiguous) or attend(q, k, v, scores)


def attend_dropout_compiled(
    q: Tensor, k: Tensor, v: Tensor, scores: ScoreOptions, contiguous: bool, drop_count: int, keep_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `attend_compiled` with dropout; the third output is the key, or the dropout mask of the fallback."""
    key = sample_key()
    results = compiled_kernels.forward(q, k, v, scores, DropoutOptions(key, drop_count, keep_scale), contiguous)
    if results is not None:
        return *results, key
    dropout_mask = _dropout_mask(q, k, key, drop_count)
    return *attend(q, k, v, scores, dropout_mask, keep_scale), dropout_mask


def attend_backward_compiled(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: ScoreOptions,
    p: Tensor,
    dropout_mask: Tensor | None,
    output_dscores: bool,
    drop_count: int,
    keep_scale: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of `attend_backward`, by the kernel that belongs to the one that ran forward."""
    if p.dim() == 3:
        dropout = None if dropout_mask is None else DropoutOptions(dropout_mask, drop_count, keep_scale)
        gradients = compiled_kernels.backward(dy, q, k, v, scores, dropout, output_dscores)
        if gradients is not None:
            return gradients
        dropout_mask = None if dropout_mask is None else _dropout_mask(q, k, dropout_mask, drop_count)
        _, p = attend(q, k, v, scores)
    return attend_backward(dy, q, k, v, scores, p, output_dscores, dropout_mask, keep_scale)


def _dropout_mask(q: Tensor, k: Tensor, key: Tensor, drop_count: int) -> Tensor:
    """Return the mask that the compiled kernel draws from a key: bool [b, h, l, s], true for kept probabilities."""
    shape = (*q.shape[:3], k.size(2))
    return keep_mask_compiled(key, torch.Size(shape).numel(), drop_count).view(shape).view(torch.bool)
