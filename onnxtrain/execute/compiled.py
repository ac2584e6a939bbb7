"""A compiled module: its programs, what they were compiled from, and how a call runs them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from onnxtrain.capture.capture import Captured
from onnxtrain.execute.boundary import Unit
from onnxtrain.execute.early_gradients import StagedBoundary
from onnxtrain.execute.regions import program as regions
from onnxtrain.execute.sized_units import SizedUnits
from onnxtrain.execute.unit_builder import BackwardPrograms, Rerun
from onnxtrain.graph import sizes
from onnxtrain.plan.channels_last import ChannelsLast
from onnxtrain.plan.cut import Cut
from onnxtrain.plan.lifetimes import Timeline, timeline
from onnxtrain.plan.storage import Storages, bind_symbols
from onnxtrain.report import CompileReport, PassReport, Refusal


@dataclass(frozen=True)
class Compiled:
    """A unit ready to run, with what it was made from.

    Attributes:
        captured: the capture; its `sources` say which tensors the unit takes.
        unit: the programs and the autograd boundary.
        report: what each stage did.
        run: takes the tensors of the capture's inputs and gives the module's output.
        known: the number of each size in the call that it was compiled for.
        units: where the unit depends on sizes, all of them; `unit` is the first.
        layout: what lies channels-last, where anything does.
        is_shared: whether the programs were made for another module, whose graph is the same.
    """

    captured: Captured
    unit: Unit
    report: CompileReport
    run: Callable[..., Any]
    known: Mapping[str, int] = field(default_factory=dict)
    units: SizedUnits | None = None
    layout: ChannelsLast | None = None
    is_shared: bool = False

    @property
    def parts(self) -> Cut | None:
        """The plan of a unit with gradients: of the results that had a gradient in the newest backward; None without.

        Before the first backward it is for a gradient of each result that can have one.
        """
        source = self.unit.backward_source
        return source.parts if isinstance(source, BackwardPrograms) else None

    def timeline(self, known: Mapping[str, int] | None = None) -> tuple[Timeline, Storages]:
        """The memory of a step as it is planned, at the sizes that the unit was compiled for or at others.

        Raises:
            ValueError: there is no plan: the unit gives no gradients.
        """
        parts = self.parts
        if parts is None:
            raise ValueError("a graph without gradients has no plan")
        nodes = (*parts.forward.nodes, *parts.backward.nodes)
        storages = Storages(nodes, self.known if known is None else known, self.unit.device_type, self.layout)
        boundary = self.unit.differentiably
        return timeline(parts, storages, boundary.groups if isinstance(boundary, StagedBoundary) else ()), storages

    def regions(self) -> tuple[PassReport, ...]:
        """What the option regions compiles of each program, at the sizes of the first call, and what stays out."""
        parts = {"inference": self.unit.forward.part}
        if self.parts is not None:
            parts = {"forward": self.parts.forward, "backward": self.parts.backward}
        titles = {name: f"fused regions ({name})" for name in parts}
        if self.layout is not None:
            why = "its pictures lie channels-last, which no region's kernel reads"
            return tuple(PassReport(t, 0.0, refused=(Refusal("regions", name, why),)) for name, t in titles.items())
        nodes = [node for part in parts.values() for node in part.nodes]
        storages = Storages(nodes, self.known, self.unit.device_type)  # of both: backward reads sizes of forward's
        return tuple(regions.described(titles[name], part, storages) for name, part in parts.items())

    def results(self, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        """The results of a call, which `output` gives the form of the module's output."""
        unit = self.unit if self.units is None else self.units.unit(tensors)
        return unit(tensors)

    def output(self, results: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Any:
        """The module's output of these results of a call on `tensors`."""
        return self.captured.output.unflatten(results, _sizes(self.captured, tensors))

    def is_twin(self, captured: Captured) -> bool:
        """Whether a capture of another module is the same graph."""
        mine = self.captured
        return (
            self.units is None
            and [(v.dtype, v.shape) for v in mine.model.graph.inputs]
            == [(v.dtype, v.shape) for v in captured.model.graph.inputs]
            and mine.sources == captured.sources
            and (mine.result_count, mine.mutations, mine.sizes)
            == (captured.result_count, captured.mutations, captured.sizes)
            and mine.written_views == captured.written_views
            and mine.output == captured.output
            and (mine.stored_name == captured.stored_name != "" or mine.guards.same_graph(captured.guards))
        )

    def of(self, captured: Captured, rerun: Rerun) -> Compiled:
        """This unit, for the module of a capture that is its twin."""
        unit = copy.copy(self.unit)  # the programs are shared
        unit.rerun = rerun
        return replace(self, captured=captured, unit=unit, run=runner(captured, unit), is_shared=True)


def runner(captured: Captured, unit: Unit) -> Callable[..., Any]:
    """Runs a unit on the tensors of the capture's inputs, and gives the module's output."""
    unflatten, apply = captured.output.unflatten, unit.apply
    if captured.sizes:
        return lambda *tensors: unflatten(unit(tensors), _sizes(captured, tensors))
    if apply is None:
        return lambda *tensors: unflatten(unit(tensors), ())
    return lambda *tensors: unflatten(apply(unit, *tensors), ())


def runner_by_sizes(captured: Captured, units: SizedUnits) -> Callable[..., Any]:
    """The same, with the unit for the sizes of each call."""
    unflatten = captured.output.unflatten
    return lambda *tensors: unflatten(units.unit(tensors)(tensors), _sizes(captured, tensors))


def _sizes(captured: Captured, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The sizes that forward returns as ints."""
    known = bind_symbols(captured.model.graph.inputs, tensors)
    return tuple(sizes.evaluate(size, known) for size in captured.sizes)
