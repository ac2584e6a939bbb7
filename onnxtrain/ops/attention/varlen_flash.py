"""Attention of packed sequences (`varlen.py`) on a GPU, by PyTorch's flash attention.

It runs in float16 and bfloat16, for heads of up to 256 elements, from compute capability 8.0 on. Source: Dao 2023,
https://arxiv.org/abs/2307.08691. It was written from PyTorch's signatures, and has not run on a GPU yet.

Forward saves the logsumexp as a vector and, with dropout, the generator's state in place of the dropout mask. The
kernel gets the number of all tokens as the length of the longest sequence: the lengths are known only on the device,
and blocks of rows past the end of a sequence return at once.
"""

from __future__ import annotations

import torch

from onnxtrain.graph.sizes import Size
from onnxtrain.ops.attention.kernel_arguments import PackedSequences
from onnxtrain.torch_compat import aten_kernels

Tensor = torch.Tensor

_LARGEST_HEAD = 256
_CAPABILITY = (8, 0)


def flash_runs(device: str, dtype: torch.dtype, width: Size) -> bool:
    """Return whether flash attention supports heads of `width` elements of this type on this device."""
    if device != "cuda" or dtype not in (torch.float16, torch.bfloat16) or not isinstance(width, int):
        return False
    fits = 0 < width <= _LARGEST_HEAD and width % 8 == 0
    return fits and torch.backends.cuda.flash_sdp_enabled() and torch.cuda.get_device_capability() >= _CAPABILITY


def varlen_flash(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor]:
    """Return y[t, h, d] and the logsumexp [h * t]."""
    y, logsumexp, _ = varlen_dropout_flash(q, k, v, packed, 0.0)
    return y, logsumexp


def varlen_dropout_flash(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, ratio: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `varlen_flash` with dropout; the third output is the state of the generator that it sampled from."""
    y, logsumexp, state, _, _ = aten_kernels.varlen_flash(
        *_operands(q, k, v, packed), ratio, packed.causal, False, scale=packed.scale
    )
    return _zero_outside(y, packed.cu_seqlens_q), logsumexp.flatten(), state


def varlen_backward_flash(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequences,
    y: Tensor,
    logsumexp: Tensor,
    state: Tensor | None,
    ratio: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `state` is None without dropout."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device) if state is None else state
    q, k, v, rows, columns, *longest = _operands(q, k, v, packed)
    dq, dk, dv = aten_kernels.varlen_flash_grad(
        *(dy.contiguous(), q, k, v, y.contiguous(), logsumexp.view(q.size(1), q.size(0)), rows, columns, *longest),
        *(ratio, packed.causal, state, state.new_empty(0)),
        scale=packed.scale,
    )
    return (
        _zero_outside(dq, packed.cu_seqlens_q),
        _zero_outside(dk, packed.cu_seqlens_k),
        _zero_outside(dv, packed.cu_seqlens_k),
    )


def _operands(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:
    """Return the first arguments of both kernels: q, k, v, the offsets, and upper bounds of the sequence lengths."""
    dense = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    rows, columns = (cu.to(torch.int32).contiguous() for cu in (packed.cu_seqlens_q, packed.cu_seqlens_k))
    return *dense, rows, columns, q.size(0), k.size(0)  # type: ignore[return-value]  # three tensors are unpacked


def _zero_outside(x: Tensor, cu: Tensor) -> Tensor:
    """Fill x[t, ...] with 0 at the tokens that belong to no sequence: the kernel does not write them."""
    token = torch.arange(x.size(0), device=x.device)
    return x.masked_fill_(((token < cu[0]) | (token >= cu[-1]))[:, None, None], 0.0)
