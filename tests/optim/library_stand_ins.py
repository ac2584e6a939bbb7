"""Small optimizers with the published interfaces of Megatron-LM, Apex and DeepSpeed, which go gradient by gradient.

Written from their documentation, to train with before and after `FP16_Optimizer` replaced their loops. Parameters are
half precision, what is stepped are float32 copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import Parameter

dist = SimpleNamespace(all_reduce=lambda tensor, op, group: None, ReduceOp=torch.distributed.ReduceOp)


def _is_finite(gradient: torch.Tensor) -> bool:
    return math.isfinite(float(gradient.float().sum()))


def _masters(parameters: Sequence[Parameter]) -> list[Parameter]:
    return [Parameter(p.detach().float()) for p in parameters]


class DynamicScale:
    """A loss scale that halves at an overflow."""

    def __init__(self) -> None:
        self.value = 1024.0

    def update(self, overflow: bool) -> None:
        self.value = self.value / 2 if overflow else self.value


class Megatron:
    """`megatron.fp16.fp16.FP16_Optimizer`: backward, update_master_grads, clip_master_grads, step."""

    def __init__(self, parameters: Sequence[Parameter], lr: float) -> None:
        self.fp16_groups, self.fp32_from_fp32_groups = [list(parameters)], [[]]
        self.fp32_from_fp16_groups = [_masters(parameters)]
        self.optimizer = torch.optim.SGD(self.fp32_from_fp16_groups[0], lr=lr)
        self.loss_scaler, self.overflow = DynamicScale(), False

    def _check_overflow(self) -> None:
        gradients = [p.grad for group in self.fp16_groups for p in group if p.grad is not None]
        self.overflow = not all(map(_is_finite, gradients))

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> float:
        if self.overflow:
            return -1.0
        return float(torch.nn.utils.clip_grad_norm_(self.fp32_from_fp16_groups[0], max_norm, norm_type))

    def train_step(self, loss: torch.Tensor) -> float:
        """Call what Megatron's train_step calls, in its order."""
        for p in self.fp16_groups[0]:
            p.grad = None
        (loss * self.loss_scaler.value).backward()
        self._check_overflow()
        if not self.overflow:
            for half, full in zip(self.fp16_groups[0], self.fp32_from_fp16_groups[0], strict=True):
                full.grad = half.grad.float() / self.loss_scaler.value
        norm = self.clip_master_grads(1.0)
        self.loss_scaler.update(self.overflow)
        if not self.overflow:
            self.optimizer.step()
            with torch.no_grad():
                for half, full in zip(self.fp16_groups[0], self.fp32_from_fp16_groups[0], strict=True):
                    half.copy_(full)
        return norm


class ApexScaler:
    """`apex.amp.scaler.LossScaler`."""

    def __init__(self) -> None:
        self._scale, self._overflow_buf = DynamicScale(), torch.zeros(1, dtype=torch.int32)

    def loss_scale(self) -> float:
        return self._scale.value

    def update_scale(self) -> bool:
        overflow = bool(self._overflow_buf.item())
        self._overflow_buf.zero_()
        self._scale.update(overflow)
        return overflow


class Apex(torch.optim.SGD):
    """An optimizer as `apex.amp.initialize(opt_level="O2")` leaves it."""

    def __init__(self, parameters: Sequence[Parameter], lr: float) -> None:
        masters = _masters(parameters)
        super().__init__(masters, lr=lr)
        self._amp_stash = SimpleNamespace(
            all_fp16_params=list(parameters),
            all_fp32_from_fp16_params=masters,
            all_fp32_from_fp32_params=[],
            all_fp32_from_fp32_grad_stash=[],
        )
        self.scaler = ApexScaler()

    def _amp_lazy_init(self) -> None:
        pass

    def _prepare_amp_backward(self) -> None:
        for half in self._amp_stash.all_fp16_params:
            half.grad = None

    def _post_amp_backward(self, scaler: ApexScaler) -> None:
        for half, full in zip(self._amp_stash.all_fp16_params, self._amp_stash.all_fp32_from_fp16_params, strict=True):
            if half.grad is None:
                continue
            if not _is_finite(half.grad):
                scaler._overflow_buf.fill_(1)
            unscaled = half.grad.float() / scaler.loss_scale()
            full.grad = unscaled if full.grad is None else full.grad + unscaled

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in (*self._amp_stash.all_fp16_params, *self._amp_stash.all_fp32_from_fp16_params):
            p.grad = None

    @contextmanager
    def scale_loss(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """`apex.amp.scale_loss(loss, optimizer)`."""
        self._prepare_amp_backward()
        yield loss.float() * self.scaler.loss_scale()
        self._post_amp_backward(self.scaler)

    def train_step(self, *losses: torch.Tensor) -> bool:
        """A step on accumulated gradients; whether it was skipped."""
        self.zero_grad()
        for loss in losses:
            with self.scale_loss(loss) as scaled:
                scaled.backward()
        if self.scaler.update_scale():
            return True
        self.step()
        with torch.no_grad():
            for half, full in zip(
                self._amp_stash.all_fp16_params, self._amp_stash.all_fp32_from_fp16_params, strict=True
            ):
                half.copy_(full)
        return False


def is_model_parallel_parameter(p: Any) -> bool:
    return getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False)


def masked(norm: torch.Tensor) -> torch.Tensor:
    """Return the replacement of an infinite or NaN norm, which differs between versions."""
    return norm.masked_fill(~norm.isfinite(), -1.0)


class DeepSpeed:
    """`deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer`: what its `step` asks of gradients."""

    cpu_offload = False
    device = "cpu"

    def __init__(self, gradients: dict[int, list[torch.Tensor | None]]) -> None:
        self.averaged_gradients, self.bit16_groups = gradients, [[]] * len(gradients)
        self.dp_process_group, self.model_parallel_rank = None, 0

    def _model_parallel_all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        pass

    @staticmethod
    def _has_inf_or_nan(gradient: torch.Tensor) -> torch.Tensor:
        return (~gradient.float().isfinite()).any().float()

    def has_overflow_serial(self, params: Sequence[Any]) -> torch.Tensor:
        count = torch.zeros(1)
        for p in params:
            if p.grad is not None:
                count += self._has_inf_or_nan(p.grad)
        return count.bool()

    def has_overflow_partitioned_grads_serial(self) -> torch.Tensor:
        count = torch.zeros(1)
        for index in range(len(self.bit16_groups)):
            for gradient in self.averaged_gradients[index]:
                if gradient is not None:
                    count += self._has_inf_or_nan(gradient)
        return count.bool()

    def get_grad_norm_direct(
        self, gradients: Sequence[torch.Tensor], params: Sequence[Any], norm_type: float = 2
    ) -> torch.Tensor:
        norms = [
            torch.linalg.vector_norm(g.double(), norm_type)
            for g, p in zip(gradients, params, strict=False)
            if not getattr(p, "ds_pipe_replicated", False)
            and (is_model_parallel_parameter(p) or self.model_parallel_rank == 0)
        ]
        total = torch.stack(norms).pow(norm_type).sum().float() if norms else torch.zeros(())
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
        return masked(total.pow(1 / norm_type))
