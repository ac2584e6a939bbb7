"""What is patched in PyTorch while a module is captured: only for the capturing thread, and undone at the end.

* A user's `torch.autograd.Function` would be inlined and its backward lost without a word: refused instead.
* Reentrant `torch.utils.checkpoint` makes PyTorch's export put everything after it under no_grad: its function is
  called directly.
* Hooks on tensors inside forward would be forgotten: refused.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from onnxtrain.capture import source_line
from onnxtrain.errors import CaptureError

CAPTURE_LOCK = threading.RLock()


@contextmanager
def capturing() -> Iterator[None]:
    """Holds the capture lock and the patches."""
    with CAPTURE_LOCK, ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # PyTorch copies its own treespecs in a way that it deprecates itself.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        # It looks for side effects too, and takes an LSTM's list of weights, which it exchanges itself, for one.
        warnings.filterwarnings("ignore", message="The tensor attribute", category=UserWarning)
        owner = threading.get_ident()
        stack.enter_context(_replaced(torch.autograd.Function, "apply", classmethod(_apply_for(owner))))
        for name, what in _LOST.items():
            stack.enter_context(_replaced(torch.Tensor, name, _refusal(owner, getattr(torch.Tensor, name), what)))
        yield


# What forward may do to a tensor inside, and a graph would forget.
_LOST = {
    "register_hook": "register_hook on a tensor inside forward",
    "retain_grad": "retain_grad on a tensor inside forward",
}


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = name in owner.__dict__
    before = owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _refusal(owner: int, original: Callable[..., Any], what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != owner:
            return original(*args, **kwargs)
        raise CaptureError(
            f"{what} cannot be captured: a graph has no such tensor",
            where=source_line.of_caller(),
            todo="the module runs in PyTorch; return the tensor from forward and use it there",
        )

    return refuse


def _apply_for(owner: int) -> Callable[..., Any]:
    original = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]  # a classmethod

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != owner:
            return original(cls, *args, **kwargs)
        return _apply_in_capture(cls, original, args, kwargs)

    return apply


def _apply_in_capture(cls: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if issubclass(cls, CheckpointFunction):
        run, _preserve_rng_state, *rest = args
        if any(isinstance(t, torch.Tensor) and t.requires_grad for t in rest):
            return run(*rest)
        with torch.no_grad():  # as in eager: a reentrant checkpoint of inputs without gradients gives none
            return run(*rest)
    if cls.__module__ == "torch.utils.checkpoint":
        return original(cls, *args, **kwargs)
    raise CaptureError(
        f"the custom autograd.Function {cls.__module__}.{cls.__qualname__} cannot be captured yet: "
        "its own backward would be lost",
        where=source_line.of_caller(),
        todo="the module runs in PyTorch; express it in PyTorch operators to have it captured",
    )
