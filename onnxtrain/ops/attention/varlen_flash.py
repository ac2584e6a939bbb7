"""Attention of sequences one after another (`varlen.py`) on a GPU, by PyTorch's flash attention.

In float16 and bfloat16, for heads of up to 256 elements, from compute capability 8.0 on. Dao 2023,
https://arxiv.org/abs/2307.08691. It was written from PyTorch's signatures, and has not run on a GPU yet.

What is kept is its logsumexp as a vector and, with dropout, the state of the generator in the place of the noise. As
long as the longest sequence the kernel is told that of all tokens together: which one is longest only the device knows,
and blocks of rows that are not there end at once.
"""

from __future__ import annotations

import torch

from onnxtrain.graph.sizes import Size
from onnxtrain.ops.attention.scores import Packed
from onnxtrain.torch_compat import aten_kernels

Tensor = torch.Tensor

_LARGEST_HEAD = 256
_CAPABILITY = (8, 0)


def flash_runs(device: str, dtype: torch.dtype, width: Size) -> bool:
    """Whether flash attention does heads of this width."""
    if device != "cuda" or dtype not in (torch.float16, torch.bfloat16) or not isinstance(width, int):
        return False
    fits = 0 < width <= _LARGEST_HEAD and width % 8 == 0
    return fits and torch.backends.cuda.flash_sdp_enabled() and torch.cuda.get_device_capability() >= _CAPABILITY


def varlen_flash(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """Gives y[t, h, d] and the logsumexp [h * t]."""
    y, logsumexp, _ = varlen_dropout_flash(q, k, v, packed, 0.0)
    return y, logsumexp


def varlen_dropout_flash(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, ratio: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with dropout, and the state of the generator that it drew from."""
    y, logsumexp, state, _, _ = aten_kernels.varlen_flash(
        *_operands(q, k, v, packed), ratio, packed.causal, False, scale=packed.scale
    )
    return _of_sequences(y, packed.cu_q), logsumexp.flatten(), state


def varlen_backward_flash(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    y: Tensor,
    logsumexp: Tensor,
    state: Tensor | None,
    ratio: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device) if state is None else state
    q, k, v, rows, columns, *longest = _operands(q, k, v, packed)
    dq, dk, dv = aten_kernels.varlen_flash_grad(
        *(dy.contiguous(), q, k, v, y.contiguous(), logsumexp.view(q.size(1), q.size(0)), rows, columns, *longest),
        *(ratio, packed.causal, state, state.new_empty(0)),
        scale=packed.scale,
    )
    return _of_sequences(dq, packed.cu_q), _of_sequences(dk, packed.cu_k), _of_sequences(dv, packed.cu_k)


def _operands(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:
    """What both passes read first: q, k, v and the offsets as the kernels want them, and how long a sequence may be."""
    dense = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    rows, columns = (cu.to(torch.int32).contiguous() for cu in (packed.cu_q, packed.cu_k))
    return *dense, rows, columns, q.size(0), k.size(0)  # type: ignore[return-value]  # three tensors are unpacked


def _of_sequences(x: Tensor, cu: Tensor) -> Tensor:
    """x[t, ...] with zeros where a token belongs to no sequence: the kernel writes nothing there."""
    token = torch.arange(x.size(0), device=x.device)
    return x.masked_fill_(((token < cu[0]) | (token >= cu[-1]))[:, None, None], 0.0)
