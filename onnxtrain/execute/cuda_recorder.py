"""Recordings on a GPU: CUDA graphs.

    caller's stream ──waits for the last turn──> copies in ─> replay ─> copies out ──event──> the next turn waits

Written from PyTorch's documentation; it has not run on a GPU yet.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from onnxtrain.capture.capture import Captured
from onnxtrain.execute.recorded_program import NotRecordedError, Play, Recorder, Recordings, Results
from onnxtrain.log import warn_once
from onnxtrain.options import Options

_WARM_UPS = 3  # on the side stream: libraries make their workspaces for a stream when it first runs them
_CAPTURE = threading.Lock()  # PyTorch allows one at a time in a process


def recorder_for(device: torch.device) -> Recorder | None:
    """The recorder for a unit on a device; None where nothing is recorded there."""
    return CudaRecorder(device) if device.type == "cuda" else None


def may_record(options: Options, device: torch.device) -> bool:
    """Whether programs on a device are recorded, where nothing in them stands in the way."""
    return options.cuda_graphs and options.memory_budget_bytes is None and recorder_for(device) is not None


def recordings_for(
    captured: Captured, inputs: Sequence[torch.Tensor], options: Options, device: torch.device
) -> Recordings | None:
    """What programs are recorded with under the option cuda_graphs; None where it is off, or on a CPU."""
    recorder = recorder_for(device) if options.cuda_graphs else None
    if recorder is None:
        if options.cuda_graphs:
            warn_once(f"The option cuda_graphs has no effect on the device {device.type}.")
        return None
    values = captured.model.graph.inputs
    fixed = frozenset(v.name or "" for v, s in zip(values, captured.sources, strict=True) if s.kind != "input")
    elsewhere = [v.name for v, tensor in zip(values, inputs, strict=True) if tensor.device != device]
    why_not = f"the input {elsewhere[0]} is not on {device}" if elsewhere else ""
    if options.memory_budget_bytes is not None:
        why_not = "recordings hold memory for themselves, which memory_budget_bytes does not count"
    return Recordings(recorder, device, fixed, why_not)


class CudaRecorder:
    """Records the programs of one unit into CUDA graphs of one memory pool.

    The graphs of a pool may lie in each other's memory, but for what is kept of their results. So their replays take
    turns: a turn begins when the one before has ended, on whatever stream, and has copied its results out.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._ended = torch.cuda.Event()
        self._side = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper: torch.cuda.CUDAGraph | None = None

    def is_busy(self) -> bool:
        with torch.cuda.device(self._device):  # the caller's may be another
            return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._lock, torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            stream.wait_event(self._ended)
            try:
                yield
            finally:
                self._ended.record(stream)

    def record(self, function: Callable[[], Results]) -> tuple[Results, Play]:
        stream, side = torch.cuda.current_stream(), self._side
        side.wait_stream(stream)
        try:
            with _CAPTURE, torch.cuda.stream(side):  # which a capture that fails does not leave by itself
                if self._keeper is None:  # a pool can be used again only as long as it has a graph
                    self._keeper = torch.cuda.CUDAGraph()
                    with warnings.catch_warnings(action="ignore"), self._capture(self._keeper):
                        pass  # nothing is recorded, of which PyTorch warns
                self._warm_up(function)
                graph = torch.cuda.CUDAGraph()
                with self._capture(graph):
                    results = function()
                return results, graph.replay
        finally:
            stream.wait_stream(side)

    def _warm_up(self, function: Callable[[], Results]) -> None:
        """Runs the function until a recording of it is what any later run would do. What it draws is drawn again.

        Raises:
            NotRecordedError: it draws from the CPU's generator: the recording would repeat these numbers. Those of the
                GPU's are drawn by the recording, from where the generator is when it is played.
        """
        with torch.random.fork_rng([self._device]):
            before = torch.get_rng_state()
            for _ in range(_WARM_UPS):
                function()
            if not torch.equal(before, torch.get_rng_state()):
                raise NotRecordedError("it draws random numbers on the host")

    def _capture(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager[None]:
        # "thread_local": what other threads do meanwhile, as those of a data loader, is allowed.
        return torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local")

    def settle(self) -> None:
        if not self.is_busy():  # the garbage collector may come while something else is recorded, which forbids to wait
            self._ended.synchronize()
