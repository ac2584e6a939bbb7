"""The `torch.autograd.Function` that stands for a function which samples: its calls are captured as PythonOps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch

Call: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any]], torch.Tensor]

_CLASSES: WeakValueDictionary[Any, Any] = WeakValueDictionary()


def sampling_class(function: Callable[..., Any], module_name: str, call: Call) -> Any:
    """Return the class whose forward returns `call(args, kwargs)`; the same one for each call of the user's function.

    Args:
        function: the user's function; errors give its source location.
        module_name: the name of its module.
        call: calls it, and returns the samples as a tensor.
    """
    existing = _CLASSES.get(function)
    if existing is not None:
        return existing

    def forward(_ctx: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        return call(args, kwargs)

    forward.__wrapped__ = function  # type: ignore[attr-defined]
    members = {
        "__module__": module_name,
        "__qualname__": getattr(function, "__qualname__", function.__name__),
        "forward": staticmethod(forward),
        "has_checked_sizes": True,
    }
    created = _CLASSES[function] = type(function.__name__, (torch.autograd.Function,), members)
    return created
