"""A program that runs its regions by compiled kernels, once they are there. The package's docstring has the picture."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from onnxtrain.errors import GraphError
from onnxtrain.execute.cpp_program.static_graph import bind_sizes
from onnxtrain.execute.program import Joined, Program, Run, drained
from onnxtrain.execute.regions.build import build, refuse
from onnxtrain.execute.regions.call import RegionCall, load
from onnxtrain.execute.regions.request import Request
from onnxtrain.graph import traversal
from onnxtrain.graph.values import dtype_of
from onnxtrain.log import LOG
from onnxtrain.native import background
from onnxtrain.native.build import BuildError
from onnxtrain.ops import definition_of
from onnxtrain.options import Options
from onnxtrain.plan.cut import Part
from onnxtrain.plan.regions import Region, find_regions
from onnxtrain.plan.storage import Storages
from onnxtrain.report import PassReport, Refusal

_CALLS = 20  # before it is worth to compile: a region takes some 6 s of a processor
LEAST = 16384  # elements of a region's tensors: below it, a call costs more than is gained

Results = tuple[tuple[Any, ...], tuple[int, ...]]
Make = Callable[[Part, Joined], Program]


def watch(program: Program, options: Options, device: torch.device, make: Make) -> FusedProgram | None:
    """Lets a program run its regions by compiled kernels, where it has nodes of a kind that gains.

    Args:
        program: whose `run` is replaced.
        options: `kernels` says which nodes.
        device: where it runs, a CPU or a GPU.
        make: makes a program of the part, its nodes in another order, with some of them joined.
    """
    if not options.kernels.startswith("fused"):
        return None
    fusions = [definition_of(node).fusion for node in program.part.nodes]
    if not any(f is not None and (f.profitable or options.kernels == "fused-all") for f in fusions):
        return None
    return FusedProgram(program, options, device, make)


def _dump_folder(options: Options) -> Path | None:
    """The folder for the graphs and the libraries of regions, where graphs are saved."""
    saved = options.save_graphs
    return saved and saved.with_name(f"{saved.name}_regions")


class FusedProgram:
    """What `run` of a program is, in turn.

    Attributes:
        calls: those of its regions that are compiled.
        settled: whether it is decided what stays.
    """

    def __init__(self, program: Program, options: Options, device: torch.device, make: Make) -> None:
        self._program, self._options, self._device, self._make = program, options, device, make
        self._ordinary = program.run
        self._run: Run = self._counting
        self._seen = 0
        self._work: threading.Thread | None = None
        self._lock = threading.Lock()  # the module may be called by several threads
        self._part = program.part
        self.calls: list[RegionCall] = []
        self.settled = False
        program.run = self.run

    def run(self, tensors: Iterable[torch.Tensor], given: Sequence[int]) -> Results:
        return self._run(tensors, given)

    # 1

    def _counting(self, tensors: Iterable[torch.Tensor], given: Sequence[int]) -> Results:
        tensors = list(tensors)
        # A custom autograd function hands its context to backward among the tensors.
        shapes = [tuple(t.shape) if isinstance(t, torch.Tensor) else () for t in tensors]
        self._seen += any(math.prod(shape) >= LEAST for shape in shapes)
        if self._seen >= _CALLS:
            self._start(shapes, tuple(given))
        return self._ordinary(drained(tensors), given)

    # 2

    def _start(self, shapes: Sequence[Sequence[int]], given: Sequence[int]) -> None:
        with self._lock:
            if self._work is None:
                self._run = self._ordinary
                self._work = threading.Thread(target=self._prepare, args=(shapes, given), daemon=True)
                self._work.start()

    def _prepare(self, shapes: Sequence[Sequence[int]], given: Sequence[int]) -> None:
        """Off the main thread, in pieces: in all it takes some 100 ms, and to compile a region minutes."""
        part = self._program.part
        try:
            with background.throttled():
                storages = Storages(part.nodes, bind_sizes(part, shapes, given), self._device.type)
            with background.throttled():
                self._part, regions, _ = find_regions(part, storages)
        except (GraphError, NameError) as reason:
            LOG.debug("%s has no regions: %s", self._program.filename, reason)
            return
        requests, equal = self._requests(regions, storages)
        requests.sort(key=lambda request: _worth(equal[request.key], storages), reverse=True)
        fused: Program | None = None
        for request, library in build(requests, _dump_folder(self._options)):
            calls = self._calls(request, library, equal[request.key])
            if calls:
                self.calls += calls
                with background.throttled():
                    fused = self._fused(self.calls)
                    self._run = fused.run
        if fused is None:
            LOG.debug("%s has no compiled regions, of %d", self._program.filename, len(regions))
        elif self._options.kernels == "fused":
            for call in self.calls:
                call.try_both()
            self._run = _Timing(self, fused).run
        else:
            self.settled = True

    def _requests(self, regions: Sequence[Region], storages: Storages) -> tuple[list[Request], dict[str, list[Region]]]:
        """What is to be compiled, and the regions that each is for, by its key."""
        requests: list[Request] = []
        equal: dict[str, list[Region]] = {}
        for region in regions:
            if not self._is_wanted(region, storages):
                continue
            try:
                with background.throttled():
                    request = Request(region.part, [storages.shape(v) for v in region.part.inputs], self._device)
            except GraphError as reason:
                LOG.info("The region %s stays as it is: %s", region, reason)
                continue
            if request.key not in equal:
                requests.append(request)
            equal.setdefault(request.key, []).append(region)
        return requests, equal

    def _is_wanted(self, region: Region, storages: Storages) -> bool:
        large = storages.number(region.elements) >= LEAST
        return large and (region.gains or self._options.kernels == "fused-all")

    def _calls(self, request: Request, library: Path | BuildError, regions: Sequence[Region]) -> list[RegionCall]:
        """The calls of equal regions; none where there is no kernel that computes what they do."""
        try:
            if isinstance(library, BuildError):
                raise library
            with background.throttled():
                kernel = load(library, self._device)
            calls = []
            for region in regions:
                with background.throttled():
                    calls.append(RegionCall(region.part, kernel, self._device))
            return calls
        except BuildError as reason:
            refuse(request, str(reason))
            LOG.info("The region %s stays as it is: %s", regions[0], reason)
            return []

    def _fused(self, calls: Sequence[RegionCall]) -> Program:
        joined: Mapping[Any, RegionCall] = {call.part.nodes[0]: call for call in calls}
        return self._make(self._part, joined)

    # 4

    def settle(self) -> None:
        """Keeps the regions whose kernels were faster than their nodes."""
        with self._lock:
            if not self.settled:
                self._settle()

    def _settle(self) -> None:
        won = [call for call in self.calls if call.chosen == "kernel"]
        gained = sum(call.gain() for call in won)
        LOG.info(
            "%s: %d of %d regions run by compiled kernels, which saves %.2f ms a call",
            self._program.filename,
            len(won),
            len(self.calls),
            gained * 1e3,
        )
        self._run = self._fused(won).run if won else self._ordinary
        self.settled = True


def _worth(regions: Sequence[Region], storages: Storages) -> tuple[bool, int]:
    """Larger for what is to be compiled first: kinds that were measured to gain, then by bytes that a step saves."""
    element = dtype_of(regions[0].part.nodes[0].outputs[0]).itemsize
    saved = sum(region.saved * storages.number(region.elements) for region in regions)
    return regions[0].gains, int(element) * saved


def described(title: str, part: Part, storages: Storages) -> PassReport:
    """Which regions a part has at these sizes and which are compiled; what is in none, with the reason."""
    started = time.perf_counter()
    try:
        _, regions, refused = find_regions(part, storages)
    except (GraphError, NameError) as reason:
        regions, refused = (), [(node, str(reason)) for node in part.nodes[:1]]
    made = []
    for region in regions:
        large = storages.number(region.elements) >= LEAST
        when = "by auto and on" if region.gains else "by on"
        made.append(f"{region} over [{', '.join(map(str, region.frame))}]: {when if large else 'too small to compile'}")
    said = tuple(Refusal("regions", node.op_type, why, traversal.origin(node) or "") for node, why in refused)
    return PassReport(title, (time.perf_counter() - started) * 1e3, tuple(made), said)


class _Timing:
    """3: the program whose regions try both ways."""

    def __init__(self, owner: FusedProgram, fused: Program) -> None:
        self._owner, self._fused = owner, fused

    def run(self, tensors: Iterable[torch.Tensor], given: Sequence[int]) -> Results:
        result = self._fused.run(tensors, given)
        if all(call.chosen is not None for call in self._owner.calls):
            self._owner.settle()
        return result
