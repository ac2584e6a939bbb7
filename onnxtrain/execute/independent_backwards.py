"""One autograd node for each group of results whose backwards share nothing (`plan.independent_results`).

    tensors ──forward program──> a, b      a ──node──> its gradients      b ──node──> its gradients

Forward runs once. Each node saves the tensors that its own backward reads: after the backward of one result, that of
another is still possible, as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from onnxtrain.execute.boundary import Flags, Unit, backward_context, differentiable_backward, random_state
from onnxtrain.plan.backward_stages import Groups
from onnxtrain.torch_compat.dynamo import untraced
from onnxtrain.torch_compat.tensors import version_of


class IndependentBoundary:
    """Runs units of one capture with an autograd node for each group of results.

    Args:
        groups: the results of each node.
        reached: for each result, the inputs that its gradient reaches.
        wrt: for each input, whether it needs a gradient.
    """

    def __init__(self, groups: Groups, reached: Groups, wrt: Flags) -> None:
        self.groups, self._reached = groups, tuple(map(frozenset, reached))
        self.needs_grad = (False, *wrt)

    def __call__(self, unit: Unit, *tensors: torch.Tensor) -> Sequence[Any]:
        run = _Run(self, unit, tensors)
        results: list[Any] = list(run.outputs[: unit.num_results])
        apply: Callable[..., Sequence[Any]] = _Group.apply
        for number, group in enumerate(self.groups):
            reached = self.reached(group)
            arguments = (t if i in reached else t.detach() for i, t in enumerate(tensors))
            for index, result in zip(group, apply(run, number, *arguments), strict=True):
                results[index] = result
        run.outputs = ()
        return results

    def reached(self, results: Iterable[int]) -> frozenset[int]:
        """Return the inputs that the gradients of these results reach."""
        return frozenset().union(*(self._reached[i] for i in results))


class _Run:
    """One run of forward, until each node has saved its tensors."""

    def __init__(self, boundary: IndependentBoundary, unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
        self.boundary, self.unit, self.tensors = boundary, unit, tensors
        self.random_state = random_state(tensors, unit.runs_python) if unit.is_random else None
        self.versions = [] if unit.is_inference else [version_of(tensors[i]) for i in unit.unsaved_inputs]
        with torch.no_grad():
            self.outputs, self.sizes = unit.run(tensors)

    def has_cotangent(self, number: int) -> Flags:
        """Return, for each result, whether it has a cotangent in the backward of a group."""
        return tuple(i in self.boundary.groups[number] for i in range(self.unit.num_results))


class _Group(torch.autograd.Function):
    """The results of one group."""

    @staticmethod
    def forward(ctx: Any, run: _Run, number: int, *tensors: torch.Tensor) -> tuple[Any, ...]:
        unit = run.unit
        ctx.set_materialize_grads(False)
        backward = ctx.backward_program = unit.backward(run.has_cotangent(number), run.boundary.needs_grad)
        kept = run.outputs[unit.first_kept :]
        ctx.save_for_backward(*(kept[i] for i in backward.kept))
        ctx.random_state = run.random_state
        ctx.call = unit, run.tensors, run.versions, run.sizes
        ctx.results = [(r.shape, r.dtype, r.device) for r in run.outputs[: unit.num_results]]
        ctx.group = run.boundary.groups[number]
        ctx.boundary = run.boundary
        return tuple(unit.without_base(i, run.outputs[i]) for i in ctx.group)

    @staticmethod
    @untraced
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        unit, _, _, forward_sizes = ctx.call
        if all(c is None for c in cotangents):
            return (None,) * len(ctx.needs_input_grad)
        by_result: list[Any] = [None] * unit.num_results
        for index, cotangent in zip(ctx.group, cotangents, strict=True):
            by_result[index] = cotangent
        if torch.is_grad_enabled():
            return (None, None, *differentiable_backward(ctx, by_result, ctx.needs_input_grad[2:]))
        backward = ctx.backward_program
        reached = ctx.boundary.reached(i for i, cotangent in enumerate(by_result) if cotangent is not None)
        for index in backward.cotangents:
            if by_result[index] is None:
                shape, dtype, device = ctx.results[index]
                by_result[index] = torch.zeros(shape, dtype=dtype, device=device)
        arguments = iter((*ctx.saved_tensors, *(by_result[i] for i in backward.cotangents)))
        ctx.maybe_clear_saved_tensors()
        sizes = [forward_sizes[i] for i in backward.sizes]
        with backward_context(unit, ctx.random_state):
            gradients, _ = backward.program.run(arguments, sizes)
        # A result without a cotangent gets zeros here: inputs that only it reaches have no gradient, as in eager.
        return (None, None, *(gradient if i in reached else None for i, gradient in enumerate(gradients)))
