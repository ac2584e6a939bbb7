"""Access the state of PyTorch's dispatcher: autocast, modes, the profiler, registered kernels."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import BaseTorchFunctionMode

from onnxtrain.torch_compat.internal import Internal, missing
from onnxtrain.torch_compat.modes import function_modes

_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


def _any_autocast_by_device() -> bool:
    return any(torch.is_autocast_enabled(device) for device in _AUTOCAST_DEVICES)


is_any_autocast_enabled = Internal[Callable[[], bool]](
    "is_any_autocast_enabled",
    lambda: torch._C._is_any_autocast_enabled,
    why="called at every step; the public function takes one device at a time",
    fallback=_any_autocast_by_device,
    cost="a step takes about a microsecond longer",
    check=lambda part: part() == _any_autocast_by_device(),
).get()

profiler_enabled = Internal[Callable[[], bool]](
    "profiler_enabled",
    lambda: torch._C._autograd._profiler_enabled,
    why="programs name their nodes for the profiler only while it runs; no public function says so",
    fallback=lambda: False,
    cost="the profiler's table has ATen operators but no nodes",
    check=lambda part: part() in (True, False),
).get()


count_function_modes = Internal[Callable[[], int]](
    "count_function_modes",
    lambda: torch._C._len_torch_function_stack,
    why="called at every step: takes 0.05 us instead of 2",
    fallback=lambda: len(function_modes()),
    cost="a step takes about two microseconds longer",
    check=lambda part: part() == len(function_modes()),
).get()


def _hides_modes(disabled: Callable[[], AbstractContextManager[Any]]) -> bool:
    with BaseTorchFunctionMode(), disabled():
        return torch.ones(2).shape == (2,)


function_modes_disabled = Internal[Callable[[], AbstractContextManager[Any]]](
    "function_modes_disabled",
    lambda: torch._C.DisableTorchFunction,
    why="in a trace, each read of a tensor's shape or dtype goes through four modes of torch.overrides: 20 us",
    fallback=nullcontext,
    cost="the capture of a model with repeated blocks takes a few percent longer",
    check=_hides_modes,
).get()


def _find_function_mode_stack() -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return torch._C._pop_torch_function_stack, torch._C._push_on_torch_function_stack


def _returns_a_pushed_mode(part: tuple[Callable[[], Any], Callable[[Any], None]]) -> bool:
    pop, push = part
    mode = BaseTorchFunctionMode()
    push(mode)
    return pop() is mode


pop_function_mode, push_function_mode = Internal[tuple[Callable[[], Any], Callable[[Any], None]]](
    "function_mode_stack",
    _find_function_mode_stack,
    why="operators inside a custom autograd function must not go through the modes of the trace",
    fallback=(missing("function_mode_stack"),) * 2,
    cost="modules with custom autograd functions run in PyTorch",
    check=_returns_a_pushed_mode,
).get()


has_kernel_for_key = Internal[Callable[[str, str], bool]](
    "has_kernel_for_key",
    lambda: torch._C._dispatch_has_kernel_for_dispatch_key,
    why="tells composite operators, which have no kernel of their own",
    fallback=lambda name, key: False,
    cost="composite operators are not decomposed; modules that call them run in PyTorch",
    check=lambda part: (
        part("aten::linear", "CompositeImplicitAutograd") and not part("aten::add.Tensor", "CompositeImplicitAutograd")
    ),
).get()


def _find_device_context() -> Callable[[object], bool]:
    device_context = importlib.import_module("torch.utils._device").DeviceContext
    return lambda mode: isinstance(mode, device_context)


def _is_named_device_context(mode: object) -> bool:
    return type(mode).__name__ == "DeviceContext"


is_device_context = Internal[Callable[[object], bool]](
    "is_device_context",
    _find_device_context,
    why="`with torch.device(...)` and torch.set_default_device apply inside custom functions too, unlike other modes",
    fallback=_is_named_device_context,
    cost="they are distinguished from other modes by the name of their class",
    check=lambda part: not part(None),
).get()


def _register_publicly(library: torch.library.Library, operator: str, function: Callable[..., Any]) -> None:
    with contextlib.suppress(RuntimeError):  # 2.11 and 2.12 refuse operators that have a kernel for meta tensors
        torch.library.register_fake(operator, function, lib=library)


def _find_register_fake() -> Callable[[torch.library.Library, str, Callable[..., Any]], None]:
    find = torch._library.simple_registry.singleton.find

    def register(library: torch.library.Library, operator: str, function: Callable[..., Any]) -> None:
        source = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
        registered = find(operator).fake_impl.register(function, source, lib=library, allow_override=True)
        library._registration_handles.append(registered)

    return register


def _registers_fake(register: Callable[[torch.library.Library, str, Callable[..., Any]], None]) -> bool:
    library = torch.library.Library("onnxtrain_check", "DEF")
    try:
        library.define("half(Tensor x) -> Tensor")
        register(library, "onnxtrain_check::half", lambda x: x.new_empty(x.shape[0] // 2))
        half: torch.Tensor = torch.ops.onnxtrain_check.half(torch.empty(6, device="meta"))
        return half.shape == (3,)
    finally:
        library._destroy()


register_fake = Internal[Callable[[torch.library.Library, str, Callable[..., Any]], None]](
    "register_fake",
    _find_register_fake,
    why="the public function calls Python's inspect to find its caller, which searches the files of all modules",
    fallback=_register_publicly,
    cost="importing onnxtrain takes up to 40 ms longer; on 2.11 and 2.12 modules with ctc_loss or lstsq run in PyTorch",
    check=callable,
    agrees=_registers_fake,
).get()


def _has_no_fake(operator: str) -> bool:
    return False


has_fake = Internal[Callable[[str], bool]](
    "has_fake",
    lambda: lambda operator: torch._library.simple_registry.singleton.find(operator).fake_impl.kernel is not None,
    why="tells for which operators this PyTorch has a meta function; no public function does",
    fallback=_has_no_fake,
    cost="onnxtrain's meta functions of three operators take precedence over PyTorch's",
    check=lambda part: not part("aten::add.Tensor"),
).get()


def _is_not_recorded(below_autograd: Callable[[], AbstractContextManager[Any]]) -> bool:
    with below_autograd():
        return not torch.ones(1, requires_grad=True).neg().requires_grad


below_autograd = Internal[Callable[[], AbstractContextManager[Any]]](
    "below_autograd",
    lambda: torch._C._AutoDispatchBelowAutograd,
    why="oneDNN's LSTM saves values for backward only in grad mode, but autograd must not record it",
    fallback=nullcontext,
    cost="autograd records the LSTM, and the record is discarded",
    check=_is_not_recorded,
).get()
