"""Attention as one operator of a trace: the kernel is chosen when the operator runs, as without a trace.

    onnxtrain::attention           q, k, v, mask?  ──>  y, logsumexp, rng_state
    onnxtrain::attention_backward  dy, q, k, v, mask?, y, logsumexp, rng_state  ──>  dq, dk, dv

A trace needs fixed strides. The results have those that PyTorch's flash kernels give: y, dq, dk and dv are transposed
views of contiguous [b, l, h, d], as is the logsumexp on a CPU; results with other strides are copied.
"""

from __future__ import annotations

from typing import Any

import torch

from onnxtrain.ops.attention import flash, gpu_kernels
from onnxtrain.ops.attention.kernel_arguments import ScoreOptions
from onnxtrain.ops.interfaces.traced_calls import TRACED_CALLS
from onnxtrain.torch_compat import dispatch

Tensor = torch.Tensor

_OPTIONS = "bool causal, float? scale, float ratio"
_LIBRARY = torch.library.Library("onnxtrain", "FRAGMENT")
_LIBRARY.define(
    f"attention(Tensor q, Tensor k, Tensor v, Tensor? mask, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_LIBRARY.define(
    "attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor y, Tensor logsumexp, "
    f"Tensor rng_state, {_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)
_ATTENTION = torch.ops.onnxtrain.attention.default
_BACKWARD = torch.ops.onnxtrain.attention_backward.default


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, ratio: float
) -> tuple[Tensor, Tensor, Tensor]:
    if q.device.type == "cpu":
        y, logsumexp = flash.attention(q, k, v, mask, causal, scale)
        state = None
    else:
        y, logsumexp, state = gpu_kernels.attention(q, k, v, ScoreOptions(scale, mask=mask, causal=causal), ratio)
    logsumexp = _rows_together(logsumexp) if q.device.type == "cpu" else logsumexp.contiguous()
    return _rows_together(y), logsumexp, _no_state(q) if state is None else state


def _attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    y: Tensor,
    logsumexp: Tensor,
    state: Tensor,
    causal: bool,
    scale: float | None,
    ratio: float,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, ...]
    if q.device.type == "cpu":
        gradients = flash.attention_backward(dy, q, k, v, mask, y, logsumexp, causal, scale)
    else:
        options = ScoreOptions(scale, mask=mask, causal=causal)
        saved_state = state if ratio else None
        gradients = gpu_kernels.attention_backward(dy, q, k, v, y, logsumexp, saved_state, options, ratio)
    dq, dk, dv = map(_rows_together, gradients)
    return dq, dk, dv


def _no_state(q: Tensor) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device=q.device)


def _rows_together(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_rows_together(like: Tensor, columns: Any) -> Tensor:
    b, h, rows, _ = like.shape
    return like.new_empty(b, rows, h, columns).transpose(1, 2)


def _attention_on_fakes(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, ratio: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    b, h, rows, _ = q.shape
    by_rows = q.device.type == "cpu"
    logsumexp = torch.empty((b, rows, h) if by_rows else (b, h, rows), dtype=dtype, device=q.device)
    logsumexp = logsumexp.transpose(1, 2) if by_rows else logsumexp
    return _empty_rows_together(q, v.size(3)), logsumexp, _no_state(q)


def _backward_on_fakes(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (_empty_rows_together(x, x.size(3)) for x in (q, k, v))
    return dq, dk, dv


_LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")
_LIBRARY.impl("attention_backward", _attention_backward, "CompositeExplicitAutograd")
dispatch.register_fake(_LIBRARY, "onnxtrain::attention", _attention_on_fakes)
dispatch.register_fake(_LIBRARY, "onnxtrain::attention_backward", _backward_on_fakes)


# The functions of `flash` and `gpu_kernels`, with their parameters


def _cpu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    may_compile: bool = False,
) -> Any:
    y, logsumexp, _ = _ATTENTION(q, k, v, mask, is_causal, scale, 0.0)
    return y, logsumexp


def _cpu_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    y: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
    may_compile: bool = False,
) -> Any:
    return _BACKWARD(dy, q, k, v, mask, y, logsumexp, _no_state(q), is_causal, scale, 0.0)


def _gpu_attention(q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, ratio: float = 0.0) -> Any:
    y, logsumexp, state = _ATTENTION(q, k, v, options.mask, options.causal, options.scale, ratio)
    return y, logsumexp, state if ratio else None


def _gpu_attention_without_state(q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions) -> Any:
    y, logsumexp, _ = _gpu_attention(q, k, v, options)
    return y, logsumexp


def _gpu_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    logsumexp: Tensor,
    state: Tensor | None,
    options: ScoreOptions,
    ratio: float = 0.0,
) -> Any:
    state = _no_state(q) if state is None else state
    return _BACKWARD(dy, q, k, v, options.mask, y, logsumexp, state, options.causal, options.scale, ratio)


TRACED_CALLS[flash.attention] = _cpu_attention
TRACED_CALLS[flash.attention_backward] = _cpu_attention_backward
TRACED_CALLS[flash.gpu_attention] = _gpu_attention_without_state
TRACED_CALLS[gpu_kernels.attention] = _gpu_attention
TRACED_CALLS[gpu_kernels.attention_backward] = _gpu_attention_backward
