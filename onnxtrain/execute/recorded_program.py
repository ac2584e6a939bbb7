"""A program that is recorded once for each set of sizes, and then replayed (the option `cuda_graphs`).

    run ─1─> counts calls of the same sizes                   the ordinary program
        ─2─> records the ordinary program, on buffers
        ─3─> copies arguments into the buffers, replays the recording, returns the results

A replay reads and writes the same addresses each time. Arguments at known addresses are not copied: the module's own
tensors (if one has moved, the recordings are dropped), and the results of other recordings, such as what forward keeps
for backward.

Results are in the recording's memory (`recorded_results`). While one is alive, the recording is not replayed. So
nothing is read after it was overwritten, in two forwards before a backward, or if the user keeps a result. Instead

- if autograd holds what forward kept, another recording is made, up to `MAX_RECORDINGS`;
- if only the user holds results, a new recording is made that returns copies of these. The ordinary calls already show
  which results the user holds at the next call, such as the loss of a training loop.

The recordings of a module share a memory pool (`shared_pool`). Arguments that backward keeps are the caller's tensors
or views of them, as without a recording: autograd sees when they are changed.

A recording is for exact sizes. For tokens without padding, `packing` rounds their number up, to need few recordings.
Otherwise the recordings of the last eight sets of sizes are kept, and a warning says what to do about many.

A `Recorder` makes the recordings: `cuda_recorder` on a GPU; the tests have one that runs on a CPU.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import onnx_ir as ir
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from onnxtrain.execute.kernel_choice.expected import expected_kernel
from onnxtrain.execute.program import Program, Run, drain
from onnxtrain.execute.recorded_results import NotRecordedError, ResultLayout
from onnxtrain.execute.shared_pool import SharedPool
from onnxtrain.graph.traversal import origin
from onnxtrain.log import warn_once
from onnxtrain.ops import Effects, definition_of
from onnxtrain.ops.definition import NoBody
from onnxtrain.plan.cut import Part
from onnxtrain.report import Refusal
from onnxtrain.torch_compat import dispatch
from onnxtrain.torch_compat.optimizer_kernels import foreach_copy

_NAME = "cuda_graphs"
CALLS = 3  # ordinary calls with the same sizes before they are recorded, which takes as long as some ten calls
MAX_SIZES = 8  # sets of sizes of a program that are remembered, with their recordings
MAX_RECORDINGS = 4  # of one program at the same sizes
MAX_MOVES = 3  # of arguments that are read where they are; after that all are copied

_MANY_SIZES = (
    f"{_NAME}: a program is called with more sets of sizes than the {MAX_SIZES} whose recordings are kept, so most "
    "calls run without a recording. Pad batches to one length or to multiples of a length (pad_to_multiple_of=64 in "
    "Hugging Face's collators), with skip_padding on; drop a smaller last batch (drop_last=True)"
)

Results = tuple[tuple[Any, ...], tuple[int, ...]]
Replay = Callable[[], None]

_profiling = dispatch.profiler_enabled
_REASONS = {
    Effects.PYTHON: "it runs the user's Python",
    Effects.COLLECTIVE: "it communicates with other processes",
    Effects.HOST_SYNC: "its results determine sizes",
}


class Recorder(Protocol):
    """Records the programs of one module and of its blocks, to replay them.

    Attributes:
        pool: what recordings overwrite in the memory that they share.
    """

    pool: SharedPool

    def is_busy(self) -> bool:
        """Return whether the caller is recording now."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Enter a section in which no other recording of this recorder runs, on any thread or stream."""

    def follow(self) -> None:
        """Make the caller's stream wait for those of earlier replays: readers of their results have ended then."""

    def without_owner(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor, which is in the shared memory, in a storage that later recordings may overwrite."""

    def record(
        self,
        function: Callable[[Sequence[torch.Tensor]], Results],
        arguments: Sequence[torch.Tensor],
        *,
        is_pooled: bool,
    ) -> tuple[Results, Replay]:
        """Run the function on the arguments, possibly several times, and record it; inside `exclusive`.

        The arguments are not kept alive.

        Args:
            function: runs the program.
            arguments: its tensors.
            is_pooled: whether the recording takes memory that earlier ones no longer hold, and later ones take what it
                does not hold; else its memory is its own.

        Returns:
            Its results, which are valid after the first replay only, and the replay: it computes the results into the
            same memory, from the contents at that time of the addresses that the function read. Each replay samples
            new random numbers; recording itself consumes none.
        """

    def synchronize(self) -> None:
        """Wait until all replays have ended: their memory may be freed then."""


def why_never(node: ir.Node) -> str:
    """Return why no program with this node is recorded, on any device; empty if there is no reason."""
    definition = definition_of(node)
    reason = next((reason for effect, reason in _REASONS.items() if effect in definition.effects), "")
    if not reason and Effects.RANDOM in definition.effects and isinstance(definition.body, NoBody):
        return "it may sample on the host, and each replay would repeat these samples"
    return reason


@dataclass(frozen=True)
class Recordings:
    """Makes the recordings of one unit's programs.

    Attributes:
        recorder: records them.
        device: the device of all tensors.
        fixed: the names of the inputs that are tensors of the module: their addresses stay the same.
        why_not: the reason if no program of the unit is recorded, else empty.
    """

    recorder: Recorder
    device: torch.device
    fixed: frozenset[str]
    why_not: str = ""

    def refusals(self, parts: Iterable[Part]) -> list[Refusal]:
        """Return the reasons, known before they run, why parts are not recorded."""
        refusals = (self.refusal(part) for part in parts)
        return list(dict.fromkeys(refusal for refusal in refusals if refusal is not None))

    def refusal(self, part: Part) -> Refusal | None:
        """Return the reason why a part is not recorded; None if it is."""
        if self.why_not:
            return Refusal(_NAME, "all programs", self.why_not)
        for node in part.nodes:
            reason = why_never(node)
            if not reason and _reads_on_host(node, part, self.device):
                reason = "the host reads a value that an earlier node computes"
            if reason:
                return Refusal(_NAME, node.name or node.op_type, reason, origin(node) or "")
        return None

    def watch(self, program: Program) -> RecordedProgram | None:
        """Replace `run` of a program by one that records; None, with a warning, if the program cannot be recorded."""
        refusal = self.refusal(program.part)
        if refusal is None:
            return RecordedProgram(program, self)
        warn_once(f"Not recorded by {refusal}")
        return None


def _reads_on_host(node: ir.Node, part: Part, device: torch.device) -> bool:
    """Return whether a node reads elements of a device tensor as Python scalars."""
    definition = definition_of(node)
    if node.outputs and part.host.issuperset(node.outputs):
        read = [v for i, v in enumerate(node.inputs) if definition.input_name(i) not in definition.shape_only_inputs]
    else:
        kernel = expected_kernel(node, device.type)
        if device.type != "cpu" and kernel.synchronizes(definition.view(node)):
            return True
        read = [v for i, v in enumerate(node.inputs) if i in kernel.host_inputs]
    return any(v is not None and v.const_value is None and v not in part.host for v in read)


@dataclass
class Sizes:
    """The calls with one set of sizes.

    Attributes:
        calls: the number of ordinary calls so far, up to `CALLS`.
        recordings: the latest used is last.
        returned: the storages of the results of the latest ordinary call, by index.
    """

    calls: int = 0
    recordings: list[Recording] = field(default_factory=list)
    returned: dict[int, StorageWeakRef] = field(default_factory=dict)

    def outlived(self) -> list[int]:
        """Return the indices of the results of the latest ordinary call that are still alive."""
        return [i for i, storage in self.returned.items() if not storage.expired()]


class RecordedProgram:
    """A program that records; see the module's docstring.

    Attributes:
        entries: by shapes, strides and sizes; the latest used is last.
    """

    def __init__(self, program: Program, recordings: Recordings) -> None:
        self._program, self._recordings = program, recordings
        self._ordinary = program.run
        self._fixed = tuple(i for i, v in enumerate(program.part.inputs) if v.name in recordings.fixed)
        self._reads_results = True  # of other recordings, where they are
        self._copied_results: set[int] = set()
        self._moves = 0
        self._evictions = 0
        self.entries: dict[Any, Sizes] = {}
        program.run = self.run
        weakref.finalize(self, recordings.recorder.synchronize).atexit = False  # before its recordings are freed

    def run(self, tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        tensors = list(tensors)
        recorder = self._recordings.recorder
        if _profiling() or recorder.is_busy():
            return self._ordinary(drain(tensors), sizes_in)
        with recorder.exclusive():
            key = tuple([(t.shape, t.stride()) for t in tensors]), tuple(sizes_in)
            entry = self.entries[key] = self.entries.pop(key) if key in self.entries else Sizes()
            self._copied_results.update(entry.outlived())
            recording = self._recording(entry, tensors, sizes_in)
            if recording is not None:
                return recording.run(tensors)
        results, sizes = self._ordinary(drain(tensors), sizes_in)
        if entry.calls > 1:  # the compilation may hold those of the first call until garbage is collected
            visible = results[: self._program.part.num_user_outputs]
            entry.returned = {i: StorageWeakRef(t.untyped_storage()) for i, t in enumerate(visible) if t is not None}
        return results, sizes

    def _recording(self, entry: Sizes, tensors: Sequence[torch.Tensor], sizes_in: Sequence[int]) -> Recording | None:
        """Return the recording for a call, made after `CALLS` calls of its sizes; None if the call runs the program."""
        addresses, in_the_way = self._addresses(tensors), False
        for recording in reversed(entry.recordings):
            if recording.addresses == addresses and not recording.live_results():
                if recording.may_replay():
                    entry.recordings.remove(recording)
                    entry.recordings.append(recording)
                    return recording
                in_the_way = True
        if entry.recordings and any(entry.recordings[-1].addresses[i] != addresses[i] for i in self._fixed):
            self._evict()
            self._count_move()
            return None
        if len(self.entries) > MAX_SIZES:
            self._evict(MAX_SIZES)
            self._evictions += 1
            if self._evictions == MAX_SIZES:
                warn_once(_MANY_SIZES)
        if entry.calls < CALLS:
            entry.calls += 1
            return None
        if not self._make_room(entry, addresses):
            return None
        return self._record(entry, tensors, sizes_in, addresses, is_pooled=not in_the_way)

    def _addresses(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the addresses of the arguments that a recording reads where they are; 0 for those that it copies."""
        if self._reads_results:
            addresses = [t.data_ptr() for t in tensors]
            addresses = [a if _RECORDED.get(a) else 0 for a in addresses]
        else:
            addresses = [0] * len(tensors)
        for i in self._fixed:
            addresses[i] = tensors[i].data_ptr()
        return addresses

    def _count_move(self) -> None:
        """Note that arguments have moved; after `MAX_MOVES` all are copied."""
        self._moves += 1
        if self._moves > MAX_MOVES:
            self._fixed, self._reads_results = (), False

    def _make_room(self, entry: Sizes, addresses: list[int]) -> bool:
        """Return whether to make another recording, after those were dropped that would not be used again."""
        for recording in list(entry.recordings):
            outlived = self._copy_outlived(recording)
            if recording.addresses == addresses:
                if outlived:
                    self._drop(entry, recording)
            elif any(a and not _RECORDED.get(a) for i, a in enumerate(recording.addresses) if i not in self._fixed):
                self._drop(entry, recording)  # it reads results of a recording that was dropped
        if len(entry.recordings) < MAX_RECORDINGS:
            return True
        if all(recording.addresses == addresses for recording in entry.recordings):
            return False
        self._drop(entry, entry.recordings[0])
        self._count_move()
        return self._reads_results

    def _copy_outlived(self, recording: Recording) -> bool:
        """Let later recordings copy the results that the user holds; return whether there are some, and no others.

        If autograd holds others, or another thread has freed all since this call looked, the recording is used again.
        """
        results = range(self._program.part.num_user_outputs)
        live = recording.live_results()
        if not live or any(memory.isdisjoint(results) for memory in live):
            return False
        self._copied_results.update(*live)
        return True

    def _record(
        self,
        entry: Sizes,
        tensors: Sequence[torch.Tensor],
        sizes_in: Sequence[int],
        addresses: list[int],
        *,
        is_pooled: bool,
    ) -> Recording | None:
        try:
            recording = Recording(
                self._program.part,
                self._ordinary,
                self._recordings,
                tensors,
                sizes_in,
                addresses,
                self._copied_results,
                is_pooled=is_pooled,
            )
        except RuntimeError as error:  # includes CUDA's errors, such as out of memory
            reason = str(error).partition("\n")[0]
            warn_once(f"Not recorded by {_NAME}: {self._program.filename}: {reason}")
            self._program.run = self._ordinary
            self._evict()
            return None
        entry.recordings.append(recording)
        entry.returned.clear()
        return recording

    def _drop(self, entry: Sizes, recording: Recording) -> None:
        self._recordings.recorder.synchronize()
        entry.recordings.remove(recording)

    def _evict(self, most: int = 0) -> None:
        """Drop the least recently used sizes, down to `most`."""
        while len(self.entries) > most:
            oldest = next(iter(self.entries))
            if self.entries[oldest].recordings:
                self._recordings.recorder.synchronize()
            del self.entries[oldest]


class Recording:
    """A recording of a program at one set of sizes.

    Attributes:
        addresses: those of the arguments that it reads where they are; 0 for those that it copies.
        inputs: the buffers into which arguments are copied.
        memories: the memory of its results.
    """

    def __init__(
        self,
        part: Part,
        run: Run,
        recordings: Recordings,
        tensors: Sequence[torch.Tensor],
        sizes_in: Sequence[int],
        addresses: Sequence[int],
        copied_results: Collection[int] = (),
        *,
        is_pooled: bool = True,
    ) -> None:
        """Record a program.

        Args:
            part: the part that it runs.
            run: the ordinary program.
            recordings: makes the recording.
            tensors: the arguments of a call.
            sizes_in: its sizes.
            addresses: see the attribute.
            copied_results: the indices of results of which each replay returns a copy.
            is_pooled: whether it shares the memory pool, if no result is alive there that it might overwrite.

        Raises:
            NotRecordedError: a tensor is on another device.
            RuntimeError: an error of the recorder or of the program; or results share memory as different types.
        """
        _check_device(tensors, recordings.device, "an argument")
        self._recorder = recordings.recorder
        arguments = [
            t.detach() if address else torch.empty_like(t) for t, address in zip(tensors, addresses, strict=True)
        ]
        self.addresses = list(addresses)
        self._copied = [i for i, address in enumerate(addresses) if not address]
        self.inputs = [arguments[i] for i in self._copied]
        self._copy_in(tensors)
        spares = self._recorder.pool.reserve(self._recorder.without_owner) if is_pooled else None
        (results, self._sizes), self._replay = self._recorder.record(
            lambda arguments: run(iter(arguments), sizes_in), arguments, is_pooled=spares is not None
        )
        _check_device([t for t in results if t is not None], recordings.device, "a result")
        layout = ResultLayout(part, tensors, arguments, results, copied_results)
        self._outputs, self.memories, self._aliased = layout.outputs, layout.memories, sorted(layout.aliased)
        self._share = None if spares is None else self._recorder.pool.add(spares, self.memories)
        result_addresses = [address for address in layout.addresses if address]
        _RECORDED.update(result_addresses)
        weakref.finalize(self, _forget, result_addresses).atexit = False

    def may_replay(self) -> bool:
        """Return whether a replay overwrites no result of another recording that is alive."""
        return self._share is None or self._recorder.pool.may_replay(self._share)

    def run(self, tensors: list[torch.Tensor]) -> Results:
        """Replay on these arguments. Empties the list: tensors that are no longer read can be freed."""
        self._recorder.follow()
        if self._share is not None:
            self._recorder.pool.replays(self._share)
        self._copy_in(tensors)
        aliased = {i: tensors[i] for i in self._aliased}
        tensors.clear()
        self._replay()
        memories = [memory.returned() for memory in self.memories]
        return tuple([output(aliased, memories) for output in self._outputs]), self._sizes

    def live_results(self) -> list[frozenset[int]]:
        """Return the indices of the results in each memory that a tensor of an earlier replay still shares."""
        return [memory.results for memory in self.memories if memory.is_alive()]

    def _copy_in(self, tensors: Sequence[torch.Tensor]) -> None:
        if self.inputs:
            foreach_copy(self.inputs, [tensors[i] for i in self._copied])


def _check_device(tensors: Iterable[torch.Tensor], device: torch.device, role: str) -> None:
    for tensor in tensors:
        if tensor.device != device:
            raise NotRecordedError(f"{role} is on {tensor.device}, expected {device}")


# The number of recordings with a result at an address. Another program's recording reads these where they are.
_RECORDED: Counter[int] = Counter()


def _forget(addresses: Iterable[int]) -> None:
    _RECORDED.subtract(addresses)
    for address in addresses:
        if _RECORDED[address] <= 0:
            del _RECORDED[address]
