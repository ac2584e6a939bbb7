"""The context of a run of a user's function: autocast, the capture around it, the backward that it is part of."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from onnxtrain.torch_compat import dispatch
from onnxtrain.torch_compat.fake_tensors import without_fakes

# Autocast

# Pairs of device type and element type; and whether casts of parameters are cached.
Autocast: TypeAlias = tuple[tuple[tuple[str, torch.dtype], ...], bool]


def current_autocast() -> Autocast | None:
    """Return the autocast state of this thread; None if it is off."""
    if not dispatch.is_any_autocast_enabled():
        return None
    devices = tuple((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))
    return devices, torch.is_autocast_cache_enabled()


@contextmanager
def _enabled_autocast(autocast: Autocast) -> Iterator[None]:
    devices, cached = autocast
    with ExitStack() as stack:
        for device, dtype in devices:
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=cached))
        yield


def autocast_context(autocast: Autocast | None) -> AbstractContextManager[None]:
    """Return a context with this autocast; one without effect for None."""
    return nullcontext() if autocast is None else _enabled_autocast(autocast)


# Python's and numpy's generators

PythonStates: TypeAlias = tuple[Any, Any]


def python_states() -> PythonStates:
    """Return the states of the generators of Python and numpy that users sample from."""
    return random.getstate(), np.random.get_state()  # noqa: NPY002


def set_python_states(states: PythonStates) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002


@contextmanager
def python_states_kept() -> Iterator[None]:
    """Restore the states at the end."""
    states = python_states()
    try:
        yield
    finally:
        set_python_states(states)


# Runs that the patched `apply` does not capture


class _Thread(threading.local):
    uncaptured = 0


_THREAD = _Thread()


@contextmanager
def uncaptured() -> Iterator[None]:
    """Run the functions called inside, even while this thread captures.

    PyTorch's function modes that trace forward are off: they would record switches of grad mode and autocast, and
    replace collectives. The states of Python's and numpy's generators are restored: a function samples again when the
    graph runs.
    """
    modes: list[Any] = []
    while dispatch.count_function_modes():
        modes.append(dispatch.pop_function_mode())  # before all else: it raises if this PyTorch lacks it
    device_modes = [mode for mode in reversed(modes) if dispatch.is_device_context(mode)]
    states = python_states()
    _THREAD.uncaptured += 1
    try:
        for mode in device_modes:
            dispatch.push_function_mode(mode)
        yield
    finally:
        for _ in device_modes:
            dispatch.pop_function_mode()
        for mode in reversed(modes):
            dispatch.push_function_mode(mode)
        set_python_states(states)
        _THREAD.uncaptured -= 1


@contextmanager
def untraced() -> Iterator[None]:
    """Run the code inside on real tensors as if this thread traced nothing."""
    with uncaptured(), disable_proxy_modes_tracing(), without_fakes():
        yield


def is_uncaptured() -> bool:
    return _THREAD.uncaptured > 0


# Attempts at one backward


class GradientsChangedError(Exception):
    """A backward returned None for a gradient that the program reads, or a gradient that the program takes for None."""


class _Backward(threading.local):
    gradients: dict[object, Sequence[torch.Tensor | None]] | None = None  # by node
    autocast: Autocast | None = None


BACKWARD = _Backward()  # of this thread: gradients computed so far, and the caller's autocast


def rerun_until_settled(run: Callable[[], Any], renew: Callable[[], None]) -> Any:
    """Return the result of `run`, a backward program; after `renew`, rerun it if other inputs have gradients.

    The user's backward functions run once.
    """
    outer = BACKWARD.gradients, BACKWARD.autocast
    BACKWARD.gradients, BACKWARD.autocast = {}, current_autocast()
    try:
        while True:
            try:
                return run()
            except GradientsChangedError:
                renew()
    finally:
        BACKWARD.gradients, BACKWARD.autocast = outer
