"""Attention and its logsumexp by PyTorch's operators, with the scores as PyTorch's math path computes them.

It runs where no kernel of PyTorch fits, on any device. Of `ScoreOptions` it knows the scale, the added mask and the
causal flag.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch

from onnxtrain.ops.attention.kernel_arguments import DropoutOptions, ScoreOptions
from onnxtrain.ops.attention.scores import scale_number
from onnxtrain.ops.random import keyed_bits
from onnxtrain.ops.softmax.softmax import safe_softmax
from onnxtrain.torch_compat import aten_kernels

Tensor = torch.Tensor
Drop: TypeAlias = Callable[[Tensor], Tensor]  # dropout of a tensor [b, h, l, s]: the same elements in each call


def formula(q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, drop: Drop | None = None) -> tuple[Tensor, Tensor]:
    """Return y[b, h, l, d] and the logsumexp [b, h, l], which is 0 for a fully masked row.

    Args:
        q: [b, h, l, e].
        k: [b, g, s, e].
        v: [b, g, s, d].
        options: how the scores are computed.
        drop: dropout of the probabilities; None without.
    """
    scores, _, wide_v = _masked_scores(q, k, v, options)
    logsumexp = scores.logsumexp(-1)
    logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
    return torch.matmul(_dropped(safe_softmax(scores, -1), drop), wide_v).to(q.dtype), logsumexp


def formula_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: ScoreOptions,
    drop: Drop | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    scores, wide_k, wide_v = _masked_scores(q, k, v, options)
    # Not from the logsumexp: for a row of finfo.min, adding the log of the number of columns is lost to rounding.
    p = safe_softmax(scores, -1)
    wide_dy, wide_q = dy.to(p.dtype), q.to(p.dtype)
    dp = _dropped(torch.matmul(wide_dy, wide_v.mT), drop)
    ds = aten_kernels.softmax_grad(dp, p, -1, p.dtype).mul_(scale_number(options.scale, q))
    dk, dv = torch.matmul(ds.mT, wide_q), torch.matmul(_dropped(p, drop).mT, wide_dy)
    return torch.matmul(ds, wide_k).to(q.dtype), sum_groups(dk, k).to(k.dtype), sum_groups(dv, v).to(v.dtype)


def repeat_for_queries(x: Tensor, q: Tensor) -> Tensor:
    """Return k or v with a head for each head of q."""
    return x if x.size(1) == q.size(1) else x.repeat_interleave(q.size(1) // x.size(1), 1)


def sum_groups(dx: Tensor, x: Tensor) -> Tensor:
    """Add the gradients of the heads into which each head of k or v was repeated."""
    if dx.size(1) == x.size(1):
        return dx
    return dx.unflatten(1, (x.size(1), -1) if x.size(1) else (0, 1)).sum(2)


def _masked_scores(q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Return masked scores as PyTorch's math path computes them; and k and v, widened, a head for each head of q."""
    if q.dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    k, v = (repeat_for_queries(x, q) for x in (k, v))
    number = scale_number(options.scale, q)
    root = math.sqrt(abs(number))
    scores = torch.matmul(q * math.copysign(root, number), k.mT * root)
    if options.mask is not None:
        scores = scores.add_(options.mask)
    if options.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill_(hidden, -math.inf)
    return scores, k, v


def _dropped(x: Tensor, drop: Drop | None) -> Tensor:
    return x if drop is None else drop(x)


def drop_by_key(dropout: DropoutOptions) -> Drop:
    """Return the dropout that a key determines."""

    def drop(x: Tensor) -> Tensor:
        kept = keyed_bits.keep_mask(dropout.key, x.numel(), dropout.drop_count).view(x.shape)
        return x * kept.to(x).mul_(dropout.keep_scale)

    return drop
