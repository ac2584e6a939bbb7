"""Attention as models write it out (`dense.py`), by the compiled kernel where it is there.

What it keeps tells backward which way forward went: the compiled kernel gives the logsumexp [b, h, l] in the place of
the probabilities, and the key [2] in the place of the noise.
"""

from __future__ import annotations

import torch

from onnxtrain.ops.attention import compiled
from onnxtrain.ops.attention.dense_kernels import attend, attend_backward
from onnxtrain.ops.attention.scores import Drops, Scores
from onnxtrain.ops.random.keyed_bits import draw_key, kept_compiled

Tensor = torch.Tensor


def attend_compiled(q: Tensor, k: Tensor, v: Tensor, scores: Scores, contiguous: bool) -> tuple[Tensor, Tensor]:
    """Gives y and the logsumexp, or else the probabilities; see `attend`.

    `contiguous`: y has to be, as eager's is; else it may be a transpose.
    """
    return compiled.forward(q, k, v, scores, None, contiguous) or attend(q, k, v, scores)


def attend_dropout_compiled(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, contiguous: bool, dropped: int, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with dropout, and the key or else the noise."""
    key = draw_key()
    found = compiled.forward(q, k, v, scores, Drops(key, dropped, factor), contiguous)
    if found is not None:
        return *found, key
    noise = _noise(q, k, key, dropped)
    return *attend(q, k, v, scores, noise, factor), noise


def attend_backward_compiled(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    p: Tensor,
    noise: Tensor | None,
    of_scores: bool,
    dropped: int,
    factor: float,
) -> tuple[Tensor, ...]:
    """The gradients, by the way that forward went: see `attend_backward`."""
    if p.dim() == 3:
        drops = None if noise is None else Drops(noise, dropped, factor)
        found = compiled.backward(dy, q, k, v, scores, drops, of_scores)
        if found is not None:
            return found
        noise = None if noise is None else _noise(q, k, noise, dropped)
        _, p = attend(q, k, v, scores)
    return attend_backward(dy, q, k, v, scores, p, of_scores, noise, factor)


def _noise(q: Tensor, k: Tensor, key: Tensor, dropped: int) -> Tensor:
    """The mask that the compiled kernel draws: bool [b, h, l, s]."""
    shape = (*q.shape[:3], k.size(2))
    return kept_compiled(key, torch.Size(shape).numel(), dropped).view(shape).view(torch.bool)
