"""Captures a module: torch.export on fake tensors, then our own conversion to ONNX.

    module(*args, **kwargs) ─flatten─> wrapper(*tensors) ─torch.export─> ATen ─functionalize─> ATen ─convert─> ONNX

Runs inside the caller's autocast, because the casts become explicit only if functionalization sees it. no_grad regions
are marked before functionalization, which drops them. The module is left as it was.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import onnx_ir as ir
import torch
from torch.export import Dim
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from onnxtrain.capture import source_line
from onnxtrain.capture.convert.convert import convert
from onnxtrain.capture.effects.assigned_buffers import AssignedBuffers
from onnxtrain.capture.effects.escaped_tensors import FakesMade
from onnxtrain.capture.effects.layout_changes import Layouts
from onnxtrain.capture.effects.outside_changes import OutsideChanges
from onnxtrain.capture.effects.outside_tensors import OutsideTensors
from onnxtrain.capture.effects.random_generators import left_alone
from onnxtrain.capture.effects.side_effects import SideEffectError, SideEffects
from onnxtrain.capture.effects.written_views import WrittenView, written_views
from onnxtrain.capture.export.composite_shapes import shape_shortcuts
from onnxtrain.capture.export.patches import capturing
from onnxtrain.capture.export.torch_reports import logged_as_info, printed_as_info
from onnxtrain.capture.export.tracing_shortcuts import cheap_tracing
from onnxtrain.capture.four_bit_weights import four_bit_weights
from onnxtrain.capture.functionalize.composite_operators import (
    buffer_copies_kept,
    composite_parts,
    nested_cast_parts,
)
from onnxtrain.capture.functionalize.memory_order_draws import draw_in_memory_order
from onnxtrain.capture.functionalize.no_grad import grad_mode_noted, keep_gradients_out
from onnxtrain.capture.functionalize.overlapping_writes import refuse_overlapping_writes
from onnxtrain.capture.functionalize.views import mark_views
from onnxtrain.capture.functionalize.without_retracing import make_convertible
from onnxtrain.capture.guards.element_decisions import ElementDecisions, UndecidedError
from onnxtrain.capture.guards.guards import Guards, compile_guards
from onnxtrain.capture.guards.size_decisions import Decisions, Example, attempts
from onnxtrain.capture.internal_errors import internal_errors_as, summary
from onnxtrain.capture.key.key import attribute_reads
from onnxtrain.capture.refusals import refuse_outside_tensor
from onnxtrain.capture.structure import OutputStructure, Structure, flatten_output
from onnxtrain.errors import CaptureError, ChangedArgumentError, ChangedParameterError, OnnxTrainError, ORTModuleIOError
from onnxtrain.graph import sizes
from onnxtrain.graph.sizes import Size
from onnxtrain.torch_compat.decompositions import without_effect_tokens, without_reference_functions
from onnxtrain.torch_compat.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from onnxtrain.torch_compat.internal import refuse_if_lacking
from onnxtrain.torch_compat.modes import autocast_disabled
from onnxtrain.torch_compat.tracing import copies_without_bases, unread_samples_kept

_PREFIX = "module."
Run: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Source:
    """Where a graph input comes from: "input" number `index`, or the "parameter", "buffer" or "attribute" `name`.

    A "part" is a tensor that a parameter holds: `name` goes on from the parameter's. One from "outside" is in a
    container, in another object or among the globals: `name` is that of its `Place`.
    """

    kind: str
    name: str = ""
    index: int = -1


@dataclass(frozen=True)
class Mutation:
    """A graph output that is written back into graph input number `target`."""

    output: int
    target: int


@dataclass(frozen=True)
class Captured:
    """A captured module.

    Attributes:
        model: the forward graph. Its outputs are the user's tensors, then the values of mutations.
        sources: where each graph input comes from.
        results: how many of the outputs are the user's tensors.
        mutations: buffers and inputs that forward changes in place.
        sizes: sizes that forward returns as ints, as expressions over the inputs' sizes.
        output: how the user's output is rebuilt from tensors and sizes.
        guards: the conditions on input sizes under which the graph is right.
        reads: the attributes of modules that forward read.
        constants: tensors from outside the graph whose elements it holds.
        took_ms: how long the capture took.
        kept: which of forward's tensors are results; None: all of them.
        stored: the name of the capture on disk that this is; "" where it is on none.
        written_views: results that are views of what `mutations` change.
    """

    model: ir.Model
    sources: tuple[Source, ...]
    results: int
    mutations: tuple[Mutation, ...]
    sizes: tuple[Size, ...]
    output: OutputStructure
    guards: Guards
    reads: frozenset[tuple[int, str]] = frozenset()
    constants: tuple[torch.Tensor, ...] = ()
    took_ms: float = 0.0
    kept: tuple[int, ...] | None = None
    stored: str = ""
    written_views: tuple[WrittenView, ...] = ()


class _Found:
    """Carries the output's structure out of the export, which undoes assignments to a module's attributes."""

    output: OutputStructure


class _Wrapper(torch.nn.Module):
    """The user's module on a flat list of tensors."""

    elements: ElementDecisions

    def __init__(
        self,
        module: torch.nn.Module,
        structure: Structure,
        watch: SideEffects,
        run: Run | None,
        elements: ElementDecisions,
    ) -> None:
        super().__init__()
        self.__dict__["elements"] = elements
        self.__dict__["_watch"] = watch
        self.__dict__["_run"] = run or module
        self.fakes = FakesMade()
        self.module = module
        self.structure = structure
        self.found = _Found()

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        watch: SideEffects = self.__dict__["_watch"]
        args, kwargs = self.structure.unflatten(tensors)
        watch.begin()
        buffers = AssignedBuffers(self.module)
        layouts = Layouts(self.module, tensors)
        self.fakes.begin()
        try:
            with self.elements.asked():
                leaves, output = flatten_output(self.__dict__["_run"](*args, **kwargs))
        except UndecidedError as decision:
            return [decision.tensor]
        self.found.output = output
        if not leaves and not tensors:
            raise ORTModuleIOError(
                "the arguments and results hold no tensor, and a graph computes with tensors",
                where=type(self.module).__name__,
                todo="the module runs in PyTorch; call it as it is",
            )
        watch.check()
        layouts.check()
        buffers.write()
        changed = self.structure.changed(args, kwargs, tensors)
        if changed:
            raise ChangedArgumentError(
                "forward changes a container among its arguments, which a graph would not repeat",
                where=type(self.module).__name__,
                got=changed,
                todo="the module runs in PyTorch; let forward copy the container before it changes it",
            )
        del args, kwargs
        self.fakes.note([*leaves, *tensors])
        found: list[Any] = leaves
        return found


def capture(
    module: torch.nn.Module,
    structure: Structure,
    tensors: Sequence[torch.Tensor],
    watch: SideEffects,
    suggested: Sequence[Example] = (),
    run: Run | None = None,
    fixed_sizes: Collection[int] = (),
    outside_is_input: bool = False,
) -> Captured:
    """Captures `module` for inputs of this structure.

    Args:
        module: the user's module; training mode, autocast and grad mode are taken as they are now.
        structure: how the call's tensors and constants make up its arguments.
        tensors: the call's tensors, as examples.
        watch: finds what forward does to the module besides computing.
        suggested: example sizes that earlier captures suggest (`Guards.suggestion`).
        run: runs `module`, if its call is to be left out.
        fixed_sizes: the numbers of the tensors whose sizes are not open.
        outside_is_input: whether tensors that forward finds outside of the module are inputs; if not, constants.

    Raises:
        CaptureError: forward cannot be captured; says where and why.
    """
    refuse_if_lacking()
    start = time.perf_counter()
    wrap = partial(_Wrapper, module, structure, watch, run)
    captured = _nearest(wrap, tensors, suggested, fixed_sizes, outside_is_input)
    return replace(captured, took_ms=(time.perf_counter() - start) * 1e3)


def _nearest(
    wrap: Callable[[ElementDecisions], _Wrapper],
    tensors: Sequence[torch.Tensor],
    suggested: Sequence[Example],
    fixed_sizes: Collection[int],
    outside_is_input: bool,
) -> Captured:
    """The first capture that is right for the call, of those with example sizes that keep more sizes open."""
    *guesses, real = attempts(tensors, suggested, fixed_sizes)
    for example in guesses:
        try:
            decisions = Decisions(tensors, example, fixed_sizes)
            captured = _capture(wrap(ElementDecisions(tensors)), decisions, outside_is_input)
        except SideEffectError:
            raise
        except CaptureError:
            continue  # forward does not take this example: the next one is nearer to the call
        if captured.guards(tensors):
            return captured
    return _capture(wrap(ElementDecisions(tensors)), Decisions(tensors, real, fixed_sizes), outside_is_input)


def _capture(wrapper: _Wrapper, decisions: Decisions, outside_is_input: bool) -> Captured:
    module, structure = wrapper.module, wrapper.structure
    outside = OutsideTensors()
    with capturing(), left_alone(module), four_bit_weights(module) as parts:
        with attribute_reads() as reads, outside.noted():
            program = _export(wrapper, decisions)
            while wrapper.elements.is_open:
                wrapper.elements.settle(program)
                program = _export(wrapper, decisions)
        wrapper.fakes.check(module)
        with _internal_errors(module):
            refuse_overlapping_writes(program)
            draw_in_memory_order(program)
            mark_views(program)
            keep_gradients_out(program)
            plain = make_convertible(program)
        traced = None if plain else program
        if not plain:
            program = _functionalize(program)
    with _internal_errors(module):
        converted = convert(program, type(module).__name__)
        names = _names(module, structure)
        guards = compile_guards(program, names, decisions, traced, wrapper.elements.made)
        if outside_is_input:
            outside.find(module, reads, decisions.examples, (t for made in wrapper.elements.made for t in made.lifted))
        sources = _sources(program, module, len(names), parts, outside)
        captured = _assemble(program, sources, converted.model, converted.outputs, wrapper.found.output, names, guards)
        if traced is not None:
            targets = [mutation.target for mutation in captured.mutations]
            views = written_views(traced, program, targets, captured.model.graph.inputs)
            captured = replace(captured, written_views=tuple(views))
    return replace(captured, reads=frozenset(reads), constants=(*captured.constants, *outside.read))


def _internal_errors(module: torch.nn.Module) -> AbstractContextManager[None]:
    return internal_errors_as(CaptureError, f"the exported graph of {type(module).__name__} is not understood")


def _export(wrapper: _Wrapper, decisions: Decisions) -> ExportedProgram:
    # An open size of 0 or 1 would be fixed as well, with a message.
    dims = tuple(
        {d: Dim.STATIC if i in decisions.fixed or size < 2 else Dim.AUTO for d, size in enumerate(t.shape)}
        for i, t in enumerate(decisions.examples)
    )
    try:
        with (
            OutsideChanges(),
            decisions.noted(),
            cheap_tracing(),
            shape_shortcuts(),
            wrapper.fakes.noted(),
            grad_mode_noted(),
            logged_as_info(),
            printed_as_info(),
        ):
            program: ExportedProgram = torch.export.export(
                wrapper, tuple(decisions.examples), dynamic_shapes=(dims,) if dims else None, strict=False
            )
        return program
    except OnnxTrainError:
        raise
    except Exception as error:  # anything that the user's forward or export raises
        raise CaptureError(
            f"forward of {type(wrapper.module).__name__} cannot be captured: {summary(error)}",
            where=source_line.in_error(error),
            todo=f"the module runs in PyTorch; {_to_do(error)}",
        ) from error


def _to_do(error: BaseException) -> str:
    """How forward becomes one that can be captured."""
    text = str(error)
    if isinstance(error, _DECIDED_BY_ELEMENTS):
        return "avoid Python decisions that depend on tensor elements"
    if isinstance(error, UnsupportedOperatorException) or "no fake impl registered" in text:
        found = re.search(r"\w+(::|\.)\w+", str(getattr(error, "func", None) or text))
        name = found[0].replace(".", "::") if found else "namespace::operator"
        return f'say what shapes the operator gives: torch.library.register_fake("{name}")'
    return "a graph takes PyTorch's operators, and Python that reads no elements of tensors"


_DECIDED_BY_ELEMENTS = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)


# PyTorch's reference functions for these losses take other arguments than the operators, and would be used anyway:
# cross_entropy with reduction="none" would get the shape ().
_WRONG_REFERENCES = (
    torch.ops.aten.nll_loss.default,
    torch.ops.aten.hinge_embedding_loss.default,
    torch.ops.aten.margin_ranking_loss.default,
)


def _functionalize(program: ExportedProgram) -> ExportedProgram:
    """Functional ATen; composite operators that have a definition stay single nodes."""
    try:
        with (
            without_reference_functions(_WRONG_REFERENCES),
            copies_without_bases(),
            buffer_copies_kept(),
            unread_samples_kept(),
            cheap_tracing(),
            shape_shortcuts(),
        ):
            functional: ExportedProgram = program.run_decompositions(composite_parts(program))
            nested = nested_cast_parts(functional)
            if nested:
                with autocast_disabled():  # all other casts are in the graph
                    functional = functional.run_decompositions(nested)
        return without_effect_tokens(functional)
    except Exception as error:  # PyTorch's tracing raises anything
        raise CaptureError(
            f"the exported graph cannot be made functional: {summary(error)}", where=source_line.in_error(error)
        ) from error


# From the export's signature to ours


def _assemble(
    program: ExportedProgram,
    found: _Sources,
    model: ir.Model,
    outputs: list[Any],
    structure: OutputStructure,
    names: Sequence[str],
    guards: Guards,
) -> Captured:
    graph = model.graph
    sources, constants, numbers = found
    kept_inputs = [v for v, s in zip(graph.inputs, sources, strict=True) if s is not None]
    lifted = constants(list(graph.inputs))
    for value, tensor in lifted:
        _make_constant(graph, value, tensor)
    graph.inputs.clear()
    graph.inputs.extend(kept_inputs)
    kept_sources = tuple(s for s in sources if s is not None)

    results: list[ir.Value] = []
    sizes_out: list[Size] = []
    mutated: list[tuple[ir.Value, str]] = []
    for spec, value in zip(program.graph_signature.output_specs, outputs, strict=True):
        if spec.kind == OutputKind.USER_OUTPUT:
            if isinstance(value, ir.Value):
                results.append(value)
            else:
                sizes_out.append(value)
        elif spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
            mutated.append((value, str(spec.target)))
        else:
            raise ChangedParameterError(
                "forward changes a parameter or an object that a graph cannot hold",
                where=str(spec.target or spec.arg),
                got=spec.kind.name,
                todo="the module runs in PyTorch; change parameters outside forward",
            )
    places = {_key(s, numbers): i for i, s in enumerate(kept_sources)}
    mutations = tuple(Mutation(len(results) + i, places[target]) for i, (_, target) in enumerate(mutated))
    graph.outputs.clear()
    graph.outputs.extend([*results, *(v for v, _ in mutated)])
    _name_inputs(graph, kept_sources, names)
    held = tuple(tensor for _, tensor in lifted)
    return Captured(model, kept_sources, len(results), mutations, tuple(sizes_out), structure, guards, constants=held)


def _key(source: Source, numbers: dict[str, int]) -> str:
    """What an output spec calls this input when it is mutated."""
    if source.kind == "input":
        return next(name for name, index in numbers.items() if index == source.index)
    return _PREFIX + source.name


# Where each placeholder comes from; None for a lifted constant, whose tensor the second part gives; and the numbers of
# the call's tensors.
_Sources: TypeAlias = tuple[
    list[Source | None], Callable[[list[ir.Value]], list[tuple[ir.Value, torch.Tensor]]], dict[str, int]
]


def _sources(
    program: ExportedProgram,
    module: torch.nn.Module,
    user_inputs: int,
    parts: Mapping[str, str],
    outside: OutsideTensors,
) -> _Sources:
    """Where the placeholders come from.

    Args:
        program: the export.
        module: the user's module.
        user_inputs: how many tensors the call has.
        parts: names what parameters hold, by its names in the export.
        outside: the tensors that are none of the module's parameters and buffers.
    """
    found: list[Source | None] = []
    lifted: list[tuple[int, torch.Tensor]] = []
    numbers: dict[str, int] = {}
    kinds = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer"}
    for position, spec in enumerate(program.graph_signature.input_specs):
        target = str(spec.target or "")
        if target.removeprefix(_PREFIX) in parts:
            found.append(Source("part", parts[target.removeprefix(_PREFIX)]))
        elif spec.kind in kinds:
            found.append(Source(kinds[spec.kind], target.removeprefix(_PREFIX)))
        elif spec.kind == InputKind.USER_INPUT:
            numbers[spec.arg.name] = len(numbers)
            found.append(Source("input", index=len(numbers) - 1))
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            found.append(_of_constant(module, target, program.constants[target], outside))
            if found[-1] is None:
                lifted.append((position, program.constants[target]))
        else:
            raise CaptureError(f"forward uses {spec.arg} of kind {spec.kind.name}, which the graph cannot hold")
    if len(numbers) != user_inputs:
        raise CaptureError(f"the export has {len(numbers)} inputs, the call {user_inputs}")
    return found, lambda inputs: [(inputs[p], t) for p, t in lifted], numbers


def _of_constant(module: torch.nn.Module, target: str, tensor: torch.Tensor, outside: OutsideTensors) -> Source | None:
    """Where a constant of the export comes from; None for one that it can only be."""
    if _is_attribute(module, target) and not outside.is_held(tensor):
        return Source("attribute", target.removeprefix(_PREFIX))
    refuse_outside_tensor(tensor)
    name = outside.name(tensor)
    return Source("outside", name) if name else None


def _is_attribute(module: torch.nn.Module, target: str) -> bool:
    """Whether a constant of the export is a tensor attribute of the user's module, and no literal of its forward."""
    found: Any = module
    for name in target.removeprefix(_PREFIX).split("."):
        found = getattr(found, name, None)
    return target.startswith(_PREFIX) and isinstance(found, torch.Tensor)


def _make_constant(graph: ir.Graph, value: ir.Value, tensor: torch.Tensor) -> None:
    """Turns a placeholder into an initializer that holds `tensor`."""
    data = tensor.detach().cpu().contiguous()
    assert value.dtype is not None
    array = data.float().numpy().astype(value.dtype.numpy()) if data.dtype == torch.bfloat16 else data.numpy()
    value.const_value = ir.Tensor(array, dtype=value.dtype, name=value.name)
    value.shape = sizes.shape(tuple(int(s) for s in data.shape))
    graph.inputs.remove(value)
    graph.register_initializer(value)


def _names(module: torch.nn.Module, structure: Structure) -> list[str]:
    """A name for each tensor of the call: what forward calls the argument that it is in."""
    positional = [
        name
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    found: list[str] = []
    for name in structure.names:
        place = re.match(r"args_(\d+)", name)
        if place and int(place[1]) < len(positional):
            name = positional[int(place[1])] + name[place.end() :]
        found.append(name if name not in found else f"{name}_{len(found)}")
    return found


def _name_inputs(graph: ir.Graph, sources: Sequence[Source], names: Sequence[str]) -> None:
    """Parameters and buffers carry their names in the module, the call's tensors their names in the call."""
    taken = {v.name for n in graph for v in n.outputs} | set(graph.initializers)
    for value, source in zip(graph.inputs, sources, strict=True):
        name = source.name or names[source.index]
        if name not in taken:
            value.name = name
            taken.add(name)
