"""Megatron-LM's FP16_Optimizer: overflow and norm of all gradients in one call each."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from onnxtrain.optim import gradients
from onnxtrain.torch_compat.optimizer_kernels import foreach_multiply


def replace(optimizer: Any, **kwargs: Callable[[], Any]) -> str | None:
    """Replace the methods; return the reason if that is impossible."""
    rank = kwargs.get("get_tensor_model_parallel_rank") or kwargs.get("get_horizontal_model_parallel_rank")
    group = kwargs.get("get_tensor_model_parallel_group") or kwargs.get("get_horizontal_model_parallel_group")
    if rank is None or group is None:
        return (
            "expected the arguments get_tensor_model_parallel_rank and get_tensor_model_parallel_group, "
            "functions of Megatron's mpu"
        )
    expected = ("_check_overflow", "clip_master_grads", "fp16_groups", "fp32_from_fp32_groups", "optimizer")
    if missing := [name for name in expected if not hasattr(optimizer, name)]:
        return f"expected a supported version of Megatron-LM, but the optimizer lacks {', '.join(missing)}"
    optimizer._check_overflow = MethodType(_check_overflow(group), optimizer)
    optimizer.clip_master_grads = MethodType(_clip_master_grads(rank, group), optimizer)
    return None


def _check_overflow(get_group: Callable[[], Any]) -> Callable[[Any], None]:
    def check(self: Any) -> None:
        """Set `overflow`: whether any gradient of any model-parallel rank has an infinite or NaN element."""
        parameters = [p for groups in (self.fp16_groups, self.fp32_from_fp32_groups) for g in groups for p in g]
        non_finite = gradients.found_non_finite([p.grad.detach() for p in parameters if p.grad is not None])
        _all_reduce(non_finite, torch.distributed.ReduceOp.MAX, get_group())
        self.overflow = bool(non_finite.item())

    return check


def _clip_master_grads(get_rank: Callable[[], int], get_group: Callable[[], Any]) -> Callable[..., float]:
    def clip(self: Any, max_norm: float, norm_type: float = 2) -> float:
        """Clip the gradients of the master weights; return their norm before clipping, or -1 after an overflow."""
        if self.overflow:
            return -1.0
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        # Parameters that are not partitioned are replicated: only rank 0 counts them.
        own = [p.grad.detach() for p in parameters if getattr(p, "model_parallel", False) or get_rank() == 0]
        norm = _norm(own, float(norm_type), parameters[0].device if parameters else None, get_group())
        if max_norm / (norm + 1e-6) < 1:
            for group in gradients.grouped(p.grad.detach() for p in parameters):
                foreach_multiply(group, max_norm / (norm + 1e-6))
        return norm

    return clip


def _norm(own: list[torch.Tensor], order: float, device: torch.device | None, group: Any) -> float:
    if order == 2.0:
        total = gradients.norm(own, device).square()
        _all_reduce(total, torch.distributed.ReduceOp.SUM, group)
        return float(total.sqrt())
    each = torch.stack([torch.linalg.vector_norm(g.float(), order) for g in own] or [torch.zeros((), device=device)])
    if order == float("inf"):
        total = each.max()
        _all_reduce(total, torch.distributed.ReduceOp.MAX, group)
        return float(total)
    total = each.pow(order).sum()
    _all_reduce(total, torch.distributed.ReduceOp.SUM, group)
    return math.pow(float(total), 1 / order)


def _all_reduce(tensor: torch.Tensor, op: Any, group: Any) -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(tensor, op=op, group=group)
