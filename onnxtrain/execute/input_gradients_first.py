"""Compute the gradients of inputs before, and separately from, those of parameters (`early_gradients="inputs"`).

    forward     inputs ◀─token─ ┐                                                        autograd nodes
                                first ──> results
                parameters ◀─token─ ┘
    backward    first: reads what forward kept;  inputs: runs the first stage;  parameters: runs the second

A zero-bubble schedule asks for the gradients of a stage's inputs, and later, from the same cotangents, for those of its
parameters (`torch.distributed.pipelining`). The second stage then continues from the results of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from onnxtrain.execute.boundary import (
    RandomState,
    Unit,
    backward_context,
    run_and_save,
)
from onnxtrain.execute.early_gradients import GroupedBoundary, StagedRun
from onnxtrain.torch_compat import autograd
from onnxtrain.torch_compat.dynamo import untraced
from onnxtrain.torch_compat.tensors import version_of


class InputsFirstBoundary(GroupedBoundary):
    """Shows autograd the inputs of units separately from the parameters (`plan.backward_stages.group_inputs`)."""

    def __call__(self, unit: Unit, *tensors: torch.Tensor) -> Sequence[Any]:
        call = _Call(self, unit, tensors)
        apply_stage: Any = _Stage.apply
        # Autograd runs the node that was made last first: that of the inputs.
        tokens = [apply_stage(call, stage, *[tensors[index] for index in self.groups[stage]]) for stage in (1, 0)]
        apply_first: Any = _First.apply
        results: Sequence[Any] = apply_first(call, *tokens)
        return results


class _Given:
    """The cotangents of a backward."""

    def __init__(self, cotangents: Sequence[torch.Tensor | None]) -> None:
        self._tensors = list(cotangents)
        self._versions = [None if t is None else version_of(t) for t in self._tensors]

    def are(self, others: _Given) -> bool:
        """Return whether these are the same tensors, unchanged since."""
        return all(map(is_, self._tensors, others._tensors)) and self._versions == others._versions


class _Begun(NamedTuple):
    """A backward: its cotangents, and its run; the gradients themselves under create_graph."""

    given: _Given
    run: StagedRun | list[torch.Tensor | None]


class _Call:
    """One forward, and the backwards that are running through it."""

    def __init__(self, boundary: InputsFirstBoundary, unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
        self.boundary, self.unit, self.tensors = boundary, unit, tensors
        self.random_state: RandomState | None = None
        self._begun: dict[int, _Begun] = {}  # by the engine's id of the backward
        self._stopped: _Begun | None = None  # ran its first stage only

    def begin(self, ctx: Any, cotangents: list[torch.Tensor | None]) -> None:
        """Start a backward, of which no stage has run."""
        given, backward_id = _Given(cotangents), autograd.current_backward()
        self._begun[backward_id] = _Begun(given, self.boundary.begin(ctx, cotangents))

        def end() -> None:
            ended = self._begun.pop(backward_id)
            if isinstance(ended.run, StagedRun) and ended.run.stage == 1:
                self._stopped = ended

        autograd.queue_callback(end)

    def gradients(self, stage: int) -> Sequence[torch.Tensor | None]:
        """Return the gradients of a stage's group; run the stage."""
        backward_id = autograd.current_backward()
        begun = self._begun[backward_id]
        if not isinstance(begun.run, StagedRun):
            return [begun.run[index] for index in self.boundary.groups[stage]]
        run = begun.run
        if stage == 1 and run.stage == 0 and (stopped := self._stopped) is not None and stopped.given.are(begun.given):
            self._stopped = None
            assert isinstance(stopped.run, StagedRun)
            run = stopped.run
        with backward_context(self.unit, self.random_state):
            if stage == 1 and run.stage == 0:  # the gradients of inputs are not wanted, but what leads to them is
                run.advance()
            return run.advance()


class _Stage(torch.autograd.Function):
    """The gradients of inputs, or of parameters. The token is an autograd edge, as in `early_gradients`."""

    @staticmethod
    def forward(ctx: Any, call: _Call, stage: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.early_call, ctx.stage = call, stage
        return tensors[0].new_empty(0)

    @staticmethod
    @untraced
    def backward(ctx: Any, *tokens: Any) -> tuple[Any, ...]:
        return (None, None, *ctx.early_call.gradients(ctx.stage))


class _First(torch.autograd.Function):
    """Forward, and what backward reads."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tokens: torch.Tensor) -> tuple[Any, ...]:
        ctx.early_call, ctx.tokens = call, [(token.dtype, token.device) for token in tokens]
        results = run_and_save(ctx, call.unit, call.tensors)
        call.random_state = ctx.random_state if call.unit.is_random else None
        return results

    @staticmethod
    @untraced
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        ctx.early_call.begin(ctx, list(cotangents))
        return (None, *(torch.empty(0, dtype=dtype, device=device) for dtype, device in ctx.tokens))
