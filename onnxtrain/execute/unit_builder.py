"""Lower planned graphs to units: the forward program, the source of backward programs and the autograd boundary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch

from onnxtrain.autodiff import Joint
from onnxtrain.capture.capture import Captured
from onnxtrain.errors import CaptureError, CommunicationError
from onnxtrain.execute.boundary import Backward, BackwardProgram, Flags, Unit
from onnxtrain.execute.cpp_program import program as cpp_program
from onnxtrain.execute.early_gradients import StagedBoundary, StagedProgram
from onnxtrain.execute.independent_backwards import IndependentBoundary
from onnxtrain.execute.inductor_program import program as inductor_program
from onnxtrain.execute.input_gradients_first import InputsFirstBoundary
from onnxtrain.execute.kernel_annotations import may_compile_in_background
from onnxtrain.execute.kernel_choice.tuned_program import make_program
from onnxtrain.execute.program import FusedCalls, Program
from onnxtrain.execute.reads_first import ReadsFirst
from onnxtrain.execute.recorded_program import Recordings
from onnxtrain.execute.regions import program as regions
from onnxtrain.execute.reused_memory import reuse_memory
from onnxtrain.log import LOG
from onnxtrain.ops import Effects, definition_of
from onnxtrain.options import Options
from onnxtrain.plan import streams
from onnxtrain.plan.backward_stages import (
    Groups,
    group_gradients,
    group_inputs,
    is_object,
    split_backward,
    why_not_staged,
)
from onnxtrain.plan.channels_last import ChannelsLast
from onnxtrain.plan.cut import Cut, Part, cut, single_part
from onnxtrain.plan.differentiation import Differentiation
from onnxtrain.plan.independent_results import independent_results, wants_stages
from onnxtrain.plan.mutated_inputs import check_backward_reads
from onnxtrain.plan.omitted_blocks import insert_omitted_blocks, with_omitted_blocks
from onnxtrain.plan.output_views import unshared_results
from onnxtrain.plan.parameter_buckets import join_forward_collectives
from onnxtrain.plan.parameter_order import exchanges
from onnxtrain.plan.recompute import RecomputeChoice, apply_choice
from onnxtrain.report import Refusal

Rerun = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class UnitBuilder:
    """Makes units from one optimized forward graph.

    Attributes:
        captured: the capture of the graph.
        differentiation: the graph, and how it is differentiated.
        views: see `output_views.input_views`.
        device: that all tensors are on.
        options: see `onnxtrain.options`.
        layout: which images are kept in channels_last memory format; None: none.
        recordings: records programs; None: they are not recorded.
        rerun: runs the module in PyTorch on the tensors of the capture's inputs (create_graph).
        counterpart: a unit of the same module that other ranks may run at the same time; None: there is none.
    """

    captured: Captured
    differentiation: Differentiation
    views: tuple[str, ...]
    device: torch.device
    options: Options
    layout: ChannelsLast | None
    recordings: Recordings | None
    rerun: Rerun
    counterpart: Unit | None = None

    @property
    def _name(self) -> str:
        return self.differentiation.forward.graph.name or "module"

    def program(self, part: Part, title: str) -> Program:
        """Return the program of a part; it may be recorded, fused or compiled while it is in use."""
        part = streams.scheduled(part, self.device.type)
        program = self._program(part, title, self.layout)
        if self._is_recorded(program, title) or not may_compile_in_background(self.options):
            return program
        if self.layout is None:  # a region's kernel reads and writes contiguous tensors only
            regions.watch(program, self.options, self.device, partial(self._fused, title))
            frees = title == "backward"
            inductor_program.watch(program, self.options, self.device, partial(self._views, title), frees)
        if self.device.type == "cpu":
            cpp_program.watch(program)
        return program

    def _is_recorded(self, program: Program, title: str) -> bool:
        """Let a program record, or what follows its early reads; return whether it does."""
        if self.recordings is None:
            return False
        parts = streams.split_at_reads(program.part)
        if parts is None:
            return self.recordings.watch(program) is not None
        rest = self._program(parts.rest, title, self.layout)
        if self.recordings.watch(rest) is None:
            return False
        reads = self._program(parts.reads, f"{title}, labels", self.layout)
        program.run = ReadsFirst(parts, program.part.inputs, reads, rest).run
        return True

    def not_recorded(self, unit: Unit) -> list[Refusal]:
        """Return the programs of a unit that the option cuda_graphs does not record, with reasons."""
        if self.recordings is None:
            return []
        source = unit.backward_source
        backward = [source.parts.backward] if isinstance(source, BackwardPrograms) else []
        split = streams.split_at_reads(unit.forward.part)
        return self.recordings.refusals([unit.forward.part if split is None else split.rest, *backward])

    def inference_unit(self) -> Unit:
        """Return the unit of the forward graph alone, after omitted blocks have been inserted into it.

        Raises:
            OmittedBlocksError: they cannot be inserted.
            CommunicationError: it would communicate differently from the unit `counterpart`.
        """
        insert_omitted_blocks(self.differentiation.forward.graph, self.captured.omitted)
        join_forward_collectives(self.differentiation.forward.graph)
        program = self.program(single_part(self.differentiation.forward), "inference")
        self._check_forward(program.part)
        return self._unit(program, (False,) * self.captured.result_count)

    def training_unit(self, joint: Joint, choice: RecomputeChoice) -> Unit:
        """Return the unit of a joint graph to which `choice` has been applied (`apply_choice`), without omissions.

        Raises:
            CaptureError: forward writes a value that has a gradient into an input, or backward reads an overwritten
                input.
            CommunicationError: it would communicate differently from the unit `counterpart`.
        """
        results, wrt, mutated = self.captured.result_count, self.differentiation.wrt, self.differentiation.mutated
        self._refuse_written_gradients(joint)
        check_backward_reads(joint, mutated)
        parts = cut(joint)
        forward = self.program(parts.forward, "forward")
        self._check_forward(parts.forward)
        early = choice.early or self._inputs_are_first or wants_stages(self.options.early_gradients, joint, parts)
        groups = self._groups(parts, early)
        differentiable = tuple(c is not None for c in joint.cotangents[:results])
        unreached = [
            i
            for i, (source, gradient) in enumerate(zip(self.captured.sources, joint.gradients, strict=False))
            if source.kind == "input" and wrt[i] and gradient is None
        ]
        backward = BackwardPrograms(self, joint, parts, differentiable, choice, groups)
        backward.check_communication(parts, differentiable)
        boundary: StagedBoundary | InputsFirstBoundary | IndependentBoundary | None
        if groups:
            boundary = (InputsFirstBoundary if self._inputs_are_first else StagedBoundary)(groups, len(wrt))
        else:
            boundary = self._independent_boundary(joint, parts)
        return self._unit(forward, differentiable, backward, parts, boundary, unreached)

    def _check_forward(self, part: Part) -> None:
        if self.counterpart is not None:
            check_same_collectives(part, self.counterpart.forward.part, f"{self._name} forward")

    def _independent_boundary(self, joint: Joint, parts: Cut) -> IndependentBoundary | None:
        """Return a boundary with a backward for each group of results that share nothing.

        None if there is one group.
        """
        results, reached = independent_results(joint, parts)
        return IndependentBoundary(results, reached, self.differentiation.wrt) if results else None

    def _refuse_written_gradients(self, joint: Joint) -> None:
        for mutation in self.captured.mutations:
            if joint.active[mutation.output]:
                raise CaptureError(
                    "forward writes a value that has a gradient into a buffer or an input",
                    got=self.differentiation.forward.graph.outputs[mutation.output].name,
                    expected="a written value without a gradient",
                    todo="detach() the value before it is written",
                )

    def _groups(self, parts: Cut, early: bool) -> Groups:
        """Return the gradients that each stage of backward returns; () if all are returned at its end."""
        if not early:
            return ()
        if reason := why_not_staged(parts, self.views):
            LOG.info("%s: its gradients are released at the end of backward: %s", self._name, reason)
            return ()
        if self._inputs_are_first:
            return group_inputs(parts, (i for i, source in enumerate(self.captured.sources) if source.kind == "input"))
        groups = group_gradients(parts)
        return groups if len(groups) > 1 else ()

    @property
    def _inputs_are_first(self) -> bool:
        return self.options.early_gradients == "inputs"

    def _fused(self, title: str, part: Part, fused_calls: FusedCalls) -> Program:
        return self._program(part, f"{title}, fused", fused_calls=fused_calls)

    def _views(self, title: str, part: Part) -> Program:
        return self._program(part, f"{title}, views")

    def _program(
        self, part: Part, title: str, layout: ChannelsLast | None = None, fused_calls: FusedCalls | None = None
    ) -> Program:
        program = make_program(part, f"{self._name} {title}", self.device, self.options, layout, fused_calls)
        if (
            self.device.type == "cpu"
            and self.options.kernels != "pytorch"
            and "reuse_memory" in self.options.process_wide
        ):
            reuse_memory(program)
        return program

    def _unit(
        self,
        program: Program,
        differentiable: Flags,
        backward: BackwardPrograms | None = None,
        parts: Cut | None = None,
        boundary: StagedBoundary | InputsFirstBoundary | IndependentBoundary | None = None,
        unreached: Sequence[int] = (),
    ) -> Unit:
        forward = self.differentiation.forward
        return Unit(
            forward=program,
            num_results=self.captured.result_count,
            mutations=self.differentiation.mutated,
            assumed=self.captured.assumed,
            differentiable=differentiable,
            views=self.views,
            written_views=self.captured.written_views,
            inputs=forward.graph.inputs,
            is_random=any(Effects.RANDOM in definition_of(node).effects for node in forward.graph),
            runs_python=any(Effects.PYTHON in definition_of(node).effects for node in forward.graph),
            device_type=self.device.type,
            backward=backward,
            rerun=self.rerun,
            unsaved_inputs=parts.unsaved() if parts is not None else (),
            contexts=[i for i, value in enumerate(parts.kept) if is_object(value)] if parts is not None else (),
            autograd_apply=boundary,
            unshared=unshared_results(forward, self.captured.result_count),
            unreached=unreached,
        )


def check_same_collectives(part: Part, other: Part, name: str) -> None:
    """Raise CommunicationError unless two parts communicate in the same way."""
    for number, (got, expected) in enumerate(zip_longest(exchanges(part.nodes), exchanges(other.nodes)), 1):
        if got != expected:
            raise CommunicationError(
                "ranks with and without padding would communicate in different ways",
                where=f"{name}, collective {number}",
                expected=str(expected),
                got=str(got),
                todo='set skip_padding="never"',
            )


class BackwardPrograms:
    """Makes a backward program for each set of cotangents that autograd passes and of gradients that are needed.

    If the first backward lacks cotangents that the joint graph only adds, as it lacks those of logits beside a loss,
    they are removed from that graph: to differentiate again takes longer. Another set of cotangents does that then.

    Attributes:
        parts: the cut of the program made last; before the first, the cut for all cotangents and gradients.
    """

    def __init__(
        self,
        builder: UnitBuilder,
        joint: Joint,
        parts: Cut,
        differentiable: Flags,
        choice: RecomputeChoice,
        groups: Groups,
    ) -> None:
        self._builder, self._joint, self._all_parts = builder, joint, parts
        self._has_cotangent = differentiable  # the cotangents of self._joint
        self._is_unused = True  # no program has nodes of self._joint, other than those of forward
        self.parts = parts
        self._differentiable, self._choice, self._groups = differentiable, choice, groups

    def __call__(self, has_cotangent: Flags, needs_grad: Flags) -> Backward:
        """Build a backward, as `BackwardSource` says.

        Raises:
            CommunicationError: it would communicate differently from that of the unit `counterpart`.
        """
        parts, passed = self._cut(has_cotangent, needs_grad)
        self.check_communication(parts, has_cotangent, needs_grad)
        return self._backward(parts, passed, [i for i, flag in enumerate(passed) if flag and not has_cotangent[i]])

    def check_communication(self, parts: Cut, has_cotangent: Flags, needs_grad: Flags | None = None) -> None:
        """Raise CommunicationError if a cut would communicate differently from the unit `counterpart` of the builder.

        A packed unit has the inputs of the unit with padding, and then others, which need no gradients.
        """
        counterpart = self._builder.counterpart
        other = None if counterpart is None else counterpart.backward_source
        if not isinstance(other, BackwardPrograms):
            return
        if exchanges(parts.backward.nodes) or exchanges(other._all_parts.backward.nodes):
            wanted = None if needs_grad is None else needs_grad[: len(other._joint.gradients)]
            others = other._all_parts if wanted is None else other._cut(has_cotangent, wanted)[0]
            check_same_collectives(parts.backward, others.backward, f"{self._builder._name} backward")

    def _cut(self, has_cotangent: Flags, needs_grad: Flags) -> tuple[Cut, Flags]:
        """Return the cut for a backward, and the cotangents that it reads: these, or all, some of which are zeros."""
        if self._is_unused and has_cotangent != self._differentiable:
            pruned = self._builder.differentiation.without_cotangents(self._joint, has_cotangent)
            if pruned is not None:
                self._joint, self._has_cotangent = pruned, has_cotangent
        if has_cotangent == self._has_cotangent:
            self._is_unused = False
            return cut(self._joint, needs_grad), has_cotangent
        if has_cotangent != self._differentiable:
            parts = cut(self._differentiated(has_cotangent), needs_grad)
            if self._forward_keeps_all(parts):
                return parts, has_cotangent
        if self._has_cotangent != self._differentiable:
            self.differentiate_again()
        self._is_unused = False
        return cut(self._joint, needs_grad), self._differentiable

    def differentiate_again(self) -> None:
        """Differentiate the graph again, after gradient rules have learned which gradients functions return."""
        self._joint, self._has_cotangent, self._is_unused = self._differentiated(), self._differentiable, True

    def _differentiated(self, has_cotangent: Flags | None = None) -> Joint:
        joint = apply_choice(self._builder.differentiation.optimized(has_cotangent), self._choice)
        return with_omitted_blocks(joint, self._builder.captured.omitted)[0]

    def _forward_keeps_all(self, parts: Cut) -> bool:
        """Return whether the forward program keeps every tensor and size that this backward reads."""
        tensors = {v.name for v in self._all_parts.kept}
        sizes = {v.name for v in self._all_parts.sizes}
        return {v.name for v in parts.kept} <= tensors and {v.name for v in parts.sizes} <= sizes

    def _program(self, parts: Cut) -> BackwardProgram:
        if not self._groups:
            return self._builder.program(parts.backward, "backward")
        stages = split_backward(parts, self._groups, self._builder._inputs_are_first)
        return StagedProgram(parts.backward, stages, self._groups, self._builder.program)

    def _backward(self, parts: Cut, has_cotangent: Flags, zeros: Sequence[int] = ()) -> Backward:
        self.parts = parts
        kept = {v.name: i for i, v in enumerate(self._all_parts.kept)}
        sizes = {v.name: i for i, v in enumerate(self._all_parts.sizes)}
        return Backward(
            self._program(parts),
            [kept[v.name] for v in parts.kept],
            [sizes[v.name] for v in parts.sizes],
            [i for i, passed in enumerate(has_cotangent) if passed],
            zeros,
        )
