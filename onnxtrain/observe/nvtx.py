"""NVTX ranges for NVIDIA's profilers; without CUDA they have no effect."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def torch_nvtx_range_push(msg: str) -> None:
    """Push an NVTX range."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(msg)


def torch_nvtx_range_pop() -> None:
    """Pop the innermost NVTX range."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()


def nvtx_function_decorator(fn: Callable[P, R]) -> Callable[P, R]:
    """Wrap each call of a function in an NVTX range with its name."""

    @functools.wraps(fn)
    def ranged(*args: P.args, **kwargs: P.kwargs) -> R:
        torch_nvtx_range_push(fn.__qualname__)
        try:
            return fn(*args, **kwargs)
        finally:
            torch_nvtx_range_pop()

    return ranged
