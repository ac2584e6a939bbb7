"""A program that is recorded once for each set of sizes, and then played (the option `cuda_graphs`).

    run ─1─> counts calls of the same sizes                   the ordinary program
        ─2─> records the ordinary program, on buffers
        ─3─> copies arguments into them, plays the recording, copies the results out

A recording reads and writes the same addresses whenever it is played. The module's own tensors are read where they lie:
one that has moved ends the recordings. No tensor that leaves lies in a recording's memory, so that nothing depends on
what is played when: two forwards before a backward, a result that the user keeps. What backward keeps of the arguments
are the arguments themselves, or views of them, as without a recording: autograd sees when they are changed.

A recording is for exact sizes. Where tokens run without padding, `packing` rounds their number up, so that few serve
all batches. Of other sizes the last eight are kept, and a hint says what to do about many.

What records is a `Recorder`: on a GPU `cuda_recorder`, in the tests one that runs on a CPU.
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
from onnxtrain.execute.program import Program, Run, drained
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
CALLS = 3  # of the same sizes go the ordinary way: to record takes as long as some ten of them
MOST_SIZES = 8  # of a program are remembered, and so its recordings
MOST_MOVES = 3  # of the module's own tensors; then they are copied like other arguments

_MANY_SIZES = (
    f"{_NAME}: a program is called with more sets of sizes than the {MOST_SIZES} whose recordings are kept, and most "
    "calls run as without them. Pad batches to multiples of some length (pad_to_multiple_of=64 in Hugging Face's "
    "collators), or to one length, and let skip_padding leave the padding out; drop a last batch that is smaller"
)

Results = tuple[tuple[Any, ...], tuple[int, ...]]
Play = Callable[[], None]
Output = Callable[[Mapping[int, torch.Tensor], Sequence[torch.Tensor]], Any]  # of arguments and copies

_profiling = dispatch.profiler_enabled
_REASONS = {
    Effects.PYTHON: "it runs the user's Python",
    Effects.HOST_SYNC: "sizes depend on what it computes",
}


class Recorder(Protocol):
    """Records programs of one unit so that they can be played again."""

    def is_busy(self) -> bool:
        """Whether the caller is recording what runs here."""

    def turn(self) -> AbstractContextManager[None]:
        """Inside, no other recording of this recorder is under way, on any thread or stream."""

    def record(self, function: Callable[[], Results]) -> tuple[Results, Play]:
        """Runs the function, maybe several times, and records it; in a turn.

        Returns its results, and what computes them again, into the same memory, from what then lies at the addresses
        that the function read. Until that is called the results need not be there, and no random number is drawn;
        whenever it is called, others are.
        """

    def settle(self) -> None:
        """Waits until nothing is under way that was played: its memory may go."""


class NotRecordedError(RuntimeError):
    """A program cannot be recorded; the message is the reason, without a full stop."""


def why_never(node: ir.Node) -> str:
    """Why no program with this node is recorded, wherever it runs; empty where nothing is in the way."""
    definition = definition_of(node)
    found = next((reason for effect, reason in _REASONS.items() if effect in definition.effects), "")
    if not found and Effects.RANDOM in definition.effects and isinstance(definition.body, NoBody):
        return "it may draw random numbers on the host, which would be the same each time"
    return found


@dataclass(frozen=True)
class Recordings:
    """What the programs of one unit are recorded with.

    Attributes:
        recorder: records them.
        device: on which all tensors must lie.
        fixed: the names of the inputs that are tensors of the module, and stay where they are.
        why_not: where no program of the unit is recorded, the reason.
    """

    recorder: Recorder
    device: torch.device
    fixed: frozenset[str]
    why_not: str = ""

    def refusals(self, parts: Iterable[Part]) -> list[Refusal]:
        """Why some of these parts are not recorded, as far as it is known before they run."""
        found = (self.refusal(part) for part in parts)
        return list(dict.fromkeys(refusal for refusal in found if refusal is not None))

    def refusal(self, part: Part) -> Refusal | None:
        if self.why_not:
            return Refusal(_NAME, "all programs", self.why_not)
        for node in part.nodes:
            reason = why_never(node)
            if not reason and _reads_on_host(node, part, self.device):
                reason = "the host reads a number that an earlier node computes"
            if reason:
                return Refusal(_NAME, node.name or node.op_type, reason, origin(node) or "")
        return None

    def watch(self, program: Program) -> RecordedProgram | None:
        """Lets a program be recorded; where something stands in the way, says so once in the log."""
        refusal = self.refusal(program.part)
        if refusal is None:
            return RecordedProgram(program, self)
        warn_once(f"Not recorded by {refusal}")
        return None


def _reads_on_host(node: ir.Node, part: Part, device: torch.device) -> bool:
    """Whether a node takes the contents of a tensor of the device as Python numbers."""
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
    """What `run` of a program is, in turn. See the module's docstring.

    Attributes:
        known: by shapes, strides and given sizes the calls so far or the recording; those used last stand last.
    """

    def __init__(self, program: Program, recordings: Recordings) -> None:
        self._program, self._recordings = program, recordings
        self._ordinary = program.run
        self._fixed = tuple(i for i, v in enumerate(program.part.inputs) if v.name in recordings.fixed)
        self._moves = 0
        self._forgotten = 0
        self.known: dict[Any, int | Recording] = {}
        program.run = self.run
        weakref.finalize(self, recordings.recorder.settle).atexit = False  # before its recordings go

    def run(self, tensors: Iterable[torch.Tensor], given: Sequence[int]) -> Results:
        tensors = list(tensors)
        recorder = self._recordings.recorder
        if not (_profiling() or recorder.is_busy()):
            with recorder.turn():
                recording = self._recording(tensors, given)
                if recording is not None:
                    return recording.run(tensors)
        return self._ordinary(drained(tensors), given)

    def _recording(self, tensors: Sequence[torch.Tensor], given: Sequence[int]) -> Recording | None:
        """The recording for a call, made where it is time to; None where the call goes the ordinary way."""
        key = tuple([(t.shape, t.stride()) for t in tensors]), tuple(given)
        found = self.known[key] = self.known.pop(key, 0)
        if isinstance(found, Recording):
            if found.addresses == [tensors[i].data_ptr() for i in self._fixed]:
                return found
            self._forget()
            self._moves += 1
            if self._moves > MOST_MOVES:
                self._fixed = ()
            return None
        if len(self.known) > MOST_SIZES:
            self._forget(MOST_SIZES)
            self._forgotten += 1
            if self._forgotten == MOST_SIZES:
                warn_once(_MANY_SIZES)
        if found < CALLS:
            self.known[key] = found + 1
            return None
        try:
            made = Recording(self._program.part, self._ordinary, self._recordings, tensors, given, self._fixed)
        except RuntimeError as error:  # CUDA's are, and that of the memory that is not there
            reason = str(error).partition("\n")[0]
            warn_once(f"Not recorded by {_NAME}: {self._program.filename}: {reason}")
            self._program.run = self._ordinary
            self._forget()
            return None
        self.known[key] = made
        return made

    def _forget(self, most: int = 0) -> None:
        """Forgets all sizes but the `most` that were used last."""
        while len(self.known) > most:
            oldest = next(iter(self.known))
            if isinstance(self.known[oldest], Recording):
                self._recordings.recorder.settle()
            del self.known[oldest]


class Recording:
    """A program at one set of sizes, recorded.

    Attributes:
        addresses: of the arguments that are read where they lie.
        buffers: the memory that it reads and writes and that nobody else sees.
    """

    def __init__(
        self,
        part: Part,
        run: Run,
        by: Recordings,
        tensors: Sequence[torch.Tensor],
        given: Sequence[int],
        fixed: Sequence[int],
    ) -> None:
        """Records `run` of `part` on such tensors and sizes. Those at the positions `fixed` are read where they lie.

        Raises:
            NotRecordedError: a tensor does not lie on the device, or results share memory as different types.
            RuntimeError: the recorder's, or the program's.
        """
        _check_device(tensors, by.device, "an argument")
        arguments = [t.detach() if i in fixed else torch.empty_like(t) for i, t in enumerate(tensors)]
        self.addresses = [tensors[i].data_ptr() for i in fixed]
        self._copied = [i for i in range(len(tensors)) if i not in fixed]
        self._inputs = [arguments[i] for i in self._copied]
        self._copy_in(tensors)
        (found, self._sizes), self._play = by.recorder.record(lambda: run(iter(arguments), given))
        _check_device([t for t in found if t is not None], by.device, "a result")
        layout = _Layout(part, tensors, arguments, found)
        self._outputs, self._copied_out, self._passed = layout.outputs, layout.copied, sorted(layout.passed)
        self.buffers = *self._inputs, *self._copied_out

    def run(self, tensors: list[torch.Tensor]) -> Results:
        """Plays it on these arguments. The list is emptied: nothing here keeps alive what is read no more."""
        self._copy_in(tensors)
        passed = {i: tensors[i] for i in self._passed}
        tensors.clear()
        self._play()
        copies = [tensor.clone() for tensor in self._copied_out]
        return tuple([output(passed, copies) for output in self._outputs]), self._sizes

    def _copy_in(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._inputs:
            foreach_copy(self._inputs, [tensors[i] for i in self._copied])


def _check_device(tensors: Iterable[torch.Tensor], device: torch.device, what: str) -> None:
    for tensor in tensors:
        if tensor.device != device:
            raise NotRecordedError(f"{what} lies on {tensor.device}, and not on {device}")


class _Layout:
    """How a program's results are given out.

    Attributes:
        outputs: make each of them.
        copied: the memory that is copied.
        passed: positions of the arguments in whose memory results lie.
    """

    def __init__(
        self,
        part: Part,
        given: Sequence[torch.Tensor],
        arguments: Sequence[torch.Tensor],
        found: Sequence[torch.Tensor | None],
    ) -> None:
        """Looks where the results `found` lie, of a run on `arguments`, which stand for the caller's, `given`."""
        self.copied: list[torch.Tensor] = []
        self.passed: set[int] = set()
        self._copies: dict[int, int] = {}  # by storage, the place in `copied`
        self._sharing: dict[int, list[torch.Tensor]] = {}  # by storage
        for tensor in found:
            if tensor is not None:
                self._sharing.setdefault(storage_id(tensor), []).append(tensor)
        sets, places = AliasSets(part.nodes, definition_of), {v: i for i, v in enumerate(part.inputs)}
        self.outputs: list[Output] = []
        for value, tensor in zip(part.outputs, found, strict=True):
            if value is None or tensor is None:
                self.outputs.append(lambda passed, copies: None)
                continue
            index = places.get(sets.root(value))
            own = None if index is None else self._of_argument(index, tensor, given[index], arguments[index])
            self.outputs.append(own or self._copy(tensor))

    def _of_argument(
        self, index: int, tensor: torch.Tensor, given: torch.Tensor, argument: torch.Tensor
    ) -> Output | None:
        """A result that lies in an argument's memory, in that of the caller's; None for any other."""
        if tensor is argument:
            self.passed.add(index)
            return lambda passed, copies: passed[index]
        alike = tensor.dtype == argument.dtype and argument.stride() == given.stride()
        if storage_id(tensor) != storage_id(argument) or not alike:
            return None
        self.passed.add(index)
        size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset() - argument.storage_offset()
        return lambda passed, copies: passed[index].as_strided(size, stride, passed[index].storage_offset() + offset)

    def _copy(self, tensor: torch.Tensor) -> Output:
        """A result that is copied. Those that share memory share that of the copy: changes of one show in the other."""
        storage = storage_id(tensor)
        sharing = self._sharing[storage]
        as_it_is = torch.empty_like(tensor).stride() == tensor.stride()  # a clone has the same strides then
        alone = as_it_is and all(other is tensor for other in sharing)
        if any(other.dtype != tensor.dtype for other in sharing):
            raise NotRecordedError("two results share memory as different types")
        if storage not in self._copies:
            self._copies[storage] = len(self.copied)
            self.copied.append(tensor if alone else _whole(tensor))
        number = self._copies[storage]
        if alone:
            return lambda passed, copies: copies[number]
        size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        if is_view(tensor):
            return lambda passed, copies: copies[number].as_strided(size, stride, offset)
        # detach() gives a tensor of the same memory and version that is no view to autograd.
        return lambda passed, copies: copies[number].as_strided(size, stride, offset).detach()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that a tensor lies in, flat."""
    storage = tensor.untyped_storage()
    return tensor.new_empty(0).set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
