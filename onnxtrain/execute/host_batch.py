"""Batches whose integers and booleans the host still knows after it copied them to a device.

    batch on the host ─to_device─▶ batch on the device       copies that the host does not wait for
                      └──────────▶ its values on the host    looked up by the tensor, as long as nobody changes that

The number of tokens of a batch without padding must be known before a step begins (`packing`). To read it from the
device means to wait for all earlier work there: the batch may have been copied after it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from onnxtrain.torch_compat.tensors import version_of


class _HostValues(NamedTuple):
    """What the host knows of a tensor.

    Attributes:
        values: a tensor on the host, which nobody else changes.
        version: that of the tensor on the device when it was made.
    """

    values: torch.Tensor
    version: int


_known: MutableMapping[torch.Tensor, _HostValues] = WeakIdKeyDictionary()


def to_device(batch: Any, device: torch.device | str) -> Any:
    """Copy a batch to a device, so that a step on it does not wait for the device to skip padding.

    Floating-point tensors are copied as by `Tensor.to(device, non_blocking=True)`: do not change those in pinned memory
    before the copy has ended. Others may be changed afterwards.

    Args:
        batch: a tensor, or a nested mapping, list or tuple of tensors and other values.
        device: the device of the model.

    Returns:
        The batch, with dicts in place of mappings, and its tensors on the device.
    """
    target = torch.device(device)
    if isinstance(batch, torch.Tensor):
        return _copied(batch, target)
    if isinstance(batch, Mapping):
        return {key: to_device(value, target) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, target) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, target) for value in batch)
    return batch


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    decides = not (tensor.is_floating_point() or tensor.is_complex())
    if not decides or device.type == "cpu" or tensor.device.type != "cpu" or type(tensor) is not torch.Tensor:
        return tensor.to(device, non_blocking=True)
    source = staged(tensor, device)
    copy = source.to(device, non_blocking=True)
    if not copy.is_inference():
        _known[copy] = _HostValues(source, version_of(copy))
    return copy


def staged(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on the host, from which a copy to the device is asynchronous.

    A copy from pageable memory waits for earlier work of the stream if it is larger than 64 KB. PyTorch reuses pinned
    memory only after the copies that read it.
    """
    return torch.empty_like(tensor, pin_memory=device.type == "cuda").copy_(tensor)


def host_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a tensor on a device, on the host; None if the host does not know them."""
    known = _known.get(tensor)
    if known is None or version_of(tensor) != known.version or tensor.shape != known.values.shape:
        return None
    return known.values
