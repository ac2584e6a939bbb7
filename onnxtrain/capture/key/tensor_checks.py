"""Check that tensors still have the facts of a snapshot: PyTorch's check in C++, and an exact one in Python."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxtrain.capture.structure import PLAIN_TENSORS
from onnxtrain.torch_compat.tensors import TENSOR_GUARDS, negated_view

_TensorGuards: Any = TENSOR_GUARDS.get()

TENSOR_FACT_NAMES = ("type", "requires_grad", "dtype", "shape", "device")


def state_tensor_facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a capture depends on in a tensor of the module's state, except its values."""
    kind = type(tensor)
    kind = torch.Tensor if kind in PLAIN_TENSORS else kind
    return kind, tensor.requires_grad, tensor.dtype, tensor.shape, tensor.device


def cpp_check(
    tensors: Sequence[torch.Tensor], dynamic_tensors: Sequence[torch.Tensor] = ()
) -> Callable[..., bool] | None:
    """Return PyTorch's check in C++ of all facts and the exact class; None if this PyTorch has none that works.

    Args:
        tensors: checked with their sizes.
        dynamic_tensors: checked except for their sizes.
    """
    return _cpp_check(tensors, dynamic_tensors) if detects_every_fact() else None


def _cpp_check(tensors: Sequence[torch.Tensor], dynamic_tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    if _TensorGuards is None:
        return None
    sizes = [*(list(tensor.shape) for tensor in tensors), *([None] * tensor.dim() for tensor in dynamic_tensors)]
    tensors = [*tensors, *dynamic_tensors]
    any_strides: list[list[None]] = [[None] * tensor.dim() for tensor in tensors]
    try:
        guards = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=any_strides)
    except (TypeError, RuntimeError, ValueError):
        return None
    check: Callable[..., bool] = guards.check
    return check


@functools.cache
def detects_every_fact() -> bool:
    """Return whether the C++ check of this PyTorch detects a change of each fact."""
    if negated_view is None:
        return False
    with torch.inference_mode(False), torch.no_grad():
        plain = torch.zeros(2, 3, dtype=torch.float32, device="cpu")
        different = [
            *(plain.double(), plain.to("meta"), plain.clone().requires_grad_(), plain.as_subclass(_Subclass)),
            *(plain[0], negated_view(plain), plain.to_sparse(), torch.nn.Parameter(plain, requires_grad=False)),
        ]
        with torch.inference_mode():
            different.append(plain.clone())
        resized = plain.new_zeros(3, 3)
    static, dynamic = _cpp_check([plain], ()), _cpp_check((), [plain])
    if static is None or dynamic is None:
        return False
    detected = [check(plain) and not any(map(check, different)) for check in (static, dynamic)]
    return all(detected) and dynamic(resized) and not static(resized)


class _Subclass(torch.Tensor):
    pass


class PythonCheck:
    """A check that tensors have these facts, which a snapshot or a key holds."""

    def __init__(self, facts_of: Callable[[torch.Tensor], tuple[Any, ...]], tensors: Sequence[torch.Tensor]) -> None:
        self._facts_of = facts_of
        self._facts = [*map(facts_of, tensors)]

    def __call__(self, *tensors: torch.Tensor) -> bool:
        return [*map(self._facts_of, tensors)] == self._facts
