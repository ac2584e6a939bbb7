"""Recordings on a GPU: CUDA graphs.

    caller's stream ──waits for the last section──> copies in ─> replay ──event──> the next section waits

Ran on one H200 with PyTorch 2.11 (tests marked gpu).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from onnxtrain.capture.capture import Captured
from onnxtrain.execute.recorded_program import Recorder, Recordings, Replay, Results
from onnxtrain.execute.recorded_results import NotRecordedError
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


def recordings_for(
    captured: Captured, inputs: Sequence[torch.Tensor], options: Options, device: torch.device
) -> Recordings | None:
    """Return the recordings of a unit under the option cuda_graphs; None if it is off, or on a CPU."""
    recorder = recorder_for(device) if options.cuda_graphs else None
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


class CudaRecorder:
    """Records the programs of one unit into CUDA graphs, each with memory of its own.

    Replays are in the order of the calls, on any stream: one begins when the one before has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._ended = torch.cuda.Event()
        self._side = torch.cuda.Stream(device)

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

    def follow(self, previous: torch.cuda.Stream | None) -> torch.cuda.Stream:
        stream = torch.cuda.current_stream()
        if previous is not None and previous != stream:
            stream.wait_stream(previous)
        return stream

    def record(
        self, function: Callable[[Sequence[torch.Tensor]], Results], arguments: Sequence[torch.Tensor]
    ) -> tuple[Results, Replay]:
        stream, side = torch.cuda.current_stream(), self._side
        side.wait_stream(stream)
        try:
            with _CAPTURE, torch.cuda.stream(side):  # a failed capture would stay on the side stream
                self._warm_up(function, arguments)
                graph = torch.cuda.CUDAGraph()
                # "thread_local" allows other threads, such as those of a data loader, to use CUDA meanwhile.
                with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
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
