"""Which ops read a number from the device, and how the host gets it without waiting for what was launched since."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from onnxtrain.ops.interfaces import OpInterface


class PendingInt:
    """An integer on its way from the device to the host, in the order of the stream that computes it."""

    def __init__(self, number: torch.Tensor) -> None:
        """Launch the copy of a tensor of one element."""
        self._copy, self._event = number, None
        if number.is_cuda:
            self._copy = torch.empty_like(number, device="cpu", pin_memory=True)
            self._copy.copy_(number, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(number.device))

    def result(self) -> int:
        """Wait for the copy alone, and return the integer."""
        if self._event is not None:
            self._event.synchronize()
        return int(self._copy)


class HostRead(NamedTuple):
    """How an op with one tensor output reads a number from the device.

    Attributes:
        reads: the name of the input that the number depends on.
        start: launches the copy of the number, from the input.
        finish: (input, pending) -> the output of the op.
        fill: (input, output) -> an output of more elements, which readers ignore; there are few different numbers of
            elements. None: readers read all elements.
    """

    reads: str
    start: Callable[[torch.Tensor], PendingInt]
    finish: Callable[[torch.Tensor, PendingInt], torch.Tensor]
    fill: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None


HOST_READS = OpInterface[HostRead]("host reads", names=lambda read: (read.reads,))
