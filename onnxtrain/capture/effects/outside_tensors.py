"""Tensors that forward reads besides its arguments, parameters and buffers: graph inputs, or constants.

An input may change in place between calls. A tensor whose elements forward reads as Python numbers is a constant: the
graph is right for these elements only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from onnxtrain.capture.key.surroundings import Surroundings, memory_key
from onnxtrain.torch_compat.patch_points import TENSOR_READS
from onnxtrain.torch_compat.tensors import is_fake


class OutsideTensors:
    """The outside tensors of one capture.

    Attributes:
        read: tensors whose elements forward read as Python numbers.
    """

    def __init__(self) -> None:
        self.read: list[torch.Tensor] = []
        self._held: set[Hashable] = set()
        self._names: dict[Hashable, str] = {}
        self._devices: set[torch.device] = set()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record which tensors this thread reads as Python numbers; fake tensors have no elements to read."""
        with ExitStack() as stack:
            for point in TENSOR_READS:
                stack.enter_context(point.replaced_in_thread(self._noting(point.original)))
            yield

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any) -> Any:
            if not is_fake(tensor) and memory_key(tensor) is not None:
                self.read.append(tensor)
            return original(tensor, *args)

        return read

    def find(
        self,
        module: torch.nn.Module,
        reads: Collection[tuple[int, str]],
        examples: Iterable[torch.Tensor],
        decided_by: Iterable[Any],
    ) -> None:
        """Find the outside tensors that can be graph inputs.

        Args:
            module: the user's module.
            reads: the attributes of modules that forward read.
            examples: the call's tensors. A tensor on another device can only be a constant.
            decided_by: tensors that guards hold.
        """
        held = [*self.read, *(value for value in decided_by if isinstance(value, torch.Tensor))]
        self._held = {memory_key(tensor) for tensor in held}
        self._names = Surroundings(module, reads).tensor_names()
        self._devices = {tensor.device for tensor in examples}

    def name(self, tensor: torch.Tensor) -> str:
        """The name of a tensor that can be a graph input; "" for any other."""
        fits = not self.is_held(tensor) and (tensor.device in self._devices or not tensor.dim())
        return self._names.get(memory_key(tensor), "") if fits else ""

    def is_held(self, tensor: torch.Tensor) -> bool:
        """Whether the graph depends on the elements of a tensor."""
        return memory_key(tensor) in self._held
