"""One node of autograd for each group of results that share nothing (`plan.independent_results`).

    tensors ──forward program──> a, b      a ──node──> its gradients      b ──node──> its gradients

Forward runs once. Each node keeps what its own backward reads: after the backward of one result, that of another is
still possible, as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from onnxtrain.execute.boundary import Flags, Unit, differentiable_backward, random_state
from onnxtrain.plan.backward_stages import Groups
from onnxtrain.torch_compat import dispatch


class IndependentBoundary:
    """Runs units of one capture so that each group of results has a node of its own.

    Args:
        groups: the results of each node.
        reached: for each result, the inputs that its gradient reaches.
        wrt: for each input, whether its gradient is wanted.
    """

    def __init__(self, groups: Groups, reached: Groups, wrt: Flags) -> None:
        self.groups, self._reached = groups, tuple(map(frozenset, reached))
        self.needed = (False, *wrt)

    def __call__(self, unit: Unit, *tensors: torch.Tensor) -> Sequence[Any]:
        run = _Run(self, unit, tensors)
        results: list[Any] = list(run.found[: unit.results])
        apply: Callable[..., Sequence[Any]] = _Group.apply
        for number, group in enumerate(self.groups):
            reached = self.reached(group)
            given = (t if i in reached else t.detach() for i, t in enumerate(tensors))
            for index, result in zip(group, apply(run, number, *given), strict=True):
                results[index] = result
        run.found = ()
        return results

    def reached(self, results: Iterable[int]) -> frozenset[int]:
        """The inputs that the gradients of these results reach."""
        return frozenset().union(*(self._reached[i] for i in results))


class _Run:
    """One run of forward, until each node has taken its part."""

    def __init__(self, boundary: IndependentBoundary, unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
        self.boundary, self.unit, self.tensors = boundary, unit, tensors
        self.random_state = random_state(tensors) if unit.random else None
        self.versions = [] if unit.inference else [tensors[i]._version for i in unit.unsaved]
        with torch.no_grad():
            self.found, self.sizes = unit.run(tensors)

    def given(self, number: int) -> Flags:
        """Which results have a cotangent in the backward of a group."""
        return tuple(i in self.boundary.groups[number] for i in range(self.unit.results))


class _Group(torch.autograd.Function):
    """The results of one group."""

    @staticmethod
    def forward(ctx: Any, run: _Run, number: int, *tensors: torch.Tensor) -> tuple[Any, ...]:
        unit = run.unit
        ctx.set_materialize_grads(False)
        backward = ctx.program = unit.backward(run.given(number), run.boundary.needed)
        kept = run.found[unit.first_kept :]
        ctx.save_for_backward(*(kept[i] for i in backward.kept))
        ctx.random_state = run.random_state
        ctx.call = unit, run.tensors, run.versions, run.sizes
        ctx.results = [(r.shape, r.dtype, r.device) for r in run.found[: unit.results]]
        ctx.group = run.boundary.groups[number]
        ctx.boundary = run.boundary
        return tuple(run.found[i].detach() if i in unit.lone_views else run.found[i] for i in ctx.group)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        unit, _, _, known = ctx.call
        if all(c is None for c in cotangents):
            return (None,) * len(ctx.needs_input_grad)
        every: list[Any] = [None] * unit.results
        for index, cotangent in zip(ctx.group, cotangents, strict=True):
            every[index] = cotangent
        if torch.is_grad_enabled():
            return (None, None, *differentiable_backward(ctx, every, ctx.needs_input_grad[2:]))
        program = ctx.program
        reached = ctx.boundary.reached(i for i, cotangent in enumerate(every) if cotangent is not None)
        for index in program.cotangents:
            if every[index] is None:
                shape, dtype, device = ctx.results[index]
                every[index] = torch.zeros(shape, dtype=dtype, device=device)
        arguments = iter((*ctx.saved_tensors, *(every[i] for i in program.cotangents)))
        ctx.maybe_clear_saved_tensors()
        sizes = [known[i] for i in program.sizes]
        if dispatch.is_any_autocast_enabled():  # the graph holds the casts already
            with torch.autocast(unit.device_type, enabled=False):
                gradients, _ = program.program.run(arguments, sizes)
        else:
            gradients, _ = program.program.run(arguments, sizes)
        # A result without a cotangent counts as one of zeros: what only it reaches has no gradient, as in eager.
        return (None, None, *(gradient if i in reached else None for i, gradient in enumerate(gradients)))
