"""Measure the candidates of a node in running steps: each call tries one of them."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.execute.kernel_choice.neighbours import worse_nearby
from onnxtrain.execute.kernel_choice.times import FAR_OFF, WORTH_SECONDS, Answer, Answers, rounded
from onnxtrain.graph.values import dtype_of
from onnxtrain.ops import definition_of
from onnxtrain.ops.cost_model import Shapes
from onnxtrain.ops.definition import Call, Kernel
from onnxtrain.system.machine import current_machine


class _Case:
    """One node at one set of shapes.

    Attributes:
        candidates: by name, the expected best first.
        answer: the times so far; None if the choice is not worth measuring.
        scale: the expected time at the answer's shapes, divided by that at these.
    """

    __slots__ = ("answer", "candidates", "scale")

    def __init__(self, candidates: dict[str, Kernel], answer: Answer | None, scale: float) -> None:
        self.candidates, self.answer, self.scale = candidates, answer, scale

    @property
    def choice(self) -> Kernel | None:
        """The settled kernel."""
        if self.answer is None:
            return next(iter(self.candidates.values()))
        return self.candidates.get(self.answer.choice)

    def ready(self) -> tuple[str, ...]:
        """Return the candidates that can run.

        The others start to compile when these have been measured: a compiler takes processor time, and if sizes change
        with every step nothing is ever settled. Candidates that cannot be compiled are dropped.
        """
        libraries = {name: kernel.library for name, kernel in self.candidates.items()}
        is_ready = {name: library is None or library.is_ready() for name, library in libraries.items()}
        self.candidates = {name: kernel for name, kernel in self.candidates.items() if is_ready[name] is not None}
        ready = tuple(name for name in self.candidates if is_ready[name])
        if self.answer is not None and len(ready) < len(self.candidates) and all(map(self.answer.is_done, ready)):
            for name in self.candidates.keys() - ready:
                library = libraries[name]
                assert library is not None, "a kernel without a library is ready"
                library.request()
        return ready


class Trial:
    """Runs a node with one candidate per call, and records its time.

    Attributes:
        chosen: the kernel that is settled for the shapes of the last call, or None.
    """

    def __init__(self, node: ir.Node, device: str, answers: Answers, measuring: bool, max_seconds: float) -> None:
        """Set up a trial.

        Args:
            node: a node with several candidates.
            device: the type of the device.
            answers: all answers so far; grows.
            measuring: whether to try candidates; otherwise only earlier answers count.
            max_seconds: how long one question may be measured.
        """
        definition = definition_of(node)
        self.chosen: Kernel | None = None
        self._view = definition.view(node)
        self._kernels = definition.candidates(node, device)
        self._answers, self._measuring, self._max_seconds = answers, measuring, max_seconds
        self._cases: dict[Shapes, _Case] = {}
        self._question = question(node)
        # "..." in an axis map is batch axes that a GEMM flattens: rows [16, 128, 384] ask the question of [2048, 384].
        patterns = definition.axes(self._view).split("->")[0].split(",")
        missing = len(definition.inputs) - len(patterns)
        self._patterns = [*(pattern.split() for pattern in patterns), *[[]] * missing]

    def __call__(self, *arguments: torch.Tensor | None) -> Any:
        shapes = tuple(() if a is None else tuple(a.shape) for a in arguments)
        case = self._cases.get(shapes)
        if case is None:
            case = self._cases[shapes] = self._case(shapes, arguments)
        self.chosen = case.choice
        if self.chosen is not None:
            return self.chosen.lower(self._view, *arguments).evaluate()
        return self._measured(case, arguments)

    def _measured(self, case: _Case, arguments: Sequence[torch.Tensor | None]) -> Any:
        answer = case.answer
        assert answer is not None
        name = answer.next(case.ready())
        call: Call = case.candidates[name].lower(self._view, *arguments)
        before, started = _THREADS.seconds_waited(), time.perf_counter()
        result = call.evaluate()
        seconds = time.perf_counter() - started
        waited = _THREADS.seconds_since(before)
        answer.add(name, seconds * case.scale, waited * case.scale)
        answer.settle(tuple(case.candidates), at_once=answer.spent > self._max_seconds)
        self.chosen = case.choice
        return result

    def _case(self, shapes: Shapes, arguments: Sequence[torch.Tensor | None]) -> _Case:
        machine = current_machine()
        expected = {k.name: k.seconds(self._view, shapes, machine) for k in self._kernels}
        by_name = {k.name: k for k in self._kernels}
        least = min(expected.values())
        order = sorted((name for name, s in expected.items() if s < FAR_OFF * least), key=expected.__getitem__)
        sizes = " ".join(map(_describe, arguments, self._patterns))
        earlier = self._answers.get(f"{self._question} {sizes}")
        is_settled = earlier is not None and earlier.choice in order
        if not is_settled:
            worse = worse_nearby(self._question, sizes, order, self._answers)
            order = [name for name in order if name not in worse]
        candidates = {name: by_name[name] for name in order}
        if not is_settled and not (self._measuring and len(order) > 1 and least >= WORTH_SECONDS):
            return _Case(candidates, None, 1.0)
        answer = self._answers.setdefault(f"{self._question} {sizes}", Answer(" ".join(map(str, map(list, shapes)))))
        if answer.reference == 0.0:
            answer.reference = least
        return _Case(candidates, answer, answer.reference / least)


class _Threads:
    """The time that threads of this process wait for a core, as Linux counts it; 0 on other systems.

    The files are kept open for a while: reading them takes 10 us, and 100 us if they are opened each time.
    """

    def __init__(self) -> None:
        self._files: list[int] = []
        self._listed = -math.inf
        self._lock = threading.Lock()  # a descriptor closed twice may belong to another file by then

    def seconds_waited(self) -> float:
        """Return the seconds that all threads have waited so far."""
        with self._lock:
            if time.monotonic() - self._listed > _LIST_SECONDS:
                self._list()
            return self._total()

    def seconds_since(self, before: float) -> float:
        """Return the seconds that they have waited since `before`, a result of `seconds_waited`."""
        with self._lock:
            return max(0.0, self._total() - before)

    def _total(self) -> float:
        try:
            return sum(int(os.pread(file, 100, 0).split()[1]) for file in self._files) * 1e-9
        except (OSError, IndexError):  # a thread has just ended
            self._listed = -math.inf
            return 0.0

    def _list(self) -> None:
        for file in self._files:
            os.close(file)
        self._files, self._listed = [], time.monotonic()
        with contextlib.suppress(OSError):
            for thread in os.listdir("/proc/self/task"):
                self._files.append(os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY))


_LIST_SECONDS = 0.5  # the list of threads is read again after so long
_THREADS = _Threads()


def question(node: ir.Node) -> str:
    """Return a node's op, attributes and element type, as text."""
    attributes = ", ".join(f"{a.name}={a.value}" for a in sorted(node.attributes.values(), key=lambda a: a.name))
    first = next(v for v in node.inputs if v is not None)
    return f"{node.domain or 'ai.onnx'}::{node.op_type}({attributes}) {dtype_of(first).name.lower()}"


def _describe(argument: torch.Tensor | None, pattern: Sequence[str]) -> str:
    """Return rounded sizes, and a letter unless contiguous: L channels_last, T transposed, S other strides."""
    if argument is None:
        return "-"
    shape = tuple(argument.shape)
    if pattern[:1] == ["..."]:
        leading = len(shape) - len(pattern) + 1
        shape = (math.prod(shape[:leading]), *shape[leading:])
    sizes = "x".join(str(rounded(size)) for size in shape)
    if argument.is_contiguous():
        return sizes
    channels_last = argument.dim() in (4, 5) and argument.movedim(1, -1).is_contiguous()
    return f"{sizes}{'L' if channels_last else 'T' if argument.dim() > 1 and argument.mT.is_contiguous() else 'S'}"
