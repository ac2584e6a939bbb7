"""Replace functions of PyTorch that are traced differently from how eager PyTorch runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from onnxtrain.capture.export import constant_masks, known_elements, packed_sequences, size_tensors
from onnxtrain.capture.export.meta_functions import is_channels_last
from onnxtrain.capture.node_storage import example_size


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


def _max_pool1d(original: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The kernel for CPUs that saves nothing for a gradient gives a contiguous result; tracing takes the other one."""
    keeps_strides = x.device.type != "cpu" or (torch.is_grad_enabled() and x.requires_grad)
    pooled: torch.Tensor = original(x if keeps_strides else _in_logical_order(x), *args, **kwargs)
    return pooled


def _channel_shuffle(original: Callable[..., Any], x: torch.Tensor, groups: int) -> torch.Tensor:
    """The kernel for CPUs keeps channels_last; tracing takes the composite, whose result is contiguous."""
    shuffled: torch.Tensor = original(x, groups)
    if x.device.type != "cpu" or not is_channels_last(*([*map(example_size, dims)] for dims in (x.shape, x.stride()))):
        return shuffled
    return shuffled.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def _in_logical_order(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or a contiguous copy if its dimensions are stored in another order."""
    axes = zip(x.shape, x.stride(), strict=True)
    strides = [example_size(stride) for size, stride in axes if example_size(size) != 1]
    return x if strides == sorted(strides, reverse=True) else x.contiguous()


def _getitem(original: Callable[..., Any], x: torch.Tensor, index: Any) -> Any:
    masked = partial(constant_masks.REPLACEMENTS[torch.Tensor.__getitem__], original)
    return packed_sequences.getitem(masked, x, index)


_REPLACEMENTS: Mapping[Any, Callable[..., Any]] = {
    **constant_masks.REPLACEMENTS,
    **known_elements.REPLACEMENTS,
    **size_tensors.REPLACEMENTS,
    **packed_sequences.REPLACEMENTS,
    torch.Tensor.__getitem__: _getitem,
    functional.one_hot: _one_hot,
    functional.max_pool1d: _max_pool1d,
    torch.channel_shuffle: _channel_shuffle,
    torch.max_pool1d: _max_pool1d,
    torch.native_channel_shuffle: _channel_shuffle,
}
