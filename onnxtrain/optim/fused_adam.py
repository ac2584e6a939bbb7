"""Adam and its variants in one fused kernel over all parameters of a kind.

    optimizer = FusedAdam(model.parameters(), lr=5e-5, weight_decay=0.01)

Source: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101; the modes are those of ONNX Runtime Training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch.optim import Optimizer

from onnxtrain.optim import gradients

_STEP = "step"


class AdamWMode(IntEnum):
    """Where the weight decay goes, and where epsilon stands against the correction of the bias."""

    ADAM_L2_REGULARIZATION = 0
    """The decay is a part of the gradient: `torch.optim.Adam`."""

    ADAMW_TRANSFORMERS = 1
    """Decay after the update, epsilon added before the correction: the AdamW of transformers."""

    ADAMW_TORCH = 2
    """Decay before the update: `torch.optim.AdamW`."""


class FusedAdam(Optimizer):
    """Adam whose step is one kernel per device and type.

    Args:
        params: the parameters, or dicts of groups, as for every optimizer of PyTorch.
        lr: the learning rate.
        bias_correction: correct the averages for their start at zero.
        betas: the factors of the running averages of the gradient and of its square.
        eps: added to the denominator.
        adam_w_mode: how weight decay is applied.
        weight_decay: its factor.
        set_grad_none: `zero_grad` drops the gradients instead of filling them with zeros.
        max_grad_norm: where given, each step first limits the 2-norm of all gradients to it. The limit is a factor
            inside the kernel: the gradients are read once for their norm and are not written for it. `grad_norm` holds
            the norm that was found.

    Each state has `exp_avg` and `exp_avg_sq`, each group `step`. A state of `torch.optim.Adam` or `AdamW` can be
    loaded. Under `torch.amp.GradScaler` the gradients are unscaled inside the kernel too.

    Raises:
        ValueError: a number that is out of its range.
        RuntimeError: in `step`, a gradient is sparse, or a parameter is not of a floating type.
    """

    _step_supports_amp_scaling = True  # GradScaler then leaves `grad_scale` and `found_inf` to the kernel

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        adam_w_mode: AdamWMode = AdamWMode.ADAMW_TRANSFORMERS,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        max_grad_norm: float | None = None,
    ) -> None:
        _check("lr", lr, "0 or more", lr >= 0)
        _check("eps", eps, "0 or more", eps >= 0)
        _check("betas", betas, "two numbers from 0 to below 1", len(betas) == 2 and all(0 <= b < 1 for b in betas))
        _check("weight_decay", weight_decay, "0 or more", weight_decay >= 0)
        _check("max_grad_norm", max_grad_norm, "more than 0", max_grad_norm is None or max_grad_norm > 0)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self._adam_w_mode = AdamWMode(adam_w_mode)
        self._set_grad_none = set_grad_none
        self.max_grad_norm = max_grad_norm
        self.grad_norm: torch.Tensor | None = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, or fills them with zeros where neither this argument nor `set_grad_none` drops them."""
        super().zero_grad(set_to_none=set_to_none or self._set_grad_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step.

        Args:
            closure: computes the loss and its gradients again.

        Returns:
            What the closure gives, else None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return loss
        factor = self._divisor()
        for group in self.param_groups:
            self._step_group(group, factor)
        return loss

    def _divisor(self) -> torch.Tensor | None:
        """What the gradients are divided by: the scale of the loss, times the excess over the largest norm."""
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        if self.max_grad_norm is None:
            return scale
        found = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        for gradient in found:
            _refuse_sparse(gradient)
        norm = gradients.norm(found)
        self.grad_norm = norm if scale is None else norm / scale.to(norm.device)
        excess = (self.grad_norm / self.max_grad_norm).clamp(min=1.0)
        return (excess if scale is None else excess * scale.to(norm.device)).float()

    def _step_group(self, group: dict[str, Any], divisor: torch.Tensor | None) -> None:
        group[_STEP] = group.get(_STEP, 0) + 1
        lists: list[list[torch.Tensor | None]] = [[], [], [], []]
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = self._state_of(parameter)
                for values, value in zip(
                    lists, (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]), strict=True
                ):
                    values.append(value)
        kinds = self._group_tensors_by_device_and_dtype(lists)
        for (device, _), (of_a_kind, _) in kinds.items():
            assert device is not None
            place = None if divisor is None else divisor.to(device)
            self._run(group, of_a_kind, place)  # type: ignore[arg-type]  # no tensor of these lists is None

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        assert parameter.grad is not None
        _refuse_sparse(parameter.grad)
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            if not parameter.is_floating_point():
                raise RuntimeError(f"FusedAdam takes parameters of floating types, got one of {parameter.dtype}.")
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _run(self, group: dict[str, Any], tensors: Sequence[list[torch.Tensor]], divisor: torch.Tensor | None) -> None:
        parameters, grads, averages, squares = tensors
        lr, decay, eps, count = float(group["lr"]), float(group["weight_decay"]), group["eps"], group[_STEP]
        beta1, beta2 = group["betas"]
        if self._adam_w_mode is AdamWMode.ADAMW_TRANSFORMERS:
            if group["bias_correction"]:
                eps /= math.sqrt(1 - beta2**count)  # the kernel adds it after the correction
            # (weight - update) * kept is weight * kept - update * kept: the kernel decays before it updates.
            kept = 1 - lr * decay
            if kept != 0:
                lr, decay = lr * kept, decay / kept
            else:  # all of the weight is decayed, and all of the update with it
                torch._foreach_zero_(parameters)
                lr, decay = 0.0, 0.0
        # With an endless count the corrections of the bias are one.
        steps = torch.full((), count if group["bias_correction"] else math.inf, device=parameters[0].device)
        kernel = torch._fused_adam_ if self._adam_w_mode is AdamWMode.ADAM_L2_REGULARIZATION else torch._fused_adamw_
        kernel(
            parameters,
            grads,
            averages,
            squares,
            [],
            [steps] * len(parameters),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=None,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every optimizer's; a state of `torch.optim.Adam` or `AdamW` is taken too.

        Raises:
            ValueError: the parameters of a group have made different numbers of steps.
        """
        super().load_state_dict(state_dict)
        for number, group in enumerate(self.param_groups):
            states = [self.state[p] for p in group["params"] if p in self.state]
            counts = {float(state.pop(_STEP)) for state in states if _STEP in state}
            if len(counts) > 1:
                raise ValueError(
                    f"The parameters of group {number} have made different numbers of steps, {sorted(counts)}: "
                    "FusedAdam counts them once a group. Put those of one count into a group of their own."
                )
            if counts:
                group[_STEP] = int(counts.pop())
            for name, value in self.defaults.items():
                group.setdefault(name, value)


def _check(name: str, value: object, expected: str, right: bool) -> None:
    if not right:
        raise ValueError(f"{name} is {value!r}; expected {expected}.")


def _refuse_sparse(gradient: torch.Tensor) -> None:
    if gradient.is_sparse:
        raise RuntimeError("FusedAdam takes no sparse gradients: use torch.optim.SparseAdam for these parameters.")
