"""Recordings on a GPU: CUDA graphs.

    caller's stream ──waits for the last section──> copies in ─> replay ──event──> the next section waits

Ran on one H200 with PyTorch 2.11 (tests marked gpu, and the benchmarks).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from onnxtrain.capture.capture import Captured
from onnxtrain.execute.recorded_program import Recorder, Recordings, Replay, Results
from onnxtrain.execute.recorded_results import NotRecordedError
from onnxtrain.execute.shared_pool import SharedPool
from onnxtrain.log import warn_once
from onnxtrain.options import Options

_WARM_UPS = 3  # on the side stream: libraries allocate their workspaces when they first run on a stream
_CAPTURE = threading.Lock()  # PyTorch allows one capture at a time in a process


def recorder_for(device: torch.device) -> Recorder | None:
    """Return the recorder for a unit on a device; None if nothing is recorded there."""
    return CudaRecorder(device) if device.type == "cuda" else None


def may_record(options: Options, device: torch.device) -> bool:
    """Return whether programs on a device are recorded, unless their nodes prevent it."""
    return options.cuda_graphs and options.memory_budget_bytes is None and recorder_for(device) is not None


class Recorders:
    """The recorders of one module and its blocks: one for each device."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, Recorder | None] = {}

    def for_device(self, device: torch.device) -> Recorder | None:
        """Return the recorder for a device; None if nothing is recorded there."""
        if device not in self._by_device:
            self._by_device[device] = recorder_for(device)
        return self._by_device[device]


def recordings_for(
    captured: Captured, inputs: Sequence[torch.Tensor], options: Options, device: torch.device, recorders: Recorders
) -> Recordings | None:
    """Return the recordings of a unit under the option cuda_graphs; None if it is off, or on a CPU."""
    recorder = recorders.for_device(device) if options.cuda_graphs else None
    if recorder is None:
        if options.cuda_graphs:
            warn_once(f"The option cuda_graphs has no effect on the device {device.type}.")
        return None
    values = captured.model.graph.inputs
    fixed = frozenset(v.name or "" for v, s in zip(values, captured.sources, strict=True) if s.kind != "input")
    misplaced = [(v.name, t.device) for v, t in zip(values, inputs, strict=True) if t.device != device]
    why_not = f"expected all inputs on {device}, got {misplaced[0][0]} on {misplaced[0][1]}" if misplaced else ""
    if options.memory_budget_bytes is not None:
        why_not = "recordings hold memory of their own, which memory_budget_bytes does not count"
    return Recordings(recorder, device, fixed, why_not)


class _SharedMemory:
    """The memory pool of CUDA graphs. It exists as long as this object: a graph that is never replayed holds it."""

    def __init__(self, side: torch.cuda.Stream) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, self.handle, stream=side, capture_error_mode="thread_local"):
            torch.zeros(1, device=side.device)


class _Bytes:
    """Bytes at an address of shared memory, which they keep mapped, by CUDA's array interface."""

    def __init__(self, memory: _SharedMemory, address: int, count: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


class CudaRecorder:
    """Records the programs of one module and of its blocks into CUDA graphs.

    Replays are in the order of the calls, on any stream: one begins when the one before has ended.

    Attributes:
        pool: see `Recorder`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._ended = torch.cuda.Event()
        self._side = torch.cuda.Stream(device)
        self._streams: set[torch.cuda.Stream] = set()  # of replays
        self._memory: _SharedMemory | None = None
        self.pool = SharedPool()

    def is_busy(self) -> bool:
        with torch.cuda.device(self._device):  # the caller's current device may differ
            return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._lock, torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            stream.wait_event(self._ended)
            try:
                yield
            finally:
                self._ended.record(stream)

    def follow(self) -> None:
        stream = torch.cuda.current_stream()
        self._streams.add(stream)
        if len(self._streams) > 1:
            for other in self._streams - {stream}:
                stream.wait_stream(other)

    def without_owner(self, flat: torch.Tensor) -> torch.Tensor:
        assert self._memory is not None, "a recording has shared the memory"
        tensor = torch.as_tensor(_Bytes(self._memory, flat.data_ptr(), flat.numel()), device=flat.device)
        if tensor.data_ptr() != flat.data_ptr():
            raise NotRecordedError(
                "torch.as_tensor copied memory that it got by address, expected a tensor at that address"
            )
        return tensor

    def record(
        self,
        function: Callable[[Sequence[torch.Tensor]], Results],
        arguments: Sequence[torch.Tensor],
        *,
        is_pooled: bool,
    ) -> tuple[Results, Replay]:
        stream, side = torch.cuda.current_stream(), self._side
        side.wait_stream(stream)
        try:
            with _CAPTURE, torch.cuda.stream(side):  # a failed capture would stay on the side stream
                self._warm_up(function, arguments)
                if is_pooled and self._memory is None:
                    self._memory = _SharedMemory(side)
                pool = self._memory.handle if is_pooled and self._memory is not None else None
                graph = torch.cuda.CUDAGraph()
                # "thread_local" allows other threads, such as those of a data loader, to use CUDA meanwhile.
                with torch.cuda.graph(graph, pool, stream=side, capture_error_mode="thread_local"):
                    results = function(arguments)
                return results, graph.replay
        finally:
            stream.wait_stream(side)

    def _warm_up(
        self, function: Callable[[Sequence[torch.Tensor]], Results], arguments: Sequence[torch.Tensor]
    ) -> None:
        """Run the function until libraries have allocated their workspaces. The states of the generators are restored.

        Raises:
            NotRecordedError: it samples from the CPU's generator: each replay would repeat these samples. A replay
                samples from the GPU's generator at its state then.
        """
        with torch.random.fork_rng([self._device]):
            before = torch.get_rng_state()
            for _ in range(_WARM_UPS):
                function(arguments)
            if not torch.equal(before, torch.get_rng_state()):
                raise NotRecordedError("it samples on the host")

    def synchronize(self) -> None:
        if not self.is_busy():  # the garbage collector may call this during a capture, which must not wait
            self._ended.synchronize()
