"""Replace functions of PyTorch that are traced differently from how eager PyTorch runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from onnxtrain.capture.export import constant_masks, packed_sequences, size_tensors


class TracedFunctions(TorchFunctionMode):
    """Replace the functions on this thread.

    A mode, not a patch of the class: after `del torch.Tensor.__getitem__`, Python takes every tensor for a sequence, so
    that `torch.tensor([torch.tensor(1)])` fails for the rest of the process.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        replacement = _REPLACEMENTS.get(function)
        if replacement is None:
            return function(*args, **(kwargs or {}))
        return replacement(function, *args, **(kwargs or {}))


def _one_hot(original: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """The kernel's result is contiguous; that of the comparison that tracing records has the strides of the labels."""
    result: torch.Tensor = original(*args, **kwargs)
    return result.contiguous()


def _getitem(original: Callable[..., Any], x: torch.Tensor, index: Any) -> Any:
    masked = partial(constant_masks.REPLACEMENTS[torch.Tensor.__getitem__], original)
    return packed_sequences.getitem(masked, x, index)


_REPLACEMENTS: Mapping[Any, Callable[..., Any]] = {
    **constant_masks.REPLACEMENTS,
    **size_tensors.REPLACEMENTS,
    **packed_sequences.REPLACEMENTS,
    torch.Tensor.__getitem__: _getitem,
    functional.one_hot: _one_hot,
}
