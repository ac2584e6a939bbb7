"""Capture a module as an ONNX graph: torch.export on fake tensors, then a conversion of its ATen graph.

    module(*args, **kwargs) ─flatten─> wrapper(*tensors) ─torch.export─> ATen ─functionalize─> ATen ─convert─> ONNX

A capture runs under the caller's autocast state, because functionalization makes autocast's casts explicit only if it
sees that state. no_grad regions are marked before functionalization, which drops them. The module is left unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import onnx_ir as ir
import torch
from torch.export import Dim
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import OutputKind

from onnxtrain.capture import source_location
from onnxtrain.capture.blocks.instantiate import instantiate
from onnxtrain.capture.blocks.omitted_blocks import OmittedBlocks
from onnxtrain.capture.blocks.outside import Outside
from onnxtrain.capture.blocks.repeated_blocks import RepeatedBlocks
from onnxtrain.capture.convert.convert import convert
from onnxtrain.capture.convert.symbolic_sizes import tensor_type
from onnxtrain.capture.effects.assigned_attributes import AssignedAttributes
from onnxtrain.capture.effects.outside_changes import OutsideChanges
from onnxtrain.capture.effects.outside_tensors import OutsideTensors
from onnxtrain.capture.effects.random_generators import refuse_other_generators
from onnxtrain.capture.effects.sampled_arrays import sampling_by_nodes
from onnxtrain.capture.effects.side_effects import SideEffectError, SideEffects, attributes_kept
from onnxtrain.capture.effects.written_views import WrittenView, written_views
from onnxtrain.capture.export.advice import advice
from onnxtrain.capture.export.composite_shapes import shape_shortcuts
from onnxtrain.capture.export.packed_sequences import expected_sizes_of_padded
from onnxtrain.capture.export.patches import capturing
from onnxtrain.capture.export.torch_reports import logged_as_info, printed_as_info
from onnxtrain.capture.export.traced_functions import TracedFunctions
from onnxtrain.capture.export.tracing_shortcuts import tracing_shortcuts
from onnxtrain.capture.fixed_inputs import fixing_inputs_if_needed
from onnxtrain.capture.four_bit_weights import plain_four_bit_weights
from onnxtrain.capture.functionalize.copied_views import decide_copies
from onnxtrain.capture.functionalize.functionalize import functionalize
from onnxtrain.capture.functionalize.memory_order_sampling import sample_in_memory_order
from onnxtrain.capture.functionalize.no_grad import detach_no_grad_values, recording_grad_mode
from onnxtrain.capture.functionalize.overlapping_writes import refuse_overlapping_writes
from onnxtrain.capture.functionalize.result_strides import restore_result_strides
from onnxtrain.capture.functionalize.strided_reads import read_in_memory_order
from onnxtrain.capture.functionalize.views import declare_views
from onnxtrain.capture.functionalize.without_retracing import make_convertible
from onnxtrain.capture.guards.assumed_answers import AssumedAnswer
from onnxtrain.capture.guards.element_decisions import ElementDecisions
from onnxtrain.capture.guards.guards import AssumptionError, Guards, compile_guards
from onnxtrain.capture.guards.size_decisions import Example, SizeDecisions, example_candidates
from onnxtrain.capture.input_origins import PREFIX, InputOrigins, Source, input_origins
from onnxtrain.capture.internal_errors import internal_errors_as, summary
from onnxtrain.capture.key.attribute_accesses import attribute_reads
from onnxtrain.capture.refusals import refuse_assumptions_between_ranks
from onnxtrain.capture.sharded.gathered import gather_before_readers
from onnxtrain.capture.structure import OutputStructure, Structure, input_names
from onnxtrain.capture.wrapper import ForwardCall, OutputHolder, Wrapper
from onnxtrain.errors import (
    CaptureError,
    ChangedParameterError,
    OnnxTrainError,
    ORTModuleFallbackException,
    SlowCaptureError,
)
from onnxtrain.graph import sizes
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import set_type
from onnxtrain.log import LOG
from onnxtrain.system.time_limit import part, time_limit
from onnxtrain.torch_compat.internal import refuse_if_lacking
from onnxtrain.torch_compat.tensors import own_memory

_SECONDS_FOR_IMAGES = 20.0  # of this thread's processor time
_SLOW_SIZES: WeakSet[torch.nn.Module] = WeakSet()  # modules for which they did not suffice


class _SlowSizesError(CaptureError):
    """A trace with dynamic sizes of images takes too long."""

    def __init__(self, parts: str) -> None:
        super().__init__(
            "expressions over the sizes of images take too long to evaluate",
            where=source_location.of_caller(),
            expected=f"a trace of at most {_SECONDS_FOR_IMAGES:.0f} s",
            got=parts,
            todo="the module is captured with the sizes of images fixed",
        )


@dataclass(frozen=True)
class Mutation:
    """An in-place change by forward: graph output `output` is written back into graph input `target`."""

    output: int
    target: int


@dataclass(frozen=True)
class Captured:
    """A captured module.

    Attributes:
        model: the forward graph. Its outputs are the user's tensors, then the values of mutations.
        sources: the origin of each graph input.
        result_count: the number of outputs that are the user's tensors.
        mutations: buffers and inputs that forward changes in place.
        sizes: sizes that forward returns as ints, as expressions over the inputs' sizes.
        output: how to rebuild the user's output from tensors and sizes.
        guards: the conditions on input sizes and elements under which the graph is valid.
        reads: the module attributes that forward read: the id of the module, and the attribute's name.
        constants: tensors from outside the graph whose values are embedded in it.
        took_ms: the duration of the capture.
        kept_results: the indices of forward's output tensors that the option keep_outputs keeps; None: all.
        stored_name: the name of the stored capture that this one was loaded from or saved as; "" if there is none.
        written_views: results that are views of tensors that `mutations` change.
        assigned: attributes of modules that each call assigns; not among `reads`.
        assumed: the answers of forward's tests that are no guards, which each call has to check.
        omitted: repeated blocks that `model` does not contain; `plan.omitted_blocks` inserts them.
    """

    model: ir.Model
    sources: tuple[Source, ...]
    result_count: int
    mutations: tuple[Mutation, ...]
    sizes: tuple[Size, ...]
    output: OutputStructure
    guards: Guards
    assigned: AssignedAttributes
    reads: frozenset[tuple[int, str]] = frozenset()
    constants: tuple[torch.Tensor, ...] = ()
    took_ms: float = 0.0
    kept_results: tuple[int, ...] | None = None
    stored_name: str = ""
    written_views: tuple[WrittenView, ...] = ()
    assumed: tuple[AssumedAnswer, ...] = ()
    omitted: tuple[OmittedBlocks, ...] = ()

    @property
    def mutated(self) -> list[int]:
        """The positions of the graph inputs that forward changes in place, one for each of `mutations`."""
        return [mutation.target for mutation in self.mutations]

    def has_same_graph(self, other: Captured) -> bool:
        """Return whether another capture, of any module or state, is the same graph at all sizes."""
        return (
            [(v.dtype, v.shape) for v in self.model.graph.inputs]
            == [(v.dtype, v.shape) for v in other.model.graph.inputs]
            and self.sources == other.sources
            and (self.result_count, self.mutations, self.sizes) == (other.result_count, other.mutations, other.sizes)
            and (self.written_views, self.assigned, self.assumed)
            == (other.written_views, other.assigned, other.assumed)
            and (self.output, self.omitted) == (other.output, other.omitted)
            and (self.stored_name == other.stored_name != "" or self.guards.same_graph(other.guards))
        )


@dataclass(frozen=True)
class _Limits:
    """What the traces of one capture may do.

    Attributes:
        outside_is_input: see `capture`.
        may_omit: see `capture`.
        seconds: the processor time that one may take; None: any.
    """

    outside_is_input: bool
    may_omit: bool
    seconds: float | None = None


def capture(
    module: torch.nn.Module,
    structure: Structure,
    tensors: Sequence[torch.Tensor],
    side_effects: SideEffects,
    suggested: Sequence[Example] = (),
    call_forward: ForwardCall | None = None,
    fixed_sizes: Collection[int] = (),
    outside_is_input: bool = False,
    may_assume: bool = False,
    may_assume_values: bool = False,
    may_omit: bool = False,
) -> Captured:
    """Capture `module` for inputs of this structure.

    Args:
        module: the user's module, captured in its current training mode, autocast state and grad mode.
        structure: how the call's tensors and constants make up its arguments.
        tensors: the call's tensors, as examples.
        side_effects: detects what forward does to the module besides computing.
        suggested: example sizes that earlier captures suggest (`Guards.suggestion`).
        call_forward: called in place of `module`, for example to skip the module's own hooks.
        fixed_sizes: the indices of the tensors whose dimensions are all static.
        outside_is_input: whether tensors that forward reads from outside the module become graph inputs; otherwise
            they become constants.
        may_assume: whether the graph may assume answers that each call has to check (`Captured.assumed`).
        may_assume_values: whether it may assume those of this call where they depend on the module's parameters.
        may_omit: whether the graph may lack repeated blocks (`Captured.omitted`).

    Raises:
        CaptureError: forward cannot be captured; says where and why.
        SideEffectError: forward changes Python state, of which nothing is left.
    """
    refuse_if_lacking()
    start = time.perf_counter()
    limits = _Limits(outside_is_input, may_omit)
    decisions_with = partial(ElementDecisions, tensors, may_assume=may_assume, may_assume_values=may_assume_values)
    decisions: list[ElementDecisions] = []

    def wrap(with_checks: bool, fixes_inputs: bool = False) -> Wrapper:
        elements = decisions_with(with_checks=with_checks, fixes_inputs=fixes_inputs)
        decisions.append(elements)
        return Wrapper(module, structure, side_effects, call_forward, elements)

    def with_inputs_fixed() -> Captured:
        real = example_candidates(tensors, (), fixed_sizes)[-1]
        return _capture_decided(partial(wrap, fixes_inputs=True), tensors, real, fixed_sizes, limits)

    try:
        captured = fixing_inputs_if_needed(
            module,
            lambda: _first_valid_capture(wrap, module, tensors, suggested, fixed_sizes, limits),
            with_inputs_fixed,
            lambda: any(each.reads_elements for each in decisions),
        )
    except ORTModuleFallbackException as error:
        side_effects.refuse_assignments(error)
        raise
    side_effects.refuse_assignments(captured)
    return replace(captured, took_ms=(time.perf_counter() - start) * 1e3)


def _first_valid_capture(
    wrap: Callable[[bool], Wrapper],
    module: torch.nn.Module,
    tensors: Sequence[torch.Tensor],
    suggested: Sequence[Example],
    fixed_sizes: Collection[int],
    limits: _Limits,
) -> Captured:
    """Try example sizes, those that keep most dimensions dynamic first, until a capture is valid for the call.

    Windows of images, as Swin's, have sizes that PyTorch takes minutes to compare. Then the sizes of images are fixed.
    """
    images = frozenset(i for i, tensor in enumerate(tensors) if tensor.dim() >= 4) - frozenset(fixed_sizes)
    if not images or module not in _SLOW_SIZES:
        try:
            limited = replace(limits, seconds=_SECONDS_FOR_IMAGES) if images else limits
            return _first_valid_of(wrap, tensors, suggested, fixed_sizes, limited)
        except _SlowSizesError as error:
            LOG.info("captured again with the sizes of images fixed: %s", error)
            _SLOW_SIZES.add(module)
    return _first_valid_of(wrap, tensors, (), images.union(fixed_sizes), limits)


def _first_valid_of(
    wrap: Callable[[bool], Wrapper],
    tensors: Sequence[torch.Tensor],
    suggested: Sequence[Example],
    fixed_sizes: Collection[int],
    limits: _Limits,
) -> Captured:
    *guesses, real = example_candidates(tensors, suggested, fixed_sizes)
    for example in guesses:
        try:
            captured = _capture_decided(wrap, tensors, example, fixed_sizes, limits)
        except (SideEffectError, SlowCaptureError, _SlowSizesError):
            raise
        except CaptureError:
            continue  # forward rejects these sizes: the next example is closer to the call's
        if captured.guards(tensors):
            return captured
    return _capture_decided(wrap, tensors, real, fixed_sizes, limits)


def _capture_decided(
    wrap: Callable[[bool], Wrapper],
    tensors: Sequence[torch.Tensor],
    example: Example,
    fixed_sizes: Collection[int],
    limits: _Limits,
) -> Captured:
    """Capture with the user's checks of data-dependent sizes as guards only if the graph needs them."""
    wrapper = wrap(False)
    try:
        return _capture(wrapper, SizeDecisions(tensors, example, fixed_sizes), limits)
    except AssumptionError:
        if not wrapper.elements.unanswered_checks:
            raise
    return _capture(wrap(True), SizeDecisions(tensors, example, fixed_sizes), limits)


def _capture(wrapper: Wrapper, decisions: SizeDecisions, limits: _Limits) -> Captured:
    """Capture for one choice of example sizes.

    Raises:
        _SlowSizesError: the trace takes more processor time than `limits` allow.
    """
    module, structure = wrapper.module, wrapper.structure
    outside = OutsideTensors()
    with (
        capturing() as calls,
        refuse_other_generators(module, wrapper.surroundings),
        plain_four_bit_weights(module) as parts,
        wrapper.local_tensors(),
        sampling_by_nodes(module, wrapper.surroundings.codes.values(), calls),
    ):
        with (
            attribute_reads(wrapper.accesses) as reads,
            outside.recording(),
            time_limit(limits.seconds, _SlowSizesError),
            part("tracing forward"),
        ):
            program, omitted = _export_blocks_once(wrapper, decisions, outside, limits.may_omit)
            while wrapper.elements.is_undecided or wrapper.elements.has_fixed:
                if not wrapper.elements.has_fixed:  # else the next trace knows these inputs from the beginning
                    wrapper.elements.decide(program, wrapper)
                program, omitted = _export_blocks_once(wrapper, decisions, outside, limits.may_omit)
        wrapper.fakes.check(module)
        with _internal_errors(module), part("functionalization"):
            decide_copies(program, decisions)
            refuse_overlapping_writes(program)
            restore_result_strides(program)
            sample_in_memory_order(program)
            read_in_memory_order(program)
            declare_views(program)
            detach_no_grad_values(program)
            needs_no_retracing = make_convertible(program)
            traced, program = (None, program) if needs_no_retracing else (program, functionalize(program))
    with _internal_errors(module):
        with part("conversion to ONNX"):
            converted = convert(program, type(module).__name__)
        names = input_names(module.forward, structure)
        answered = wrapper.elements.guards
        with logged_as_info(), part("guards"):  # operators may fail on the fake tensors of a proof
            guards = compile_guards(program, names, decisions, traced, answered, wrapper.elements.facts)
        if limits.outside_is_input:
            outside.find(module, reads, decisions.examples, (t for decision in answered for t in decision.lifted))
        origins = input_origins(program, module, len(names), parts, outside)
        captured = _assemble(program, origins, converted.model, converted.outputs, wrapper.output, names, guards)
        gather_before_readers(captured.model.graph, module)
        refuse_assumptions_between_ranks(captured.model.graph, captured.assumed)
        if traced is not None:
            views = written_views(traced, program, captured.mutated, captured.model.graph.inputs)
            captured = replace(captured, written_views=tuple(views))
    own_reads = reads - captured.assigned.unread(module)
    constants = (*captured.constants, *outside.constants)
    return replace(captured, reads=frozenset(own_reads), constants=constants, omitted=omitted)


def _internal_errors(module: torch.nn.Module) -> AbstractContextManager[None]:
    problem = f"onnxtrain failed to convert the exported graph of {type(module).__name__}"
    return internal_errors_as(CaptureError, problem)


def _export_blocks_once(
    wrapper: Wrapper, decisions: SizeDecisions, outside: OutsideTensors, may_omit: bool
) -> tuple[ExportedProgram, tuple[OmittedBlocks, ...]]:
    """Export forward, and trace each of its repeated blocks once; all of them, if their calls cannot be replaced.

    Returns:
        The export, and the blocks that it lacks.
    """
    events = [lambda: wrapper.elements.count, lambda: len(outside.constants)]
    surroundings = Outside(wrapper.surroundings, events, wrapper.fakes.count, wrapper.fakes.holds)
    hidden = wrapper.hidden
    blocks = RepeatedBlocks(wrapper.module, wrapper.accesses, surroundings, hidden)
    try:
        with hidden.hiding():
            program = _export(wrapper, decisions, blocks.recording())
        omitted = instantiate(program, blocks.copies, hidden, may_omit)
        if omitted is not None:
            return program, omitted
    except CaptureError:
        if not hidden.revealed:  # else forward may do to a parameter what only torch.export's own can take
            raise
    return _export(wrapper, decisions, nullcontext()), ()


def _export(
    wrapper: Wrapper, decisions: SizeDecisions, tracing_blocks: AbstractContextManager[None]
) -> ExportedProgram:
    # torch.export would make a dynamic dimension of size 0 or 1 static, too, and say so.
    dims = tuple(
        {d: Dim.STATIC if i in decisions.fixed or size < 2 else Dim.AUTO for d, size in enumerate(t.shape)}
        for i, t in enumerate(decisions.examples)
    )
    try:
        with (
            attributes_kept(wrapper.module),
            OutsideChanges(),
            decisions.recording(),
            tracing_shortcuts(),
            shape_shortcuts(),
            wrapper.fakes.recording(),
            recording_grad_mode(),
            TracedFunctions(),
            expected_sizes_of_padded(),
            tracing_blocks,
            logged_as_info(),
            printed_as_info(),
        ):
            program: ExportedProgram = torch.export.export(
                wrapper, tuple(decisions.examples), dynamic_shapes=(dims,) if dims else None, strict=False
            )
        return program
    except OnnxTrainError:
        raise
    except Exception as error:  # forward and torch.export may raise anything
        raise CaptureError(
            f"forward of {type(wrapper.module).__name__} cannot be captured: {summary(error)}",
            where=source_location.of_error(error),
            todo=f"the module runs in PyTorch; {advice(error)}",
        ) from error


# From the signature of torch.export to that of the graph


def _assemble(
    program: ExportedProgram,
    origins: InputOrigins,
    model: ir.Model,
    outputs: list[Any],
    output: OutputHolder,
    names: Sequence[str],
    guards: Guards,
) -> Captured:
    graph = model.graph
    kept_inputs = [v for v, s in zip(graph.inputs, origins.sources, strict=True) if s is not None]
    for value, tensor in [(graph.inputs[position], tensor) for position, tensor in origins.lifted]:
        _make_constant(graph, value, tensor)
    graph.inputs.clear()
    graph.inputs.extend(kept_inputs)
    sources = _with_reassigned(graph, tuple(s for s in origins.sources if s is not None), output.assigned)

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
                "forward changes a parameter or an object that a graph cannot represent",
                where=str(spec.target or spec.arg),
                got=spec.kind.name,
                todo="the module runs in PyTorch; change parameters outside forward",
            )
    positions = {_target_name(s, origins.call_inputs): i for i, s in enumerate(sources)}
    mutations = tuple(Mutation(len(results) + i, positions[target]) for i, (_, target) in enumerate(mutated))
    graph.outputs.clear()
    graph.outputs.extend([*results, *(v for v, _ in mutated)])
    _name_inputs(graph, sources, names)
    constants = tuple(tensor for _, tensor in origins.lifted)
    count = len(sizes_out) - output.assigned_sizes
    assigned = replace(output.assigned, sizes=tuple(sizes_out[count:]))
    own_sizes = tuple(sizes_out[:count])
    return Captured(
        model,
        sources,
        len(results),
        mutations,
        own_sizes,
        output.structure,
        guards,
        assigned,
        constants=constants,
        assumed=output.assumed,
    )


def _with_reassigned(graph: ir.Graph, sources: tuple[Source, ...], assigned: AssignedAttributes) -> tuple[Source, ...]:
    """Let the graph take the tensors that were in attributes which forward reads, and then assigns.

    Their shapes and dtypes are then part of the key, and not which tensors they are.
    """
    first_of_call = next((i for i, source in enumerate(sources) if source.kind == "input"), len(sources))
    added: list[Source] = []
    for each in assigned.tensors:
        source = Source("attribute", each.path)
        if source not in sources:
            value = ir.Value(name=each.path)
            set_type(value, tensor_type(each.before))
            graph.inputs.insert(first_of_call + len(added), value)
            added.append(source)
    return (*sources[:first_of_call], *added, *sources[first_of_call:])


def _target_name(source: Source, call_inputs: dict[str, int]) -> str:
    """Return the name by which an output spec refers to this input when forward mutates it."""
    if source.kind == "input":
        return next(name for name, index in call_inputs.items() if index == source.index)
    return PREFIX + source.name


def _make_constant(graph: ir.Graph, value: ir.Value, tensor: torch.Tensor) -> None:
    """Turn a placeholder into an initializer that holds `tensor`."""
    data = own_memory(tensor.detach().cpu().contiguous())
    assert value.dtype is not None
    array = data.float().numpy().astype(value.dtype.numpy()) if data.dtype == torch.bfloat16 else data.numpy()
    value.const_value = ir.Tensor(array, dtype=value.dtype, name=value.name)
    value.shape = sizes.shape(tuple(int(s) for s in data.shape))
    graph.inputs.remove(value)
    graph.register_initializer(value)


def _name_inputs(graph: ir.Graph, sources: Sequence[Source], names: Sequence[str]) -> None:
    """Name parameters and buffers as the module does, and the call's tensors as in `names`."""
    used_names = {v.name for n in graph for v in n.outputs} | set(graph.initializers)
    for value, source in zip(graph.inputs, sources, strict=True):
        name = source.name or names[source.index]
        if name not in used_names:
            value.name = name
            used_names.add(name)
