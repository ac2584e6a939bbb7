"""The state of PyTorch's dispatcher: autocast, modes, the profiler, registered kernels."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import BaseTorchFunctionMode

from onnxtrain.torch_compat.internal import Internal

_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


def _any_autocast_by_device() -> bool:
    return any(torch.is_autocast_enabled(device) for device in _AUTOCAST_DEVICES)


is_any_autocast_enabled = Internal[Callable[[], bool]](
    "is_any_autocast_enabled",
    lambda: torch._C._is_any_autocast_enabled,
    why="asked at every call; the public function asks for one device at a time",
    without=_any_autocast_by_device,
    cost="a call takes about a microsecond longer",
    check=lambda found: found() == _any_autocast_by_device(),
).get()

profiler_enabled = Internal[Callable[[], bool]](
    "profiler_enabled",
    lambda: torch._C._autograd._profiler_enabled,
    why="programs name their nodes for the profiler only while it runs; there is no public question",
    without=lambda: False,
    cost="the profiler's table names ATen operators but no nodes",
    check=lambda found: found() in (True, False),
).get()


def _no_function_modes() -> int:
    return 0


count_function_modes = Internal[Callable[[], int]](
    "count_function_modes",
    lambda: torch._C._len_torch_function_stack,
    why="what custom autograd functions call must not go through the modes of whoever runs the graph",
    without=_no_function_modes,
    cost="modes of torch.overrides see the operators inside of custom autograd functions twice",
    check=lambda found: found() >= 0,
).get()


def _returns_a_pushed_mode(_: object) -> bool:
    push, pop, mode = (
        torch._C._push_on_torch_function_stack,
        torch._C._pop_torch_function_stack,
        BaseTorchFunctionMode(),
    )
    push(mode)
    return pop() is mode


def _no_mode() -> Any:
    raise AssertionError("there are no modes")  # count_function_modes says so


pop_function_mode = Internal[Callable[[], Any]](
    "pop_function_mode",
    lambda: torch._C._pop_torch_function_stack,
    why="see count_function_modes",
    without=_no_mode,
    cost="see count_function_modes",
    check=_returns_a_pushed_mode,
).get()

push_function_mode = Internal[Callable[[Any], None]](
    "push_function_mode",
    lambda: torch._C._push_on_torch_function_stack,
    why="see count_function_modes",
    without=lambda mode: None,
    cost="see count_function_modes",
    check=_returns_a_pushed_mode,
).get()


has_kernel_for_key = Internal[Callable[[str, str], bool]](
    "has_kernel_for_key",
    lambda: torch._C._dispatch_has_kernel_for_dispatch_key,
    why="tells operators that are composed of others, which have no kernel of their own",
    without=lambda name, key: False,
    cost="operators that are composed of others are not decomposed; modules that call such run in PyTorch",
    check=lambda found: (
        found("aten::linear", "CompositeImplicitAutograd")
        and not found("aten::add.Tensor", "CompositeImplicitAutograd")
    ),
).get()


def _find_device_context() -> Callable[[object], bool]:
    device_context = importlib.import_module("torch.utils._device").DeviceContext
    return lambda mode: isinstance(mode, device_context)


def _is_called_device_context(mode: object) -> bool:
    return type(mode).__name__ == "DeviceContext"


is_device_context = Internal[Callable[[object], bool]](
    "is_device_context",
    _find_device_context,
    why="`with torch.device(...)` and torch.set_default_device hold in custom functions too, unlike other modes",
    without=_is_called_device_context,
    cost="they are told from other modes by the name of their class",
    check=lambda found: not found(None),
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
    why="the public function asks Python's inspect for the caller, which looks through all files of all modules",
    without=_register_publicly,
    cost="importing onnxtrain takes up to 40 ms longer; on 2.11 and 2.12 modules with ctc_loss or lstsq run in PyTorch",
    check=callable,
    agrees=_registers_fake,
).get()


def _has_no_fake(operator: str) -> bool:
    return False


has_fake = Internal[Callable[[str], bool]](
    "has_fake",
    lambda: lambda operator: torch._library.simple_registry.singleton.find(operator).fake_impl.kernel is not None,
    why="tells operators that PyTorch has shapes for by now; there is no public question",
    without=_has_no_fake,
    cost="our shapes of three operators take precedence over PyTorch's",
    check=lambda found: not found("aten::add.Tensor"),
).get()


def _is_not_recorded(found: Callable[[], AbstractContextManager[Any]]) -> bool:
    with found():
        return not torch.ones(1, requires_grad=True).neg().requires_grad


below_autograd = Internal[Callable[[], AbstractContextManager[Any]]](
    "below_autograd",
    lambda: torch._C._AutoDispatchBelowAutograd,
    why="oneDNN's LSTM asks the grad mode what to keep, and is not to be recorded by autograd",
    without=nullcontext,
    cost="the LSTM's own tape is made and dropped",
    check=_is_not_recorded,
).get()
