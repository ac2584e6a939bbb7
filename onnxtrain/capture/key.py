"""What besides the structure of a call decides which capture serves it.

Three parts, each read on every call: `environment()` (autocast, grad mode and other switches of PyTorch),
`tensor_facts()` of each input, and the state of the module: `ModuleState`. A state is a snapshot of everything that
forward can read in Python. Checking one costs microseconds: a function is generated from the snapshot, which compares
by identity and type what can be compared so, and returns the module's tensors as it finds them on the way. Where an
identity changed, a second snapshot decides whether a value changed.
"""

from __future__ import annotations

import enum
import functools
import operator
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, NoneType
from typing import Any, TypeAlias

import torch
from torch.nn.modules import module as torch_module

from onnxtrain.errors import CaptureError

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
Reads: TypeAlias = Collection[tuple[int, str]]  # (id of a module, name of an attribute)


# The environment

_NAMES = (
    "grad mode", "inference mode", "autocast on CPU", "its dtype", "autocast on CUDA", "its dtype", "autocast cache",
    "default dtype", "flash attention", "memory-efficient attention", "math attention", "cuDNN attention",
    "float32 matmul precision", "deterministic algorithms", "deterministic warn-only", "torch.func transforms",
    "torch function modes", "torch dispatch modes",
)  # fmt: skip


def environment() -> tuple[Hashable, ...]:
    """The switches of PyTorch, in this thread and now, that forward may depend on."""
    c = torch._C
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        c._get_flash_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(),
        c._get_math_sdp_enabled(),
        c._get_cudnn_sdp_enabled(),
        c._get_float32_matmul_precision(),
        c._get_deterministic_algorithms(),
        c._get_deterministic_algorithms_warn_only(),
        c._functorch.maybe_current_level(),
        c._len_torch_function_stack(),
        c._len_torch_dispatch_stack(),
    )
