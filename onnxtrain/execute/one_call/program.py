"""A program that becomes one compiled call at the sizes that it is mostly called with.

    run ─1─> counts calls of the same shapes                            the ordinary program
        ─2─> writes and compiles the function, behind                   the ordinary program
        ─3─> the two in turn, timed                                     both
        ─4─> the faster one; other shapes still go the ordinary way

The function stays only where it wins on the user's own steps: its loops know the sizes, but not the machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.execute.one_call.arrays import UnsupportedError
from onnxtrain.execute.one_call.call import ENTRY, Call, compiled_call, python_call
from onnxtrain.execute.one_call.source import LARGEST, NAME, write
from onnxtrain.execute.one_call.static_graph import static_graph
from onnxtrain.execute.program import Program, Run, drained
from onnxtrain.graph.alias import view_source
from onnxtrain.log import LOG
from onnxtrain.native import Library
from onnxtrain.ops import definition_of
from onnxtrain.plan.cut import Part

_CALLS = 8  # of the same shapes, before it is worth to compile
_TRIALS = 20  # timed calls of each of the two
_MOST_NODES = 256  # more are no small program

Shapes = Sequence[tuple[int, ...]]
Results = tuple[tuple[Any, ...], tuple[int, ...]]


def may_be_one_call(part: Part, least: int = 2) -> bool:
    """Whether nothing but sizes and operators, which show later, stands in the way of a part of `least` nodes."""
    tensor_nodes = [n for n in part.nodes if not part.host.issuperset(n.outputs)]
    if not least <= len(tensor_nodes) <= _MOST_NODES or any(definition_of(n).effects for n in tensor_nodes):
        return False
    given = set(part.inputs)
    roots = [_root(value) for value in part.outputs[: part.num_user_outputs] if value is not None]
    wanted = [value for value in part.outputs if value is not None]
    # A view that leaves would be a copy. A view of an input, kept, would not notice that the input is changed.
    if len(set(roots)) < len(roots) or any(_root(v) in given and v not in given for v in wanted):
        return False
    return not any(value.const_value is not None for value in wanted)


def _root(value: ir.Value) -> ir.Value:
    """The value in whose memory this one lies."""
    node = value.producer()
    while node is not None:
        source = view_source(node, value.index() or 0, definition_of(node))
        if source is None:
            break
        value, node = source, source.producer()
    return value


def watch(program: Program) -> OneCall | None:
    """Lets a program of a CPU become one call, where nothing that is known now stands in the way."""
    return OneCall(program) if may_be_one_call(program.part) else None


class OneCall:
    """What `run` of a program is, in turn. See the module's docstring.

    Attributes:
        call: the program as a call, once it is compiled.
        settled: whether it is decided which of the two stays.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._ordinary = program.run
        self.call: Run | None = None
        self.settled = False
        self._shapes: tuple[Any, ...] = ()
        self._seen = 0
        self._work: threading.Thread | None = None
        self._times: tuple[list[float], list[float]] = ([], [])
        program.run = self._counting

    # 1

    def _counting(self, tensors: Iterable[torch.Tensor], given: Sequence[int]) -> Results:
        tensors = list(tensors)
        shapes = (*(t.shape for t in tensors), *given)
        self._seen = self._seen + 1 if shapes == self._shapes else 0
        self._shapes = shapes
        if any(t.numel() > LARGEST for t in tensors):
            self._program.run = self._ordinary
        elif self._seen >= _CALLS and self._work is None:
            self._work = threading.Thread(
                target=self._write, args=([tuple(t.shape) for t in tensors], tuple(given)), daemon=True
            )
            self._program.run = self._ordinary
            self._work.start()
        return self._ordinary(drained(tensors), given)

    # 2

    def _write(self, shapes: Shapes, given: Sequence[int]) -> None:
        """Off the main thread: it takes some 10 ms, and the compiler seconds; the entry's, once a machine, 10 more."""
        try:
            static = static_graph(self._program.part, shapes, given)
            function = write(static.graph, static.given)
        except (UnsupportedError, GraphError) as reason:
            LOG.debug("%s does not become one call: %s", self._program.filename, reason)
            return
        library = Library("one-call", function.source, {NAME: "p"}, short=True)
        ENTRY.request()
        if not library.wait():
            return
        call = Call.of(self._program.part, static, shapes, function, getattr(library.functions, NAME))
        self.call = (compiled_call if ENTRY.wait() else python_call)(call, self._ordinary)
        self._program.run = self._timing

    # 3

    def _timing(self, tensors: Iterable[torch.Tensor], given: Sequence[int]) -> Results:
        assert self.call is not None
        ordinary, call = self._times
        turn, run = (ordinary, self._ordinary) if len(call) > len(ordinary) else (call, self.call)
        start = time.perf_counter()
        result = run(tensors, given)
        turn.append(time.perf_counter() - start)
        if len(ordinary) >= _TRIALS:
            self._program.run = self.call if _is_faster(call, ordinary) else self._ordinary
            self.settled = True
            LOG.debug(
                "%s as one call: %.1f against %.1f us", self._program.filename, min(call) * 1e6, min(ordinary) * 1e6
            )
        return result


def _is_faster(call: Sequence[float], ordinary: Sequence[float]) -> bool:
    return min(call) < min(ordinary)
