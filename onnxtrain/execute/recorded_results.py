"""The results of a recording: tensors in its memory, which the next replay overwrites.

    replay ──> memory of a result ──> a tensor that shares it     while such a tensor is alive, nothing is replayed
                                 └──> a copy of it                if that would prevent a later replay

Each memory has a storage of its own, made once by DLPack, and only tensors that were returned share it. Its number
of references tells whether one is alive: the user's, one that autograd saved, or a view of either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch.utils import dlpack

from onnxtrain.graph.alias import AliasSets
from onnxtrain.ops import definition_of
from onnxtrain.plan.cut import Part
from onnxtrain.torch_compat.tensors import is_view, storage_id, storage_use_count

Output = Callable[[Mapping[int, torch.Tensor], Sequence[torch.Tensor]], torch.Tensor | None]  # of arguments, memories


class NotRecordedError(RuntimeError):
    """A program cannot be recorded; the message is the reason, without a full stop."""


class ResultMemory:
    """The memory of a result, or of several results that share it.

    Attributes:
        template: a tensor in it.
        results: the indices of the results.
        is_copied: whether each replay returns a copy.
    """

    def __init__(
        self, tensor: torch.Tensor, results: Collection[int], is_copied: bool, is_argument: bool = False
    ) -> None:
        """Hold the memory; `is_argument`: it is that of an argument, which later recordings never overwrite."""
        self.results = frozenset(results)
        self.is_copied = is_copied or storage_use_count is None
        self._is_argument = is_argument
        self._hold(tensor if self.is_copied else _in_storage_of(dlpack.from_dlpack(_bytes(tensor)), tensor))

    def _hold(self, template: torch.Tensor) -> None:
        self.template = template
        self._storage: torch.UntypedStorage | None = None
        if not self.is_copied:
            self._storage = template.untyped_storage()
            self._unshared = self._references()

    def release(self, without_owner: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let later recordings overwrite the memory. Replays still return tensors in it.

        Args:
            without_owner: returns the bytes of a tensor, in a storage that does not keep its memory from them.
        """
        if not self._is_argument and self.template.untyped_storage().nbytes():
            with torch.inference_mode(self.template.is_inference()):  # autograd saves no tensor made in that mode
                self._hold(_in_storage_of(without_owner(_bytes(self.template)), self.template))

    def _references(self) -> int:
        """Return the number of references to the storage, from C++ and from Python."""
        assert self._storage is not None
        assert storage_use_count is not None
        return storage_use_count(self._storage) + sys.getrefcount(self._storage)

    def is_alive(self) -> bool:
        """Return whether a tensor that an earlier replay returned still shares the memory."""
        return self._storage is not None and self._references() != self._unshared

    def returned(self) -> torch.Tensor:
        """Return the tensor of a replay. Its version counter is its own."""
        return self.template.clone() if self.is_copied else self.template.data


def _in_storage_of(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor at the same place of another storage."""
    return tensor.new_empty(0).set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor, as bytes: DLPack lacks some dtypes."""
    storage = tensor.untyped_storage()
    return tensor.new_empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def _flat_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor, as a flat tensor."""
    storage = tensor.untyped_storage()
    return tensor.new_empty(0).set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))


class ResultLayout:
    """How each result of a replay is made: from an argument, or from the recording's memory.

    Attributes:
        outputs: a function for each result.
        memories: those of the recording that hold results.
        aliased: indices of the arguments that share memory with results.
        addresses: those of the results that are not copied.
    """

    def __init__(
        self,
        part: Part,
        caller_arguments: Sequence[torch.Tensor],
        arguments: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor | None],
        copied: Collection[int] = (),
    ) -> None:
        """Find the memory of each result.

        Args:
            part: the part that was recorded.
            caller_arguments: the tensors of the call.
            arguments: the tensors that were passed instead: the call's own, or buffers.
            results: the results of the run on `arguments`.
            copied: the indices of results of which each replay returns a copy.

        Raises:
            NotRecordedError: two results share memory as different types.
        """
        self.memories: list[ResultMemory] = []
        self.aliased: set[int] = set()
        self.addresses: list[int] = []
        self._copied = copied
        self._argument_storages = {storage_id(argument) for argument in arguments}
        self._memories: dict[int, int] = {}  # by storage, the index in `memories`
        self._sharing: dict[int, dict[int, torch.Tensor]] = {}  # by storage, results by index
        for number, tensor in enumerate(results):
            if tensor is not None:
                self._sharing.setdefault(storage_id(tensor), {})[number] = tensor
        sets, input_index = AliasSets(part.nodes, definition_of), {v: i for i, v in enumerate(part.inputs)}
        self.outputs: list[Output] = []
        for value, tensor in zip(part.outputs, results, strict=True):
            if value is None or tensor is None:
                self.outputs.append(lambda aliased, memories: None)
                continue
            index = input_index.get(sets.root(value))
            alias = None if index is None else self._alias(index, tensor, caller_arguments[index], arguments[index])
            self.outputs.append(alias or self._from_memory(tensor))

    def _alias(
        self, index: int, tensor: torch.Tensor, caller_argument: torch.Tensor, argument: torch.Tensor
    ) -> Output | None:
        """Return a result that shares an argument's memory, as a view of the caller's; None for any other."""
        if tensor is argument:
            self.aliased.add(index)
            return lambda aliased, memories: aliased[index]
        same_layout = tensor.dtype == argument.dtype and argument.stride() == caller_argument.stride()
        if storage_id(tensor) != storage_id(argument) or not same_layout:
            return None
        self.aliased.add(index)
        size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset() - argument.storage_offset()
        return lambda aliased, memories: aliased[index].as_strided(
            size, stride, aliased[index].storage_offset() + offset
        )

    def _from_memory(self, tensor: torch.Tensor) -> Output:
        """Return a result in the recording's memory.

        Results that share memory share what is returned: changes of one show in the other.
        """
        storage = storage_id(tensor)
        sharing = self._sharing[storage]
        keeps_strides = torch.empty_like(tensor).stride() == tensor.stride()  # a clone has the same strides then
        alone = keeps_strides and all(other is tensor for other in sharing.values())
        if any(other.dtype != tensor.dtype for other in sharing.values()):
            raise NotRecordedError("two results share memory as different types")
        if storage not in self._memories:
            self._memories[storage] = len(self.memories)
            memory = tensor if alone else _flat_storage(tensor)
            is_argument = storage in self._argument_storages
            is_copied = is_argument or any(i in self._copied for i in sharing)
            self.memories.append(ResultMemory(memory, sharing, is_copied, is_argument))
        number = self._memories[storage]
        if not self.memories[number].is_copied:
            self.addresses.append(tensor.data_ptr())
        if alone:
            return lambda aliased, memories: memories[number]
        size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        if is_view(tensor):
            return lambda aliased, memories: memories[number].as_strided(size, stride, offset)
        # detach() shares memory and version, and to autograd its result is not a view.
        return lambda aliased, memories: memories[number].as_strided(size, stride, offset).detach()
