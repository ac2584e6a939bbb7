"""Attention of sequences that lie one after another, by PyTorch's operators: one sequence after another."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from onnxtrain.ops.attention.dense_kernels import attend, attend_backward, probabilities_type
from onnxtrain.ops.attention.scores import Packed, Scores
from onnxtrain.ops.random.dropout import DRAWS, fast_mask, torch_mask
from onnxtrain.ops.random.dropout import scale_of as kept_scale

Tensor = torch.Tensor


def _sequences(packed: Packed, heads: int) -> Iterator[tuple[slice, slice, slice]]:
    """Each sequence's rows, columns, and the stretch of its heads * rows * columns scores."""
    rows, columns = packed.cu_q.tolist(), packed.cu_k.tolist()
    before = 0
    for start, end, first, last in zip(rows, rows[1:], columns, columns[1:], strict=False):
        count = heads * (end - start) * (last - first)
        yield slice(start, end), slice(first, last), slice(before, before + count)
        before += count


def score_count(packed: Packed, heads: int) -> int:
    """How many scores there are."""
    return heads * int((packed.cu_q.diff() * packed.cu_k.diff()).sum())


def _triangle(packed: Packed, like: Tensor) -> Tensor:
    """What is added to the scores of the longest sequence so that a row sees the columns up to its own number."""
    longest = [int(cu.diff().max()) if cu.numel() > 1 else 0 for cu in (packed.cu_q, packed.cu_k)]
    return torch.full(longest, -math.inf, dtype=probabilities_type(like), device=like.device).triu_(1)


def _of_heads(x: Tensor, tokens: slice) -> Tensor:
    """x[t, h, e] of a sequence as [1, h, l, e], a view."""
    return x[tokens].transpose(0, 1)[None]


def _corner(table: Tensor | None, rows: slice, columns: slice) -> Tensor | None:
    return None if table is None else table[..., : rows.stop - rows.start, : columns.stop - columns.start]


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    noise: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """y, and the probabilities of one sequence after another. `noise` lies as they do; see `attend` for the rest."""
    heads = q.size(1)
    y = q.new_zeros((*q.shape[:2], v.size(2)))
    kept = q.new_empty(score_count(packed, heads), dtype=probabilities_type(q))
    triangle = _triangle(packed, q) if packed.causal else None
    for rows, columns, stretch in _sequences(packed, heads):
        if rows.start == rows.stop:
            continue
        shape = (1, heads, rows.stop - rows.start, columns.stop - columns.start)
        scores = Scores(packed.scale, _corner(packed.bias, rows, columns), _corner(triangle, rows, columns))
        found, _ = attend(
            _of_heads(q, rows), _of_heads(k, columns), _of_heads(v, columns), scores,
            None if noise is None else noise[stretch].view(shape), factor, kept[stretch].view(shape),
        )  # fmt: skip
        y[rows] = found[0].transpose(0, 1)
    return y, kept


def varlen_attention_dropout(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, ratio: float, fast: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with dropout; its noise is drawn at once for all sequences."""
    like = torch.empty(score_count(packed, q.size(1)), dtype=torch.bool, device=q.device)
    noise = fast_mask(like, round(ratio * DRAWS)) if fast else torch_mask(like, 1 - ratio)
    factor = kept_scale(ratio, probabilities_type(q))
    y, kept = varlen_attention(q, k, v, packed, noise, factor)
    return y, kept, noise


def varlen_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    kept: Tensor,
    of_bias: bool,
    noise: Tensor | None,
    factor: float,
) -> tuple[Tensor, ...]:
    """The gradients of q, k and v, and that of bias where `of_bias`.

    `kept` are the probabilities of one sequence after another; where it is empty they are recomputed.
    """
    heads, bias = q.size(1), packed.bias
    if kept.numel() != score_count(packed, heads):
        _, kept = varlen_attention(q, k, v, packed)
    gradients = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    dbias = torch.zeros_like(bias, dtype=kept.dtype) if bias is not None and of_bias else None
    for rows, columns, stretch in _sequences(packed, heads):
        if stretch.start == stretch.stop:
            continue
        shape = (1, heads, rows.stop - rows.start, columns.stop - columns.start)
        found = attend_backward(
            _of_heads(dy, rows), _of_heads(q, rows), _of_heads(k, columns), _of_heads(v, columns),
            Scores(packed.scale), kept[stretch].view(shape), dbias is not None,
            None if noise is None else noise[stretch].view(shape), factor,
        )  # fmt: skip
        for whole, part, tokens in zip(gradients, found, (rows, columns, columns), strict=False):
            whole[tokens] = part[0].transpose(0, 1)
        if dbias is not None:
            corner, dscores = dbias[:, : shape[2], : shape[3]], found[3][0]
            corner += dscores if dbias.size(0) == heads else dscores.sum(0, keepdim=True)
    return (*gradients, dbias.to(bias.dtype)) if bias is not None and dbias is not None else tuple(gradients)
