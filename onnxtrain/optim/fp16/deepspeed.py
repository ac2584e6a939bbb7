"""DeepSpeed ZeRO stages 1 and 2: overflow and norm of all gradients in one call each.

Results and side effects differ between versions of DeepSpeed. Each replacement is therefore tried first, beside the
method that it replaces, on small gradients and without communication. If any result differs, the optimizer is
unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch

from onnxtrain.optim import gradients

Method = Callable[..., torch.Tensor]
_TOLERANCE = 1e-6  # of a norm: the replacement adds up in another order


def replace(optimizer: Any) -> str | None:
    """Replace the methods; return the reason if that is impossible."""
    if getattr(optimizer, "cpu_offload", False):
        return "with optimizer offload, DeepSpeed checks for overflow while it copies"
    replaced: dict[str, Method] = {}
    for name, make in _REPLACEMENTS.items():
        original = getattr(type(optimizer), name, None)
        if not isinstance(original, FunctionType):
            return f"expected an optimizer of ZeRO 1 or 2, but it lacks {name}"
        if difference := _difference(optimizer, name, original, make):
            return f"expected the {name} of DeepSpeed 0.15 to 0.19, but this version's {difference}"
        replaced[name] = make(original)
    for name, method in replaced.items():
        setattr(optimizer, name, MethodType(method, optimizer))
    return None


# The replacements, each made of the method of DeepSpeed that it replaces


def _overflow_of_parameters(original: FunctionType) -> Method:
    def has_overflow_serial(self: Any, params: Any) -> torch.Tensor:
        """Return whether any element of a parameter's gradient is infinite or NaN: bool [1]."""
        return _overflow(self, [p.grad for p in params if p.grad is not None])

    return has_overflow_serial


def _overflow_of_partitions(original: FunctionType) -> Method:
    def has_overflow_partitioned_grads_serial(self: Any) -> torch.Tensor:
        """Return whether any element of this rank's averaged gradients is infinite or NaN: bool [1]."""
        groups = [self.averaged_gradients[i] for i in range(len(self.bit16_groups))]
        return _overflow(self, [g for group in groups for g in group if g is not None])

    return has_overflow_partitioned_grads_serial


def _overflow(optimizer: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
    return gradients.found_non_finite(tensors, torch.device(optimizer.device)).bool()


def _norm(original: FunctionType) -> Method:
    def get_grad_norm_direct(self: Any, grads: Any, params: Any, norm_type: float = 2) -> torch.Tensor:
        """Return the norm of the gradients of all ranks, with replicated ones counted once: float32 [].

        DeepSpeed's own method reduces it over the ranks, of a single gradient: the norm of this rank's.
        """
        reduced: Method = original
        if float(norm_type) != 2.0:
            return reduced(self, grads, params, norm_type)
        is_model_parallel = original.__globals__["is_model_parallel_parameter"]
        counted = [
            (gradient.detach(), p)
            for gradient, p in zip((g for g in grads if not getattr(g, "_zero_padding", False)), params, strict=False)
            if not getattr(p, "ds_pipe_replicated", False) and (is_model_parallel(p) or self.model_parallel_rank == 0)
        ]
        own, owners = [g for g, _ in counted], [p for _, p in counted]
        if not own:
            return reduced(self, [], [], norm_type)
        norm = gradients.norm(own, torch.device(self.device)).reshape(1)
        return reduced(self, [norm], owners[:1], norm_type)

    return get_grad_norm_direct


_REPLACEMENTS: dict[str, Callable[[FunctionType], Method]] = {
    "has_overflow_serial": _overflow_of_parameters,
    "has_overflow_partitioned_grads_serial": _overflow_of_partitions,
    "get_grad_norm_direct": _norm,
}


# Trials


class _NoCommunication:
    """Stands for `deepspeed.comm` in a trial: it records reductions, and has nothing else."""

    def __init__(self, real: Any) -> None:
        self.ReduceOp = getattr(real, "ReduceOp", None)
        self.calls: list[tuple[Any, ...]] = []

    def all_reduce(self, tensor: torch.Tensor, op: Any = None, group: Any = None) -> None:
        self.calls.append((tuple(tensor.shape), tensor.dtype, op, group))


def _difference(optimizer: Any, name: str, theirs: FunctionType, make: Callable[[FunctionType], Method]) -> str:
    """Return how DeepSpeed's method behaves differently from its replacement; "" if it does not."""
    comm = _NoCommunication(theirs.__globals__.get("dist"))
    alone = FunctionType(
        theirs.__code__, {**theirs.__globals__, "dist": comm}, name, theirs.__defaults__, theirs.__closure__
    )
    ours = make(alone)
    for parts, rank in _trials(torch.device(optimizer.device)):
        results = []
        for method in (alone, ours):
            comm.calls.clear()
            try:
                result = method(_stand_in(optimizer, parts, rank, comm), *_arguments(name, parts))
            except Exception as error:  # noqa: BLE001  code of another library, of any version
                return f"cannot be tried: {type(error).__name__}: {error}"
            results.append((result, list(comm.calls)))
        (expected, expected_calls), (got, calls) = results
        if calls != expected_calls:
            return f"makes {len(expected_calls)} reductions over the ranks, where {len(calls)} were expected"
        if not _is_same(expected, got):
            return f"gives {expected}, where {got} was expected"
    return ""


def _trials(device: torch.device) -> Iterator[tuple[list[SimpleNamespace], int]]:
    """Return parameters with gradients, and a rank of model parallelism."""
    values = torch.linspace(-2, 3, 6, device=device)
    kinds: list[dict[str, Any]] = [
        {}, {"ds_pipe_replicated": True}, {"ds_pipe_replicated": False}, {"model_parallel": True},
        {"tensor_model_parallel": True},
    ]  # fmt: skip
    for rank in (0, 1):
        for last in (1.0, math.inf, -math.inf, math.nan):
            parts = [SimpleNamespace(grad=values * (1 + i), **kind) for i, kind in enumerate(kinds)]
            parts[-1].grad = parts[-1].grad.index_fill(0, torch.zeros(1, dtype=torch.int64, device=device), last)
            yield parts, rank
        yield [], rank
        yield [SimpleNamespace(grad=values.half())], rank


def _stand_in(optimizer: Any, parts: Sequence[SimpleNamespace], rank: int, comm: _NoCommunication) -> Any:
    """Return an optimizer of the same class that holds nothing but what the methods read."""
    stand_in = object.__new__(type(optimizer))
    vars(stand_in).update(
        device=optimizer.device,
        dp_process_group=None,
        model_parallel_rank=rank,
        bit16_groups=[[], []],
        averaged_gradients={0: [p.grad for p in parts], 1: [None]},
        _model_parallel_all_reduce=lambda tensor, op: comm.all_reduce(tensor, op, "model parallel"),
    )
    return stand_in


def _arguments(name: str, parts: list[SimpleNamespace]) -> tuple[Any, ...]:
    if name == "has_overflow_serial":
        return ([*parts, SimpleNamespace(grad=None)],)
    return ([p.grad for p in parts], parts) if name == "get_grad_norm_direct" else ()


def _is_same(expected: Any, got: torch.Tensor) -> bool:
    return (
        isinstance(expected, torch.Tensor)
        and (expected.dtype, expected.shape, expected.device) == (got.dtype, got.shape, got.device)
        and torch.allclose(expected.double(), got.double(), rtol=_TOLERANCE, atol=0, equal_nan=True)
    )
