"""Attention by PyTorch's operators, in blocks of batches and heads.

The scores of a block are computed, masked, normalized and multiplied by v while they are in the cache. The
probabilities of all heads are stored only if the caller saves them. A block of about 2^18 scores was fastest: forward
and backward take 0.94 to 0.57 of the time of one call per op of the body, the less the more scores (2 threads of a Xeon
at 2.8 GHz, 4 MiB L2; [16, 12, 128, 32] with dropout: 16.3 ms instead of 26.9; 2^16 scores: as fast, but 1.3 times the
time on small batches).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch

from onnxtrain.ops import huge_pages
from onnxtrain.ops.attention.kernel_arguments import ScoreOptions
from onnxtrain.ops.attention.scores import scale_number
from onnxtrain.torch_compat import aten_kernels

Tensor = torch.Tensor
Block = tuple[slice, slice, slice] | None  # slices of the batches, the heads, and the heads of k and v; None: all

_SCORES_PER_BLOCK = 1 << 18
_HALF = (torch.float16, torch.bfloat16)


def score_torch_dtype(q: Tensor) -> torch.dtype:
    """Return the type in which scores are computed and normalized."""
    return torch.float32 if q.dtype in _HALF else q.dtype


def _blocks(q: Tensor, k: Tensor) -> Iterator[Block]:
    batch, heads, rows, _ = q.shape
    kv_heads = k.size(1)
    heads_per_block = max(1, _SCORES_PER_BLOCK // max(1, rows * k.size(2)))
    if q.device.type != "cpu" or heads_per_block >= batch * heads:  # a GPU has no cache to stay in: only more launches
        yield None
    elif heads_per_block >= heads:
        step = heads_per_block // heads
        for start in range(0, batch, step):
            yield slice(start, start + step), slice(None), slice(None)
    else:
        group = heads // kv_heads
        step = max(1, heads_per_block // group)
        for sample in range(batch):
            for start in range(0, kv_heads, step):
                kv_slice = slice(start, start + step)
                yield slice(sample, sample + 1), slice(start * group, (start + step) * group), kv_slice


def _block_of_heads(x: Tensor, block: Block) -> Tensor:
    """Return the block of x[b, h, ...] with batches and heads as one axis."""
    return _block_of(x, block).flatten(0, 1)


def _block_of_kv_heads(x: Tensor, block: Block, group: int) -> Tensor:
    """Return the block of k or v with batches and heads as one axis, each head repeated for its group of q's heads."""
    x = x if block is None else x[block[0], block[2]]
    if group != 1:
        x = x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)
    return x.flatten(0, 1)


def _block_of_mask(x: Tensor, block: Block) -> Tensor:
    """Return the block of a tensor that broadcasts to the scores."""
    if block is None:
        return x
    x = x[(None,) * (4 - x.dim())]
    return x[block[0] if x.size(0) > 1 else slice(None), block[1] if x.size(1) > 1 else slice(None)]


def _block_of(x: Tensor, block: Block) -> Tensor:
    return x if block is None else x[block[0], block[1]]


def _bmm_into(out: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
    """Write factor * a @ b into `out`; all have three axes."""
    if a.dtype == out.dtype:
        torch.baddbmm(out, a, b, beta=0, alpha=factor, out=out)
    else:
        out.copy_(torch.bmm(a, b)).mul_(factor)


class _Scores:
    """The scores of attention, computed block by block."""

    def __init__(self, q: Tensor, k: Tensor, options: ScoreOptions) -> None:
        self._q, self._k, self._options = q, k, options
        self._scale, self._group = scale_number(options.scale, q), q.size(1) // k.size(1) if k.size(1) else 1

    @functools.cached_property
    def _hidden(self) -> Tensor | None:
        """True for the scores that a bool mask hides; None without one."""
        mask = self._options.mask
        return mask.logical_not() if mask is not None and mask.dtype == torch.bool else None

    @functools.cached_property
    def _addends(self) -> list[Tensor]:
        causal = _causal_mask(self._q, self._k) if self._options.causal else None
        additive = self._options.mask if self._hidden is None else None
        return [x for x in (self._options.bias, causal, additive) if x is not None]

    def empty(self, block: Block) -> Tensor:
        """Return a tensor for the scores of a block."""
        q = _block_of(self._q, block)
        return q.new_empty((*q.shape[:3], self._k.size(2)), dtype=score_torch_dtype(q))

    def write_probabilities(self, block: Block, out: Tensor) -> None:
        """Write the probabilities of a block into `out`."""
        self._write_scores(block, out)
        can_check = out.device.type == "cpu"  # on a GPU, a check for NaN would synchronize
        if can_check or not self._options.safe:
            torch.softmax(out, -1, out=out)
        # A row of -inf becomes a row of NaN: its first element is NaN.
        if self._options.safe and not (can_check and _has_no_nan(out)):
            if can_check:
                self._write_scores(block, out)
            masked = out.eq(-math.inf).all(-1, keepdim=True)
            torch.softmax(out, -1, out=out).masked_fill_(masked, 0.0)

    def _write_scores(self, block: Block, out: Tensor) -> None:
        k = _block_of_kv_heads(self._k, block, self._group)
        _bmm_into(out.flatten(0, 1), _block_of_heads(self._q, block), k.mT, self._scale)
        for x in self._addends:
            out.add_(_block_of_mask(x, block))
        if self._hidden is not None:
            fill = -math.inf if self._options.fill is None else self._options.fill
            out.masked_fill_(_block_of_mask(self._hidden, block), fill)

    def zero_hidden(self, block: Block, gradient: Tensor, p: Tensor) -> None:
        """Set the gradient of the block's hidden scores to 0; `p` are its probabilities.

        The probability of a score of -inf is 0, and so is its gradient, except in a row of -inf, where both are NaN.
        """
        mask = self._options.mask
        if mask is None or mask.dtype != torch.bool:
            return
        if self._options.fill is not None or p.device.type != "cpu" or not _has_no_nan(p):
            assert self._hidden is not None
            gradient.masked_fill_(_block_of_mask(self._hidden, block), 0.0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: ScoreOptions,
    dropout_mask: Tensor | None = None,
    keep_scale: float = 1.0,
    p: Tensor | None = None,
) -> Tensor:
    """Return y[b, h, l, d].

    Args:
        q: [b, h, l, e].
        k: [b, g, s, e].
        v: [b, g, s, d].
        scores: how the scores are computed.
        dropout_mask: bool [b, h, l, s], true for the probabilities that dropout keeps; None without dropout.
        keep_scale: the factor of the probabilities that are kept.
        p: a tensor [b, h, l, s] to write the probabilities into; None if they are not saved.
    """
    y = q.new_empty((*q.shape[:3], v.size(3)))
    group = q.size(1) // k.size(1) if k.size(1) else 1
    computed = _Scores(q, k, scores)
    for block in _blocks(q, k):
        part = computed.empty(block) if p is None else _block_of(p, block)
        computed.write_probabilities(block, part)
        kept = part
        if dropout_mask is not None:
            kept = _block_of(dropout_mask, block).view(torch.uint8).to(part.dtype).mul_(part)
        values = _block_of_kv_heads(v, block, group)
        _bmm_into(_block_of(y, block).flatten(0, 1), kept.to(v.dtype).flatten(0, 1), values, keep_scale)
    return y


def attend_saving_probabilities(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: ScoreOptions,
    dropout_mask: Tensor | None = None,
    keep_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the result of `attend` and the probabilities [b, h, l, s]."""
    p = huge_pages.empty((*q.shape[:3], k.size(2)), q.new_empty(0, dtype=score_torch_dtype(q)))
    return attend(q, k, v, scores, dropout_mask, keep_scale, p), p


def _has_no_nan(p: Tensor) -> bool:
    """Return whether no row of probabilities is NaN; a row is NaN from its first element on."""
    return not (p.numel() and p.select(-1, 0).isnan().any())


def _causal_mask(q: Tensor, k: Tensor) -> Tensor:
    """Return the additive mask [l, s] with which row r attends to columns 0 to r."""
    return torch.full((q.size(2), k.size(2)), -math.inf, dtype=score_torch_dtype(q), device=q.device).triu_(1)


def attend_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: ScoreOptions,
    p: Tensor | None,
    output_dscores: bool,
    dropout_mask: Tensor | None = None,
    keep_scale: float = 1.0,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and, with `output_dscores`, of the scores [b, h, l, s]; see `attend`.

    The probabilities are recomputed if `p` is None.
    """
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    scale, group = scale_number(scores.scale, q), q.size(1) // k.size(1) if k.size(1) else 1
    computed = _Scores(q, k, scores)
    dscores = (computed.empty(None) if p is None else torch.empty_like(p)) if output_dscores else None
    for block in _blocks(q, k):
        if p is None:
            part = computed.empty(block)
            computed.write_probabilities(block, part)
        else:
            part = _block_of(p, block)
        cotangent = _block_of_heads(dy, block)
        ds = torch.empty_like(part) if dscores is None else _block_of(dscores, block)
        _bmm_into(ds.flatten(0, 1), cotangent, _block_of_kv_heads(v, block, group).mT, keep_scale)
        kept = part
        if dropout_mask is not None:
            keep = _block_of(dropout_mask, block).view(torch.uint8).to(part.dtype)
            ds.mul_(keep)
            kept = keep.mul_(part)
        _bmm_sum_groups_into(dv, block, group, kept.to(v.dtype).flatten(0, 1).mT, cotangent, keep_scale)
        _write_score_gradients(ds, part, exact=q.dtype not in _HALF)
        computed.zero_hidden(block, ds, part)
        narrow = ds.to(q.dtype).flatten(0, 1)
        _bmm_into(_block_of(dq, block).flatten(0, 1), narrow, _block_of_kv_heads(k, block, group), scale)
        _bmm_sum_groups_into(dk, block, group, narrow.mT, _block_of_heads(q, block), scale)
    return (dq, dk, dv) if dscores is None else (dq, dk, dv, dscores)


def _write_score_gradients(ds: Tensor, p: Tensor, exact: bool) -> None:
    """Write the gradient of the scores into `ds`, which holds that of the probabilities `p`: p (dp - Σ p dp).

    Where the rows of v are alike, so are the elements of dp, and a rounding error of the sum exceeds their differences.
    With `exact`, Σ p dp is subtracted first, and what remains of the sum is small: as Σ p = 1, dp - c has the same
    gradient for each c. It takes 5 % of the time of attention's gradient; rounding q to 16 bits exceeds such an error.
    """
    if exact:
        ds.sub_(torch.linalg.vecdot(ds, p).unsqueeze(-1))
    aten_kernels.softmax_grad(ds, p, -1, p.dtype, grad_input=ds)


def _bmm_sum_groups_into(out: Tensor, block: Block, group: int, a: Tensor, b: Tensor, factor: float) -> None:
    """Write the block of factor * a @ b into the gradient of k or v, summed over the heads of q that share a head."""
    target = out if block is None else out[block[0], block[2]]
    if group == 1:
        _bmm_into(target.flatten(0, 1), a, b, factor)
        return
    per_head = torch.bmm(a, b).view(target.size(0), target.size(1), group, *target.shape[2:])
    target.copy_(per_head.sum(2).mul_(factor))
