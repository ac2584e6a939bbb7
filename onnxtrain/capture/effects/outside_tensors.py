"""Make tensors that forward reads from outside its arguments, parameters and buffers graph inputs, or constants.

A graph input may change in place between calls. A tensor whose elements forward reads as Python numbers is a constant:
the graph is valid only for these elements.
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
        constants: tensors whose elements forward read as Python numbers.
    """

    def __init__(self) -> None:
        self.constants: list[torch.Tensor] = []
        self._constant_memory: set[Hashable] = set()
        self._names: dict[Hashable, str] = {}
        self._devices: set[torch.device] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record which tensors this thread reads as Python numbers; fake tensors have no elements to read."""
        with ExitStack() as stack:
            for point in TENSOR_READS:
                stack.enter_context(point.replaced_in_thread(self._recording(point.original)))
            yield

    def _recording(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any) -> Any:
            if not is_fake(tensor) and memory_key(tensor) is not None:
                self.constants.append(tensor)
            return original(tensor, *args)

        return read

    def find(
        self,
        module: torch.nn.Module,
        reads: Collection[tuple[int, str]],
        examples: Iterable[torch.Tensor],
        guarded: Iterable[Any],
    ) -> None:
        """Find the outside tensors that can be graph inputs.

        Args:
            module: the user's module.
            reads: the attributes of modules that forward read.
            examples: the call's tensors. A tensor on another device can only be a constant.
            guarded: values that guards hold; the tensors among them are constants.
        """
        constants = [*self.constants, *(value for value in guarded if isinstance(value, torch.Tensor))]
        self._constant_memory = {memory_key(tensor) for tensor in constants}
        self._names = Surroundings(module, reads).tensor_names()
        self._devices = {tensor.device for tensor in examples}

    def name(self, tensor: torch.Tensor) -> str:
        """Return the name of a tensor that can be a graph input; "" for any other."""
        can_be_input = not self.is_constant(tensor) and (tensor.device in self._devices or not tensor.dim())
        return self._names.get(memory_key(tensor), "") if can_be_input else ""

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Return whether the graph is valid only for the elements that a tensor has now."""
        return memory_key(tensor) in self._constant_memory
