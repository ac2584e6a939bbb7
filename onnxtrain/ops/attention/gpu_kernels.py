"""Attention on a GPU, by the kernel that eager PyTorch chooses: flash, cuDNN, memory-efficient.

    attention           q, k, v, mask?  ──>  y, logsumexp, rng_state
    attention_backward  dy, q, k, v, mask?, y, logsumexp, rng_state  ──>  dq, dk, dv

The logsumexp is float32 [b, h, l] and contiguous, as compiled programs expect (`traced.py`). rng_state, int64 [2],
determines the dropout mask: it holds the seed and the offset of the GPU's generator, so that a seed gives eager's mask.
Where no kernel fits (float64, kernels switched off), a formula runs, with the dropout of eager's math path. Both
directions ask PyTorch, which decides by devices, dtypes, sizes, strides and switches; the switches are those of forward
in both (`execute/boundary.py`), because the kernels read rng_state differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from onnxtrain.ops.attention.flash_formula import formula, formula_backward, repeat_for_queries, sum_groups
from onnxtrain.ops.attention.kernel_arguments import ScoreOptions
from onnxtrain.ops.attention.scores import scale_number
from onnxtrain.torch_compat import aten_kernels

Tensor = torch.Tensor

_BACKENDS = torch.nn.attention.SDPBackend
_FLASH, _CUDNN, _EFFICIENT = (
    int(backend.value)
    for backend in (_BACKENDS.FLASH_ATTENTION, _BACKENDS.CUDNN_ATTENTION, _BACKENDS.EFFICIENT_ATTENTION)
)
_HEAD_MULTIPLE = 8  # flash attention's heads
_MASK_MULTIPLE = 16  # strides of a mask of memory-efficient attention
_LOGSUMEXP_MULTIPLE = 32  # rows of its logsumexp


class _Choice(NamedTuple):
    """The kernel, and keys and values as it takes them."""

    backend: int
    k: Tensor
    v: Tensor


def _choose(q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, ratio: float) -> _Choice:
    """Ask PyTorch for the kernel; where none shares heads of k and v, each is repeated for its group of q's.

    With dropout it is eager's choice, because another kernel would sample another mask.
    """
    ask = aten_kernels.SDP_CHOICE.get()
    shares = q.size(1) != k.size(1)
    flags = options.mask, ratio, options.causal
    backend = ask(q, k, v, *flags, scale=options.scale, enable_gqa=shares)
    if shares and not ratio and backend not in (_FLASH, _CUDNN):
        k, v = (repeat_for_queries(x, q) for x in (k, v))
        backend = ask(q, k, v, *flags, scale=options.scale, enable_gqa=False)
    return _Choice(backend, k, v)


def attention(
    q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, ratio: float = 0.0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return y, its logsumexp and rng_state, which is None without dropout.

    Args:
        q: [b, h, l, e].
        k: [b, g, s, e], of which each head serves h/g heads of q.
        v: [b, g, s, d].
        options: the scale, the added mask, which broadcasts to the scores, and the causal flag.
        ratio: the share of probabilities that dropout drops.
    """
    choice = _choose(q, k, v, options, ratio)
    scale = scale_number(options.scale, q)
    if choice.backend == _FLASH:
        y, logsumexp, _, _, _, _, state, _, _ = aten_kernels.gpu_flash.get()(
            *map(_padded_heads, (q, choice.k, choice.v)), ratio, options.causal, False, scale=scale
        )
        return y[..., : v.size(3)], logsumexp, state.view(torch.int64) if ratio else None
    if choice.backend == _CUDNN:
        y, logsumexp, _, _, _, _, seed, offset, _ = aten_kernels.gpu_cudnn.get()(
            q, choice.k, choice.v, options.mask, True, ratio, options.causal, False, scale=scale
        )
        return y, logsumexp.squeeze(-1), _state(seed, offset, ratio)
    if choice.backend == _EFFICIENT:
        y, logsumexp, seed, offset = aten_kernels.gpu_efficient.get()(
            q, choice.k, choice.v, _aligned_mask(options.mask, q, k), True, ratio, options.causal, scale=scale
        )
        return y, logsumexp[:, :, : q.size(2)].contiguous(), _state(seed, offset, ratio)
    if not ratio:
        return *formula(q, k, v, options), None
    state = torch.cuda.get_rng_state(q.device).view(torch.int64)  # the seed and the offset
    return *formula(q, k, v, options, lambda p: torch.native_dropout(p, ratio, True)[0]), state


def attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    logsumexp: Tensor,
    state: Tensor | None,
    options: ScoreOptions,
    ratio: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `state` is the rng_state of `attention`, or None without dropout."""
    choice = _choose(q, k, v, options, ratio)
    scale = scale_number(options.scale, q)
    no_state = state is None
    if state is None:
        state = torch.empty(2, dtype=torch.int64, device=q.device)  # unread without dropout
    # None becomes an undefined tensor: defined offsets of sequences would mean a packed batch.
    if choice.backend == _FLASH:
        wide = (_padded_heads(x) for x in (dy, q, choice.k, choice.v, y))
        all_gradients = aten_kernels.gpu_flash_grad.get()(
            *wide, logsumexp, None, None, q.size(2), k.size(2), ratio, options.causal,
            state.view(torch.uint64), state.new_empty(0).view(torch.uint64), scale=scale,
        )  # fmt: skip
        gradients = tuple(g[..., : x.size(3)] for g, x in zip(all_gradients, (q, k, v), strict=True))
    elif choice.backend == _CUDNN:
        gradients = aten_kernels.gpu_cudnn_grad.get()(
            dy, q, choice.k, choice.v, y, logsumexp.unsqueeze(-1), state[0], state[1], options.mask,
            None, None, q.size(2), k.size(2), ratio, options.causal, scale=scale,
        )  # fmt: skip
    elif choice.backend == _EFFICIENT:
        missing = -q.size(2) % _LOGSUMEXP_MULTIPLE
        wide_logsumexp = torch.nn.functional.pad(logsumexp, (0, missing)) if missing else logsumexp
        gradients = aten_kernels.gpu_efficient_grad.get()(
            dy, q, choice.k, choice.v, _aligned_mask(options.mask, q, k), y, wide_logsumexp, state[0], state[1],
            ratio, [True, True, True, False], options.causal, scale=scale,
        )[:3]  # fmt: skip
    else:
        return formula_backward(dy, q, k, v, options, None if no_state else _replayed_dropout(state, ratio))
    dq, dk, dv = gradients
    return dq, sum_groups(dk, k), sum_groups(dv, v)


def _padded_heads(x: Tensor) -> Tensor:
    missing = -x.size(-1) % _HEAD_MULTIPLE
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _aligned_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Expand a mask to the scores, with rows whose beginnings are aligned, as eager does for this kernel."""
    if mask is None:
        return None
    *strides, last = mask.stride()
    if last != 1 or any(stride % _MASK_MULTIPLE for stride in strides):
        columns = mask.size(-1)
        mask = torch.nn.functional.pad(mask, (0, _MASK_MULTIPLE - columns % _MASK_MULTIPLE))[..., :columns]
    return mask.expand(q.size(0), q.size(1), q.size(2), k.size(2))


def _state(seed: Tensor, offset: Tensor, ratio: float) -> Tensor | None:
    return torch.stack([seed, offset]).to(torch.int64) if ratio else None


def _replayed_dropout(state: Tensor, ratio: float) -> Callable[[Tensor], Tensor]:
    """Return a function that drops what native_dropout dropped at this state of the generator."""
    masks: list[Tensor] = []

    def drop(x: Tensor) -> Tensor:
        if not masks:
            with torch.random.fork_rng(devices=[x.device]):
                torch.cuda.set_rng_state(state.view(torch.uint8), x.device)
                masks.append(torch.native_dropout(x, ratio, True)[1])
        return torch.ops.aten.native_dropout_backward.default(x, masks[0], 1 / (1 - ratio))

    return drop
