"""A program that runs its regions by compiled kernels as soon as they are built; see the package's docstring."""

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
from onnxtrain.execute.kernel_annotations import inductor_compiles
from onnxtrain.execute.program import FusedCalls, Program, Run, drain
from onnxtrain.execute.regions.build import build, refuse
from onnxtrain.execute.regions.call import RegionCall, load
from onnxtrain.execute.regions.request import Request
from onnxtrain.graph import traversal
from onnxtrain.graph.values import dtype_of
from onnxtrain.log import LOG
from onnxtrain.native import background
from onnxtrain.native.build import BuildError
from onnxtrain.ops.interfaces.fused_regions import FUSIBLE, GAINS_FROM_FUSION
from onnxtrain.options import Options
from onnxtrain.plan.cut import Part
from onnxtrain.plan.regions import Region, find_regions
from onnxtrain.plan.storage import Storages
from onnxtrain.report import PassReport, Refusal

_CALLS = 20  # of a program before it compiles: a region takes some 6 s of a processor
MIN_ELEMENTS = 16384  # elements of a region's tensors: with fewer, a call costs more than it saves

Results = tuple[tuple[Any, ...], tuple[int, ...]]
MakeProgram = Callable[[Part, FusedCalls], Program]


def watch(program: Program, options: Options, device: torch.device, make_program: MakeProgram) -> FusedProgram | None:
    """Run the regions of a program by compiled kernels, on a CPU, if it has nodes that gain from fusion.

    Args:
        program: the program; its `run` is replaced.
        options: `kernels` says which nodes are fused.
        device: where it runs.
        make_program: makes the program of a part in which some nodes run as one call.

    Returns:
        None if the program stays as it is.
    """
    if inductor_compiles(options, device) != "regions":
        return None
    wanted = FUSIBLE if options.kernels == "fused-all" else GAINS_FROM_FUSION
    if not any(node in wanted for node in program.part.nodes):
        return None
    return FusedProgram(program, options, make_program)


def _dump_folder(options: Options) -> Path | None:
    """Return the folder for the graphs and libraries of regions; None unless graphs are saved."""
    saved = options.save_graphs
    return saved and saved.with_name(f"{saved.name}_regions")


class FusedProgram:
    """The successive `run` functions of a program, numbered as in the package's docstring.

    Attributes:
        calls: the calls of its compiled regions.
        settled: whether the regions to keep are chosen.
    """

    def __init__(self, program: Program, options: Options, make_program: MakeProgram) -> None:
        self._program, self._options, self._make_program = program, options, make_program
        self._ordinary = program.run
        self._run: Run = self._counting
        self._num_calls = 0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # the module may be called by several threads
        self._part = program.part
        self.calls: list[RegionCall] = []
        self.settled = False
        program.run = self.run

    def run(self, tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        return self._run(tensors, sizes_in)

    # 1: count calls

    def _counting(self, tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        tensors = list(tensors)
        # The tensors kept for backward include the contexts of custom autograd functions.
        shapes = [tuple(t.shape) if isinstance(t, torch.Tensor) else () for t in tensors]
        self._num_calls += any(math.prod(shape) >= MIN_ELEMENTS for shape in shapes)
        if self._num_calls >= _CALLS:
            self._start(shapes, tuple(sizes_in))
        return self._ordinary(drain(tensors), sizes_in)

    # 2: find and compile regions

    def _start(self, shapes: Sequence[Sequence[int]], sizes_in: Sequence[int]) -> None:
        with self._lock:
            if self._thread is None:
                self._run = self._ordinary
                self._thread = threading.Thread(target=self._prepare, args=(shapes, sizes_in), daemon=True)
                self._thread.start()

    def _prepare(self, shapes: Sequence[Sequence[int]], sizes_in: Sequence[int]) -> None:
        """Find regions and wait for their kernels, off the main thread.

        The work here takes some 100 ms, in throttled slices; compiling a region takes minutes.
        """
        part = self._program.part
        try:
            with background.throttled():
                storages = Storages(part.nodes, bind_sizes(part, shapes, sizes_in), "cpu")
            with background.throttled():
                self._part, regions, _ = find_regions(part, storages)
        except (GraphError, NameError) as reason:
            LOG.debug("%s has no regions: %s", self._program.filename, reason)
            return
        requests, regions_of = self._requests(regions, storages)
        requests.sort(key=lambda request: _priority(regions_of[request.key], storages), reverse=True)
        fused: Program | None = None
        for request, library in build(requests, _dump_folder(self._options)):
            calls = self._calls(request, library, regions_of[request.key])
            if calls:
                self.calls += calls
                with background.throttled():
                    fused = self._fused(self.calls)
                    self._run = fused.run
        if fused is None:
            LOG.debug("%s: none of its %d regions is compiled", self._program.filename, len(regions))
        elif self._options.kernels == "fused":
            for call in self.calls:
                call.try_both()
            self._run = _Timing(self, fused).run
        else:
            self.settled = True

    def _requests(self, regions: Sequence[Region], storages: Storages) -> tuple[list[Request], dict[str, list[Region]]]:
        """Return one request for each set of equal regions, and the regions by the request's key."""
        requests: list[Request] = []
        regions_of: dict[str, list[Region]] = {}
        for region in regions:
            if not self._is_wanted(region, storages):
                continue
            try:
                with background.throttled():
                    request = Request(region.part, [storages.shape(v) for v in region.part.inputs])
            except GraphError as reason:
                LOG.info("The region %s runs unfused: %s", region, reason)
                continue
            if request.key not in regions_of:
                requests.append(request)
            regions_of.setdefault(request.key, []).append(region)
        return requests, regions_of

    def _is_wanted(self, region: Region, storages: Storages) -> bool:
        large = storages.number(region.elements) >= MIN_ELEMENTS
        return large and (region.gains or self._options.kernels == "fused-all")

    def _calls(self, request: Request, library: Path | BuildError, regions: Sequence[Region]) -> list[RegionCall]:
        """Return the calls of equal regions; none if the kernel cannot be used."""
        try:
            if isinstance(library, BuildError):
                raise library
            with background.throttled():
                kernel = load(library)
            calls = []
            for region in regions:
                with background.throttled():
                    calls.append(RegionCall(region.part, kernel))
            return calls
        except BuildError as reason:
            refuse(request, str(reason))
            LOG.info("The region %s runs unfused: %s", regions[0], reason)
            return []

    def _fused(self, calls: Sequence[RegionCall]) -> Program:
        fused_calls: Mapping[Any, RegionCall] = {call.part.nodes[0]: call for call in calls}
        return self._make_program(self._part, fused_calls)

    # 4: keep the faster

    def settle(self) -> None:
        """Keep the regions whose kernels were faster than their nodes."""
        with self._lock:
            if not self.settled:
                self._settle()

    def _settle(self) -> None:
        faster = [call for call in self.calls if call.chosen == "kernel"]
        saved = sum(call.gain() for call in faster)
        LOG.info(
            "%s: %d of %d regions run by compiled kernels, which saves %.2f ms per call",
            self._program.filename,
            len(faster),
            len(self.calls),
            saved * 1e3,
        )
        self._run = self._fused(faster).run if faster else self._ordinary
        self.settled = True


def _priority(regions: Sequence[Region], storages: Storages) -> tuple[bool, int]:
    """Return the priority of compilation: regions that are known to be faster, then by the bytes that a step saves."""
    itemsize = dtype_of(regions[0].part.nodes[0].outputs[0]).itemsize
    saved = sum(region.saved * storages.number(region.elements) for region in regions)
    return regions[0].gains, int(itemsize) * saved


def describe_regions(title: str, part: Part, storages: Storages) -> PassReport:
    """Report the regions of a part at these sizes, which are compiled, and why the other nodes are in none."""
    started = time.perf_counter()
    try:
        _, regions, refused = find_regions(part, storages)
    except (GraphError, NameError) as reason:
        regions, refused = (), [(node, str(reason)) for node in part.nodes[:1]]
    applied = []
    for region in regions:
        large = storages.number(region.elements) >= MIN_ELEMENTS
        when = "by kernels=fused and fused-all" if region.gains else "by kernels=fused-all only"
        frame = ", ".join(map(str, region.frame))
        applied.append(f"{region} over [{frame}]: {when if large else 'too small to compile'}")
    refusals = tuple(Refusal("regions", node.op_type, why, traversal.origin(node) or "") for node, why in refused)
    return PassReport(title, (time.perf_counter() - started) * 1e3, tuple(applied), refusals)


class _Timing:
    """3: the program whose regions interleave their kernel and their nodes."""

    def __init__(self, owner: FusedProgram, fused: Program) -> None:
        self._owner, self._fused = owner, fused

    def run(self, tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        result = self._fused.run(tensors, sizes_in)
        if all(call.chosen is not None for call in self._owner.calls):
            self._owner.settle()
        return result
