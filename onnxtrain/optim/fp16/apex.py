"""Apex's amp with float32 copies of half-precision weights: all gradients are unscaled and checked in one call."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch

from onnxtrain.optim import gradients


def replace(optimizer: Any) -> str | None:
    """Replaces the methods, or says why not."""
    expected = ("_post_amp_backward", "_amp_lazy_init", "zero_grad")
    if missing := [name for name in expected if not hasattr(optimizer, name)]:
        return f"it has no {', '.join(missing)}, as amp.initialize of Apex gives"
    if not hasattr(optimizer, "_prepare_amp_backward"):
        return "amp.initialize of Apex has not prepared it"
    optimizer._post_amp_backward = MethodType(_post_amp_backward(optimizer._post_amp_backward), optimizer)
    optimizer.zero_grad = MethodType(_zero_grad(optimizer.zero_grad), optimizer)
    return None


def _post_amp_backward(original: Any) -> Any:
    def post_amp_backward(self: Any, scaler: Any) -> None:
        """Gives the float32 copies the gradients of their half-precision weights, divided by the loss scale."""
        self._amp_lazy_init()
        stash = self._amp_stash
        if not hasattr(stash, "all_fp32_from_fp16_params"):
            original(scaler)  # the weights are their own float32 copies
            return
        new, before = _scaled(stash)
        inverse = torch.full((), 1 / scaler.loss_scale(), device=new[0].device if new else None)
        found = gradients.unscale(new, inverse)
        for gradient, earlier in before:
            gradient.add_(earlier)
        if new:
            overflow = scaler._overflow_buf  # int32 [1]; the scaler looks at it when it next sets its scale
            overflow.copy_(torch.maximum(overflow, found.to(overflow.device, overflow.dtype)))

    return post_amp_backward


def _scaled(stash: Any) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    """The float32 gradients that are still scaled, and those with what was accumulated before this backward."""
    new: list[torch.Tensor] = []
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    for half, full in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
        if half.grad is not None:
            earlier, full.grad = full.grad, half.grad.detach().to(full.dtype, copy=True)
            new.append(full.grad)
            if earlier is not None:
                before.append((full.grad, earlier))
    kept: list[torch.Tensor | None] = stash.all_fp32_from_fp32_grad_stash
    for number, full in enumerate(stash.all_fp32_from_fp32_params):
        earlier, kept[number] = kept[number], None
        if full.grad is None:
            full.grad = earlier
            continue
        new.append(full.grad)
        if earlier is not None:
            before.append((full.grad, earlier))
    return new, before


def _zero_grad(original: Any) -> Any:
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Drops the gradients of the weights and of their float32 copies, or fills those of the weights with zeros."""
        self._amp_lazy_init()
        stash = self._amp_stash
        if not hasattr(stash, "all_fp32_from_fp16_params"):
            original()
            return
        _clear([*stash.all_fp16_params, *stash.all_fp32_from_fp32_params], set_to_none)
        _clear(stash.all_fp32_from_fp16_params, True)

    return zero_grad


def _clear(parameters: Sequence[torch.Tensor], set_to_none: bool) -> None:
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
    for group in gradients.grouped(p.grad.detach() for p in parameters if p.grad is not None):
        torch._foreach_zero_(group)
