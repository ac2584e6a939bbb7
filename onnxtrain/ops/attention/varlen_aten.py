"""Attention of packed sequences (`varlen.py`), by PyTorch's operators in a loop over the sequences.

Tensors of scores, probabilities and dropout masks are vectors: those of one sequence after another, each [h, l, s].
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from onnxtrain.ops.attention.dense_aten import attend, attend_backward, score_torch_dtype
from onnxtrain.ops.attention.kernel_arguments import PackedSequences, ScoreOptions
from onnxtrain.ops.random.dropout import dropout_scale, fast_mask, torch_mask
from onnxtrain.ops.random.keyed_bits import DROP_LEVELS

Tensor = torch.Tensor


def _sequences(packed: PackedSequences, heads: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the slices of the rows, the columns and the scores of each sequence."""
    row_offsets, column_offsets = packed.cu_seqlens_q.tolist(), packed.cu_seqlens_k.tolist()
    score_offset = 0
    for row, row_end, column, column_end in zip(
        row_offsets, row_offsets[1:], column_offsets, column_offsets[1:], strict=False
    ):
        count = heads * (row_end - row) * (column_end - column)
        yield slice(row, row_end), slice(column, column_end), slice(score_offset, score_offset + count)
        score_offset += count


def score_count(packed: PackedSequences, heads: int) -> int:
    """Return the number of scores of all sequences and heads."""
    return heads * int((packed.cu_seqlens_q.diff() * packed.cu_seqlens_k.diff()).sum())


def _causal_mask(packed: PackedSequences, like: Tensor) -> Tensor:
    """Return the additive mask [l, s] of the longest sequence, with which row r attends to columns 0 to r."""
    longest = [int(cu.diff().max()) if cu.numel() > 1 else 0 for cu in (packed.cu_seqlens_q, packed.cu_seqlens_k)]
    return torch.full(longest, -math.inf, dtype=score_torch_dtype(like), device=like.device).triu_(1)


def _sequence(x: Tensor, tokens: slice) -> Tensor:
    """Return a view [1, h, l, e] of the tokens of a sequence in x[t, h, e]."""
    return x[tokens].transpose(0, 1)[None]


def _crop(mask: Tensor | None, rows: slice, columns: slice) -> Tensor | None:
    return None if mask is None else mask[..., : rows.stop - rows.start, : columns.stop - columns.start]


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequences,
    dropout_mask: Tensor | None = None,
    keep_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return y[t, h, d] and the probabilities; see `attend` for the other arguments."""
    heads = q.size(1)
    y = q.new_zeros((*q.shape[:2], v.size(2)))
    probabilities = q.new_empty(score_count(packed, heads), dtype=score_torch_dtype(q))
    causal = _causal_mask(packed, q) if packed.causal else None
    for rows, columns, span in _sequences(packed, heads):
        if rows.start == rows.stop:
            continue
        shape = (1, heads, rows.stop - rows.start, columns.stop - columns.start)
        scores = ScoreOptions(packed.scale, _crop(packed.bias, rows, columns), _crop(causal, rows, columns))
        result, _ = attend(
            _sequence(q, rows), _sequence(k, columns), _sequence(v, columns), scores,
            None if dropout_mask is None else dropout_mask[span].view(shape),
            keep_scale, probabilities[span].view(shape),
        )  # fmt: skip
        y[rows] = result[0].transpose(0, 1)
    return y, probabilities


def varlen_attention_dropout(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, ratio: float, fast: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `varlen_attention` with dropout, whose mask is sampled by one call; it is the third output."""
    like = torch.empty(score_count(packed, q.size(1)), dtype=torch.bool, device=q.device)
    dropout_mask = fast_mask(like, round(ratio * DROP_LEVELS)) if fast else torch_mask(like, 1 - ratio)
    keep_scale = dropout_scale(ratio, score_torch_dtype(q))
    y, probabilities = varlen_attention(q, k, v, packed, dropout_mask, keep_scale)
    return y, probabilities, dropout_mask


def varlen_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequences,
    probabilities: Tensor,
    output_dbias: bool,
    dropout_mask: Tensor | None,
    keep_scale: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v and, with `output_dbias`, of bias; empty `probabilities` are recomputed."""
    heads, bias = q.size(1), packed.bias
    if probabilities.numel() != score_count(packed, heads):
        _, probabilities = varlen_attention(q, k, v, packed)
    gradients = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    dbias = torch.zeros_like(bias, dtype=probabilities.dtype) if bias is not None and output_dbias else None
    for rows, columns, span in _sequences(packed, heads):
        if span.start == span.stop:
            continue
        shape = (1, heads, rows.stop - rows.start, columns.stop - columns.start)
        results = attend_backward(
            _sequence(dy, rows), _sequence(q, rows), _sequence(k, columns), _sequence(v, columns),
            ScoreOptions(packed.scale), probabilities[span].view(shape), dbias is not None,
            None if dropout_mask is None else dropout_mask[span].view(shape), keep_scale,
        )  # fmt: skip
        for gradient, result, tokens in zip(gradients, results, (rows, columns, columns), strict=False):
            gradient[tokens] = result[0].transpose(0, 1)
        if dbias is not None:
            crop, dscores = dbias[:, : shape[2], : shape[3]], results[3][0]
            crop += dscores if dbias.size(0) == heads else dscores.sum(0, keepdim=True)
    return (*gradients, dbias.to(bias.dtype)) if bias is not None and dbias is not None else tuple(gradients)
