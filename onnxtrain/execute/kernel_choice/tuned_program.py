"""A program whose kernels are chosen by measured time, for its sizes.

    run ──same shapes as last call──> the program with the expected kernels
     └─other shapes─> are they settled? ─yes─> a program with the fastest kernels at these sizes
                                        └─no─> a program whose nodes try their candidates, until all are settled

A call at the usual sizes costs one comparison of shapes. No step waits for a measurement: a trial is a call that the
step needs. Nothing is tried in the first step, which people wait for: trials took 0.1 of the 2.3 s of T5's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import onnx_ir as ir
import torch

from onnxtrain.execute.kernel_choice.expected import CachedExpectations
from onnxtrain.execute.kernel_choice.stored import file_of, load, save
from onnxtrain.execute.kernel_choice.times import WORTH_SECONDS, Answers, rounded
from onnxtrain.execute.kernel_choice.trial import Trial
from onnxtrain.execute.program import FusedCalls, KernelOf, Program, Results, drain
from onnxtrain.graph import sizes
from onnxtrain.ops.definition import Call, Kernel
from onnxtrain.options import Options
from onnxtrain.plan.channels_last import ChannelsLast
from onnxtrain.plan.cut import Part

_LOCK = threading.Lock()
_ANSWERS: dict[Path, Answers] = {}  # of this process, by the file that keeps them


def answers_in(file: Path) -> Answers:
    """Return all answers: those in the file, and those of this process."""
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
    fused_calls: FusedCalls | None = None,
) -> Program:
    """Return the program of a part, which measures kernels if nodes have several; for `fused_calls` see `Program`.

    If results must have the same bits in every run, the cost model alone decides.
    """
    exact = options.rng == "torch" or torch.are_deterministic_algorithms_enabled()
    fused = {n for call in (fused_calls or {}).values() for n in call.part.nodes}
    expected = CachedExpectations()
    tunable = [] if exact else [n for n in part.nodes if n not in fused and _is_tunable(n, expected, device.type)]
    if not tunable:
        return Program(part, name, device, expected, layout=layout, fused_calls=fused_calls)
    return TunedProgram(part, name, device, tunable, expected, options, layout, fused_calls)


def _is_tunable(node: ir.Node, expected: CachedExpectations, device: str) -> bool:
    """Return whether a node has several kernels, and takes long enough at some size for the choice to matter."""
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
        tunable: Sequence[ir.Node],
        expected: CachedExpectations,
        options: Options,
        layout: ChannelsLast | None = None,
        fused_calls: FusedCalls | None = None,
    ) -> None:
        shaping = _shaping_inputs(part, tunable)
        super().__init__(part, name, device, expected, entry=shaping, layout=layout, fused_calls=fused_calls)
        self.namespace["other_shapes"] = self._run_other_shapes
        self._run_expected: Callable[..., Results] = self.run
        self._shaping_indices = [part.inputs.index(value) for value in shaping]
        self._tunable = tunable
        self._measuring = bool(options.tuning)
        limit_ms = float("inf") if isinstance(options.tuning, bool | str) else options.tuning
        self._max_seconds = limit_ms / 1000
        self._file = file_of(options.cache_dir)
        self._trials: dict[ir.Node, Trial] = {}
        self._trying: Program | None = None
        self._expected = expected
        expected_names = tuple(expected(node, device.type).name for node in tunable)
        self._variants: dict[tuple[str, ...], Program] = {expected_names: self}
        self._settled: dict[tuple[int, ...], Program] = {}
        self._has_run = False

    def _run_other_shapes(self, tensors: list[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        """Run a call whose shapes differ from the last call with the expected kernels."""
        if not self._has_run:
            self._has_run = True
            return self._run_expected(drain(tensors), sizes_in, True)
        shapes = [tensors[index].shape for index in self._shaping_indices]
        size_class = _size_class(shapes)
        settled = self._settled.get(size_class)
        if settled is None:
            return self._try(tensors, sizes_in, size_class)
        if settled is not self:
            return settled.run(drain(tensors), sizes_in)
        self.namespace.update((f"shape_{i}", shape) for i, shape in enumerate(shapes or [()]))
        return self._run_expected(drain(tensors), sizes_in, True)

    def _try(self, tensors: list[torch.Tensor], sizes_in: Sequence[int], size_class: tuple[int, ...]) -> Results:
        """Run each node with its next candidate; if all nodes are settled then, build the program for these sizes."""
        if self._trying is None:
            answers = answers_in(self._file)
            self._trials = {
                node: Trial(node, self._device.type, answers, self._measuring, self._max_seconds)
                for node in self._tunable
            }
            self._trying = self._with_kernels(f"{self._name} trying", self._trial_or_expected)
        result = self._trying.run(drain(tensors), sizes_in)
        chosen = [trial.chosen for trial in self._trials.values() if trial.chosen is not None]
        if len(chosen) == len(self._trials):
            self._settled[size_class] = self._variant(chosen)
            if self._measuring:
                save(self._file, answers_in(self._file))
        return result

    def _profiled(self, tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        """Run the kernels that run at these sizes without a profiler, with a profiler range per node."""
        arguments = list(tensors)
        shapes = [arguments[index].shape for index in self._shaping_indices]
        program = self._settled.get(_size_class(shapes), self)
        if program is self:
            return super()._profiled(drain(arguments), sizes_in)
        return program.run(drain(arguments), sizes_in)

    def _trial_or_expected(self, node: ir.Node, device: str) -> Kernel:
        trial = self._trials.get(node)
        if trial is None:
            return self._expected(node, device)
        return Kernel(lower=lambda n, *arguments: Call(trial, *arguments))

    def _variant(self, kernels: Sequence[Kernel]) -> Program:
        """Return the program with these kernels, one for each tunable node."""
        names = tuple(kernel.name for kernel in kernels)
        variant = self._variants.get(names)
        if variant is None:
            chosen = dict(zip(self._tunable, kernels, strict=True))
            variant = self._variants[names] = self._with_kernels(
                self._name, lambda node, device: chosen.get(node) or self._expected(node, device)
            )
            self.source, self.filename = variant.source, variant.filename
        return variant

    def _with_kernels(self, name: str, kernels: KernelOf) -> Program:
        return Program(self.part, name, self._device, kernels, layout=self._layout, fused_calls=self._fused_calls)


def _size_class(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(rounded(size) for shape in shapes for size in shape)


def _shaping_inputs(part: Part, tunable: Sequence[ir.Node]) -> list[ir.Value]:
    """Return a few inputs whose shapes determine all symbols of the tunable nodes that inputs determine."""
    values = [v for node in tunable for v in node.inputs if v is not None]
    missing = {name for v in values for size in sizes.dims_of(v) for name in sizes.symbols(size)}
    shaping = []
    for value in part.inputs:
        determined = {size for size in sizes.dims_of(value) if isinstance(size, str)} & missing
        if determined:
            shaping.append(value)
            missing -= determined
    return shaping
