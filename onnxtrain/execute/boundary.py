"""The autograd boundary: a compiled unit as one `torch.autograd.Function`.

    tensors ──forward program──> results, kept      kept goes through ctx.save_for_backward
    kept, output gradients ──backward program──> input gradients

A backward program is made for each pattern of which outputs have gradients and which inputs need them, and reused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import is_not
from typing import Any, Protocol

import onnx_ir as ir
import torch

from onnxtrain.capture.effects.written_views import WrittenView
from onnxtrain.capture.source_location import hide_own_frames
from onnxtrain.errors import KernelError
from onnxtrain.execute.program import Program
from onnxtrain.ops.python_function.run_context import rerun_until_settled
from onnxtrain.plan.storage import bind_symbols
from onnxtrain.torch_compat import autograd, dispatch
from onnxtrain.torch_compat.tensors import storage_id

Flags = tuple[bool, ...]
Results = tuple[tuple[Any, ...], tuple[int, ...]]


class BackwardProgram(Protocol):
    """Kept tensors, then cotangents, and sizes -> one gradient or None per input, and no sizes."""

    def run(self, arguments: Iterable[torch.Tensor], sizes: Sequence[int]) -> Results: ...


class BackwardSource(Protocol):
    """Makes backward programs: (which results have a gradient, which inputs need one) -> program."""

    def __call__(self, given: Flags, needed: Flags) -> Backward: ...

    def renew(self) -> None:
        """The functions of PythonOps were found to give gradients for other inputs than was assumed."""


class Backward:
    """A backward program and what it takes.

    Attributes:
        program: what computes the gradients.
        kept: positions, among the unit's kept tensors, of those that it reads.
        sizes: positions of the sizes that it reads.
        cotangents: positions, among the unit's results, of the cotangents that it reads.
        zeros: those of them that did not come and are made of zeros.
    """

    __slots__ = ("cotangents", "kept", "program", "sizes", "zeros")

    def __init__(
        self,
        program: BackwardProgram,
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

    def takes_all(self, forward: Program) -> bool:
        """Whether it takes all that the forward program of a unit with one result keeps, and all its sizes."""
        part = forward.part
        return (
            self.kept == tuple(range(len(part.outputs) - 1))
            and self.cotangents == (0,)
            and not self.zeros
            and self.sizes == tuple(range(len(part.sizes_out)))
        )

    def arguments(
        self, saved: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor | None], ctx: Any
    ) -> Sequence[Any]:
        """What the program takes, of the unit's kept tensors and of the cotangents that came."""
        first = [saved[i] for i in self.kept]
        return (*first, *(_zeros(ctx, i) if i in self.zeros else cotangents[i] for i in self.cotangents))


class Unit:
    """A compiled capture, ready to run.

    Attributes:
        forward: the forward program: tensors -> results, values of mutations, kept tensors.
        results: number of results that the user sees.
        mutations: for each mutated input, its position.
        differentiable: for each result, whether a gradient may come for it; empty for inference.
        views: for each result, "view" where it may lie in an input's memory, "detached" where it was detached from
            it besides, else "".
        random: whether the program draws random numbers.
        device_type: "cpu" or "cuda".
        unsaved: positions of the inputs that are not among the kept tensors.
        simple: whether there is nothing more to a step than to run the programs.
        usual: which inputs needed a gradient in the newest backward of a simple unit, and its program; (None, any
            program) where that takes less than all that forward kept.
        apply: what `__call__` does, on (unit, *tensors), where nothing is to be done after it; else None. It runs on
            every step, and each Python call on the way costs 0.4 us there.
        lone_views: positions of the results that are views of what nobody else sees: users may change them in place,
            which autograd refuses for a view that an autograd function made.
        written_views: results that are made views of inputs which forward mutated.
        inputs: the inputs of the graph, whose shapes name the sizes.
        unreached: positions of the inputs that no gradient reaches. They are cut off: else autograd would run what
            made them, a function of the user's with zeros.
        backward_source: makes the backward programs; None without gradients.
        contexts: positions, among the kept, of Python objects: save_for_backward takes tensors only.
        differentiably: runs (unit, *tensors) so that autograd can run backward; as one node of autograd if not given.
    """

    def __init__(
        self,
        forward: Program,
        results: int,
        mutations: Sequence[int],
        differentiable: Flags,
        views: Sequence[str],
        random: bool,
        device_type: str,
        backward: BackwardSource | None,
        rerun: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        unsaved: Sequence[int] = (),
        contexts: Sequence[int] = (),
        differentiably: Callable[..., Sequence[Any]] | None = None,
        lone_views: Collection[int] = (),
        unreached: Collection[int] = (),
        written_views: Sequence[WrittenView] = (),
        inputs: Sequence[ir.Value] = (),
    ) -> None:
        self.forward = forward
        self.results = results
        self.mutations = tuple(mutations)
        self.differentiable = differentiable
        self.views = tuple(views)
        self.random = random
        self.device_type = device_type
        self.first_kept = results + len(self.mutations)
        self.unsaved = tuple(unsaved)
        self.none = (None,) * results
        self.inference = torch.is_inference_mode_enabled()
        # A unit is made in the state in which it is called: where autocast is off now, it need not be switched off.
        plain = not self.mutations and not dispatch.is_any_autocast_enabled()
        self.several = sum(differentiable) > 1  # then one of their cotangents may be missing
        self.fixed = tuple(i for i, d in enumerate(differentiable) if not d)
        self.rerun = rerun
        self.contexts = tuple(contexts)
        self.lone_views = frozenset(lone_views)
        self.simple = plain and results == 1 and not (random or self.contexts or self.fixed or self.inference)
        self.usual: tuple[Flags | None, BackwardProgram] = None, forward  # one attribute: threads exchange it at once
        self.backward_source = backward
        self._backwards: dict[tuple[Flags, Flags], Backward] = {}
        self.written_views = tuple(written_views)
        self._inputs = inputs
        self._any_views = any(views) or bool(written_views)
        self.differentiably = differentiably or _APPLY
        self._apply = _cut_off(self.differentiably, frozenset(unreached))
        self.apply = self._apply if backward is not None and not self._any_views else None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Runs forward on `tensors`, in the grad mode that the unit was made for; returns the results."""
        results: Sequence[Any]
        if self.backward_source is not None:
            results = self._apply(self, *tensors)
        else:
            with torch.no_grad():
                found, _ = self.run(tensors)
                results = found[: self.results]
        return self._with_views(results, tensors) if self._any_views else results

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """Runs the forward program and writes mutated inputs back; returns its outputs and sizes."""
        if dispatch.is_any_autocast_enabled():  # the graph holds the casts already
            with torch.autocast(self.device_type, enabled=False):
                found, sizes = self.forward.run(tensors, ())
        else:
            found, sizes = self.forward.run(tensors, ())
        if self.mutations:
            self.write_back(tensors, found)
        return found, sizes

    def write_back(self, tensors: Sequence[torch.Tensor], found: Sequence[torch.Tensor | None]) -> None:
        """Copies the values of mutated buffers and inputs into them."""
        for offset, target in enumerate(self.mutations):
            value = found[self.results + offset]
            assert value is not None
            tensors[target].copy_(value)

    def _with_views(self, results: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        """The results, those among them that are views of inputs as such."""
        rebuilt = [self._in_place_of(i, r, tensors) if self.views[i] else r for i, r in enumerate(results)]
        known = bind_symbols(self._inputs, tensors) if self.written_views else {}
        for view in self.written_views:
            rebuilt[view.result] = view.rebuilt(rebuilt[view.result], tensors[view.target], known)
        return rebuilt

    def _in_place_of(self, index: int, result: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A result that lies in an input's memory, as a view of that input made outside the boundary.

        So the user's in-place changes and gradients go through it as in eager. Whether it does shows only now: a
        reshape may copy.
        """
        storage = storage_id(result)
        for tensor in tensors:
            if storage_id(tensor) == storage and tensor.dtype == result.dtype:
                base = tensor.detach() if self.views[index] == "detached" else tensor
                if _same_place(tensor, result):
                    return base  # an input, or an operator that gave it back: contiguous() of what is so
                return base.as_strided(result.size(), result.stride(), result.storage_offset())
        return result

    def backward(self, given: Flags, needed: Flags) -> Backward:
        """The backward program for this pattern. `needed` has a flag for the unit itself before those of its inputs."""
        known = self._backwards.get((given, needed))
        if known is None:
            assert self.backward_source is not None
            known = self._backwards[given, needed] = self.backward_source(given, needed[1:])
        if self.simple and known.takes_all(self.forward):
            self.usual = needed, known.program
        return known

    def renew_backwards(self) -> None:
        """Backward programs are made again when they are asked for."""
        assert self.backward_source is not None
        self._backwards.clear()
        self.backward_source.renew()


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()


def random_state(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[tuple[torch.device, torch.Tensor]]]:
    """The states of the generators that forward draws from."""
    devices = {t.device for t in tensors if t.device.type == "cuda"}
    return torch.get_rng_state(), [(d, torch.cuda.get_rng_state(d)) for d in sorted(devices, key=str)]


class _Boundary(torch.autograd.Function):
    """Forward and backward of a unit, as autograd sees them.

    Backward programs take their arguments from an iterator, which holds nothing once it is read, and autograd lets go
    of what was saved (unless retain_graph says otherwise): each tensor is freed after its last use, as in eager. So are
    cotangents from PyTorch 2.13 on, which hands them over in a list that can be emptied.

    `ctx.call` is (unit, tensors, versions, sizes): one attribute, because each costs as much as a third of a small
    operator. The tensors are held beside the saved ones for create_graph, which runs the module again in PyTorch:
    eager does not refuse a change of a tensor that its backward does not read.
    """

    @staticmethod
    def forward(ctx: Any, unit: Unit, *tensors: torch.Tensor) -> tuple[Any, ...]:
        if not unit.simple:
            return keep_and_run(ctx, unit, tensors)
        found, sizes = unit.forward.run(tensors, ())
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*found[1:])
        ctx.call = unit, tensors, [tensors[i]._version for i in unit.unsaved], sizes
        return (found[0].detach(),) if unit.lone_views else found[:1]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        return _gradients(ctx, list(cotangents))


def _gradients(ctx: Any, cotangents: list[Any]) -> tuple[Any, ...]:
    """Backward of `_Boundary`. Empties the list of cotangents."""
    unit: Unit = ctx.call[0]
    needed = ctx.needs_input_grad
    if cotangents[0] is None and all(c is None for c in cotangents):  # as of a function that gave no gradient
        return (None,) * len(needed)
    if torch.is_grad_enabled():
        return (None, *differentiable_backward(ctx, cotangents, needed[1:]))
    usual, program = unit.usual
    if needed == usual and not dispatch.is_any_autocast_enabled():
        arguments = iter((*ctx.saved_tensors, *cotangents))
        cotangents.clear()
        ctx.maybe_clear_saved_tensors()
        gradients, _ = program.run(arguments, ctx.call[3])
        return (None, *gradients)
    if not unit.contexts:
        return _backward(ctx, cotangents, needed)
    try:
        found: tuple[Any, ...] = rerun_until_settled(lambda: _backward(ctx, cotangents, needed), unit.renew_backwards)
    except Exception as error:  # maybe of a custom function's backward
        hide_own_frames(error)
        raise
    return found


def keep_and_run(ctx: Any, unit: Unit, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Runs forward of any unit, and keeps in `ctx` what its backward needs; returns the results."""
    ctx.set_materialize_grads(False)
    if unit.random:
        ctx.random_state = random_state(tensors)
    found, sizes = unit.run(tensors)
    kept = found[unit.first_kept :]
    if unit.contexts:
        ctx.contexts = [kept[i] for i in unit.contexts]
        kept = tuple(None if i in unit.contexts else tensor for i, tensor in enumerate(kept))
    ctx.save_for_backward(*kept)
    results = found[: unit.results]
    if unit.lone_views:  # detach() gives a tensor of the same memory and version that is no view to autograd
        results = tuple(r.detach() if i in unit.lone_views else r for i, r in enumerate(results))
    ctx.call = unit, tensors, () if unit.inference else [tensors[i]._version for i in unit.unsaved], sizes
    if unit.several:
        ctx.results = [(r.shape, r.dtype, r.device) for r in results]
    if unit.fixed:
        ctx.mark_non_differentiable(*(results[i] for i in unit.fixed))
    return results


def _backward(ctx: Any, cotangents: list[torch.Tensor | None], needed: Flags) -> tuple[Any, ...]:
    """Backward of any unit."""
    unit = ctx.call[0]
    program, arguments, sizes = prepare_backward(ctx, cotangents, needed)
    if dispatch.is_any_autocast_enabled():
        with torch.autocast(unit.device_type, enabled=False):
            gradients, _ = program.run(arguments, sizes)
    else:
        gradients, _ = program.run(arguments, sizes)
    return (None, *gradients)


def prepare_backward(
    ctx: Any, cotangents: list[torch.Tensor | None], needed: Flags
) -> tuple[BackwardProgram, Iterator[Any], Sequence[int]]:
    """The backward program for these cotangents, and what it takes: an iterator that holds nothing once it is read.

    What was saved is read here and passed to no Python function: where a debugger, a tracer or torch.compile evaluates
    the frames, the caller's would keep its arguments alive until backward ends. The list of cotangents is emptied.
    """
    unit, _, _, known = ctx.call
    backward = unit.backward(tuple(map(is_not, cotangents, unit.none)), needed)
    arguments = iter(backward.arguments(_saved(ctx), cotangents, ctx))
    if not unit.contexts:  # a PythonOp's backward may run twice
        cotangents.clear()
        ctx.maybe_clear_saved_tensors()
    return backward.program, arguments, [known[i] for i in backward.sizes] if backward.sizes else ()


def _saved(ctx: Any) -> Sequence[Any]:
    """What forward kept: tensors, and Python objects in their places."""
    saved: Sequence[Any] = ctx.saved_tensors
    places = ctx.call[0].contexts
    if not places:
        return saved
    contexts = dict(zip(places, ctx.contexts, strict=True))
    return [contexts.get(i, tensor) for i, tensor in enumerate(saved)]


def _cut_off(run: Callable[..., Sequence[Any]], unreached: frozenset[int]) -> Callable[..., Sequence[Any]]:
    """`run` of (unit, *tensors) with these tensors detached."""
    if not unreached:
        return run

    def cut_off(unit: Unit, *tensors: torch.Tensor) -> Sequence[Any]:
        return run(unit, *(t.detach() if i in unreached else t for i, t in enumerate(tensors)))

    return cut_off


# Function.apply without its Python part, which looks for torch.func's wrappers: none get here, and it costs as much as
# two small operators (4 us of 60 for a forward of five layers).
_APPLY: Callable[..., tuple[Any, ...]] = super(torch.autograd.Function, _Boundary).apply
# The same the other way: what autograd calls looks for the function's backward, and for vjp and boxed gradients.
autograd.call_backward_directly(_Boundary, _Boundary.backward, _gradients)


def _zeros(ctx: Any, index: int) -> torch.Tensor:
    shape, dtype, device = ctx.results[index]
    return torch.zeros(shape, dtype=dtype, device=device)


def differentiable_backward(
    ctx: Any, cotangents: Sequence[torch.Tensor | None], needed: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Gradients that can be differentiated again: the module runs once more, in PyTorch (create_graph=True)."""
    unit, tensors, versions, _ = ctx.call
    warnings.warn(
        "create_graph=True: onnxtrain runs this module again in PyTorch to differentiate its gradient; "
        "it is exact but not accelerated" + (", and dropout draws PyTorch's masks" if unit.random else ""),
        stacklevel=2,
    )
    _ = ctx.saved_tensors  # raises where one of them was changed
    for index, version in zip(unit.unsaved, versions, strict=False):
        if tensors[index]._version != version and index not in unit.mutations:
            raise KernelError(
                "an input of the module was changed in place between forward and backward(create_graph=True)",
                todo="change it after backward, or change a copy",
            )
    if unit.random:
        own, devices = ctx.random_state
        with torch.random.fork_rng(devices=[device for device, _ in devices]):
            torch.set_rng_state(own)
            for device, state in devices:
                torch.cuda.set_rng_state(state, device)
            results = unit.rerun(tensors)
    else:
        results = unit.rerun(tensors)
    pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if c is not None and r.requires_grad]
    wanted = [t for t, n in zip(tensors, needed, strict=True) if n]
    found = iter(
        torch.autograd.grad([r for r, _ in pairs], wanted, [c for _, c in pairs], create_graph=True, allow_unused=True)
    )
    return [next(found) if n else None for n in needed]
