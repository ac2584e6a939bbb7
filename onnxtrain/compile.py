"""The compiler, top to bottom. Every stage takes a value and gives a value.

nn.Module ─capture─▶ forward graph ─optimize─▶ forward graph ─differentiate─▶ joint graph ─optimize─▶ joint graph
          ─plan─▶ forward program + backward program ─execute─▶ outputs, gradients
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.autodiff import Joint, differentiate
from onnxtrain.capture.export import Captured
from onnxtrain.errors import CaptureError
from onnxtrain.execute.boundary import Backward, BackwardProgram, Flags, Unit
from onnxtrain.execute.cuda_recorder import recorder_for
from onnxtrain.execute.early_gradients import StagedBoundary, StagedProgram
from onnxtrain.execute.kernel_choice.tuned import make_program
from onnxtrain.execute.one_call import program as one_call
from onnxtrain.execute.program import Joined, Program
from onnxtrain.execute.recorded import Recordings
from onnxtrain.execute.regions import program as regions
from onnxtrain.execute.reused_memory import reuse_memory
from onnxtrain.execute.sized_units import SizedUnits
from onnxtrain.execute.work_counter import WorkCounter
from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.alias import AliasSets, view_source
from onnxtrain.graph.traversal import clone, with_graph
from onnxtrain.ops import NOT_DIFFERENTIABLE, Effects, definition_of
from onnxtrain.ops.native import NOTE
from onnxtrain.ops.randomness import MASKS
from onnxtrain.options import Options
from onnxtrain.options.notices import say_once
from onnxtrain.passes import joint_passes, optimize, optimize_forward
from onnxtrain.passes.user_graph_optimizers import GraphFunction, functions_for, rewrite
from onnxtrain.plan import channels_last
from onnxtrain.plan.backward_stages import Groups, group_gradients, split_backward
from onnxtrain.plan.budget import bytes_allowed, choose_within_budget
from onnxtrain.plan.channels_last import ChannelsLast
from onnxtrain.plan.cut import Cut, Part, cut, single_part
from onnxtrain.plan.default_recompute import choose_by_default
from onnxtrain.plan.lifetimes import Timeline, timeline
from onnxtrain.plan.mutated_inputs import check_backward_reads, differentiate_with_copies
from onnxtrain.plan.recompute import KEEP_ALL, RecomputeChoice, apply_choice, choose_by_checkpoints
from onnxtrain.plan.recompute_subgraphs import choose_by_options
from onnxtrain.plan.storage import Storages, bind_symbols
from onnxtrain.report import CompileReport, PassReport, Refusal, SubgraphReport, Work
from onnxtrain.stages import Mode, Stages

_LOG = logging.getLogger(__name__)

Rerun = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


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
        return source.parts if isinstance(source, _Backwards) else None

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

    def is_twin(self, captured: Captured) -> bool:
        """Whether a capture of another module is the same graph."""
        mine = self.captured
        return (
            self.units is None
            and [(v.dtype, v.shape) for v in mine.model.graph.inputs]
            == [(v.dtype, v.shape) for v in captured.model.graph.inputs]
            and mine.sources == captured.sources
            and (mine.results, mine.mutations, mine.sizes) == (captured.results, captured.mutations, captured.sizes)
            and mine.output == captured.output
            and (mine.stored == captured.stored != "" or mine.guards.same_graph(captured.guards))
        )

    def of(self, captured: Captured, rerun: Rerun) -> Compiled:
        """This unit, for the module of a capture that is its twin."""
        unit = copy.copy(self.unit)  # the programs are shared
        unit.rerun = rerun
        return replace(self, captured=captured, unit=unit, run=_runner(captured, unit), is_shared=True)


def _runner(captured: Captured, unit: Unit) -> Callable[..., Any]:
    unflatten, apply = captured.output.unflatten, unit.apply
    if captured.sizes:
        return lambda *tensors: unflatten(unit(tensors), _sizes(captured, tensors))
    if apply is None:
        return lambda *tensors: unflatten(unit(tensors), ())
    return lambda *tensors: unflatten(apply(unit, *tensors), ())


def _runner_by_sizes(captured: Captured, units: SizedUnits) -> Callable[..., Any]:
    unflatten = captured.output.unflatten
    return lambda *tensors: unflatten(units.unit(tensors)(tensors), _sizes(captured, tensors))


def _sizes(captured: Captured, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The sizes that forward returns as ints."""
    known = bind_symbols(captured.model.graph.inputs, tensors)
    return tuple(sizes.evaluate(size, known) for size in captured.sizes)


def compile_module(
    module: torch.nn.Module,
    captured: Captured,
    inputs: Sequence[torch.Tensor],
    options: Options,
    rerun: Rerun,
    before_dropout_keys: Callable[[ir.Model], None] | None = None,
) -> Compiled:
    """Compiles a captured module.

    Args:
        module: the user's module, in the state (training, autocast, grad mode) in which it is to run.
        captured: its capture (`capture.export.capture`).
        inputs: the tensors of the capture's inputs.
        options: see `onnxtrain.options`.
        rerun: runs the module in PyTorch on such tensors (create_graph).
        before_dropout_keys: looks at the graph between the two parts of the forward passes, without changing it.

    Raises:
        ORTModuleFallbackException: the module cannot be differentiated.
    """
    training = torch.is_grad_enabled()
    mode: Mode = "training" if module.training and training else "inference"
    device = one_device(inputs)
    work = WorkCounter(inputs, device) if options.count_work else None
    stages = Stages(options, mode, type(module).__name__, work)

    model = stages.record("capture", captured.model, took_ms=captured.took_ms)
    note_kernels(model.graph, options, device)
    wrt = tuple(training and t.requires_grad for t in inputs)
    before = work(_differentiated(captured, wrt)) if work else None

    changes = optimize_forward(model, options, before_dropout_keys)
    model = stages.record("optimize", model, changes, sum(done.took_ms for done in changes.passes))
    views = _views(captured, model)
    random = any(Effects.RANDOM in definition_of(node).effects for node in model.graph)
    layout = ChannelsLast() if channels_last.is_profitable(model.graph, inputs) else None
    recordings = _recordings(captured, inputs, options, device)
    build = _Build(captured, model, wrt, views, device, options, layout, recordings)
    if any(wrt):
        joint = stages.record_joint("differentiate", build.joint())
        changes = optimize(joint.model, joint_passes(options))
        joint = stages.record_joint("optimize-joint", joint.rebind_gradients(), changes)
        if functions := functions_for(type(module).__name__, device.type):
            joint = stages.record_joint("user-functions", _rewritten(joint, functions))
        if options.memory_budget_bytes is not None:
            return _within_budget(build, joint, inputs, random, rerun, stages, before)
        joint, choice, subgraphs = _steered(build, joint, inputs)
        unit = build.training_unit(joint, random, rerun, choice)
        made = [str(choice)] if choice.values else ()
        stages.done("plan", joint.model, made, subgraphs, build.not_recorded(unit))
    else:
        unit = build.inference_unit(random, rerun)
        stages.done("plan", model, refused=build.not_recorded(unit))
    known = bind_symbols(captured.model.graph.inputs, inputs)
    return Compiled(captured, unit, stages.report(before), _runner(captured, unit), known, layout=layout)


def _differentiated(captured: Captured, wrt: Flags) -> ir.Model:
    """The joint graph of a capture as it is, without any pass; the capture itself where no gradient is asked for."""
    if not any(wrt):
        return captured.model
    of = [i < captured.results for i in range(len(captured.model.graph.outputs))]
    return differentiate(with_graph(captured.model, clone(captured.model.graph)[0]), wrt, of).model


def _within_budget(
    build: _Build,
    joint: Joint,
    inputs: Sequence[torch.Tensor],
    random: bool,
    rerun: Rerun,
    stages: Stages,
    before: Work | None,
) -> Compiled:
    """The unit, or the units by size, whose steps fit into `memory_budget_bytes`."""
    captured, options = build.captured, build.options
    assert options.memory_budget_bytes is not None
    allowed = bytes_allowed(options.memory_budget_bytes, inputs)
    changed, parts = build.changed(joint), cut(joint)
    # Gradients leave early where the option says so, or where nothing else fits; not where backward cannot be split.
    early = False if _why_whole(parts, build.views) else options.early_gradients or None

    def chosen(known: Mapping[str, int]) -> RecomputeChoice:
        storages = Storages(joint.model.graph, known, build.device.type, build.layout)
        return choose_within_budget(parts, storages, allowed, changed, early)

    def made(choice: RecomputeChoice) -> Unit:
        planned = apply_choice(joint.copy(), choice)
        unit = build.training_unit(planned, random, rerun, choice)
        stages.done("plan", planned.model, [str(choice)], refused=build.not_recorded(unit))
        return unit

    known = bind_symbols(joint.model.graph.inputs, inputs)
    if isinstance(allowed, float):
        unit = made(chosen(known))
        return Compiled(captured, unit, stages.report(before), _runner(captured, unit), known, layout=build.layout)
    units = SizedUnits(joint.model.graph.inputs[: len(inputs)], chosen, made)  # cotangents come after them
    unit, run = units.unit(inputs), _runner_by_sizes(captured, units)
    return Compiled(captured, unit, stages.report(before), run, known, units, build.layout)


def _steered(
    build: _Build, joint: Joint, inputs: Sequence[torch.Tensor]
) -> tuple[Joint, RecomputeChoice, Sequence[SubgraphReport]]:
    """The joint graph as checkpoints, memory_opt_level and memory_opt_config want it, and what could be chosen.

    Where none of them says anything, what is cheap is computed again.
    """
    options, asked = build.options, choose_by_checkpoints(joint, build.changed(joint))
    known = bind_symbols(joint.model.graph.inputs, inputs)
    if not (options.memory_opt_level or options.memory_opt_config):
        if options.recompute_cheap and not asked.values:
            asked = choose_by_default(cut(joint), known, build.changed(joint))
        return apply_choice(joint, asked), asked, ()
    storages = Storages(joint.model.graph, known, build.device.type, build.layout)
    choice, subgraphs = choose_by_options(cut(joint), storages, options, build.changed(joint))
    choice = replace(choice, values=choice.values | asked.values)
    return apply_choice(joint, choice), choice, subgraphs


def _rewritten(joint: Joint, functions: Sequence[GraphFunction]) -> Joint:
    """What users' functions make of a joint graph."""
    graph = joint.model.graph
    done = rewrite(graph, functions)
    # A new node that forward's results need runs in forward.
    needed = set(graph.outputs[: joint.outputs])
    for node in reversed(graph):
        if any(v in needed for v in node.outputs):
            needed.update(traversal.reads(node))
    forward = {node for node in done.added if any(v in needed for v in node.outputs)}
    return replace(
        joint,
        forward_nodes=joint.forward_nodes | forward,
        gradients=tuple(g if g is None else done.replaced.get(g, g) for g in joint.gradients),
    )


def one_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """The device of all tensors; 0-dimensional CPU tensors may stand beside a GPU's."""
    devices = {t.device for t in tensors if t.dim() > 0 or t.device.type != "cpu"}
    if len(devices) > 1:
        raise CaptureError(
            "the module's parameters and inputs lie on several devices",
            got=", ".join(sorted(map(str, devices))),
            todo="move them to one device",
        )
    return next(iter(devices)) if devices else torch.device("cpu")


def note_kernels(graph: ir.Graph, options: Options, device: torch.device) -> None:
    """Notes on nodes how they draw, and whether they may run compiled C++: their kernels ask.

    A GPU's own dropout draws eager's numbers, and nothing is cheaper there. Compiled kernels take the place of others
    when they are ready, in the middle of a run: not where two runs are to give the same bits.
    """
    fast = options.rng == "fast" and device.type == "cpu"
    native = _may_compile_behind(options)
    for node in graph:
        if Effects.RANDOM in definition_of(node).effects:
            node.metadata_props["rng"] = "fast" if fast else "torch"
            if device.type == "cpu":
                node.metadata_props[MASKS] = "packed"
            node.metadata_props["draws"] = "any" if options.rng == "fast" else "eager's"
        if native:
            node.metadata_props[NOTE] = "on"


def _may_compile_behind(options: Options) -> bool:
    """Whether compiled C++ may take the place of operators when it is ready, in the middle of a run."""
    return options.native and options.rng == "fast" and not torch.are_deterministic_algorithms_enabled()


def may_record(options: Options, device: torch.device) -> bool:
    """Whether programs on a device are recorded, where nothing in them stands in the way."""
    return options.cuda_graphs and options.memory_budget_bytes is None and recorder_for(device) is not None


def _recordings(
    captured: Captured, inputs: Sequence[torch.Tensor], options: Options, device: torch.device
) -> Recordings | None:
    """What programs are recorded with under the option cuda_graphs; None where it is off, or on a CPU."""
    recorder = recorder_for(device) if options.cuda_graphs else None
    if recorder is None:
        if options.cuda_graphs:
            say_once(f"The option cuda_graphs has no effect on the device {device.type}.")
        return None
    values = captured.model.graph.inputs
    fixed = frozenset(v.name or "" for v, s in zip(values, captured.sources, strict=True) if s.kind != "input")
    elsewhere = [v.name for v, tensor in zip(values, inputs, strict=True) if tensor.device != device]
    why_not = f"the input {elsewhere[0]} does not lie on {device}" if elsewhere else ""
    if options.memory_budget_bytes is not None:
        why_not = "recordings hold memory for themselves, which memory_budget_bytes does not count"
    return Recordings(recorder, device, fixed, why_not)


def _views(captured: Captured, model: ir.Model) -> tuple[str, ...]:
    """For each result, "view" where it may lie in an input's memory, "detached" if without gradient, else ""."""
    sets = AliasSets(model.graph, definition_of)
    inputs = set(model.graph.inputs)
    results = model.graph.outputs[: captured.results]
    return tuple(("detached" if _is_detached(v) else "view") if sets.root(v) in inputs else "" for v in results)


def _lone_views(captured: Captured, model: ir.Model) -> list[int]:
    """The results that may be views of a value that is neither an input nor seen through another result."""
    sets, outputs, inputs = AliasSets(model.graph, definition_of), model.graph.outputs, set(model.graph.inputs)
    roots = [sets.root(v) for v in outputs]
    return [
        i
        for i, (value, root) in enumerate(zip(outputs[: captured.results], roots, strict=False))
        if value is not root and root not in inputs and roots.count(root) == 1
    ]


def _is_detached(value: ir.Value) -> bool:
    """Whether an op without gradient stands between the value and the input that it is a view of."""
    node = value.producer()
    while node is not None:
        definition = definition_of(node)
        if definition.gradient is NOT_DIFFERENTIABLE:
            return True
        source = view_source(node, value.index() or 0, definition)
        if source is None:
            return False
        value, node = source, source.producer()
    return False


class _Build:
    """Units from one optimized forward graph."""

    def __init__(
        self,
        captured: Captured,
        model: ir.Model,
        wrt: Flags,
        views: tuple[str, ...],
        device: torch.device,
        options: Options,
        layout: ChannelsLast | None,
        recordings: Recordings | None,
    ) -> None:
        self.captured, self.device, self.options, self._recordings = captured, device, options, recordings
        self._model, self._wrt, self.views, self.layout = model, wrt, views, layout
        self._name = model.graph.name or "module"
        # Also for results that may be views of an input: whether they are shows at run time. One that is gets remade
        # outside the boundary and its gradient does not come through it; one that was copied gets it here.
        self._of = (*(True for _ in views), *(False for _ in captured.mutations))
        self._changed = [mutation.target for mutation in captured.mutations]

    def joint(self, given: Flags | None = None) -> Joint:
        """The joint graph for these results' cotangents (None: all that can have one)."""
        of = self._of if given is None else (*given, *(False for _ in self.captured.mutations))
        return differentiate_with_copies(self._model, self._changed, lambda model: differentiate(model, self._wrt, of))

    def changed(self, joint: Joint) -> list[ir.Value]:
        """The inputs whose contents are others when backward runs."""
        return [joint.model.graph.inputs[index] for index in self._changed]

    def optimized_joint(self, given: Flags | None = None) -> Joint:
        joint = self.joint(given)
        optimize(joint.model, joint_passes(self.options))
        return joint.rebind_gradients()

    def program(self, part: Part, title: str) -> Program:
        program = self._made(part, title, self.layout)
        is_recorded = self._recordings is not None and self._recordings.watch(program) is not None
        if is_recorded or not _may_compile_behind(self.options):
            return program
        if self.layout is None:  # a region's kernel reads and writes in the usual order only
            regions.watch(program, self.options, self.device, partial(self._fused, title))
        if self.device.type == "cpu":
            one_call.watch(program)
        return program

    def not_recorded(self, unit: Unit) -> list[Refusal]:
        """The programs of a unit that the option cuda_graphs cannot serve, with reasons."""
        if self._recordings is None:
            return []
        source = unit.backward_source
        return self._recordings.refusals(
            [unit.forward.part, *([source.parts.backward] if isinstance(source, _Backwards) else [])]
        )

    def _fused(self, title: str, part: Part, joined: Joined) -> Program:
        return self._made(part, f"{title}, fused", joined=joined)

    def _made(
        self, part: Part, title: str, layout: ChannelsLast | None = None, joined: Joined | None = None
    ) -> Program:
        program = make_program(part, f"{self._name} {title}", self.device, self.options, layout, joined)
        if self.device.type == "cpu" and self.options.native:
            reuse_memory(program)
        return program

    def inference_unit(self, random: bool, rerun: Rerun) -> Unit:
        part = single_part(self._model)
        program = self.program(part, "inference")
        flags = (False,) * self.captured.results
        return self._unit(program, flags, random, None, rerun, ())

    def training_unit(self, joint: Joint, random: bool, rerun: Rerun, choice: RecomputeChoice = KEEP_ALL) -> Unit:
        """The unit of a joint graph to which `choice` is applied already."""
        results = self.captured.results
        differentiable = tuple(c is not None for c in joint.cotangents[:results])
        for mutation in self.captured.mutations:
            if joint.active[mutation.output]:
                raise CaptureError(
                    "forward writes a value that has a gradient into a buffer or an input",
                    got=self._model.graph.outputs[mutation.output].name,
                    todo="detach() the value before it is written",
                )
        check_backward_reads(joint, self._changed)
        full = cut(joint)
        forward = self.program(full.forward, "forward")
        contexts = [i for i, value in enumerate(full.kept) if _is_object(value)]
        groups = self._groups(full, choice.early or self.options.early_gradients)
        make = _Backwards(self, joint, full, differentiable, choice, groups)
        unreached = [
            i
            for i, (source, gradient) in enumerate(zip(self.captured.sources, joint.gradients, strict=False))
            if source.kind == "input" and self._wrt[i] and gradient is None
        ]
        return self._unit(forward, differentiable, random, make, rerun, full.unsaved(), contexts, groups, unreached)

    def _groups(self, full: Cut, early: bool) -> Groups:
        """The gradients that each stage of backward hands over; () where all leave at its end."""
        if not early:
            return ()
        if why := _why_whole(full, self.views):
            _LOG.info("%s: its gradients are handed over at the end of backward: %s", self._name, why)
            return ()
        groups = group_gradients(full)
        return groups if len(groups) > 1 else ()

    def _unit(
        self,
        program: Program,
        differentiable: Flags,
        random: bool,
        make: _Backwards | None,
        rerun: Rerun,
        unsaved: Sequence[int],
        contexts: Sequence[int] = (),
        groups: Groups = (),
        unreached: Sequence[int] = (),
    ) -> Unit:
        return Unit(
            forward=program,
            results=self.captured.results,
            mutations=self._changed,
            differentiable=differentiable,
            views=self.views,
            random=random,
            device_type=self.device.type,
            backward=make,
            rerun=rerun,
            unsaved=unsaved,
            contexts=contexts,
            differentiably=StagedBoundary(groups, len(self._wrt)) if groups else None,
            lone_views=_lone_views(self.captured, self._model),
            unreached=unreached,
        )


def _is_object(value: ir.Value) -> bool:
    """Whether a value is a Python object in a running program, and no tensor."""
    producer = value.producer()
    if producer is None:
        return False
    definition = definition_of(producer)
    return definition.output_name(value.index() or 0) in definition.objects


def _why_whole(parts: Cut, views: Sequence[str]) -> str | None:
    """Why backward cannot run in stages; None where it can."""
    if any(map(_is_object, parts.kept)):
        return "a custom autograd function runs in it"
    return "an output may be a view of an input" if any(views) else None


class _Backwards:
    """Makes the backward program for each pattern of given cotangents and needed gradients.

    Attributes:
        parts: the cut whose backward was made last; before the first, that for all of them.
    """

    def __init__(
        self, build: _Build, joint: Joint, full: Cut, differentiable: Flags, choice: RecomputeChoice, groups: Groups
    ) -> None:
        self._build, self._joint, self._full = build, joint, full
        self.parts = full
        self._differentiable, self._choice, self._groups = differentiable, choice, groups

    def __call__(self, given: Flags, needed: Flags) -> Backward:
        """Gradients of the inputs in `needed`, from the cotangents in `given`."""
        if given == self._differentiable:
            return self._backward(cut(self._joint, needed), given)
        special = cut(self._differentiated(given), needed)
        if self._has_all(special):
            return self._backward(special, given)
        zeros = [i for i, (d, g) in enumerate(zip(self._differentiable, given, strict=True)) if d and not g]
        return self._backward(cut(self._joint, needed), self._differentiable, zeros)

    def renew(self) -> None:
        """Differentiates again: gradient rules know more now."""
        self._joint = self._differentiated()

    def _differentiated(self, given: Flags | None = None) -> Joint:
        return apply_choice(self._build.optimized_joint(given), self._choice)

    def _has_all(self, special: Cut) -> bool:
        """Whether the forward program keeps all that this backward reads."""
        tensors = {v.name for v in self._full.kept}
        sizes = {v.name for v in self._full.sizes}
        return {v.name for v in special.kept} <= tensors and {v.name for v in special.sizes} <= sizes

    def _program(self, parts: Cut) -> BackwardProgram:
        if not self._groups:
            return self._build.program(parts.backward, "backward")
        return StagedProgram(parts.backward, split_backward(parts, self._groups), self._groups, self._build.program)

    def _backward(self, parts: Cut, given: Flags, zeros: Sequence[int] = ()) -> Backward:
        self.parts = parts
        kept = {v.name: i for i, v in enumerate(self._full.kept)}
        sizes = {v.name: i for i, v in enumerate(self._full.sizes)}
        return Backward(
            self._program(parts),
            [kept[v.name] for v in parts.kept],
            [sizes[v.name] for v in parts.sizes],
            [i for i, g in enumerate(given) if g],
            zeros,
        )
