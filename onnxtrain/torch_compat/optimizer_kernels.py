"""Access PyTorch's kernels for lists of tensors (foreach, fused optimizers, gradient scaling), with formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxtrain.torch_compat.aten_kernels import has_schema
from onnxtrain.torch_compat.internal import Internal

Tensors = tuple[torch.Tensor, ...] | list[torch.Tensor]


def _tensors(*rows: float) -> list[torch.Tensor]:
    return [torch.tensor([row, -2 * row]) for row in rows]


# Fused optimizers


def _adam_formula(is_decoupled: bool) -> Callable[..., None]:
    """Kingma and Ba 2015, https://arxiv.org/abs/1412.6980; with decoupled weight decay, Loshchilov and Hutter 2019."""

    def step(
        params: Tensors,
        grads: Tensors,
        exp_avgs: Tensors,
        exp_avg_sqs: Tensors,
        max_exp_avg_sqs: Tensors,
        state_steps: Tensors,
        *,
        lr: float | torch.Tensor,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        if found_inf is not None and found_inf.item():
            return
        for parameter, grad, mean, square, count in zip(params, grads, exp_avgs, exp_avg_sqs, state_steps, strict=True):
            if grad_scale is not None:
                grad.div_(grad_scale)
            if is_decoupled:
                parameter.mul_(1 - lr * weight_decay)
                gradient = grad
            else:
                gradient = grad.add(parameter, alpha=weight_decay)
            mean.lerp_(gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            root = square.sqrt().div_((1 - beta2**count).sqrt()).add_(eps)
            parameter.sub_(mean / root * (lr / (1 - beta1**count)))

    return step


_ADAM_ARGUMENTS = (
    "self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps "
    "lr beta1 beta2 weight_decay eps amsgrad maximize grad_scale found_inf"
)


def _adam_agrees(formula: Callable[..., None]) -> Callable[[Callable[..., None]], bool]:
    def agrees(kernel: Callable[..., None]) -> bool:
        results = []
        for step in (kernel, formula):
            after = []
            for lr, skip in ((0.1, None), (torch.tensor(0.1), torch.zeros(())), (0.1, torch.ones(()))):
                lists = [
                    _tensors(0.5, 1.0),
                    _tensors(0.1, -0.3),
                    _tensors(0.2, 0.1),
                    [t.abs() for t in _tensors(0.3, 2.0)],
                ]
                options = {"lr": lr, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-6}
                rest = {"amsgrad": False, "maximize": False, "grad_scale": torch.tensor(2.0), "found_inf": skip}
                step(*lists, [], [torch.tensor(3.0)] * 2, **options, **rest)
                after += [*lists[0], *lists[2], *lists[3]]
            results.append(after)
        pairs = zip(*results, strict=True)
        return all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)

    return agrees


def _fused(name: str, find: Callable[[], Any], is_decoupled: bool) -> Callable[..., None]:
    formula = _adam_formula(is_decoupled)
    return Internal[Callable[..., None]](
        name,
        find,
        why="one kernel for all parameters; the public functions decay differently and count steps per parameter",
        fallback=formula,
        cost="an optimizer step takes about ten kernels per parameter",
        check=has_schema(f"_{name}_", _ADAM_ARGUMENTS, results=0),
        agrees=_adam_agrees(formula),
    ).get()


fused_adam = _fused("fused_adam", lambda: torch._fused_adam_, is_decoupled=False)
fused_adamw = _fused("fused_adamw", lambda: torch._fused_adamw_, is_decoupled=True)

# Lists of gradients


def _elements_after(kernel: Callable[[Tensors], None], *rows: float) -> list[list[float]]:
    tensors = _tensors(*rows)
    kernel(tensors)
    return [tensor.tolist() for tensor in tensors]


def _zero(tensors: Tensors) -> None:
    for tensor in tensors:
        tensor.zero_()


foreach_zero = Internal[Callable[[Tensors], None]](
    "foreach_zero",
    lambda: torch._foreach_zero_,
    why="one kernel for all tensors",
    fallback=_zero,
    cost="one kernel per tensor",
    check=has_schema("_foreach_zero_", "self", results=0),
    agrees=lambda kernel: _elements_after(kernel, 1.0, 2.0) == [[0.0, 0.0], [0.0, 0.0]],
).get()


def _copy(targets: Tensors, sources: Tensors) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _copies(kernel: Callable[[Tensors, Tensors], None]) -> bool:
    return _elements_after(lambda tensors: kernel(tensors, _tensors(5.0, 6.0)), 1.0, 2.0) == [
        [5.0, -10.0],
        [6.0, -12.0],
    ]


foreach_copy = Internal[Callable[[Tensors, Tensors], None]](
    "foreach_copy",
    lambda: torch._foreach_copy_,
    why="one kernel for all tensors",
    fallback=_copy,
    cost="one kernel per tensor",
    check=has_schema("_foreach_copy_", "self src", results=0),
    agrees=_copies,
).get()


def _multiply(tensors: Tensors, factor: float | torch.Tensor) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def _foreach_multiply(tensors: Tensors, factor: float | torch.Tensor) -> None:
    torch._foreach_mul_(tensors, factor)


def _multiplies(kernel: Callable[[Tensors, float | torch.Tensor], None], factor: float | torch.Tensor) -> bool:
    return _elements_after(lambda tensors: kernel(tensors, factor), 1.0) == [[3.0, -6.0]]


# A factor that is a tensor is on the tensors' device, and has their dtype: the product would round it to that.
foreach_multiply = Internal[Callable[[Tensors, float | torch.Tensor], None]](
    "foreach_multiply",
    lambda: _foreach_multiply,
    why="one kernel for all tensors",
    fallback=_multiply,
    cost="one kernel per tensor",
    check=has_schema("_foreach_mul_.Scalar", "self scalar", results=0),
    agrees=lambda kernel: _multiplies(kernel, 3.0) and _multiplies(kernel, torch.tensor(3.0)),
).get()


def _norms(tensors: Tensors, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors]


def _foreach_norm(tensors: Tensors, dtype: torch.dtype) -> Sequence[torch.Tensor]:
    return torch._foreach_norm(tensors, 2, dtype=dtype)


foreach_norm = Internal[Callable[[Tensors, torch.dtype], Sequence[torch.Tensor]]](
    "foreach_norm",
    lambda: _foreach_norm,
    why="the 2-norms of all tensors in one kernel",
    fallback=_norms,
    cost="one kernel per tensor",
    check=has_schema("_foreach_norm.Scalar", "self ord dtype"),
    agrees=lambda norms: torch.allclose(
        torch.stack([*norms(_tensors(1.0, 3.0), torch.float64)]), torch.stack(_norms(_tensors(1.0, 3.0), torch.float64))
    ),
).get()


def _check_and_unscale(tensors: Tensors, non_finite: torch.Tensor, factor: torch.Tensor) -> None:
    for tensor in tensors:
        non_finite.copy_(torch.maximum(non_finite, (~tensor.isfinite().all()).to(non_finite.dtype)))
        tensor.mul_(factor)


def _unscale_agrees(kernel: Callable[..., None]) -> bool:
    for row, expected in ((1.0, 0.0), (float("inf"), 1.0)):
        tensors, non_finite = _tensors(row), torch.zeros(1)
        kernel(tensors, non_finite, torch.tensor(0.5))
        if non_finite.item() != expected or tensors[0].tolist() != [row / 2, -row]:
            return False
    return True


check_and_unscale = Internal[Callable[[Tensors, torch.Tensor, torch.Tensor], None]](
    "check_and_unscale",
    lambda: torch._amp_foreach_non_finite_check_and_unscale_,
    why="GradScaler's kernel: unscales and checks all gradients in one pass",
    fallback=_check_and_unscale,
    cost="several kernels per gradient",
    check=has_schema("_amp_foreach_non_finite_check_and_unscale_", "self found_inf inv_scale", results=0),
    agrees=_unscale_agrees,
).get()
