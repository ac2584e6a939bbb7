"""Attention as models write it out (`dense.py`), by the compiled kernel where it is there.

What it keeps tells backward which way forward went: the compiled kernel gives the logsumexp [b, h, l] in the place of
the probabilities, and the key [2] in the place of the noise.
"""

from __future__ import annotations

import torch

from onnxtrain.ops.attention import compiled
from onnxtrain.ops.attention.compiled import Drops, Masks
from onnxtrain.ops.attention.dense_kernels import attend, attend_backward, probabilities_type
from onnxtrain.ops.draws import draw_key, kept

Tensor = torch.Tensor


def attend_compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    fill: float | None,
    scale: float | None,
    safe: bool,
    causal: bool,
    contiguous: bool,
) -> tuple[Tensor, Tensor]:
    """Gives y and the logsumexp, or else the probabilities; see `attend` for what has the same name there.

    `causal`: each row sees the columns up to its own number only, which neither bias nor mask says. `contiguous`: y has
    to be, as eager's is; else it may be a transpose.
    """
    masks = Masks(bias, mask, fill, causal, safe)
    found = compiled.forward(q, k, v, masks, scale, None, contiguous)
    return found or attend(q, k, v, _with_triangle(q, k, masks), mask, fill, scale, safe)


def attend_dropout_compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    fill: float | None,
    scale: float | None,
    safe: bool,
    causal: bool,
    contiguous: bool,
    dropped: int,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with dropout, and the key or else the noise."""
    masks = Masks(bias, mask, fill, causal, safe)
    key = draw_key()
    found = compiled.forward(q, k, v, masks, scale, Drops(key, dropped, factor), contiguous)
    if found is not None:
        return *found, key
    noise = _noise(q, k, key, dropped)
    return *attend(q, k, v, _with_triangle(q, k, masks), mask, fill, scale, safe, noise, factor), noise


def attend_backward_compiled(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    fill: float | None,
    p: Tensor,
    noise: Tensor | None,
    scale: float | None,
    safe: bool,
    causal: bool,
    of_scores: bool,
    dropped: int,
    factor: float,
) -> tuple[Tensor, ...]:
    """The gradients, by the way that forward went: see `attend_backward`."""
    if p.dim() == 3:
        masks = Masks(bias, mask, fill, causal, safe)
        drops = None if noise is None else Drops(noise, dropped, factor)
        found = compiled.backward(dy, q, k, v, masks, scale, drops, of_scores)
        if found is not None:
            return found
        noise = None if noise is None else _noise(q, k, noise, dropped)
        _, p = attend(q, k, v, _with_triangle(q, k, masks), mask, fill, scale, safe)
    return attend_backward(dy, q, k, v, mask, fill, p, scale, of_scores, noise, factor)


def _noise(q: Tensor, k: Tensor, key: Tensor, dropped: int) -> Tensor:
    """The mask that the compiled kernel draws: bool [b, h, l, s]."""
    shape = (*q.shape[:3], k.size(2))
    return kept(key, torch.Size(shape).numel(), dropped).view(shape).view(torch.bool)


def _with_triangle(q: Tensor, k: Tensor, masks: Masks) -> Tensor | None:
    """The bias with what hides later columns added to it."""
    if not masks.causal:
        return masks.bias
    shape = (q.size(2), k.size(2))
    triangle = torch.full(shape, -torch.inf, dtype=probabilities_type(q), device=q.device).triu_(1)
    return triangle if masks.bias is None else triangle + masks.bias
