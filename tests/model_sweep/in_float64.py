"""Run a model in float64 whose code names float32.

`x.float()` and `softmax(x, dtype=torch.float32)` leave x in float64: otherwise it would be rounded, and a layer would
get two dtypes. `torch.finfo(x.dtype).min`, with which models mask scores, is that of float32: float64's is -inf there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from onnxtrain.torch_compat import pytree
from onnxtrain.torch_compat.replacement import replaced


class _NoFloat32(TorchFunctionMode):
    """Leave tensors in float64 where a function would convert them to float32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(t.dtype == torch.float64 for t in tensors):
            if func is torch.Tensor.float:
                return args[0]
            args, kwargs = pytree.tree_map(lambda a: torch.float64 if a is torch.float32 else a, (args, kwargs))
        return func(*args, **kwargs)


@contextmanager
def in_float64() -> Iterator[None]:
    """Run a model's code in float64 throughout."""
    finfo = torch.finfo

    def of_float32(dtype: torch.dtype = torch.float32) -> torch.finfo:
        return finfo(torch.float32 if dtype == torch.float64 else dtype)

    with replaced(torch, "finfo", of_float32), _NoFloat32():
        yield
