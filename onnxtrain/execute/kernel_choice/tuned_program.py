"""A program whose kernels are chosen by measured time, for its sizes.

    run ──shapes as last time──> the program as it was written first
     └─other shapes─> settled for them ─yes─> a program with the kernels that are fastest at these sizes
                         └─no─> a program whose nodes try their candidates, until all are settled

So a call at usual sizes costs one comparison of shapes more than without a choice. Nothing waits for a measurement:
each call of a candidate is a step's own. Nothing is tried in the first step of all, which people wait for: that took
0.1 of the 2.3 s of a T5's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import onnx_ir as ir
import torch

from onnxtrain.execute.kernel_choice.expected import ExpectedOnce
from onnxtrain.execute.kernel_choice.stored import file_of, load, save
from onnxtrain.execute.kernel_choice.times import WORTH_SECONDS, Answers, rounded
from onnxtrain.execute.kernel_choice.trial import Trial
from onnxtrain.execute.program import Joined, KernelOf, Program, Results, drained
from onnxtrain.graph import sizes
from onnxtrain.ops.definition import Call, Kernel
from onnxtrain.options import Options
from onnxtrain.plan.channels_last import ChannelsLast
from onnxtrain.plan.cut import Part

_LOCK = threading.Lock()
_ANSWERS: dict[Path, Answers] = {}  # of this process, by the file that keeps them


def answers_in(file: Path) -> Answers:
    """What is known, from the file and from this process."""
    with _LOCK:
        if file not in _ANSWERS:
            _ANSWERS[file] = load(file)
        return _ANSWERS[file]


def make_program(
    part: Part,
    name: str,
    device: torch.device,
    options: Options,
    layout: ChannelsLast | None = None,
    joined: Joined | None = None,
) -> Program:
    """The program of a part, with a choice of kernels where there is one. `joined` as in `Program`.

    Where results must be the same bits in every run, the cost model alone decides.
    """
    exact = options.rng == "torch" or torch.are_deterministic_algorithms_enabled()
    inside = {n for call in (joined or {}).values() for n in call.part.nodes}
    expected = ExpectedOnce()
    open_nodes = [] if exact else [n for n in part.nodes if n not in inside and _is_open(n, expected, device.type)]
    if not open_nodes:
        return Program(part, name, device, expected, layout=layout, joined=joined)
    return TunedProgram(part, name, device, open_nodes, expected, options, layout, joined)


def _is_open(node: ir.Node, expected: ExpectedOnce, device: str) -> bool:
    """Whether speed decides between kernels, and may matter at some size."""
    candidates = expected.seconds(node, device)
    if len(candidates) == 1:
        return False
    if any(isinstance(size, str) for value in node.inputs if value is not None for size in sizes.dims_of(value)):
        return True
    return min(seconds for _, seconds in candidates) >= WORTH_SECONDS


class TunedProgram(Program):
    """See the module's docstring."""

    def __init__(
        self,
        part: Part,
        name: str,
        device: torch.device,
        open_nodes: Sequence[ir.Node],
        expected: ExpectedOnce,
        options: Options,
        layout: ChannelsLast | None = None,
        joined: Joined | None = None,
    ) -> None:
        watched = _watched(part, open_nodes)
        super().__init__(part, name, device, expected, entry=watched, layout=layout, joined=joined)
        self.namespace["elsewhere"] = self._elsewhere
        self._as_written: Callable[..., Results] = self.run
        self._places = [part.inputs.index(value) for value in watched]
        self._open_nodes = open_nodes
        self._measuring = bool(options.tuning)
        limit_ms = float("inf") if isinstance(options.tuning, bool | str) else options.tuning
        self._most_seconds = limit_ms / 1000
        self._file = file_of(options.cache_dir)
        self._trials: dict[ir.Node, Trial] = {}
        self._trying: Program | None = None
        self._expected = expected
        self._own = tuple(expected(node, device.type).name for node in open_nodes)
        self._variants: dict[tuple[str, ...], Program] = {self._own: self}
        self._settled: dict[tuple[int, ...], Program] = {}
        self._has_run = False

    def _elsewhere(self, tensors: list[torch.Tensor], given: Sequence[int]) -> Results:
        """Runs a call whose shapes are not those of the last one, or which other kernels serve."""
        if not self._has_run:
            self._has_run = True
            return self._as_written(drained(tensors), given, True)
        shapes = [tensors[place].shape for place in self._places]
        size_class = _size_class(shapes)
        settled = self._settled.get(size_class)
        if settled is None:
            return self._try(tensors, given, size_class)
        if settled is not self:
            return settled.run(drained(tensors), given)
        self.namespace.update((f"shape_{i}", shape) for i, shape in enumerate(shapes or [()]))
        return self._as_written(drained(tensors), given, True)

    def _try(self, tensors: list[torch.Tensor], given: Sequence[int], size_class: tuple[int, ...]) -> Results:
        """Runs the nodes by their candidates in turn; where that settled all, the next call goes straight."""
        if self._trying is None:
            answers = answers_in(self._file)
            self._trials = {
                node: Trial(node, self._device.type, answers, self._measuring, self._most_seconds)
                for node in self._open_nodes
            }
            self._trying = self._with_kernels(f"{self._name} trying", self._trial_or_expected)
        result = self._trying.run(drained(tensors), given)
        chosen = [trial.chosen for trial in self._trials.values() if trial.chosen is not None]
        if len(chosen) == len(self._trials):
            self._settled[size_class] = self._variant(chosen)
            if self._measuring:
                save(self._file, answers_in(self._file))
        return result

    def _profiled(self, tensors: Iterable[torch.Tensor], given: Sequence[int]) -> Results:
        """Runs with a profiler range per node what runs at these sizes without: the settled kernels, where they are."""
        held = list(tensors)
        shapes = [held[place].shape for place in self._places]
        program = self._settled.get(_size_class(shapes), self)
        if program is self:
            return super()._profiled(drained(held), given)
        return program.run(drained(held), given)

    def _trial_or_expected(self, node: ir.Node, device: str) -> Kernel:
        trial = self._trials.get(node)
        if trial is None:
            return self._expected(node, device)
        return Kernel(lower=lambda n, *arguments: Call(trial, *arguments))

    def _variant(self, kernels: Sequence[Kernel]) -> Program:
        """The program with these kernels of the open nodes."""
        names = tuple(kernel.name for kernel in kernels)
        known = self._variants.get(names)
        if known is None:
            chosen = dict(zip(self._open_nodes, kernels, strict=True))
            known = self._variants[names] = self._with_kernels(
                self._name, lambda node, device: chosen.get(node) or self._expected(node, device)
            )
            self.source, self.filename = known.source, known.filename
        return known

    def _with_kernels(self, name: str, kernels: KernelOf) -> Program:
        return Program(self.part, name, self._device, kernels, layout=self._layout, joined=self._joined)


def _size_class(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(rounded(size) for shape in shapes for size in shape)


def _watched(part: Part, open_nodes: Sequence[ir.Node]) -> list[ir.Value]:
    """A few inputs whose shapes tell all sizes of the open nodes that the inputs tell."""
    values = [v for node in open_nodes for v in node.inputs if v is not None]
    missing = {name for v in values for size in sizes.dims_of(v) for name in sizes.symbols(size)}
    found = []
    for value in part.inputs:
        told = {size for size in sizes.dims_of(value) if isinstance(size, str)} & missing
        if told:
            found.append(value)
            missing -= told
    return found
