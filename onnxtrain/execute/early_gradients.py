"""Release gradients while backward runs (the option `early_gradients`).

    forward     stage n ◀─token─ ... ◀─token─ stage 1 ◀─token─ first ──> results        autograd nodes
    backward    first: runs its stage, returns the gradients of the last layers
                stage 1: runs the next, ...

Backward is split where gradients are ready (`plan.backward_stages`); each stage is an autograd node with edges to its
own parameters. The engine accumulates the gradients of a node before it runs the next one: they are added to .grad and
freed, and hooks fire, layer by layer as in eager. `autograd.grad`, `backward(inputs=)` and DistributedDataParallel see
true edges; a stage whose gradients are not needed does not run.

A hook may change the parameter whose gradient it receives: no later stage reads it. Changing a tensor that a later
stage reads is an error, as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import KernelError
from onnxtrain.execute.boundary import (
    RandomState,
    Results,
    Unit,
    backward_context,
    differentiable_backward,
    prepare_backward,
    run_and_save,
)
from onnxtrain.execute.program import Program, drain
from onnxtrain.ops import Effects, definition_of
from onnxtrain.ops.collective.transfers import complete
from onnxtrain.plan.backward_stages import Groups
from onnxtrain.plan.cut import Part
from onnxtrain.torch_compat import autograd
from onnxtrain.torch_compat.dynamo import untraced
from onnxtrain.torch_compat.tensors import version_of


class StagedProgram:
    """A backward program in stages.

    Args:
        part: all of backward.
        stages: one part for each of `groups` (`split_backward`).
        groups: the inputs whose gradients each stage returns.
        make_program: makes the program of a part, from the part and a title.
    """

    def __init__(
        self, part: Part, stages: Sequence[Part], groups: Groups, make_program: Callable[[Part, str], Program]
    ) -> None:
        self.part, self.groups = part, groups
        self.programs = [make_program(stage, f"backward {number}") for number, stage in enumerate(stages, 1)]
        self.last_reads: list[set[ir.Value]] = []
        read_later: set[ir.Value] = set()
        for stage in reversed(stages):
            self.last_reads.append(set(stage.inputs) - read_later)
            read_later.update(stage.inputs)
        self.last_reads.reverse()

    def begin(self, arguments: Iterable[torch.Tensor], sizes: Sequence[int]) -> StagedRun:
        """Start a run; no stage has run yet."""
        return StagedRun(self, arguments, sizes)

    def run(self, arguments: Iterable[torch.Tensor], sizes: Sequence[int]) -> Results:
        """Run all stages."""
        run = self.begin(arguments, sizes)
        gradients: list[torch.Tensor | None] = [None] * len(self.part.outputs)
        for group in self.groups:
            for index, gradient in zip(group, run.advance(), strict=True):
                gradients[index] = gradient
        return tuple(gradients), ()


class StagedRun:
    """One run of a staged program, between two of its stages."""

    def __init__(self, program: StagedProgram, arguments: Iterable[torch.Tensor], sizes: Sequence[int]) -> None:
        self._program = program
        self.stage = 0  # the next one
        read = set[ir.Value]().union(*program.last_reads)
        self._tensors = {v: t for v, t in zip(program.part.inputs, arguments, strict=True) if v in read}
        self._sizes = dict(zip(program.part.sizes_in, sizes, strict=True))
        self._versions = {value: version_of(tensor) for value, tensor in self._tensors.items()}

    def advance(self) -> list[torch.Tensor | None]:
        """Run the next stage; return the gradients of its group.

        The run holds neither these gradients nor tensors that no later stage reads.

        Raises:
            KernelError: a tensor that this stage reads was changed since backward began.
        """
        program, last_reads = self._program.programs[self.stage], self._program.last_reads[self.stage]
        self.stage += 1
        part, tensors = program.part, self._tensors
        for value in last_reads:
            if value in self._versions and version_of(tensors[value]) != self._versions[value]:
                raise KernelError(
                    "a tensor that backward reads was changed in place while backward ran",
                    where=value.name,
                    expected=f"version {self._versions[value]}",
                    got=f"version {version_of(tensors[value])}",
                    todo="change it in a hook of its own gradient, or after backward",
                )
        arguments = [tensors.pop(value) if value in last_reads else tensors[value] for value in part.inputs]
        outputs, sizes = program.run(drain(arguments), [self._sizes[value] for value in part.sizes_in])
        gradients, kept = outputs[: part.num_user_outputs], outputs[part.num_user_outputs :]
        for output, tensor in zip(part.outputs[part.num_user_outputs :], kept, strict=True):
            assert output is not None  # a later stage reads it
            tensors[output] = tensor
        self._sizes.update(zip(part.sizes_out, sizes, strict=True))
        return list(gradients)

    def complete_collectives(self) -> None:
        """Wait for the collectives of stages that ran, for which only later ones would: PyTorch keeps their results."""
        for value, tensor in self._tensors.items():
            producer = value.producer()
            if producer is not None and Effects.COLLECTIVE in definition_of(producer).effects:
                complete(tensor)


class GroupedBoundary:
    """Runs units of one capture so that autograd sees groups of their inputs as separate nodes.

    Args:
        groups: the inputs whose gradients each stage of backward returns, in the order of backward; two or more.
        num_inputs: how many inputs the units have.

    Attributes:
        needs_grad: the argument of `Unit.backward`: a flag for the unit, then one per input.
    """

    def __init__(self, groups: Groups, num_inputs: int) -> None:
        members = {index for group in groups for index in group}
        self.groups = groups
        self.needs_grad = (False, *(index in members for index in range(num_inputs)))

    def begin(self, ctx: Any, cotangents: list[torch.Tensor | None]) -> StagedRun | list[torch.Tensor | None]:
        """Start a backward, of which no stage has run; return the gradients themselves under create_graph."""
        if torch.is_grad_enabled():
            return differentiable_backward(ctx, cotangents, self.needs_grad[1:])
        program, arguments, sizes = prepare_backward(ctx, cotangents, self.needs_grad)
        assert isinstance(program, StagedProgram)
        return program.begin(arguments, sizes)


class StagedBoundary(GroupedBoundary):
    """Runs the backward of units in stages."""

    def __call__(self, unit: Unit, *tensors: torch.Tensor) -> Sequence[Any]:
        call = _Call(self, unit, tensors)
        apply_later: Callable[..., torch.Tensor] = _LaterStage.apply
        apply_first: Callable[..., Sequence[Any]] = _FirstStage.apply
        token = None
        for stage in range(len(self.groups) - 1, 0, -1):
            token = apply_later(call, stage, token, *[tensors[index] for index in self.groups[stage]])
        return apply_first(call, token, *[tensors[index] for index in self.groups[0]])


class _Call:
    """One forward, and the backwards that are running through it."""

    def __init__(self, boundary: StagedBoundary, unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
        self.boundary, self.unit, self.tensors = boundary, unit, tensors
        self.random_state: RandomState | None = None
        self._runs: dict[int, StagedRun | list[torch.Tensor | None]] = {}  # by the engine's id of the backward

    def begin(self, ctx: Any, cotangents: list[torch.Tensor | None]) -> None:
        """Start a backward. Its tensors are freed when the engine is done with it, wherever it stopped."""
        backward_id, runs = autograd.current_backward(), self._runs
        runs[backward_id] = self.boundary.begin(ctx, cotangents)

        def drop() -> None:
            run = runs.pop(backward_id, None)
            if isinstance(run, StagedRun):
                run.complete_collectives()

        autograd.queue_callback(drop)

    def advance(self, stage: int) -> Sequence[torch.Tensor | None]:
        """Run a stage; return the gradients of its group."""
        run = self._runs[autograd.current_backward()]
        if not isinstance(run, StagedRun):
            return [run[index] for index in self.boundary.groups[stage]]
        with backward_context(self.unit, self.random_state):
            return run.advance()


class _LaterStage(torch.autograd.Function):
    """A stage of backward after the first.

    The token is an autograd edge and has no elements. It is on the device of the parameters: the engine then runs all
    stages on that device's thread and stream.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, stage: int, token: torch.Tensor | None, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.call, ctx.stage = call, stage
        return tensors[0].new_empty(0)

    @staticmethod
    @untraced
    def backward(ctx: Any, *tokens: Any) -> tuple[Any, ...]:
        token = tokens[0] if ctx.stage + 1 < len(ctx.call.boundary.groups) else None
        return (None, None, token, *ctx.call.advance(ctx.stage))


class _FirstStage(torch.autograd.Function):
    """Forward, and the first stage of backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, token: torch.Tensor, *tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.early_call, ctx.token = call, (token.dtype, token.device)
        results = run_and_save(ctx, call.unit, call.tensors)
        call.random_state = ctx.random_state if call.unit.is_random else None
        return results

    @staticmethod
    @untraced
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        call: _Call = ctx.early_call
        call.begin(ctx, list(cotangents))
        dtype, device = ctx.token
        return (None, torch.empty(0, dtype=dtype, device=device), *call.advance(0))
