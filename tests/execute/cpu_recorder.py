"""A recorder of programs that runs on a CPU.

A replay computes into the memory of the recorded results, after it has filled that memory with NaN.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from onnxtrain.execute.recorded_program import RecordedProgram, Recording, Replay, Results
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

    def recordings(self) -> list[Recording]:
        return [r for program in self.programs for entry in program.entries.values() for r in entry.recordings]

    def poison(self) -> None:
        """Fill the memory of recordings that nobody reads: floating-point elements with NaN, integers with -1."""
        for recording in self.recordings():
            for memory in recording.memories:
                if not memory.is_alive():
                    memory.template.untyped_storage().fill_(255)
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


class CpuRecorder:
    def __init__(self, log: Recorders) -> None:
        self._log = log
        self._lock = threading.Lock()

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

    def follow(self, previous: Any) -> Any:
        return None

    def record(
        self, function: Callable[[Sequence[torch.Tensor]], Results], arguments: Sequence[torch.Tensor]
    ) -> tuple[Results, Replay]:
        assert self._log.in_turn
        self._log.records += 1
        if self._log.error is not None:
            raise self._log.error
        with torch.random.fork_rng([]):
            results = function(arguments)
        storages = {storage_id(t) for t in arguments}
        own = [None if t is None or storage_id(t) in storages else t.untyped_storage() for t in results[0]]
        log, addresses = self._log, [without_owner(t) for t in arguments]

        def play() -> None:
            assert log.in_turn
            log.plays += 1
            for old in own:
                if old is not None:
                    old.fill_(255)  # whoever reads an earlier replay's results gets NaN
            for old, new in zip(own, function(addresses)[0], strict=True):
                if old is not None:
                    old.copy_(new.untyped_storage())

        return results, play

    def synchronize(self) -> None:
        self._log.settled += 1


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
