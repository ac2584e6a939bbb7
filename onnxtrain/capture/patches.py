"""What is patched in PyTorch while a module is captured: only for the capturing thread, and undone at the end.

* A user's `torch.autograd.Function` would be inlined and its backward lost without a word: refused instead.
* Reentrant `torch.utils.checkpoint` makes PyTorch's export put everything after it under no_grad: its function is
  called directly.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from onnxtrain.capture import source_line
from onnxtrain.errors import CaptureError

CAPTURE_LOCK = threading.RLock()


@contextmanager
def capturing() -> Iterator[None]:
    """Holds the capture lock and the patches."""
    owner = threading.get_ident()
    with CAPTURE_LOCK, warnings.catch_warnings():
        # PyTorch copies its own treespecs in a way that it deprecates itself.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        function: Any = torch.autograd.Function
        base: Any = next(c for c in function.__mro__ if "apply" in c.__dict__)
        original = base.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != owner:
                return original.__get__(None, cls)(*args, **kwargs)
            return _apply_in_capture(cls, original, args, kwargs)

        patched = function is not base and "apply" in function.__dict__
        before = function.__dict__.get("apply")
        function.apply = classmethod(apply)
        try:
            yield
        finally:
            if patched:
                function.apply = before
            elif function is base:
                function.apply = original
            else:
                del function.apply


def _apply_in_capture(cls: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if issubclass(cls, CheckpointFunction):
        run, _preserve_rng_state, *rest = args
        return run(*rest)
    if cls.__module__ == "torch.utils.checkpoint":
        return original.__get__(None, cls)(*args, **kwargs)
    raise CaptureError(
        f"the custom autograd.Function {cls.__module__}.{cls.__qualname__} cannot be captured yet: "
        "its own backward would be lost",
        where=source_line.of_caller(),
        todo="the module runs in PyTorch; express it in PyTorch operators to have it captured",
    )
