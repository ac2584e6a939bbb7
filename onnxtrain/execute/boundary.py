"""The autograd boundary: a compiled unit as one `torch.autograd.Function`.

    tensors ──forward program──> results, kept      kept goes through ctx.save_for_backward
    kept, output gradients ──backward program──> input gradients

A backward program is made for each pattern of which outputs have gradients and which inputs need them, and reused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from onnxtrain.errors import KernelError
from onnxtrain.execute.program import Program

Flags = tuple[bool, ...]


class BackwardSource(Protocol):
    """Makes backward programs: (which results have a gradient, which inputs need one) -> program."""

    def __call__(self, given: Flags, needed: Flags) -> Backward: ...


class Backward:
    """A backward program and what it takes.

    Attributes:
        program: (kept tensors, then cotangents) -> one gradient or None per input.
        kept: positions, among the unit's kept tensors, of those that it reads.
        sizes: positions of the sizes that it reads.
        cotangents: positions, among the unit's results, of the cotangents that it reads.
        zeros: those of them that did not come and are made of zeros.
    """

    def __init__(
        self,
        program: Program,
        kept: Sequence[int],
        sizes: Sequence[int],
        cotangents: Sequence[int],
        zeros: Sequence[int] = (),
    ) -> None:
        self.program = program
        self.kept = tuple(kept)
        self.sizes = tuple(sizes)
        self.cotangents = tuple(cotangents)
        self.zeros = frozenset(zeros)


class Unit:
    """A compiled capture, ready to run.

    Attributes:
        forward: the forward program: tensors -> results, values of mutations, kept tensors.
        results: number of results that the user sees.
        mutations: for each mutated input, its position.
        differentiable: for each result, whether a gradient may come for it; empty for inference.
        views: for each result, whether it may lie in an input's memory.
        random: whether the program draws random numbers.
    """

    def __init__(
        self,
        forward: Program,
        results: int,
        mutations: Sequence[int],
        differentiable: Flags,
        views: Flags,
        random: bool,
        backward: BackwardSource | None,
        rerun: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> None:
        self.forward = forward
        self.results = results
        self.mutations = tuple(mutations)
        self.differentiable = differentiable
        self.views = views
        self.random = random
        self.rerun = rerun
        self._make_backward = backward
        self._backwards: dict[tuple[Flags, Flags], Backward] = {}
        self._any_views = any(views)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Runs forward on `tensors`; returns the results."""
        if self._make_backward is None or not torch.is_grad_enabled():
            with torch.no_grad():
                found, _ = self.forward.run(tensors, ())
                self.write_back(tensors, found)
            results: list[Any] = list(found[: self.results])
        else:
            results = list(_Boundary.apply(self, *tensors))  # type: ignore[no-untyped-call]
        if self._any_views:
            results = [self._as_view(r, tensors) if v else r for r, v in zip(results, self.views, strict=True)]
        return results

    def write_back(self, tensors: Sequence[torch.Tensor], found: Sequence[torch.Tensor | None]) -> None:
        """Copies the values of mutated buffers and inputs into them."""
        for offset, target in enumerate(self.mutations):
            value = found[self.results + offset]
            assert value is not None
            tensors[target].copy_(value)

    @staticmethod
    def _as_view(result: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A result that lies in an input's memory, as a view of that input made outside the boundary.

        So the user's in-place changes and gradients go through it as in eager.
        """
        storage = result.untyped_storage()._cdata
        for tensor in tensors:
            if tensor.untyped_storage()._cdata == storage and tensor.dtype == result.dtype:
                if _same_place(tensor, result):
                    return tensor
                return tensor.as_strided(result.size(), result.stride(), result.storage_offset())
        return result

    def backward(self, given: Flags, needed: Flags) -> Backward:
        """The backward program for this pattern."""
        known = self._backwards.get((given, needed))
        if known is None:
            assert self._make_backward is not None
            known = self._backwards[given, needed] = self._make_backward(given, needed)
        return known


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()


def _random_state(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[tuple[torch.device, torch.Tensor]]]:
    devices = {t.device for t in tensors if t.device.type == "cuda"}
    return torch.get_rng_state(), [(d, torch.cuda.get_rng_state(d)) for d in sorted(devices, key=str)]


class _Boundary(torch.autograd.Function):
    """Forward and backward of a unit, as autograd sees them."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.unit = unit
        ctx.random_state = _random_state(tensors) if unit.random else None
        found, sizes = unit.forward.run(tensors, ())
        unit.write_back(tensors, found)
        ctx.sizes = sizes
        ctx.save_for_backward(*found[unit.results + len(unit.mutations) :])
        # For create_graph, which runs the module again in PyTorch. Held beside the saved tensors, because eager does
        # not refuse a change of a tensor that its backward does not read.
        ctx.tensors = tensors
        ctx.versions = [t._version if not t.is_inference() else 0 for t in tensors]
        results = found[: unit.results]
        ctx.results = [(r.shape, r.dtype, r.device) for r in results if r is not None]
        fixed = [r for r, d in zip(results, unit.differentiable, strict=True) if not d and r is not None]
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        unit: Unit = ctx.unit
        needed = tuple(ctx.needs_input_grad[1:])
        if torch.is_grad_enabled():
            return (None, *_differentiable_backward(ctx, cotangents, needed))
        given = tuple(c is not None for c in cotangents)
        backward = unit.backward(given, needed)
        saved = ctx.saved_tensors
        if backward.zeros:
            cotangents = tuple(_zeros(ctx, i) if i in backward.zeros else c for i, c in enumerate(cotangents))
        arguments = [saved[i] for i in backward.kept]
        arguments += [cotangents[i] for i in backward.cotangents]
        gradients, _ = backward.program.run(arguments, [ctx.sizes[i] for i in backward.sizes])
        return (None, *gradients)


def _zeros(ctx: Any, index: int) -> torch.Tensor:
    shape, dtype, device = ctx.results[index]
    return torch.zeros(shape, dtype=dtype, device=device)


def _differentiable_backward(
    ctx: Any, cotangents: Sequence[torch.Tensor | None], needed: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Gradients that can be differentiated again: the module runs once more, in PyTorch (create_graph=True)."""
    unit: Unit = ctx.unit
    warnings.warn(
        "create_graph=True: onnxtrain runs this module again in PyTorch to differentiate its gradient; "
        "it is exact but not accelerated" + (", and dropout draws PyTorch's masks" if unit.random else ""),
        stacklevel=2,
    )
    for tensor, version in zip(ctx.tensors, ctx.versions, strict=True):
        if (
            not tensor.is_inference()
            and tensor._version != version
            and not any(tensor is t for t in _written(unit, ctx.tensors))
        ):
            raise KernelError(
                "an input of the module was changed in place between forward and backward(create_graph=True)",
                todo="change it after backward, or change a copy",
            )
    with torch.random.fork_rng(devices=[d for d, _ in (ctx.random_state or (None, []))[1]], enabled=unit.random):
        if ctx.random_state is not None:
            torch.set_rng_state(ctx.random_state[0])
            for device, state in ctx.random_state[1]:
                torch.cuda.set_rng_state(state, device)
        results = unit.rerun(ctx.tensors)
    pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if c is not None and r.requires_grad]
    wanted = [t for t, n in zip(ctx.tensors, needed, strict=True) if n]
    found = iter(
        torch.autograd.grad([r for r, _ in pairs], wanted, [c for _, c in pairs], create_graph=True, allow_unused=True)
    )
    return [next(found) if n else None for n in needed]


def _written(unit: Unit, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors[i] for i in unit.mutations]
