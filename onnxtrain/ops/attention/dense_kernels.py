"""Attention that keeps its probabilities, block by block: torch functions.

The scores of some batches and heads at a time are computed, masked, normalized and multiplied while the cache holds
them; only the probabilities are written out as a whole. A block of some 2^18 scores was best: forward and backward take
0.94 to 0.57 of the time of one call for each written op, least where scores are many (2 threads of a Xeon at 2.8 GHz,
4 MiB L2; [16, 12, 128, 32] with dropout: 16.3 ms against 26.9; 2^16: as fast, but 1.3 times as slow on small batches).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from onnxtrain.ops import huge_pages
from onnxtrain.ops.attention.parts import scale_number
from onnxtrain.ops.attention.scores import Scores
from onnxtrain.torch_compat import aten_kernels

Tensor = torch.Tensor
Block = tuple[slice, slice, slice] | None  # of batches, of heads, of heads of k and v; None: all of them

_BLOCK = 1 << 18  # scores
_HALF = (torch.float16, torch.bfloat16)


def probabilities_type(q: Tensor) -> torch.dtype:
    """The type in which scores are normalized."""
    return torch.float32 if q.dtype in _HALF else q.dtype


def _blocks(q: Tensor, k: Tensor) -> Iterator[Block]:
    batch, heads, rows, _ = q.shape
    shared = k.size(1)
    count = max(1, _BLOCK // max(1, rows * k.size(2)))  # heads in a block
    if count >= batch * heads:
        yield None
    elif count >= heads:
        step = count // heads
        for start in range(0, batch, step):
            yield slice(start, start + step), slice(None), slice(None)
    else:
        each = heads // shared
        step = max(1, count // each)
        for one in range(batch):
            for start in range(0, shared, step):
                yield slice(one, one + 1), slice(start * each, (start + step) * each), slice(start, start + step)


def _heads(x: Tensor, block: Block) -> Tensor:
    """The block of x[b, h, ...] with batches and heads as one axis."""
    return (x if block is None else x[block[0], block[1]]).flatten(0, 1)


def _shared(x: Tensor, block: Block, each: int) -> Tensor:
    """The same of k or v, once for each of the heads that share it."""
    x = x if block is None else x[block[0], block[2]]
    if each != 1:
        x = x[:, :, None].expand(-1, -1, each, -1, -1).flatten(1, 2)
    return x.flatten(0, 1)


def _broadcast(x: Tensor, block: Block) -> Tensor:
    """The block of what broadcasts to the scores."""
    if block is None:
        return x
    x = x[(None,) * (4 - x.dim())]
    return x[block[0] if x.size(0) > 1 else slice(None), block[1] if x.size(1) > 1 else slice(None)]


def _part(x: Tensor, block: Block) -> Tensor:
    return x if block is None else x[block[0], block[1]]


def _product(out: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
    """Writes factor * a @ b, batches of matrices."""
    if a.dtype == out.dtype:
        torch.baddbmm(out, a, b, beta=0, alpha=factor, out=out)
    else:
        out.copy_(torch.bmm(a, b)).mul_(factor)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    noise: Tensor | None = None,
    factor: float = 1.0,
    p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y[b, h, l, d] and the probabilities [b, h, l, s].

    Args:
        q: [b, h, l, e].
        k: [b, g, s, e].
        v: [b, g, s, d].
        scores: how they are made.
        noise: bool [b, h, l, s], which probabilities dropout keeps.
        factor: of the probabilities that are kept.
        p: where the probabilities go.
    """
    batch, heads, rows, _ = q.shape
    kept = probabilities_type(q)
    if p is None:
        p = huge_pages.empty((batch, heads, rows, k.size(2)), q.new_empty(0, dtype=kept))
    y = q.new_empty((batch, heads, rows, v.size(3)))
    number, each = scale_number(scores.scale, q), heads // k.size(1) if k.size(1) else 1
    mask = scores.mask
    hidden = mask.logical_not() if mask is not None and mask.dtype == torch.bool else None
    later = _triangle(q, k) if scores.causal else None
    added = [x for x in (scores.bias, later, mask if hidden is None else None) if x is not None]

    def compute(block: Block, part: Tensor) -> None:
        _product(part.flatten(0, 1), _heads(q, block), _shared(k, block, each).mT, number)
        for x in added:
            part.add_(_broadcast(x, block))
        if hidden is not None:
            part.masked_fill_(_broadcast(hidden, block), -math.inf if scores.fill is None else scores.fill)

    for block in _blocks(q, k):
        part = _part(p, block)
        compute(block, part)
        looks = part.device.type == "cpu"  # a GPU would have to be waited for
        if looks or not scores.safe:
            torch.softmax(part, -1, out=part)
        # A row of -inf becomes a row of NaN: its first element is NaN.
        if scores.safe and not (looks and _has_no_nan(part)):
            if looks:
                compute(block, part)
            masked = part.eq(-math.inf).all(-1, keepdim=True)
            torch.softmax(part, -1, out=part).masked_fill_(masked, 0.0)
        used = part if noise is None else _part(noise, block).view(torch.uint8).to(kept).mul_(part)
        _product(_part(y, block).flatten(0, 1), used.to(v.dtype).flatten(0, 1), _shared(v, block, each), factor)
    return y, p


def _has_no_nan(p: Tensor) -> bool:
    """Whether no row of probabilities is NaN: such a row is so from its first element on."""
    return not (p.numel() and p.select(-1, 0).isnan().any())


def _triangle(q: Tensor, k: Tensor) -> Tensor:
    """What is added to the scores so that a row sees the columns up to its own number."""
    return torch.full((q.size(2), k.size(2)), -math.inf, dtype=probabilities_type(q), device=q.device).triu_(1)


def attend_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    p: Tensor,
    of_scores: bool,
    noise: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v and, where `of_scores`, that of the scores [b, h, l, s]; see `attend`."""
    heads = q.size(1)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    number, each = scale_number(scores.scale, q), heads // k.size(1) if k.size(1) else 1
    dscores = torch.empty_like(p) if of_scores else None
    hidden = _passing_through(scores, p)
    for block in _blocks(q, k):
        part = _part(p, block)
        cotangent = _heads(dy, block)
        ds = torch.empty_like(part) if dscores is None else _part(dscores, block)
        _product(ds.flatten(0, 1), cotangent, _shared(v, block, each).mT, factor)
        used = part
        if noise is not None:
            kept = _part(noise, block).view(torch.uint8).to(part.dtype)
            ds.mul_(kept)
            used = kept.mul_(part)
        _summed(dv, block, each, used.to(v.dtype).flatten(0, 1).mT, cotangent, factor)
        aten_kernels.softmax_grad(ds, part, -1, part.dtype, grad_input=ds)
        if hidden is not None:
            ds.masked_fill_(_broadcast(hidden, block), 0.0)
        narrow = ds.to(q.dtype).flatten(0, 1)
        _product(_part(dq, block).flatten(0, 1), narrow, _shared(k, block, each), number)
        _summed(dk, block, each, narrow.mT, _heads(q, block), number)
    return (dq, dk, dv) if dscores is None else (dq, dk, dv, dscores)


def _passing_through(scores: Scores, p: Tensor) -> Tensor | None:
    """Where scores have no gradient though their probability may not be 0.

    Where scores were -inf the probability is 0, and so is the gradient, but in a row of nothing else, which is NaN.
    """
    if scores.mask is None or scores.mask.dtype != torch.bool:
        return None
    if scores.fill is None and p.device.type == "cpu" and _has_no_nan(p):
        return None
    return scores.mask.logical_not()


def _summed(out: Tensor, block: Block, each: int, a: Tensor, b: Tensor, factor: float) -> None:
    """Writes the block of factor * a @ b of k's or v's gradient: the heads that share one of it summed."""
    target = out if block is None else out[block[0], block[2]]
    if each == 1:
        _product(target.flatten(0, 1), a, b, factor)
        return
    found = torch.bmm(a, b).view(target.size(0), target.size(1), each, *target.shape[2:])
    target.copy_(found.sum(2).mul_(factor))
