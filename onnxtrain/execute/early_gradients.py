"""Release gradients while backward runs (the option `early_gradients`).

    forward     stage n ◀─token─ ... ◀─token─ stage 1 ◀─token─ first ──> results        nodes of autograd
    backward    first: runs its stage, returns the gradients of the last layers
                stage 1: runs the next, ...

Backward is split where gradients are ready (`plan.backward_stages`); each stage is a node of autograd with the edges to
its own parameters. The engine accumulates what a node returned before it runs the next one: gradients are added to
.grad and freed, and hooks fire, layer by layer as in eager. `autograd.grad`, `backward(inputs=)` and
DistributedDataParallel see true edges; a stage that nobody asks for does not run.

A hook may change a parameter whose gradient it is given: nothing reads it any more. One that changes a tensor which a
later stage reads is refused as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import KernelError
from onnxtrain.execute.boundary import Results, Unit, differentiable_backward, keep_and_run, prepare_backward
from onnxtrain.execute.program import Program, drained
from onnxtrain.plan.backward_stages import Groups
from onnxtrain.plan.cut import Part
from onnxtrain.torch_compat import autograd, dispatch


class StagedProgram:
    """A backward program in stages.

    Args:
        part: the whole of it.
        stages: one part for each of `groups` (`split_backward`).
        groups: the inputs whose gradients each stage gives.
        make: makes the program of a part.
    """

    def __init__(
        self, part: Part, stages: Sequence[Part], groups: Groups, make: Callable[[Part, str], Program]
    ) -> None:
        self.part, self.groups = part, groups
        self.programs = [make(stage, f"backward {number}") for number, stage in enumerate(stages, 1)]
        self.last_reads: list[set[ir.Value]] = []
        seen: set[ir.Value] = set()
        for stage in reversed(stages):
            self.last_reads.append(set(stage.inputs) - seen)
            seen.update(stage.inputs)
        self.last_reads.reverse()

    def begin(self, arguments: Iterable[torch.Tensor], sizes: Sequence[int]) -> StagedRun:
        """Starts a run; no stage has run yet."""
        return StagedRun(self, arguments, sizes)

    def run(self, arguments: Iterable[torch.Tensor], sizes: Sequence[int]) -> Results:
        """Runs all stages."""
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
        self._stage = 0
        read = set[ir.Value]().union(*program.last_reads)
        self._tensors = {v: t for v, t in zip(program.part.inputs, arguments, strict=True) if v in read}
        self._sizes = dict(zip(program.part.sizes_in, sizes, strict=True))
        self._versions = {value: tensor._version for value, tensor in self._tensors.items()}

    def advance(self) -> list[torch.Tensor | None]:
        """Runs the next stage; returns the gradients of its group. Nothing here holds them, or what is read no more.

        Raises:
            KernelError: a tensor that this stage reads was changed since backward began.
        """
        program, last_reads = self._program.programs[self._stage], self._program.last_reads[self._stage]
        self._stage += 1
        part, tensors = program.part, self._tensors
        for value in last_reads:
            if value in self._versions and tensors[value]._version != self._versions[value]:
                raise KernelError(
                    "a tensor that backward reads was changed in place while backward ran",
                    where=value.name,
                    todo="change it in a hook of its own gradient, or after backward",
                )
        taken = [tensors.pop(value) if value in last_reads else tensors[value] for value in part.inputs]
        found, sizes = program.run(drained(taken), [self._sizes[value] for value in part.sizes_in])
        for carried, tensor in zip(part.outputs[part.num_user_outputs :], found[part.num_user_outputs :], strict=True):
            assert carried is not None  # it is read later
            tensors[carried] = tensor
        self._sizes.update(zip(part.sizes_out, sizes, strict=True))
        return list(found[: part.num_user_outputs])


class StagedBoundary:
    """Runs units of one capture so that autograd runs their backward in stages.

    Args:
        groups: the inputs whose gradients each stage gives, in the order of backward; two or more.
        inputs: how many inputs the units have.

    Attributes:
        needed: what `Unit.backward` takes: a flag for the unit itself, then one per input.
    """

    def __init__(self, groups: Groups, inputs: int) -> None:
        members = {index for group in groups for index in group}
        self.groups = groups
        self.needed = (False, *(index in members for index in range(inputs)))

    def __call__(self, unit: Unit, *tensors: torch.Tensor) -> Sequence[Any]:
        call = _Call(self, unit, tensors)
        later: Callable[..., torch.Tensor] = _Later.apply
        first: Callable[..., Sequence[Any]] = _First.apply
        token = None
        for stage in range(len(self.groups) - 1, 0, -1):
            token = later(call, stage, token, *[tensors[index] for index in self.groups[stage]])
        return first(call, token, *[tensors[index] for index in self.groups[0]])


class _Call:
    """One forward, and the backwards that are on their way through it."""

    def __init__(self, boundary: StagedBoundary, unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
        self.boundary, self.unit, self.tensors = boundary, unit, tensors
        self._runs: dict[int, StagedRun | list[torch.Tensor | None]] = {}  # by the engine's number of the backward

    def begin(self, ctx: Any, cotangents: list[torch.Tensor | None]) -> None:
        """Starts a backward; what is left of it goes when the engine is done with it, wherever it stopped."""
        run: StagedRun | list[torch.Tensor | None]
        if torch.is_grad_enabled():
            run = differentiable_backward(ctx, cotangents, self.boundary.needed[1:])
        else:
            program, arguments, sizes = prepare_backward(ctx, cotangents, self.boundary.needed)
            assert isinstance(program, StagedProgram)
            run = program.begin(arguments, sizes)
        number, runs = autograd.current_backward(), self._runs
        runs[number] = run

        def drop() -> None:
            runs.pop(number, None)

        autograd.queue_callback(drop)

    def advance(self, stage: int) -> Sequence[torch.Tensor | None]:
        """The gradients of a stage, which runs now."""
        run = self._runs[autograd.current_backward()]
        if not isinstance(run, StagedRun):
            return [run[index] for index in self.boundary.groups[stage]]
        if dispatch.is_any_autocast_enabled():  # the graph holds the casts already
            with torch.autocast(self.unit.device_type, enabled=False):
                return run.advance()
        return run.advance()


class _Later(torch.autograd.Function):
    """A stage but the first. The token has no elements: it is an edge. It lies where the parameters do, so that the
    engine runs all stages on that device's thread and stream.
    """  # noqa: D205  one thought

    @staticmethod
    def forward(ctx: Any, call: _Call, stage: int, token: torch.Tensor | None, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.call, ctx.stage = call, stage
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *tokens: Any) -> tuple[Any, ...]:
        token = tokens[0] if ctx.stage + 1 < len(ctx.call.boundary.groups) else None
        return (None, None, token, *ctx.call.advance(ctx.stage))


class _First(torch.autograd.Function):
    """Forward, and the first stage of backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, token: torch.Tensor, *tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.early, ctx.token = call, (token.dtype, token.device)
        return keep_and_run(ctx, call.unit, call.tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        call: _Call = ctx.early
        call.begin(ctx, list(cotangents))
        dtype, device = ctx.token
        return (None, torch.empty(0, dtype=dtype, device=device), *call.advance(0))
