"""The autograd boundary: a compiled unit as one `torch.autograd.Function`.

    tensors ──forward program──> results, kept      kept goes through ctx.save_for_backward
    kept, output gradients ──backward program──> input gradients

Backward programs are cached by which results have a cotangent and which inputs need a gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from operator import is_not
from typing import Any, NamedTuple, Protocol

import onnx_ir as ir
import torch

from onnxtrain.capture.effects.written_views import WrittenView
from onnxtrain.capture.guards.assumed_answers import AssumedAnswer, check_answers
from onnxtrain.capture.source_location import hide_own_frames
from onnxtrain.errors import KernelError
from onnxtrain.execute.program import Program
from onnxtrain.ops.python_function.run_context import (
    PythonStates,
    python_states,
    python_states_kept,
    rerun_until_settled,
    set_python_states,
)
from onnxtrain.plan.storage import bind_symbols
from onnxtrain.torch_compat import attention_switches, autograd, dispatch
from onnxtrain.torch_compat.dynamo import untraced
from onnxtrain.torch_compat.tensors import is_view, storage_id, version_of

Flags = tuple[bool, ...]
Results = tuple[tuple[Any, ...], tuple[int, ...]]


class BackwardProgram(Protocol):
    """Runs on the kept tensors followed by the cotangents; returns a gradient or None per input, and no sizes."""

    def run(self, arguments: Iterable[torch.Tensor], sizes: Sequence[int]) -> Results: ...


class BackwardSource(Protocol):
    """Makes backward programs."""

    def __call__(self, has_cotangent: Flags, needs_grad: Flags) -> Backward:
        """Return the backward program for these results (one flag each) and these inputs (one flag each)."""

    def differentiate_again(self) -> None:
        """Differentiate again: custom functions returned gradients for unexpected inputs."""


class Backward:
    """A backward program and its inputs.

    Attributes:
        program: computes the gradients.
        kept: indices, among the unit's kept tensors, of those that it reads.
        sizes: indices, among the unit's sizes, of those that it reads.
        cotangents: indices, among the unit's results, of the cotangents that it reads.
        zeros: those of `cotangents` that autograd does not pass; they are filled with zeros.
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

    def reads_all_kept(self, forward: Program) -> bool:
        """Return whether it reads every tensor and size that the forward program of a unit with one result keeps."""
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
        """Return the inputs of the program, from the unit's kept tensors and the cotangents that autograd passed."""
        kept = [saved[i] for i in self.kept]
        return (*kept, *(_zeros(ctx, i) if i in self.zeros else cotangents[i] for i in self.cotangents))


class Unit:
    """A compiled capture, ready to run.

    Attributes:
        forward: the forward program: tensors -> results, new values of mutated inputs, kept tensors.
        num_results: how many results the user sees.
        mutations: the indices of the mutated inputs.
        assumed: the answers that the graph assumes, among the results.
        differentiable: for each result, whether autograd may pass a cotangent; all False for inference.
        views: for each result, "view" if it may share an input's memory, "detached" if it may and was detached from
            the input, else "".
        is_random: whether the forward program samples.
        runs_python: whether it runs the user's Python, which may sample from Python's and numpy's generators.
        device_type: "cpu" or "cuda".
        unsaved_inputs: indices of the inputs that are not among the kept tensors.
        is_simple: whether a step does nothing but run the programs.
        simple_backward: which inputs needed a gradient in the latest backward of a simple unit, and its program;
            (None, any program) if that program reads less than all that forward kept.
        apply: `__call__` on (unit, *tensors), if nothing has to be done after it; else None. It runs on every step,
            where each Python call costs 0.4 us.
        unshared: indices of the results that share memory with no input and no other result.
        written_views: results that become views of inputs that forward mutated.
        inputs: the inputs of the graph, whose shapes bind the symbolic dimensions.
        unreached: indices of the inputs that no gradient reaches. They are detached: otherwise autograd would run the
            user's function that computed them, with zeros.
        backward_source: makes the backward programs; None without gradients.
        contexts: indices, among the kept values, of Python objects: save_for_backward takes tensors only.
        autograd_apply: runs (unit, *tensors) and records backward; by default as one autograd node.
    """

    def __init__(
        self,
        forward: Program,
        num_results: int,
        mutations: Sequence[int],
        differentiable: Flags,
        views: Sequence[str],
        is_random: bool,
        device_type: str,
        backward: BackwardSource | None,
        rerun: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        unsaved_inputs: Sequence[int] = (),
        contexts: Sequence[int] = (),
        autograd_apply: Callable[..., Sequence[Any]] | None = None,
        unshared: Collection[int] = (),
        unreached: Collection[int] = (),
        written_views: Sequence[WrittenView] = (),
        inputs: Sequence[ir.Value] = (),
        runs_python: bool = False,
        assumed: Sequence[AssumedAnswer] = (),
    ) -> None:
        self.forward = forward
        self.assumed = tuple(assumed)
        self.runs_python = runs_python
        self.num_results = num_results
        self.mutations = tuple(mutations)
        self.differentiable = differentiable
        self.views = tuple(views)
        self.is_random = is_random
        self.device_type = device_type
        self.first_kept = num_results + len(self.mutations)
        self.unsaved_inputs = tuple(unsaved_inputs)
        self.no_cotangents = (None,) * num_results
        self.is_inference = torch.is_inference_mode_enabled()
        # A unit is made under the same autocast state as it is called: if autocast is off now, it stays off.
        runs_as_is = not self.mutations and not dispatch.is_any_autocast_enabled()
        self.several_differentiable = sum(differentiable) > 1  # then autograd may pass only some cotangents
        self.nondifferentiable = tuple(i for i, d in enumerate(differentiable) if not d)
        self.rerun = rerun
        self.contexts = tuple(contexts)
        self._unshared = frozenset(unshared)
        self.is_simple = (
            runs_as_is
            and num_results == 1
            and not (is_random or self.contexts or self.nondifferentiable or self.is_inference)
        )
        self.simple_backward: tuple[Flags | None, BackwardProgram] = None, forward  # a pair: threads swap it atomically
        self.backward_source = backward
        self._backwards: dict[tuple[Flags, Flags], Backward] = {}
        self.written_views = tuple(written_views)
        self._inputs = inputs
        self._any_views = any(views) or bool(written_views)
        self.autograd_apply = autograd_apply or _APPLY
        self._apply = _detach_unreached(self.autograd_apply, frozenset(unreached))
        self.apply = self._apply if backward is not None and not self._any_views else None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Run forward on `tensors`, in the grad mode that the unit was made for; returns the results."""
        results: Sequence[Any]
        if self.backward_source is not None:
            results = self._apply(self, *tensors)
        else:
            with torch.no_grad():
                outputs, _ = self.run(tensors)
                results = outputs[: self.num_results]
        return self._with_views(results, tensors) if self._any_views else results

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """Run the forward program and write mutated inputs back; returns its outputs and sizes.

        Raises:
            WrongAnswerError: the call is not as the graph assumes; nothing is written.
        """
        if dispatch.is_any_autocast_enabled():  # the graph holds the casts already
            with torch.autocast(self.device_type, enabled=False):
                outputs, sizes = self.forward.run(tensors, ())
        else:
            outputs, sizes = self.forward.run(tensors, ())
        if self.assumed:
            check_answers(self.assumed, outputs)
        if self.mutations:
            self.write_back(tensors, outputs)
        return outputs, sizes

    def without_base(self, index: int, result: torch.Tensor) -> torch.Tensor:
        """Return a result that is no view to autograd, if it shares memory with no other tensor that the user sees.

        Kernels return views: those of Linear flatten the axes of a batch. Users may change a result in place, which
        autograd refuses for a view that an autograd function returns. detach() shares memory and version.
        """
        return result.detach() if index in self._unshared and is_view(result) else result

    def write_back(self, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor | None]) -> None:
        """Copy the new values into the mutated buffers and inputs."""
        for offset, target in enumerate(self.mutations):
            value = outputs[self.num_results + offset]
            assert value is not None
            tensors[target].copy_(value)

    def _with_views(self, results: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Return the results; those that share an input's memory are rebuilt as views of the input."""
        rebuilt = [self._as_view(i, r, tensors) if self.views[i] else r for i, r in enumerate(results)]
        bindings = bind_symbols(self._inputs, tensors) if self.written_views else {}
        for view in self.written_views:
            rebuilt[view.result] = view.rebuild(rebuilt[view.result], tensors[view.target], bindings)
        return rebuilt

    def _as_view(self, index: int, result: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a result that shares an input's memory, as a view of that input made outside the boundary.

        So the user's in-place changes and gradients go through it as in eager. Whether it shares memory is known only
        at run time: a reshape may copy.
        """
        storage = storage_id(result)
        for tensor in tensors:
            if storage_id(tensor) == storage and tensor.dtype == result.dtype:
                base = tensor.detach() if self.views[index] == "detached" else tensor
                if _same_geometry(tensor, result):
                    return base  # an input, or an operator that returned it, as contiguous() of a contiguous tensor
                return base.as_strided(result.size(), result.stride(), result.storage_offset())
        return result

    def backward(self, has_cotangent: Flags, needs_grad: Flags) -> Backward:
        """Return the backward program for these results and inputs.

        Args:
            has_cotangent: a flag per result.
            needs_grad: as `ctx.needs_input_grad`: a flag for the unit, then one per input.
        """
        backward = self._backwards.get((has_cotangent, needs_grad))
        if backward is None:
            assert self.backward_source is not None
            backward = self.backward_source(has_cotangent, needs_grad[1:])
            self._backwards[has_cotangent, needs_grad] = backward
        if self.is_simple and backward.reads_all_kept(self.forward):
            self.simple_backward = needs_grad, backward.program
        return backward

    def discard_backwards(self) -> None:
        """Drop all backward programs; the next backward differentiates the graph again."""
        assert self.backward_source is not None
        self._backwards.clear()
        self.backward_source.differentiate_again()


def _same_geometry(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one storage have the same elements in the same order."""
    return a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()


class RandomState(NamedTuple):
    """The state that the random ops of forward depended on.

    Attributes:
        cpu: the state of the CPU's generator.
        gpus: the states of the generators of GPUs.
        attention_kernels: those that PyTorch could choose, if there are GPUs.
        python: the states of Python's and numpy's generators; None if forward runs none of the user's Python.
    """

    cpu: torch.Tensor
    gpus: list[tuple[torch.device, torch.Tensor]]
    attention_kernels: attention_switches.Kernels
    python: PythonStates | None = None


def set_random_state(state: RandomState) -> None:
    """Let the next samples be those that followed the state."""
    torch.set_rng_state(state.cpu)
    for device, gpu_state in state.gpus:
        torch.cuda.set_rng_state(gpu_state, device)
    if state.python is not None:
        set_python_states(state.python)


def random_state(tensors: Sequence[torch.Tensor], runs_python: bool = False) -> RandomState:
    """Return the state of the generators that forward samples from: the CPU's, and those of the GPUs of `tensors`."""
    devices = sorted({t.device for t in tensors if t.device.type == "cuda"}, key=str)
    gpus = [(device, torch.cuda.get_rng_state(device)) for device in devices]
    kernels = attention_switches.enabled_kernels() if gpus else ()
    return RandomState(torch.get_rng_state(), gpus, kernels, python_states() if runs_python else None)


_NO_CONTEXT = nullcontext()


def backward_context(unit: Unit, state: RandomState | None) -> AbstractContextManager[object]:
    """Return the context of a backward program: without autocast, with the attention kernels of forward.

    The graph holds the casts already. Kernels store the state of their dropout differently, so that backward must
    choose the one of forward.
    """
    autocast = dispatch.is_any_autocast_enabled()
    switched = state is not None and state.gpus and state.attention_kernels != attention_switches.enabled_kernels()
    if not autocast and not switched:
        return _NO_CONTEXT
    contexts = ExitStack()
    if autocast:
        contexts.enter_context(torch.autocast(unit.device_type, enabled=False))
    if state is not None and switched:
        contexts.enter_context(attention_switches.only(state.attention_kernels))
    return contexts


class _Boundary(torch.autograd.Function):
    """Forward and backward of a unit, as autograd sees them.

    Backward programs take their arguments from an iterator, which holds no tensor that was read, and autograd frees the
    saved tensors (unless retain_graph=True): each tensor is freed after its last use, as in eager. The same holds
    for cotangents from PyTorch 2.13 on, which passes them in a list that can be emptied.

    `ctx.call` is (unit, tensors, versions, sizes): one attribute, because each costs a third of a small operator. The
    input tensors are held besides the saved ones for create_graph, which runs the module again in PyTorch: eager
    allows changing a tensor that its backward does not read.
    """

    @staticmethod
    def forward(ctx: Any, unit: Unit, *tensors: torch.Tensor) -> tuple[Any, ...]:
        if not unit.is_simple:
            return run_and_save(ctx, unit, tensors)
        outputs, sizes = unit.forward.run(tensors, ())
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*outputs[1:])
        ctx.call = unit, tensors, [version_of(tensors[i]) for i in unit.unsaved_inputs], sizes
        return (unit.without_base(0, outputs[0]),)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        return _gradients(ctx, list(cotangents))


@untraced
def _gradients(ctx: Any, cotangents: list[Any]) -> tuple[Any, ...]:
    """Run backward of `_Boundary`. Empties the list of cotangents.

    A function that torch.compile compiles may call backward() itself: on a CPU it runs in the same thread.
    """
    unit: Unit = ctx.call[0]
    needs_grad = ctx.needs_input_grad
    if cotangents[0] is None and all(c is None for c in cotangents):  # from a function that returned no gradient
        return (None,) * len(needs_grad)
    if torch.is_grad_enabled():
        return (None, *differentiable_backward(ctx, cotangents, needs_grad[1:]))
    simple_needs_grad, program = unit.simple_backward
    if needs_grad == simple_needs_grad and not dispatch.is_any_autocast_enabled():
        arguments = iter((*ctx.saved_tensors, *cotangents))
        cotangents.clear()
        ctx.maybe_clear_saved_tensors()
        gradients, _ = program.run(arguments, ctx.call[3])
        return (None, *gradients)
    if not unit.contexts:
        return _backward(ctx, cotangents, needs_grad)
    try:
        results: tuple[Any, ...] = rerun_until_settled(
            lambda: _backward(ctx, cotangents, needs_grad), unit.discard_backwards
        )
    except Exception as error:  # possibly raised by a custom function's backward
        hide_own_frames(error)
        raise
    return results


def run_and_save(ctx: Any, unit: Unit, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Run forward of any unit, and save in `ctx` what its backward needs; returns the results."""
    ctx.set_materialize_grads(False)
    if unit.is_random:
        ctx.random_state = random_state(() if unit.device_type == "cpu" else tensors, unit.runs_python)
    outputs, sizes = unit.run(tensors)
    kept = outputs[unit.first_kept :]
    if unit.contexts:
        ctx.contexts = [kept[i] for i in unit.contexts]
        kept = tuple(None if i in unit.contexts else tensor for i, tensor in enumerate(kept))
    ctx.save_for_backward(*kept)
    results = tuple(map(unit.without_base, range(unit.num_results), outputs))
    ctx.call = unit, tensors, () if unit.is_inference else [version_of(tensors[i]) for i in unit.unsaved_inputs], sizes
    if unit.several_differentiable:
        ctx.results = [(r.shape, r.dtype, r.device) for r in results]
    if unit.nondifferentiable:
        ctx.mark_non_differentiable(*(results[i] for i in unit.nondifferentiable))
    return results


def _backward(ctx: Any, cotangents: list[torch.Tensor | None], needs_grad: Flags) -> tuple[Any, ...]:
    """Run backward of any unit."""
    unit = ctx.call[0]
    program, arguments, sizes = prepare_backward(ctx, cotangents, needs_grad)
    with backward_context(unit, ctx.random_state if unit.is_random else None):
        gradients, _ = program.run(arguments, sizes)
    return (None, *gradients)


def prepare_backward(
    ctx: Any, cotangents: list[torch.Tensor | None], needs_grad: Flags
) -> tuple[BackwardProgram, Iterator[Any], Sequence[int]]:
    """Return the backward program for these cotangents, an iterator over its arguments, and its sizes.

    The iterator holds no tensor that was read. The saved tensors are read here and passed to no other Python function:
    under a debugger, a tracer or torch.compile, the caller's frame would keep its arguments alive until backward ends.
    Empties the list of cotangents.
    """
    unit, _, _, sizes = ctx.call
    backward = unit.backward(tuple(map(is_not, cotangents, unit.no_cotangents)), needs_grad)
    arguments = iter(backward.arguments(_saved(ctx), cotangents, ctx))
    if not unit.contexts:  # a PythonOp's backward may run twice
        cotangents.clear()
        ctx.maybe_clear_saved_tensors()
    return backward.program, arguments, [sizes[i] for i in backward.sizes] if backward.sizes else ()


def _saved(ctx: Any) -> Sequence[Any]:
    """Return the values that forward kept, in order: tensors and Python objects."""
    saved: Sequence[Any] = ctx.saved_tensors
    indices = ctx.call[0].contexts
    if not indices:
        return saved
    contexts = dict(zip(indices, ctx.contexts, strict=True))
    return [contexts.get(i, tensor) for i, tensor in enumerate(saved)]


def _detach_unreached(run: Callable[..., Sequence[Any]], unreached: frozenset[int]) -> Callable[..., Sequence[Any]]:
    """`run` of (unit, *tensors) with these tensors detached."""
    if not unreached:
        return run

    def run_detached(unit: Unit, *tensors: torch.Tensor) -> Sequence[Any]:
        return run(unit, *(t.detach() if i in unreached else t for i, t in enumerate(tensors)))

    return run_detached


# Function.apply without its Python part, which looks for torch.func's wrappers: none get here, and it costs as much as
# two small operators (4 us of 60 for a forward of five layers).
_APPLY: Callable[..., tuple[Any, ...]] = super(torch.autograd.Function, _Boundary).apply
# Likewise for backward: the method that autograd calls looks up the function's backward, vjp and boxed gradients.
autograd.call_backward_directly(_Boundary, _Boundary.backward, _gradients)


def _zeros(ctx: Any, index: int) -> torch.Tensor:
    shape, dtype, device = ctx.results[index]
    return torch.zeros(shape, dtype=dtype, device=device)


def differentiable_backward(
    ctx: Any, cotangents: Sequence[torch.Tensor | None], needs_grad: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Return gradients that can be differentiated again: runs the module once more, in PyTorch (create_graph=True).

    Raises:
        KernelError: an input was changed in place since forward.
    """
    unit, tensors, versions, _ = ctx.call
    warnings.warn(
        "create_graph=True: onnxtrain runs this module again in PyTorch to differentiate its gradient; "
        "it is exact but not accelerated" + (", and dropout samples PyTorch's masks" if unit.is_random else ""),
        stacklevel=2,
    )
    _ = ctx.saved_tensors  # raises if one of them was changed
    for index, version in zip(unit.unsaved_inputs, versions, strict=False):
        if version_of(tensors[index]) != version and index not in unit.mutations:
            raise KernelError(
                "an input of the module was changed in place between forward and backward(create_graph=True)",
                expected=f"input {index} at version {version}, as in forward",
                got=f"version {version_of(tensors[index])}",
                todo="change it after backward, or change a copy",
            )
    if unit.is_random:
        state: RandomState = ctx.random_state
        with torch.random.fork_rng(devices=[device for device, _ in state.gpus]), python_states_kept():
            set_random_state(state)
            with attention_switches.only(state.attention_kernels) if state.gpus else _NO_CONTEXT:
                results = unit.rerun(tensors)
    else:
        results = unit.rerun(tensors)
    pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if c is not None and r.requires_grad]
    inputs = [t for t, n in zip(tensors, needs_grad, strict=True) if n]
    gradients = iter(
        torch.autograd.grad([r for r, _ in pairs], inputs, [c for _, c in pairs], create_graph=True, allow_unused=True)
    )
    return [next(gradients) if n else None for n in needs_grad]
