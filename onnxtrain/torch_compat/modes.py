"""Access modes and global settings that a graph depends on, and modes in which a capture runs operators."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from onnxtrain.torch_compat.internal import Internal, required

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    TorchDispatchMode = required(
        "dispatch_mode",
        lambda: importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode,
        "sees the operators that an operator or a user's function calls; documented, in a private module",
        check=lambda part: callable(part.__torch_dispatch__),
    )


# Modes of the caller


def _find_modes() -> tuple[Callable[[], Sequence[Any]], Callable[[], Sequence[Any]]]:
    dispatch = importlib.import_module("torch.utils._python_dispatch")._get_current_dispatch_mode_stack
    return importlib.import_module("torch.overrides")._get_current_function_mode_stack, dispatch


function_modes, dispatch_modes = required(
    "mode_stacks",
    _find_modes,
    "a module inside a mode of torch.overrides or torch.utils runs in PyTorch, so that the mode sees its operators",
    check=lambda part: all(isinstance(stack(), list) for stack in part),
    fallback=(tuple, tuple),
)


count_dispatch_modes = Internal[Callable[[], int]](
    "count_dispatch_modes",
    lambda: torch._C._len_torch_dispatch_stack,
    why="called at every step: takes 0.05 us instead of 2",
    fallback=lambda: len(dispatch_modes()),
    cost="a step takes about two microseconds longer",
    check=lambda part: part() == len(dispatch_modes()),
).get()

# torch.func

_TRANSFORMS = required(
    "functorch_transforms",
    lambda: (torch._C._functorch.maybe_current_level, torch._C._are_functorch_transforms_active),
    "a module inside vmap, grad or jvp runs in PyTorch; no public function tells this",
    check=lambda part: isinstance(part[0](), int | None) and isinstance(part[1](), bool),
    fallback=(lambda: None, lambda: False),
)
transform_level: Callable[[], int | None] = _TRANSFORMS[0]
is_inside_transform: Callable[[], bool] = _TRANSFORMS[1]


is_transformed = required(
    "functorch_values",
    lambda: torch._C._functorch.is_functorch_wrapped_tensor,
    "tensors inside vmap, grad or jvp belong to the transform, and have no storage; no public function tells this",
    check=lambda part: not part(torch.empty(0)),
    fallback=lambda tensor: False,
)


def _forward_ad_level() -> int:
    return forward_ad._current_level


forward_ad_level = required(
    "forward_ad_level",
    lambda: _forward_ad_level,
    "a module under forward-mode differentiation runs in PyTorch; no public function tells this",
    check=lambda part: isinstance(part(), int),
    fallback=lambda: -1,
)


def _find_layers() -> tuple[Callable[[], int], Callable[[int], None]]:
    functorch = torch._C._functorch
    return functorch.get_dynamic_layer_stack_depth, functorch.pop_dynamic_layer_stack_and_undo_to_depth


transform_depth, leave_transforms = Internal[Any](
    "transform_layers",
    _find_layers,
    why="a graph of torch.compile enters and leaves transforms by calls; an error in between leaves them entered",
    fallback=(lambda: 0, lambda depth: None),
    cost="after an error in a graph of torch.compile that calls torch.func, the thread stays inside the transform",
    check=lambda part: part[0]() >= 0 and callable(part[1]),
).get()

# Global settings


def _public_switches() -> tuple[Hashable, ...]:
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.fp16_bf16_reduction_math_sdp_allowed(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _find_switches() -> Callable[[], tuple[Hashable, ...]]:
    c = torch._C
    flash, efficient = c._get_flash_sdp_enabled, c._get_mem_efficient_sdp_enabled
    math, cudnn = c._get_math_sdp_enabled, c._get_cudnn_sdp_enabled
    reductions, precision = c._get_math_sdp_allow_fp16_bf16_reduction, c._get_float32_matmul_precision
    deterministic, warns = c._get_deterministic_algorithms, c._get_deterministic_algorithms_warn_only

    def switches() -> tuple[Hashable, ...]:
        return flash(), efficient(), math(), cudnn(), reductions(), precision(), deterministic(), warns()

    return switches


kernel_switches = Internal[Callable[[], tuple[Hashable, ...]]](
    "kernel_switches",
    _find_switches,
    why="called at every step; the public functions are Python wrappers of the same",
    fallback=_public_switches,
    cost="a step takes about a microsecond longer",
    check=lambda part: part() == _public_switches(),
).get()

# Autocast


def _find_autocast_inside() -> Callable[[str], tuple[AbstractContextManager[Any], ...]]:
    exclude, include = torch._C._SetExcludeDispatchKeyGuard, torch._C._IncludeDispatchKeyGuard
    keys = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}

    def inside(device: str) -> tuple[AbstractContextManager[Any], ...]:
        return exclude(keys[device], False), include(keys[device])

    return inside


def _casts(autocast_inside: Callable[[str], tuple[AbstractContextManager[Any], ...]]) -> bool:
    x = torch.ones(1, 1)
    off, on = autocast_inside("cpu")
    with torch.autocast("cpu", torch.bfloat16), off, on:
        return torch.mm(x, x).dtype == torch.bfloat16


autocast_inside_operators = required(
    "autocast_inside_operators",
    _find_autocast_inside,
    "functionalization switches autocast off inside operators, where composite operators cast",
    check=_casts,
)


def _casts_nothing(autocast_disabled: Callable[[], AbstractContextManager[Any]]) -> bool:
    x = torch.ones(1, 1)
    with torch.autocast("cpu", torch.bfloat16), autocast_disabled():
        return torch.mm(x, x).dtype == x.dtype


autocast_disabled = Internal[Callable[[], AbstractContextManager[Any]]](
    "autocast_disabled",
    lambda: torch._C._DisableAutocast,
    why="the public context manager is for one device",
    fallback=nullcontext,
    cost="gradients of operators without a definition may be traced with casts, and then run in PyTorch",
    check=_casts_nothing,
).get()


def _find_autocast_calls() -> tuple[Any, Any]:
    module = importlib.import_module("torch.amp.autocast_mode")
    return module._enter_autocast, module._exit_autocast


enter_autocast, exit_autocast = Internal[Any](
    "autocast_calls",
    _find_autocast_calls,
    why="graphs of torch.compile call them to enter and leave autocast",
    fallback=(None, None),
    cost="graphs of torch.compile with autocast inside run in PyTorch",
    check=lambda part: all(map(callable, part)),
).get()

# Hooks


def _top_saved_tensors_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


has_saved_tensors_hooks = Internal[Callable[[], bool]](
    "has_saved_tensors_hooks",
    lambda: lambda: _top_saved_tensors_hooks() is not None,
    why="tells whether saved-tensor hooks must be kept from fake tensors, and whether a checkpoint reruns the module",
    fallback=lambda: True,
    cost="hooks are disabled at every capture; a module that returns token-level results runs with padding",
    check=lambda part: isinstance(part(), bool),
).get()
