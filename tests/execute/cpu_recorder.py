"""A recorder of programs that runs on a CPU.

A replay computes into the memory of the recorded results. Before, it fills with NaN what a CUDA graph may overwrite:
that memory, and the whole pool apart from what was allocated when the recording was made.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from onnxtrain.execute.recorded_program import RecordedProgram, Recording, Replay, Results
from onnxtrain.execute.shared_pool import SharedPool
from onnxtrain.torch_compat.tensors import storage_id


class Recorders:
    """All recorders and watched programs of a test."""

    def __init__(self) -> None:
        self.programs: list[RecordedProgram] = []
        self.busy = False
        self.in_turn = False
        self.records = 0
        self.plays = 0
        self.settled = 0
        self.error: Exception | None = None
        self.pools: list[Pool] = []

    def recordings(self) -> list[Recording]:
        return [r for program in self.programs for entry in program.entries.values() for r in entry.recordings]

    def poison(self) -> None:
        """Fill the memory of recordings that is no longer read: floating-point elements with NaN, integers with -1."""
        memories = [memory for recording in self.recordings() for memory in recording.memories]
        read = {m.template.untyped_storage().data_ptr() for m in memories if m.is_alive()}
        for recording in self.recordings():
            for memory in recording.memories:
                storage = memory.template.untyped_storage()
                if storage.data_ptr() not in read:
                    storage.fill_(255)
            for buffer in recording.inputs:
                buffer.untyped_storage().fill_(255)

    def since(self) -> tuple[int, int]:
        """The numbers of recordings and replays since the last call."""
        counts = self.records, self.plays
        self.records = self.plays = 0
        return counts


def without_owner(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor at the same address, which does not keep the memory alive: a CUDA graph holds addresses."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return tensor.new_empty(0).set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


@dataclass
class Block:
    """Memory of a pool. It is allocated as long as the storage lives that was last made there."""

    memory: torch.Tensor
    storage: StorageWeakRef | None = None

    def is_free(self) -> bool:
        return self.storage is None or self.storage.expired()

    def storage_like(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """Allocate the block for a tensor's storage, and copy that there."""
        count = tensor.untyped_storage().nbytes()
        if count:
            memory = (ctypes.c_uint8 * count).from_address(self.memory.data_ptr())
            storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
            storage.copy_(tensor.untyped_storage())
        else:
            storage = torch.UntypedStorage(0)
        self.storage = StorageWeakRef(storage)
        return storage


class Pool:
    """The memory of CUDA graphs."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def nbytes(self) -> int:
        return sum(block.memory.numel() for block in self.blocks)

    def move(
        self, results: Sequence[torch.Tensor | None], arguments: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor | None], list[Block | None]]:
        """Move results into the pool.

        Returns:
            The moved results; and for each result its block, None for those in the memory of arguments.
        """
        kept, moved = {storage_id(t) for t in arguments}, dict[int, tuple[torch.UntypedStorage, Block]]()
        tensors: list[torch.Tensor | None] = []
        blocks: list[Block | None] = []
        for t in results:
            if t is None or storage_id(t) in kept:
                tensors.append(t)
                blocks.append(None)
                continue
            if storage_id(t) not in moved:
                block = self._block(t.untyped_storage().nbytes())
                moved[storage_id(t)] = block.storage_like(t), block
            storage, block = moved[storage_id(t)]
            base = t.new_empty(0).set_(storage, t.storage_offset(), t.shape, t.stride())
            tensors.append(base.as_strided(t.shape, t.stride()) if t._is_view() else base)
            blocks.append(block)
        return tensors, blocks

    def _block(self, count: int) -> Block:
        fitting = [b for b in self.blocks if b.is_free() and b.memory.numel() >= count]
        if not fitting:
            self.blocks.append(Block(torch.empty(count, dtype=torch.uint8)))
            return self.blocks[-1]
        return min(fitting, key=lambda block: block.memory.numel())


class CpuRecorder:
    def __init__(self, log: Recorders) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._shared = Pool()
        self.pool = SharedPool()
        log.pools.append(self._shared)

    def is_busy(self) -> bool:
        return self._log.busy

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._lock:
            self._log.in_turn = True
            try:
                yield
            finally:
                self._log.in_turn = False

    def follow(self) -> None: ...

    def without_owner(self, flat: torch.Tensor) -> torch.Tensor:
        return without_owner(flat)

    def record(
        self,
        function: Callable[[Sequence[torch.Tensor]], Results],
        arguments: Sequence[torch.Tensor],
        *,
        is_pooled: bool,
    ) -> tuple[Results, Replay]:
        assert self._log.in_turn
        log, pool = self._log, self._shared if is_pooled else Pool()
        log.records += 1
        if not is_pooled:
            log.pools.append(pool)
        if log.error is not None:
            raise log.error
        allocated = [block for block in pool.blocks if not block.is_free()]
        with torch.random.fork_rng([]):
            results, sizes = function(arguments)
        moved, blocks = pool.move(results, arguments)
        addresses = [without_owner(t) for t in arguments]

        def play() -> None:
            assert log.in_turn
            log.plays += 1
            for block in pool.blocks:
                if not any(block is other for other in allocated):
                    block.memory.fill_(255)  # whoever reads an earlier replay's results gets NaN
            for block, new in zip(blocks, function(addresses)[0], strict=True):
                if block is not None:
                    block.memory[: new.untyped_storage().nbytes()] = _bytes(new)

        return (tuple(moved), sizes), play

    def synchronize(self) -> None:
        self._log.settled += 1


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


class Trained:
    """A module under test, and its state when the test began."""

    def __init__(self, model: nn.Module, log: Recorders) -> None:
        self.model, self.log = model, log
        self.start = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def both(self, scenario: Callable[[nn.Module], Sequence[torch.Tensor]]) -> None:
        """Run a scenario with the ordinary programs, and again with recordings: results must be bitwise equal."""
        ways = []
        for busy in (True, False):
            with torch.no_grad():
                for name, tensor in self.model.state_dict().items():
                    tensor.copy_(self.start[name])
            self.model.zero_grad()
            self.log.busy = busy
            results = list(scenario(self.model))
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            state = [tensor.clone() for tensor in self.model.state_dict().values()]
            self.log.poison()
            ways.append([*results, *grads, *state])
        for ordinary, played in zip(*ways, strict=True):
            torch.testing.assert_close(played, ordinary, rtol=0, atol=0)
