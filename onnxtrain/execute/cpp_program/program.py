"""Replace a program by one compiled C++ function for the sizes that it is mostly called with.

    run ─1─> counts calls of the same shapes                            the ordinary program
        ─2─> emits and compiles the function in the background          the ordinary program
        ─3─> interleaves and times the two                              both
        ─4─> the faster one; other shapes still run the ordinary program

The function stays only if it is faster on the user's own steps: its loops know the sizes, but not the machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.execute.cpp_program.call import ENTRY, Call, compiled_call, python_call
from onnxtrain.execute.cpp_program.source import MAX_ELEMENTS, NAME, emit_function
from onnxtrain.execute.cpp_program.static_graph import static_graph
from onnxtrain.execute.program import Program, Run, drain
from onnxtrain.graph.alias import view_source
from onnxtrain.log import LOG
from onnxtrain.native import Library
from onnxtrain.ops import definition_of
from onnxtrain.ops.interfaces.cpp import UnsupportedError
from onnxtrain.plan.cut import Part

_CALLS_BEFORE_COMPILING = 8  # with the same shapes, before compiling pays off
_MAX_TRIALS = 20  # timed calls of each of the two at most
_DECISIVE_TRIALS = 5  # if all of one take less than all of the other; equal programs do so in 1 of 126 trials
_MAX_NODES = 256  # of a small program

Shapes = Sequence[tuple[int, ...]]
Results = tuple[tuple[Any, ...], tuple[int, ...]]


def may_be_cpp_program(part: Part, min_nodes: int = 2) -> bool:
    """Return whether a part of at least `min_nodes` nodes may be compiled; sizes and operators are checked later."""
    tensor_nodes = [n for n in part.nodes if not part.host.issuperset(n.outputs)]
    if not min_nodes <= len(tensor_nodes) <= _MAX_NODES or any(definition_of(n).effects for n in tensor_nodes):
        return False
    inputs = set(part.inputs)
    roots = [_root(value) for value in part.outputs[: part.num_user_outputs] if value is not None]
    outputs = [value for value in part.outputs if value is not None]
    # A view that is returned would be a copy; one of an input, kept for backward, would miss changes of the input.
    if len(set(roots)) < len(roots) or any(_root(v) in inputs and v not in inputs for v in outputs):
        return False
    return not any(value.const_value is not None for value in outputs)


def _root(value: ir.Value) -> ir.Value:
    """Return the value whose memory this one shares."""
    node = value.producer()
    while node is not None:
        source = view_source(node, value.index() or 0, definition_of(node))
        if source is None:
            break
        value, node = source, source.producer()
    return value


def watch(program: Program) -> CppProgram | None:
    """Let a CPU program be replaced by a compiled function if `may_be_cpp_program`."""
    return CppProgram(program) if may_be_cpp_program(program.part) else None


class CppProgram:
    """The successive `run` functions of a program; see the module's docstring.

    Attributes:
        call: the compiled function as a program, once it is available.
        settled: whether the faster of the two is chosen.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._ordinary = program.run
        self.call: Run | None = None
        self.settled = False
        self._shapes: tuple[Any, ...] = ()
        self._repeats = 0
        self._thread: threading.Thread | None = None
        self._times: tuple[list[float], list[float]] = ([], [])
        program.run = self._counting

    # 1: count calls

    def _counting(self, tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        tensors = list(tensors)
        shapes = (*(t.shape for t in tensors), *sizes_in)
        self._repeats = self._repeats + 1 if shapes == self._shapes else 0
        self._shapes = shapes
        if any(t.numel() > MAX_ELEMENTS for t in tensors):
            self._program.run = self._ordinary
        elif self._repeats >= _CALLS_BEFORE_COMPILING and self._thread is None:
            self._thread = threading.Thread(
                target=self._build, args=([tuple(t.shape) for t in tensors], tuple(sizes_in)), daemon=True
            )
            self._program.run = self._ordinary
            self._thread.start()
        return self._ordinary(drain(tensors), sizes_in)

    # 2: compile

    def _build(self, shapes: Shapes, sizes_in: Sequence[int]) -> None:
        """Emit and compile the function, off the main thread.

        Emitting takes some 10 ms and compiling seconds; entry.cpp takes 10 s more, once per machine.
        """
        try:
            static = static_graph(self._program.part, shapes, sizes_in)
            function = emit_function(static.graph, static.passed_through)
        except (UnsupportedError, GraphError) as reason:
            LOG.debug("%s cannot be compiled to one function: %s", self._program.filename, reason)
            return
        library = Library("cpp-program", function.source, {NAME: "p"}, keeps_gil=True)
        ENTRY.request()
        if not library.wait():
            return
        call = Call.from_function(self._program.part, static, shapes, function, getattr(library.functions, NAME))
        self.call = (compiled_call if ENTRY.wait() else python_call)(call, self._ordinary)
        self._program.run = self._timing

    # 3: time both

    def _timing(self, tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        assert self.call is not None
        ordinary, call = self._times
        times, run = (ordinary, self._ordinary) if len(call) > len(ordinary) else (call, self.call)
        start = time.perf_counter()
        result = run(tensors, sizes_in)
        times.append(time.perf_counter() - start)
        if len(ordinary) >= _MAX_TRIALS or _is_decided(call, ordinary):
            self._program.run = self.call if _is_faster(call, ordinary) else self._ordinary
            self.settled = True
            LOG.debug(
                "%s: %.1f us as one C++ function, %.1f us as the ordinary program",
                self._program.filename,
                min(call) * 1e6,
                min(ordinary) * 1e6,
            )
        return result


def _is_decided(call: Sequence[float], ordinary: Sequence[float]) -> bool:
    """Return whether the latest timings of the two leave no doubt: the first call of a function is slow."""
    if min(len(call), len(ordinary)) < _DECISIVE_TRIALS:
        return False
    call, ordinary = call[-_DECISIVE_TRIALS:], ordinary[-_DECISIVE_TRIALS:]
    return max(call) < min(ordinary) or max(ordinary) < min(call)


def _is_faster(call: Sequence[float], ordinary: Sequence[float]) -> bool:
    return min(call) < min(ordinary)
