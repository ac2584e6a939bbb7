"""A program that is recorded once for each set of sizes, and then replayed (the option `cuda_graphs`).

    run ─1─> counts calls of the same sizes                   the ordinary program
        ─2─> records the ordinary program, on buffers
        ─3─> copies arguments into the buffers, replays the recording, copies the results out

A replay reads and writes the same addresses each time. The module's own tensors are not copied: if one has moved, the
recordings are dropped. No result is in a recording's memory, so replays are independent of each other: two forwards
before a backward, a result that the user keeps. Arguments that backward keeps are the caller's tensors or views of
them, as without a recording: autograd sees when they are changed.

A recording is for exact sizes. For tokens without padding, `packing` rounds their number up, to need few recordings.
Otherwise the recordings of the last eight sets of sizes are kept, and a warning says what to do about many.

A `Recorder` makes the recordings: `cuda_recorder` on a GPU; the tests have one that runs on a CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import onnx_ir as ir
import torch

from onnxtrain.execute.kernel_choice.expected import expected_kernel
from onnxtrain.execute.program import Program, Run, drain
from onnxtrain.graph.alias import AliasSets
from onnxtrain.graph.traversal import origin
from onnxtrain.log import warn_once
from onnxtrain.ops import Effects, definition_of
from onnxtrain.ops.definition import NoBody
from onnxtrain.plan.cut import Part
from onnxtrain.report import Refusal
from onnxtrain.torch_compat import dispatch
from onnxtrain.torch_compat.optimizer_kernels import foreach_copy
from onnxtrain.torch_compat.tensors import is_view, storage_id

_NAME = "cuda_graphs"
CALLS = 3  # ordinary calls with the same sizes before they are recorded, which takes as long as some ten calls
MOST_SIZES = 8  # sets of sizes of a program that are remembered, with their recordings
MOST_MOVES = 3  # of the module's own tensors; after that they are copied as other arguments are

_MANY_SIZES = (
    f"{_NAME}: a program is called with more sets of sizes than the {MOST_SIZES} whose recordings are kept, so most "
    "calls run without a recording. Pad batches to one length or to multiples of a length (pad_to_multiple_of=64 in "
    "Hugging Face's collators), with skip_padding on; drop a smaller last batch (drop_last=True)"
)

Results = tuple[tuple[Any, ...], tuple[int, ...]]
Replay = Callable[[], None]
Output = Callable[[Mapping[int, torch.Tensor], Sequence[torch.Tensor]], Any]  # of arguments and copies

_profiling = dispatch.profiler_enabled
_REASONS = {
    Effects.PYTHON: "it runs the user's Python",
    Effects.HOST_SYNC: "its results determine sizes",
}


class Recorder(Protocol):
    """Records programs of one unit, to replay them."""

    def is_busy(self) -> bool:
        """Return whether the caller is recording now."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Enter a section in which no other recording of this recorder runs, on any thread or stream."""

    def record(self, function: Callable[[], Results]) -> tuple[Results, Replay]:
        """Run the function, possibly several times, and record it; inside `exclusive`.

        Returns:
            Its results, which are valid after the first replay only, and the replay: it computes the results into the
            same memory, from the contents at that time of the addresses that the function read. Each replay samples
            new random numbers; recording itself consumes none.
        """

    def synchronize(self) -> None:
        """Wait until all replays have ended: their memory may be freed then."""


class NotRecordedError(RuntimeError):
    """A program cannot be recorded; the message is the reason, without a full stop."""


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


class RecordedProgram:
    """A program that records; see the module's docstring.

    Attributes:
        entries: the number of calls so far or the recording, by shapes, strides and sizes; the latest used is last.
    """

    def __init__(self, program: Program, recordings: Recordings) -> None:
        self._program, self._recordings = program, recordings
        self._ordinary = program.run
        self._fixed = tuple(i for i, v in enumerate(program.part.inputs) if v.name in recordings.fixed)
        self._moves = 0
        self._evictions = 0
        self.entries: dict[Any, int | Recording] = {}
        program.run = self.run
        weakref.finalize(self, recordings.recorder.synchronize).atexit = False  # before its recordings are freed

    def run(self, tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        tensors = list(tensors)
        recorder = self._recordings.recorder
        if not (_profiling() or recorder.is_busy()):
            with recorder.exclusive():
                recording = self._recording(tensors, sizes_in)
                if recording is not None:
                    return recording.run(tensors)
        return self._ordinary(drain(tensors), sizes_in)

    def _recording(self, tensors: Sequence[torch.Tensor], sizes_in: Sequence[int]) -> Recording | None:
        """Return the recording for a call, made after `CALLS` calls of its sizes; None if the call runs the program."""
        key = tuple([(t.shape, t.stride()) for t in tensors]), tuple(sizes_in)
        entry = self.entries[key] = self.entries.pop(key, 0)
        if isinstance(entry, Recording):
            if entry.addresses == [tensors[i].data_ptr() for i in self._fixed]:
                return entry
            self._evict()
            self._moves += 1
            if self._moves > MOST_MOVES:
                self._fixed = ()
            return None
        if len(self.entries) > MOST_SIZES:
            self._evict(MOST_SIZES)
            self._evictions += 1
            if self._evictions == MOST_SIZES:
                warn_once(_MANY_SIZES)
        if entry < CALLS:
            self.entries[key] = entry + 1
            return None
        try:
            recording = Recording(self._program.part, self._ordinary, self._recordings, tensors, sizes_in, self._fixed)
        except RuntimeError as error:  # includes CUDA's errors, such as out of memory
            reason = str(error).partition("\n")[0]
            warn_once(f"Not recorded by {_NAME}: {self._program.filename}: {reason}")
            self._program.run = self._ordinary
            self._evict()
            return None
        self.entries[key] = recording
        return recording

    def _evict(self, most: int = 0) -> None:
        """Drop the least recently used sizes, down to `most`."""
        while len(self.entries) > most:
            oldest = next(iter(self.entries))
            if isinstance(self.entries[oldest], Recording):
                self._recordings.recorder.synchronize()
            del self.entries[oldest]


class Recording:
    """A recording of a program at one set of sizes.

    Attributes:
        addresses: those of the arguments that are not copied.
        buffers: the private memory that it reads and writes.
    """

    def __init__(
        self,
        part: Part,
        run: Run,
        recordings: Recordings,
        tensors: Sequence[torch.Tensor],
        sizes_in: Sequence[int],
        fixed: Sequence[int],
    ) -> None:
        """Record a program.

        Args:
            part: the part that it runs.
            run: the ordinary program.
            recordings: makes the recording.
            tensors: the arguments of a call.
            sizes_in: its sizes.
            fixed: the indices of the arguments that are not copied.

        Raises:
            NotRecordedError: a tensor is on another device, or results share memory as different types.
            RuntimeError: an error of the recorder or of the program.
        """
        _check_device(tensors, recordings.device, "an argument")
        arguments = [t.detach() if i in fixed else torch.empty_like(t) for i, t in enumerate(tensors)]
        self.addresses = [tensors[i].data_ptr() for i in fixed]
        self._copied = [i for i in range(len(tensors)) if i not in fixed]
        self._inputs = [arguments[i] for i in self._copied]
        self._copy_in(tensors)
        (results, self._sizes), self._replay = recordings.recorder.record(lambda: run(iter(arguments), sizes_in))
        _check_device([t for t in results if t is not None], recordings.device, "a result")
        layout = _ResultLayout(part, tensors, arguments, results)
        self._outputs, self._copied_out, self._aliased = layout.outputs, layout.copied, sorted(layout.aliased)
        self.buffers = *self._inputs, *self._copied_out

    def run(self, tensors: list[torch.Tensor]) -> Results:
        """Replay on these arguments. Empties the list: tensors that are no longer read can be freed."""
        self._copy_in(tensors)
        aliased = {i: tensors[i] for i in self._aliased}
        tensors.clear()
        self._replay()
        copies = [tensor.clone() for tensor in self._copied_out]
        return tuple([output(aliased, copies) for output in self._outputs]), self._sizes

    def _copy_in(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._inputs:
            foreach_copy(self._inputs, [tensors[i] for i in self._copied])


def _check_device(tensors: Iterable[torch.Tensor], device: torch.device, role: str) -> None:
    for tensor in tensors:
        if tensor.device != device:
            raise NotRecordedError(f"{role} is on {tensor.device}, expected {device}")


class _ResultLayout:
    """How each result of a replay is made: from an argument, or from a copy of the recording's memory.

    Attributes:
        outputs: a function for each result.
        copied: the tensors that are cloned after each replay.
        aliased: indices of the arguments that share memory with results.
    """

    def __init__(
        self,
        part: Part,
        caller_arguments: Sequence[torch.Tensor],
        arguments: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor | None],
    ) -> None:
        """Find the memory of each result.

        Args:
            part: the part that was recorded.
            caller_arguments: the tensors of the call.
            arguments: the tensors that were passed instead: the call's own, or buffers.
            results: the results of the run on `arguments`.
        """
        self.copied: list[torch.Tensor] = []
        self.aliased: set[int] = set()
        self._copies: dict[int, int] = {}  # by storage, the index in `copied`
        self._sharing: dict[int, list[torch.Tensor]] = {}  # by storage
        for tensor in results:
            if tensor is not None:
                self._sharing.setdefault(storage_id(tensor), []).append(tensor)
        sets, input_index = AliasSets(part.nodes, definition_of), {v: i for i, v in enumerate(part.inputs)}
        self.outputs: list[Output] = []
        for value, tensor in zip(part.outputs, results, strict=True):
            if value is None or tensor is None:
                self.outputs.append(lambda aliased, copies: None)
                continue
            index = input_index.get(sets.root(value))
            alias = None if index is None else self._alias(index, tensor, caller_arguments[index], arguments[index])
            self.outputs.append(alias or self._copy(tensor))

    def _alias(
        self, index: int, tensor: torch.Tensor, caller_argument: torch.Tensor, argument: torch.Tensor
    ) -> Output | None:
        """Return a result that shares an argument's memory, as a view of the caller's; None for any other."""
        if tensor is argument:
            self.aliased.add(index)
            return lambda aliased, copies: aliased[index]
        same_layout = tensor.dtype == argument.dtype and argument.stride() == caller_argument.stride()
        if storage_id(tensor) != storage_id(argument) or not same_layout:
            return None
        self.aliased.add(index)
        size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset() - argument.storage_offset()
        return lambda aliased, copies: aliased[index].as_strided(size, stride, aliased[index].storage_offset() + offset)

    def _copy(self, tensor: torch.Tensor) -> Output:
        """Return a result that is copied.

        Results that share memory share the copy: changes of one show in the other.
        """
        storage = storage_id(tensor)
        sharing = self._sharing[storage]
        keeps_strides = torch.empty_like(tensor).stride() == tensor.stride()  # a clone has the same strides then
        alone = keeps_strides and all(other is tensor for other in sharing)
        if any(other.dtype != tensor.dtype for other in sharing):
            raise NotRecordedError("two results share memory as different types")
        if storage not in self._copies:
            self._copies[storage] = len(self.copied)
            self.copied.append(tensor if alone else _flat_storage(tensor))
        number = self._copies[storage]
        if alone:
            return lambda aliased, copies: copies[number]
        size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        if is_view(tensor):
            return lambda aliased, copies: copies[number].as_strided(size, stride, offset)
        # detach() shares memory and version, and to autograd its result is no view.
        return lambda aliased, copies: copies[number].as_strided(size, stride, offset).detach()


def _flat_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor, as a flat tensor."""
    storage = tensor.untyped_storage()
    return tensor.new_empty(0).set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
