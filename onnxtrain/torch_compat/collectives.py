"""Access the functional collectives of torch.distributed, and whether a loss is to be computed from sharded logits."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from onnxtrain.torch_compat.internal import Internal, missing

# Functions of (tensor, …, name of the process group) that return a tensor to be waited for.
functional_collectives = Internal[Any](
    "functional_collectives",
    lambda: torch.ops._c10d_functional,
    why="the public collectives write into their arguments; the functional ones have no public name",
    fallback=missing("functional_collectives"),
    cost="modules with DTensor parameters run in PyTorch",
    check=lambda part: callable(part.all_reduce) and callable(part.wait_tensor),
).get()


class _Completed(torch.autograd.Function):
    """The plain tensor that an asynchronous collective returns, once it is complete."""

    @staticmethod
    def forward(ctx: Any, pending: Any) -> torch.Tensor:
        return pending.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def completed(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a tensor that an asynchronous collective returned; return any other as it is."""
    if type(tensor).__name__ != "AsyncCollectiveTensor":
        return tensor
    return _Completed.apply(tensor)  # type: ignore[no-untyped-call]


def _find_is_loss_parallel() -> Callable[[], bool]:
    dispatcher = importlib.import_module("torch.distributed.tensor").DTensor._op_dispatcher
    return lambda: torch.ops.aten._log_softmax.default in dispatcher._custom_op_handlers


def _always() -> bool:
    return True


is_loss_parallel = Internal[Callable[[], bool]](
    "is_loss_parallel",
    _find_is_loss_parallel,
    why="the context manager loss_parallel leaves no public trace",
    fallback=_always,
    cost="the loss of logits that are sharded over classes is computed from shards outside of loss_parallel, too",
    check=lambda part: part() in (True, False),
)
