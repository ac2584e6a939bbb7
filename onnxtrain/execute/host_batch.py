"""Keep the integers and booleans of a batch on the host after copying the batch to a device.

    batch on the host ─to_device─▶ batch on the device       copies that the host does not wait for
                      └──────────▶ its values on the host    looked up by the tensor, until it is changed

The number of tokens of a batch without padding must be known before a step begins (`packing`), the number of its labels
before the loss is launched (`NumberOnHost`). Reading them from the device would wait for all earlier work there,
because the batch may have been copied after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from onnxtrain.torch_compat.tensors import version_of


class _HostValues(NamedTuple):
    """A copy of a tensor on the host.

    Attributes:
        values: a tensor on the host, which no other code changes.
        version: that of the tensor on the device when it was made.
    """

    values: torch.Tensor
    version: int


_host_copies: MutableMapping[torch.Tensor, _HostValues] = WeakIdKeyDictionary()


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
    remember(copy, source)
    return copy


def remember(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Remember the values of a tensor on a device, until it is changed.

    Args:
        tensor: on the device. Nothing is remembered of inference tensors: without versions, changes are not seen.
        values: on the host; no other code changes them.
    """
    if not tensor.is_inference():
        _host_copies[tensor] = _HostValues(values, version_of(tensor))


def staged(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on the host, from which a copy to the device is asynchronous.

    A copy from pageable memory waits for earlier work of the stream if it is larger than 64 KB. PyTorch reuses pinned
    memory only after the copies that read it.
    """
    return torch.empty_like(tensor, pin_memory=device.type == "cuda").copy_(tensor)


def host_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a tensor on a device, on the host; None if the host does not know them."""
    entry = _host_copies.get(tensor)
    if entry is None or version_of(tensor) != entry.version or tensor.shape != entry.values.shape:
        return None
    return entry.values


def zeros_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros of the shape and dtype of a tensor, on the CPU and in the memory of one element."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


class NumberOnHost:
    """Computes a number that a program reads from the device, from batches whose integers the host knows.

    Attributes:
        run: computes, on the CPU, the tensor that the number depends on; of floating tensors it reads the shapes only.
        start: makes the number from that tensor.
    """

    def __init__(self, run: Callable[..., tuple[Sequence[Any], Any]], start: Callable[[torch.Tensor], Any]) -> None:
        self.run, self.start = run, start

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Return the number; None if the host does not know the tensors."""
        arguments = [zeros_on_host(t) if t.is_floating_point() else host_values(t) for t in tensors]
        if any(values is None for values in arguments):
            return None
        return self.start(self.run(arguments, ())[0][0])
