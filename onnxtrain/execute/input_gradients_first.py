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


class _Cotangents:
    """The cotangents of a backward."""

    def __init__(self, cotangents: Sequence[torch.Tensor | None]) -> None:
        self._tensors = list(cotangents)
        self._versions = [None if t is None else version_of(t) for t in self._tensors]

    def equal(self, others: _Cotangents) -> bool:
        """Return whether these are the same tensors, unchanged since."""
        return all(map(is_, self._tensors, others._tensors)) and self._versions == others._versions


class _Backward(NamedTuple):
    """A backward that has started: its cotangents, and its run, or the gradients themselves under create_graph."""

    cotangents: _Cotangents
    run: StagedRun | list[torch.Tensor | None]


class _Call:
    """One forward, and the backwards that are running through it."""

    def __init__(self, boundary: InputsFirstBoundary, unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
        self.boundary, self.unit, self.tensors = boundary, unit, tensors
        self.random_state: RandomState | None = None
        self._running: dict[int, _Backward] = {}  # by the engine's id of the backward
        self._stopped: _Backward | None = None  # ran its first stage only

    def begin(self, ctx: Any, cotangents: list[torch.Tensor | None]) -> None:
        """Start a backward, of which no stage has run."""
        own_cotangents, backward_id = _Cotangents(cotangents), autograd.current_backward()
        self._running[backward_id] = _Backward(own_cotangents, self.boundary.begin(ctx, cotangents))

        def end() -> None:
            ended = self._running.pop(backward_id)
            if isinstance(ended.run, StagedRun) and ended.run.stage == 1:
                self._stopped = ended

        autograd.queue_callback(end)

    def gradients(self, stage: int) -> Sequence[torch.Tensor | None]:
        """Return the gradients of a stage's group; run the stage."""
        backward_id = autograd.current_backward()
        backward = self._running[backward_id]
        if not isinstance(backward.run, StagedRun):
            return [backward.run[index] for index in self.boundary.groups[stage]]
        run = backward.run
        stopped = self._stopped if stage == 1 and run.stage == 0 else None
        if stopped is not None and stopped.cotangents.equal(backward.cotangents):
            self._stopped = None
            assert isinstance(stopped.run, StagedRun)
            run = stopped.run
        with backward_context(self.unit, self.random_state):
            if stage == 1 and run.stage == 0:  # only gradients of parameters are needed; they depend on this stage
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
    """Forward, and the state that backward reads."""

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
