"""Adam and AdamW as one fused kernel over all parameters of a device and dtype.

    optimizer = FusedAdam(model.parameters(), lr=5e-5, weight_decay=0.01)

Source: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101. The modes are those of ONNX Runtime Training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch.optim import Optimizer

from onnxtrain.optim import gradients
from onnxtrain.torch_compat.dynamo import untraced
from onnxtrain.torch_compat.optimizer_kernels import foreach_multiply, foreach_zero, fused_adam, fused_adamw

_STEP = "step"


class AdamWMode(IntEnum):
    """The variant of weight decay, and of the order of epsilon and bias correction."""

    ADAM_L2_REGULARIZATION = 0
    """L2 regularization, added to the gradient, as in `torch.optim.Adam`."""

    ADAMW_TRANSFORMERS = 1
    """Decay after the update, epsilon before bias correction, as in transformers' AdamW."""

    ADAMW_TORCH = 2
    """Decay before the update, as in `torch.optim.AdamW`."""


class FusedAdam(Optimizer):
    """Adam whose step is one kernel per device and dtype.

    Args:
        params: parameters or dicts of parameter groups, as for any PyTorch optimizer.
        lr: the learning rate.
        bias_correction: whether the moments are corrected for their start at zero.
        betas: the decay rates of the first and the second moment.
        eps: added to the denominator.
        adam_w_mode: see `AdamWMode`.
        weight_decay: the coefficient of weight decay.
        set_grad_none: whether `zero_grad` sets gradients to None instead of zero.
        max_grad_norm: if given, gradients are clipped to this 2-norm over all of them. The clipping factor is applied
            inside the kernel, after one read of the gradients for their norm. `grad_norm` then holds the norm before
            clipping.

    The state of a parameter is `exp_avg` and `exp_avg_sq`, that of a group `step`. State dicts of torch.optim's Adam
    and AdamW can be loaded. With `torch.amp.GradScaler`, gradients are unscaled inside the kernel, which also skips the
    update after an overflow: the host does not wait for the device, and `step` is then a tensor on the device. The
    exception is `ADAMW_TRANSFORMERS` with parameters that are not float32: the host reads whether to skip.

    Raises:
        ValueError: an argument is out of range.
        RuntimeError: in `step`, a gradient is sparse or a parameter is not of a floating-point dtype.
    """

    _step_supports_amp_scaling = True  # GradScaler then passes `grad_scale` and `found_inf` on to `step`

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
        _check("lr", lr, "a number >= 0", lr >= 0)
        _check("eps", eps, "a number >= 0", eps >= 0)
        _check("betas", betas, "two numbers in [0, 1)", len(betas) == 2 and all(0 <= b < 1 for b in betas))
        _check("weight_decay", weight_decay, "a number >= 0", weight_decay >= 0)
        _check("max_grad_norm", max_grad_norm, "a number > 0", max_grad_norm is None or max_grad_norm > 0)
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
        """Set gradients to None, or to zero if both `set_to_none` and the constructor's `set_grad_none` are False."""
        super().zero_grad(set_to_none=set_to_none or self._set_grad_none)

    @torch.no_grad()
    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Args:
            closure: recomputes the loss and the gradients.

        Returns:
            The result of the closure; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skip: torch.Tensor | None = getattr(self, "found_inf", None)
        if skip is not None:
            skip = skip.reshape(()).clamp(max=1.0)  # GradScaler sums it over devices; the kernel compares it with 1
        divisor = self._divisor()
        for group in self.param_groups:
            self._step_group(group, divisor, skip)
        return loss

    def _divisor(self) -> torch.Tensor | None:
        """Return the divisor of the gradients: the loss scale times the excess of their norm over `max_grad_norm`."""
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        if self.max_grad_norm is None:
            return scale
        all_gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        for gradient in all_gradients:
            _refuse_sparse(gradient)
        norm = gradients.norm(all_gradients)
        self.grad_norm = norm if scale is None else norm / scale.to(norm.device)
        excess = (self.grad_norm / self.max_grad_norm).clamp(min=1.0)
        return excess if scale is None else excess * scale.to(norm.device)

    def _step_group(self, group: dict[str, Any], divisor: torch.Tensor | None, skip: torch.Tensor | None) -> None:
        before = group.get(_STEP, 0)
        if skip is None:
            count = group[_STEP] = int(before) + 1
        else:
            count = before + torch.ones_like(skip)
            group[_STEP] = count - skip
        lists: list[list[torch.Tensor]] = [[], [], [], []]
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = self._state_of(parameter)
                for values, value in zip(
                    lists, (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]), strict=True
                ):
                    values.append(value)
        for tensors in gradients.group_lists(lists):
            device = tensors[0][0].device
            shared: list[Any] = [count, divisor, skip]
            shared = [s.to(device, non_blocking=True) if isinstance(s, torch.Tensor) else s for s in shared]
            self._run(group, tensors, *shared)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        assert parameter.grad is not None
        _refuse_sparse(parameter.grad)
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            if not parameter.is_floating_point():
                raise RuntimeError(f"FusedAdam expects parameters of a floating-point dtype, got {parameter.dtype}.")
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _run(
        self,
        group: dict[str, Any],
        tensors: Sequence[list[torch.Tensor]],
        count: int | torch.Tensor,
        divisor: torch.Tensor | None,
        skip: torch.Tensor | None,
    ) -> None:
        parameters, grads, *_ = tensors
        if divisor is not None and divisor.dtype is torch.float64:
            if parameters[0].dtype is torch.float64:  # the kernel's divisor is float32
                foreach_multiply(grads, divisor.reciprocal())
                divisor = None
            else:
                divisor = divisor.float()
        if self._adam_w_mode is AdamWMode.ADAMW_TRANSFORMERS:
            if skip is not None and parameters[0].dtype is torch.float32:
                self._run_transformers_on_device(group, tensors, count, divisor, skip)
            elif skip is None or not skip.item():
                self._run_transformers(group, tensors, float(count), divisor)
            return
        # An infinite step count makes both bias corrections 1.
        _call_kernel(
            fused_adam if self._adam_w_mode is AdamWMode.ADAM_L2_REGULARIZATION else fused_adamw,
            group,
            tensors,
            count if group["bias_correction"] else math.inf,
            divisor,
            skip,
            {"lr": float(group["lr"]), "weight_decay": float(group["weight_decay"]), "eps": group["eps"]},
        )

    def _run_transformers(
        self,
        group: dict[str, Any],
        tensors: Sequence[list[torch.Tensor]],
        count: float,
        divisor: torch.Tensor | None,
    ) -> None:
        lr, decay, eps = float(group["lr"]), float(group["weight_decay"]), group["eps"]
        if group["bias_correction"]:
            eps /= math.sqrt(1 - group["betas"][1] ** count)  # the kernel adds it after bias correction
        else:
            count = math.inf
        # The kernel decays before the update: (weight - update) * factor is weight * factor - update * factor.
        factor = 1 - lr * decay
        if factor != 0:
            lr, decay = lr * factor, decay / factor
        else:  # weight and update decay to zero
            foreach_zero(tensors[0])
            lr, decay = 0.0, 0.0
        settings = {"lr": lr, "weight_decay": decay, "eps": eps}
        _call_kernel(fused_adamw, group, tensors, count, divisor, None, settings)

    def _run_transformers_on_device(
        self,
        group: dict[str, Any],
        tensors: Sequence[list[torch.Tensor]],
        count: int | torch.Tensor,
        divisor: torch.Tensor | None,
        skip: torch.Tensor,
    ) -> None:
        """Update parameters, of which only the device knows the number of steps.

        The kernel takes epsilon from the host, so its bias corrections are part of the learning rate. It multiplies the
        decay by the learning rate, so the weights decay afterwards.
        """
        lr, decay = torch.full_like(skip, float(group["lr"]), dtype=torch.float64), float(group["weight_decay"])
        factor = 1 - lr * decay
        if group["bias_correction"]:
            counts = torch.zeros_like(lr) + count
            first, second = (1 - beta**counts for beta in group["betas"])
            lr = lr * second.sqrt() / first
        settings = {"lr": lr.float(), "weight_decay": 0.0, "eps": group["eps"]}
        _call_kernel(fused_adamw, group, tensors, math.inf, divisor, skip, settings)
        if decay != 0:
            foreach_multiply(tensors[0], factor.masked_fill(skip > 0, 1.0).float())

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict. The numbers of steps are integers, as without a gradient scaler."""
        state = super().state_dict()
        for group in state["param_groups"]:
            if _STEP in group:
                group[_STEP] = int(group[_STEP])
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of FusedAdam, `torch.optim.Adam` or `torch.optim.AdamW`.

        Raises:
            ValueError: the parameters of a group have different step counts.
        """
        super().load_state_dict(state_dict)
        for number, group in enumerate(self.param_groups):
            states = [self.state[p] for p in group["params"] if p in self.state]
            counts = {float(state.pop(_STEP)) for state in states if _STEP in state}
            if len(counts) > 1:
                raise ValueError(
                    f"The parameters of group {number} have different numbers of steps, {sorted(counts)}: FusedAdam "
                    "counts steps per group. Put parameters with equal numbers of steps into a group of their own."
                )
            if counts:
                group[_STEP] = int(counts.pop())
            for name, value in self.defaults.items():
                group.setdefault(name, value)


def _call_kernel(
    kernel: Callable[..., None],
    group: dict[str, Any],
    tensors: Sequence[list[torch.Tensor]],
    count: float | torch.Tensor,
    divisor: torch.Tensor | None,
    skip: torch.Tensor | None,
    settings: dict[str, Any],
) -> None:
    parameters, grads, averages, squares = tensors
    device = parameters[0].device
    steps = count if isinstance(count, torch.Tensor) else torch.full((), count, dtype=torch.float32, device=device)
    beta1, beta2 = group["betas"]
    kernel(
        parameters,
        grads,
        averages,
        squares,
        [],
        [steps] * len(parameters),
        beta1=beta1,
        beta2=beta2,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
        found_inf=skip,
        **settings,
    )


def _check(name: str, value: object, expected: str, is_valid: bool) -> None:
    if not is_valid:
        raise ValueError(f"{name} is {value!r}; expected {expected}.")


def _refuse_sparse(gradient: torch.Tensor) -> None:
    if gradient.is_sparse:
        raise RuntimeError(
            "FusedAdam expects dense gradients, got a sparse one: use torch.optim.SparseAdam for these parameters."
        )
