"""A program that runs its regions by compiled kernels, once they are there. The package's docstring has the picture."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from onnxtrain.errors import GraphError
from onnxtrain.execute.one_call.static_graph import known_numbers
from onnxtrain.execute.program import Joined, Program, Run, drained
from onnxtrain.execute.regions.build import build
from onnxtrain.execute.regions.call import RegionCall, load
from onnxtrain.execute.regions.request import Request
from onnxtrain.native.build import BuildError
from onnxtrain.ops import definition_of
from onnxtrain.options import Options
from onnxtrain.plan.cut import Part
from onnxtrain.plan.regions import Region, find
from onnxtrain.plan.storage import Storages

_LOG = logging.getLogger(__name__)
_CALLS = 20  # before it is worth to compile: a region takes some 20 s of a processor
LEAST = 16384  # elements of a region's tensors: below it, a call costs more than is gained

Results = tuple[tuple[Any, ...], tuple[int, ...]]
Make = Callable[[Part, Joined], Program]


def watch(program: Program, options: Options, make: Make) -> FusedProgram | None:
    """Lets a program of a CPU run its regions by compiled kernels, where it has nodes of a kind that gains.

    Args:
        program: whose `run` is replaced.
        options: `regions` says which nodes.
        make: makes a program of the part, its nodes in another order, with some of them joined.
    """
    if options.regions == "off":
        return None
    fuses = [definition_of(node).fuses for node in program.part.nodes]
    if not any(f is not None and (f.gains or options.regions == "on") for f in fuses):
        return None
    return FusedProgram(program, options, make)


class FusedProgram:
    """What `run` of a program is, in turn.

    Attributes:
        calls: its regions, once they are compiled.
        settled: whether it is decided what stays.
    """

    def __init__(self, program: Program, options: Options, make: Make) -> None:
        self._program, self._options, self._make = program, options, make
        self._ordinary = program.run
        self._run: Run = self._counting
        self._seen = 0
        self._work: threading.Thread | None = None
        self._part = program.part
        self.calls: list[RegionCall] = []
        self.settled = False
        program.run = self.run

    def run(self, tensors: Iterable[torch.Tensor], given: Sequence[int]) -> Results:
        return self._run(tensors, given)

    # 1

    def _counting(self, tensors: Iterable[torch.Tensor], given: Sequence[int]) -> Results:
        tensors = list(tensors)
        self._seen += any(t.numel() >= LEAST for t in tensors)
        if self._seen >= _CALLS:
            self._run = self._ordinary
            shapes = [tuple(t.shape) for t in tensors]
            self._work = threading.Thread(target=self._prepare, args=(shapes, tuple(given)), daemon=True)
            self._work.start()
        return self._ordinary(drained(tensors), given)

    # 2

    def _prepare(self, shapes: Sequence[Sequence[int]], given: Sequence[int]) -> None:
        """Off the main thread: to find the regions takes some 100 ms, and to compile one minutes."""
        part = self._program.part
        try:
            storages = Storages(part.nodes, known_numbers(part, shapes, given), "cpu")
            self._part, regions = find(part, storages)
        except (GraphError, NameError) as reason:
            _LOG.debug("%s has no regions: %s", self._program.filename, reason)
            return
        calls = [self._call(region, storages) for region in regions if self._is_wanted(region, storages)]
        self.calls = [call for call in calls if call is not None]
        if not self.calls:
            _LOG.debug("%s has no compiled regions, of %d", self._program.filename, len(regions))
            return
        fused = self._fused(self.calls)
        self._run = fused.run if self._options.regions == "on" else _Timing(self, fused).run
        self.settled = self._options.regions == "on"

    def _is_wanted(self, region: Region, storages: Storages) -> bool:
        large = storages.number(region.elements) >= LEAST
        return large and (region.gains or self._options.regions == "on")

    def _call(self, region: Region, storages: Storages) -> RegionCall | None:
        try:
            request = Request(region.part, [storages.shape(v) for v in region.part.inputs])
            kernel = load(build(request, self._options.regions_dump))
            return RegionCall(region.part, kernel, timed=self._options.regions == "auto")
        except (BuildError, GraphError) as reason:
            _LOG.info("The region %s stays as it is: %s", region, reason)
            return None

    def _fused(self, calls: Sequence[RegionCall]) -> Program:
        joined: Mapping[Any, RegionCall] = {call.part.nodes[0]: call for call in calls}
        return self._make(self._part, joined)

    # 4

    def settle(self) -> None:
        """Keeps the regions whose kernels were faster than their nodes."""
        won = [call for call in self.calls if call.chosen == "kernel"]
        gained = sum(call.gain() for call in won)
        _LOG.info(
            "%s: %d of %d regions run by compiled kernels, which saves %.2f ms a call",
            self._program.filename,
            len(won),
            len(self.calls),
            gained * 1e3,
        )
        self._run = self._fused(won).run if won else self._ordinary
        self.settled = True


class _Timing:
    """3: the program whose regions try both ways."""

    def __init__(self, owner: FusedProgram, fused: Program) -> None:
        self._owner, self._fused = owner, fused

    def run(self, tensors: Iterable[torch.Tensor], given: Sequence[int]) -> Results:
        result = self._fused.run(tensors, given)
        if all(call.chosen is not None for call in self._owner.calls):
            self._owner.settle()
        return result
