"""A compiled module: its programs, the capture that they were compiled from, and the function that runs a call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from onnxtrain.capture.capture import Captured
from onnxtrain.capture.guards.assumed_answers import WrongAnswerError
from onnxtrain.execute.boundary import Unit, random_state, set_random_state
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
    """A unit ready to run, with its capture and report.

    Attributes:
        captured: the capture; its `sources` say which tensors the unit takes.
        unit: the programs and the autograd boundary.
        report: what each stage did.
        run: takes the tensors of the capture's inputs and returns the module's output.
        symbol_values: the integer of each symbolic dimension in the call that it was compiled for.
        units: all units, if there are several, each up to some sizes; `unit` is the first.
        layout: which values are channels_last.
        is_shared: whether the programs were made for another module with the same graph.
    """

    captured: Captured
    unit: Unit
    report: CompileReport
    run: Callable[..., Any]
    symbol_values: Mapping[str, int] = field(default_factory=dict)
    units: SizedUnits | None = None
    layout: ChannelsLast | None = None
    is_shared: bool = False

    @property
    def parts(self) -> Cut | None:
        """The plan of a unit, for the cotangents of the latest backward; None if the unit has no gradients.

        Before the first backward, every differentiable result counts as having a cotangent.
        """
        source = self.unit.backward_source
        return source.parts if isinstance(source, BackwardPrograms) else None

    def timeline(self, symbol_values: Mapping[str, int] | None = None) -> tuple[Timeline, Storages]:
        """Return the planned memory of a step.

        Args:
            symbol_values: the integer of each symbolic dimension; by default as in the call compiled for.

        Raises:
            ValueError: there is no plan: the unit has no gradients.
        """
        parts = self.parts
        if parts is None:
            raise ValueError("expected a unit with gradients, got one compiled for inference: it has no memory plan")
        nodes = (*parts.forward.nodes, *parts.backward.nodes)
        symbol_values = self.symbol_values if symbol_values is None else symbol_values
        storages = Storages(nodes, symbol_values, self.unit.device_type, self.layout)
        boundary = self.unit.autograd_apply
        return timeline(parts, storages, boundary.groups if isinstance(boundary, StagedBoundary) else ()), storages

    def regions(self) -> tuple[PassReport, ...]:
        """Return, for each program, the fused regions at the sizes of the first call, and the nodes outside them."""
        parts = {"inference": self.unit.forward.part}
        if self.parts is not None:
            parts = {"forward": self.parts.forward, "backward": self.parts.backward}
        titles = {name: f"fused regions ({name})" for name in parts}
        reason = ""
        if self.unit.device_type != "cpu":
            reason = "it is for a GPU, where kernels=fused and fused-all compile whole programs instead"
        elif self.layout is not None:
            reason = "its image tensors are channels_last, and a region's kernel takes contiguous tensors only"
        if reason:
            return tuple(PassReport(t, 0.0, refused=(Refusal("regions", name, reason),)) for name, t in titles.items())
        nodes = [node for part in parts.values() for node in part.nodes]
        storages = Storages(nodes, self.symbol_values, "cpu")  # of both parts: backward reads forward's sizes
        return tuple(regions.describe_regions(titles[name], part, storages) for name, part in parts.items())

    def results(self, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Return the results of a call, as `output` takes them."""
        unit = self.unit if self.units is None else self.units.unit(tensors)
        return unit(tensors)

    def output(self, results: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Any:
        """Return the module's output, from the results of a call on `tensors`."""
        return self.captured.output.unflatten(results, _sizes(self.captured, tensors))

    def has_same_graph(self, captured: Captured) -> bool:
        """Return whether the capture of another module has this unit's graph."""
        return self.units is None and self.captured.has_same_graph(captured)

    def for_module(self, captured: Captured, rerun: Rerun) -> Compiled:
        """Return this unit for another module whose capture has the same graph; see `UnitBuilder` for `rerun`."""
        unit = copy.copy(self.unit)  # the programs are shared
        unit.rerun = rerun
        return replace(self, captured=captured, unit=unit, run=runner(captured, unit), is_shared=True)


def runner(captured: Captured, unit: Unit) -> Callable[..., Any]:
    """Return a function that runs a unit on the tensors of the capture's inputs and returns the module's output.

    With the tensors that `assigning` takes, if there are any.
    """
    unflatten, apply = _unflatten(captured), unit.apply
    if captured.sizes:
        return lambda *tensors: unflatten(unit(tensors), _sizes(captured, tensors))
    if apply is None:
        return lambda *tensors: unflatten(unit(tensors), ())
    return lambda *tensors: unflatten(apply(unit, *tensors), ())


def runner_by_sizes(captured: Captured, units: SizedUnits) -> Callable[..., Any]:
    """Return a `runner` that uses the unit for the sizes of each call."""
    unflatten = _unflatten(captured)
    return lambda *tensors: unflatten(units.unit(tensors)(tensors), _sizes(captured, tensors))


def _unflatten(captured: Captured) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    unflatten, indices = captured.output.unflatten, captured.assigned.results
    if not indices:
        return unflatten
    return lambda results, sizes: (unflatten(results, sizes), [results[i] for i in indices])


def assigning(run: Callable[..., Any], captured: Captured, module: torch.nn.Module) -> Callable[..., Any]:
    """Return `run`, a runner, followed by the assignments to attributes of `module` that forward makes."""
    assigned = captured.assigned
    if not assigned.targets and not assigned.tensors:
        return run
    targets = (*assigned.targets, *(each.target for each in assigned.tensors))
    holders = [(module.get_submodule(path).__dict__, name) for path, name in targets]
    inputs, values_of = captured.model.graph.inputs, assigned.values.unflatten

    def run_and_assign(*tensors: torch.Tensor) -> Any:
        output, assigned_tensors = run(*tensors) if assigned.results else (run(*tensors), ())
        symbol_values = bind_symbols(inputs, tensors) if assigned.sizes else {}
        values = values_of(assigned_tensors, tuple(sizes.evaluate(size, symbol_values) for size in assigned.sizes))
        tensors_now = (each.value.clone() for each in assigned.tensors)
        for (attributes, name), value in zip(holders, (*values, *tensors_now), strict=True):
            attributes[name] = value
        return output

    return run_and_assign


def undoing_samples(run: Callable[..., Any], captured: Captured) -> Callable[..., Any]:
    """Return `run`, a runner, which leaves the random generators unchanged if the graph assumes a wrong answer."""
    if not captured.assumed:
        return run

    def run_or_undo(*tensors: torch.Tensor) -> Any:
        before = random_state(tensors, runs_python=True)
        try:
            return run(*tensors)
        except WrongAnswerError:
            set_random_state(before)
            raise

    return run_or_undo


def _sizes(captured: Captured, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the sizes that forward returns as ints."""
    symbol_values = bind_symbols(captured.model.graph.inputs, tensors)
    return tuple(sizes.evaluate(size, symbol_values) for size in captured.sizes)
