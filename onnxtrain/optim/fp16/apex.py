"""Apex's amp with float32 master weights: unscale and check all gradients in one call."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch

from onnxtrain.optim import gradients
from onnxtrain.torch_compat.optimizer_kernels import foreach_zero


def replace(optimizer: Any) -> str | None:
    """Replace the methods; return the reason if that is impossible."""
    expected = ("_post_amp_backward", "_amp_lazy_init", "zero_grad")
    if missing := [name for name in expected if not hasattr(optimizer, name)]:
        return f"expected the attributes that Apex's amp.initialize adds, but it lacks {', '.join(missing)}"
    if not hasattr(optimizer, "_prepare_amp_backward"):
        return "expected an optimizer prepared by Apex's amp.initialize"
    optimizer._post_amp_backward = MethodType(_post_amp_backward(optimizer._post_amp_backward), optimizer)
    optimizer.zero_grad = MethodType(_zero_grad(optimizer.zero_grad), optimizer)
    return None


def _post_amp_backward(original: Any) -> Any:
    def post_amp_backward(self: Any, scaler: Any) -> None:
        """Copy the half-precision gradients, divided by the loss scale, to the master weights."""
        self._amp_lazy_init()
        stash = self._amp_stash
        if not hasattr(stash, "all_fp32_from_fp16_params"):
            original(scaler)  # there are no master weights
            return
        new, before = _scaled(stash)
        inverse = torch.full((), 1 / scaler.loss_scale(), device=new[0].device if new else None)
        non_finite = gradients.unscale(new, inverse)
        for gradient, earlier in before:
            gradient.add_(earlier)
        if new:
            overflow = scaler._overflow_buf  # int32 [1]; the scaler looks at it when it next sets its scale
            overflow.copy_(torch.maximum(overflow, non_finite.to(overflow.device, overflow.dtype)))

    return post_amp_backward


def _scaled(stash: Any) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the master gradients, still scaled.

    And those with a gradient accumulated before this backward, with it.
    """
    new: list[torch.Tensor] = []
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    for half, full in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
        if half.grad is not None:
            earlier, full.grad = full.grad, half.grad.detach().to(full.dtype, copy=True)
            new.append(full.grad)
            if earlier is not None:
                before.append((full.grad, earlier))
    stashed: list[torch.Tensor | None] = stash.all_fp32_from_fp32_grad_stash
    for number, full in enumerate(stash.all_fp32_from_fp32_params):
        earlier, stashed[number] = stashed[number], None
        if full.grad is None:
            full.grad = earlier
            continue
        new.append(full.grad)
        if earlier is not None:
            before.append((full.grad, earlier))
    return new, before


def _zero_grad(original: Any) -> Any:
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Set the gradients of master weights to None, and those of the weights to None or zero."""
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
        foreach_zero(group)
