"""Refuse in-place changes of tensors from outside the module, and undo the changes that tracing made.

    TABLE.add_(1)        tracing runs this on the global tensor itself, because it does not depend on an input

Such a forward runs in PyTorch, which then makes the change.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from onnxtrain.capture import source_location
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat.modes import is_transformed
from onnxtrain.torch_compat.pytree import tree_leaves
from onnxtrain.torch_compat.tensors import version_of

_REAL_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class OutsideChanges(TorchFunctionMode):
    """Restore the real tensors that are changed in place inside this context.

    Raises:
        CaptureError: on exit, if a tensor was changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor, int, str | None]] = {}
        # Real tensors created inside the context, for example by the trial run of a custom function.
        self._created: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _may_mutate(function, kwargs):
            for leaf in _real_tensors(args, kwargs):
                if id(leaf) not in self._before and not self._is_created(leaf):
                    line = source_location.of_trace(source_location.stack_trace(sys._getframe(1)))
                    self._before[id(leaf)] = leaf, _copy(leaf), version_of(leaf), line
        result = function(*args, **kwargs)
        if type(result) in _REAL_TYPES and all(map(self._is_created, _real_tensors(args, kwargs))):
            self._created[id(result)] = result
        return result

    def _is_created(self, tensor: torch.Tensor) -> bool:
        return self._created.get(id(tensor)) is tensor

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        changed = [(t, before, line) for t, before, version, line in self._before.values() if version_of(t) != version]
        self._before.clear()
        with torch.no_grad():
            for tensor, before, _ in changed:
                tensor.copy_(before)
        if changed and error[0] is None:
            tensor, _, line = changed[0]
            raise CaptureError(
                "forward changes a tensor in place that belongs neither to the module nor to the call",
                where=line,
                expected="in-place changes of registered buffers, or of arguments of forward",
                got=f"{type(tensor).__name__} {list(tensor.shape)} from a global, an attribute or another object",
                todo="the module runs in PyTorch; register the tensor as a buffer",
            )


def _real_tensors(args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) in _REAL_TYPES and not is_transformed(leaf)]


def _may_mutate(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(function, "__name__", "").partition(".")[0]
    if name.endswith("_") and not name.endswith("__"):
        return True
    return name == "__setitem__" or name.startswith("__i") or "out" in kwargs or bool(kwargs.get("inplace"))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor on another thread, where the trace's modes are not active."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: tensor.detach().clone()).result()
