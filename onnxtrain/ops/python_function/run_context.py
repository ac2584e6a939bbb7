"""What surrounds a run of a user's function: autocast, a capture, the backward that it is part of."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeAlias

import numpy as np
import torch

from onnxtrain.torch_compat import dispatch

# Autocast

# Device type, element type; and whether casts of parameters are cached.
Autocast: TypeAlias = tuple[tuple[tuple[str, torch.dtype], ...], bool]


def autocast_of_now() -> Autocast | None:
    """The autocast of this thread; None where there is none."""
    if not dispatch.is_any_autocast_enabled():
        return None
    devices = tuple((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))
    return devices, torch.is_autocast_cache_enabled()


@contextmanager
def _under(autocast: Autocast) -> Iterator[None]:
    devices, cached = autocast
    with ExitStack() as stack:
        for device, dtype in devices:
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=cached))
        yield


def under(autocast: Autocast | None) -> AbstractContextManager[None]:
    """Switches this autocast on, where there is one."""
    return nullcontext() if autocast is None else _under(autocast)


# When the patched `apply` is to leave calls alone


class _Thread(threading.local):
    uncaptured = 0


_THREAD = _Thread()


@contextmanager
def uncaptured() -> Iterator[None]:
    """Calls of functions inside are run, even while this thread captures.

    PyTorch's modes that watch forward are off: they would write down switches of grad mode and autocast, and exchange
    collectives. What is drawn is not missed later: a function draws anew when the graph runs.
    """
    _THREAD.uncaptured += 1
    drawn = random.getstate(), np.random.get_state()  # noqa: NPY002  # the one that users draw from
    modes: list[Any] = []
    while dispatch.count_function_modes():
        modes.append(dispatch.pop_function_mode())
    kept = [mode for mode in reversed(modes) if dispatch.is_device_context(mode)]
    try:
        for mode in kept:
            dispatch.push_function_mode(mode)
        yield
    finally:
        for _ in kept:
            dispatch.pop_function_mode()
        for mode in reversed(modes):
            dispatch.push_function_mode(mode)
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])  # noqa: NPY002
        _THREAD.uncaptured -= 1


def is_uncaptured() -> bool:
    return _THREAD.uncaptured > 0


# Attempts at one backward


class GradientsChangedError(Exception):
    """A backward gave None for an input whose gradient the program computes with, or no None where one was expected."""


class _Backward(threading.local):
    gradients: dict[object, Sequence[torch.Tensor | None]] | None = None  # by the place in the graph
    autocast: Autocast | None = None


BACKWARD = _Backward()  # of this thread: gradients known by now, and the caller's autocast


def until_settled(run: Callable[[], Any], renew: Callable[[], None]) -> Any:
    """The result of `run`, a backward program; run again after `renew` where the inputs that get gradients changed.

    No user's backward runs twice for that.
    """
    before = BACKWARD.gradients, BACKWARD.autocast
    BACKWARD.gradients, BACKWARD.autocast = {}, autocast_of_now()
    try:
        while True:
            try:
                return run()
            except GradientsChangedError:
                renew()
    finally:
        BACKWARD.gradients, BACKWARD.autocast = before
