"""Attention of packed sequences (`varlen.py`), by PyTorch's operators in a loop over the sequences.

A dropout mask is a vector: that of one sequence after another, each [h, l, s].
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from onnxtrain.ops.attention.dense_aten import attend, attend_backward, score_torch_dtype
from onnxtrain.ops.attention.kernel_arguments import PackedSequences, ScoreOptions
from onnxtrain.ops.attention.scores import scale_number

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


def _causal_mask(packed: PackedSequences, like: Tensor) -> Tensor | None:
    """Return the additive mask [l, s] of the longest sequence, with which row r attends to columns 0 to r."""
    if not packed.causal:
        return None
    longest = [int(cu.diff().max()) if cu.numel() > 1 else 0 for cu in (packed.cu_seqlens_q, packed.cu_seqlens_k)]
    return torch.full(longest, -math.inf, dtype=score_torch_dtype(like), device=like.device).triu_(1)


def _sequence(x: Tensor, tokens: slice) -> Tensor:
    """Return a view [1, h, l, e] of the tokens of a sequence in x[t, h, e]."""
    return x[tokens].transpose(0, 1)[None]


def _crop(mask: Tensor | None, rows: slice, columns: slice) -> Tensor | None:
    return None if mask is None else mask[..., : rows.stop - rows.start, : columns.stop - columns.start]


def _scores(packed: PackedSequences, causal: Tensor | None, rows: slice, columns: slice) -> ScoreOptions:
    return ScoreOptions(packed.scale, _crop(packed.bias, rows, columns), _crop(causal, rows, columns))


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequences,
    dropout_mask: Tensor | None = None,
    keep_scale: float = 1.0,
) -> Tensor:
    """Return y[t, h, d]; see `attend` for the other arguments."""
    heads = q.size(1)
    y = q.new_zeros((*q.shape[:2], v.size(2)))
    causal = _causal_mask(packed, q)
    for rows, columns, span in _sequences(packed, heads):
        if rows.start == rows.stop:
            continue
        shape = (1, heads, rows.stop - rows.start, columns.stop - columns.start)
        result = attend(
            _sequence(q, rows), _sequence(k, columns), _sequence(v, columns), _scores(packed, causal, rows, columns),
            None if dropout_mask is None else dropout_mask[span].view(shape), keep_scale,
        )  # fmt: skip
        y[rows] = result[0].transpose(0, 1)
    return y


def varlen_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequences,
    output_dbias: bool,
    dropout_mask: Tensor | None = None,
    keep_scale: float = 1.0,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v and, with `output_dbias`, of bias."""
    heads, bias, causal = q.size(1), packed.bias, _causal_mask(packed, q)
    gradients = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    dbias = torch.zeros_like(bias, dtype=score_torch_dtype(q)) if bias is not None and output_dbias else None
    for rows, columns, span in _sequences(packed, heads):
        if span.start == span.stop:
            continue
        shape = (1, heads, rows.stop - rows.start, columns.stop - columns.start)
        results = attend_backward(
            _sequence(dy, rows), _sequence(q, rows), _sequence(k, columns), _sequence(v, columns),
            _scores(packed, causal, rows, columns), None, dbias is not None,
            None if dropout_mask is None else dropout_mask[span].view(shape), keep_scale,
        )  # fmt: skip
        for gradient, result, tokens in zip(gradients, results, (rows, columns, columns), strict=False):
            gradient[tokens] = result[0].transpose(0, 1)
        if dbias is not None:
            crop, dscores = dbias[:, : shape[2], : shape[3]], results[3][0]
            crop += dscores if dbias.size(0) == heads else dscores.sum(0, keepdim=True)
    return (*gradients, dbias.to(bias.dtype)) if bias is not None and dbias is not None else tuple(gradients)


def varlen_logsumexp(q: Tensor, k: Tensor, packed: PackedSequences) -> Tensor:
    """Return the logsumexp of the scores [h, t] of sequences without a bias; 0 for a row that attends to nothing."""
    group, causal = q.size(1) // k.size(1) if k.size(1) else 1, _causal_mask(packed, q)
    result = torch.zeros(q.size(1), q.size(0), dtype=score_torch_dtype(q), device=q.device)
    for rows, columns, span in _sequences(packed, q.size(1)):
        if span.start == span.stop:
            continue
        own_q, own_k = (_sequence(x, tokens)[0].to(result.dtype) for x, tokens in ((q, rows), (k, columns)))
        scores = own_q @ own_k.repeat_interleave(group, 0).mT * scale_number(packed.scale, q)
        mask = _crop(causal, rows, columns)
        result[:, rows] = (scores if mask is None else scores + mask).logsumexp(-1)
    return result
