"""One call of a user's `torch.autograd.Function` as a graph holds it, and how it runs.

    forward     tensors, sizes      ──> context, outputs
    backward    context, cotangents ──> gradients

PyTorch itself records the call: `apply` runs under autograd on stand-ins of the inputs, and the node that it hangs on
its outputs is the context. That node is the user's `ctx`, with all that forward saved. Backward calls the user's
backward with it, and does around it what autograd's engine does: missing cotangents, counts, shapes, types.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from onnxtrain.errors import PythonOpError
from onnxtrain.ops.python_function.run_context import BACKWARD, Autocast, GradientsChangedError, uncaptured, under
from onnxtrain.ops.python_function.template import Sizes, collect, filled, slots
from onnxtrain.torch_compat import autograd
from onnxtrain.torch_compat.tensors import storage_id

# (sizes of the tensor inputs, the size arguments) -> sizes of the outputs
ShapeRule: TypeAlias = Callable[[Sequence[Sizes], Sizes], list[list[Any]]]


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor argument.

    Attributes:
        requires_grad: whether it required a gradient when the call was captured.
        argument: its number among the arguments; -1 for one inside a container, which autograd does not see.
        device: where it was.
    """

    dtype: torch.dtype
    rank: int
    requires_grad: bool
    argument: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that the call gives.

    Attributes:
        differentiable: whether a gradient can come for it.
        result: its number among the function's results; -1 for one inside a container.
        alias: the tensor input in whose memory it may lie; -1 if none.
        changed: the tensor input that it is, changed in place; -1 if none.
    """

    dtype: torch.dtype
    rank: int
    device: torch.device
    differentiable: bool
    result: int
    alias: int
    changed: int


class Context:
    """What one run of a call leaves for backward."""

    __slots__ = ("inputs", "node", "outputs", "owner")

    def __init__(self, edge: GradientEdge | None, inputs: list[Any], outputs: list[Any]) -> None:
        self.node: Any = edge and edge.node  # the user's ctx
        self.owner = edge and edge.ownership_token  # without its C++ half the ctx has lost what it saved (torch 2.11)
        self.inputs = inputs  # shape, dtype and device of each tensor input
        self.outputs = outputs  # and of each output


class Learned:
    """What backward showed at one place of a graph.

    Attributes:
        lacking: tensor inputs for which it gave None.
        varying: those for which it gave None at one time and a gradient at another.
    """

    def __init__(self) -> None:
        self.lacking: set[int] = set()
        self.varying: set[int] = set()


@dataclass(eq=False)
class PythonCall:
    """A call of `function`, with a Slot wherever a tensor, a size or a number made from sizes goes in.

    Attributes:
        arguments, keywords: what `apply` gets.
        result: what it returns, with a Slot for each tensor.
        copied: tensor inputs that the function changes in place: it gets copies.
        returned: of those, the ones not marked dirty; their new values are further outputs.
        recorded: whether autograd records the call.
        autocast: the autocast that it was captured under; None where there was none.
        rule: gives the outputs' sizes where forward is not run on fake tensors for that.
        backward_reuse: what the user's `alias_input` declared for backward.
        key: how the operator in PyTorch's graph finds it.
    """

    function: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    result: Any
    copied: frozenset[int]
    returned: tuple[int, ...]
    recorded: bool
    autocast: Autocast | None
    rule: ShapeRule | None = None
    backward_reuse: tuple[int, ...] = ()
    key: str = ""

    def __post_init__(self) -> None:
        backward = autograd.backward_class(self.function)
        if not isinstance(backward.__dict__.get("materialize_grads"), property):
            backward.materialize_grads = property(_materializes, _set_materializes)

    @property
    def name(self) -> str:
        return qualified_name(self.function)

    @property
    def repeats(self) -> bool:
        """Whether forward may run again in backward: the function's author says so, and it changes no argument."""
        return bool(getattr(self.function, "recomputable", False)) and not self.copied

    @property
    def results(self) -> int:
        """How many results the function returns, tensors or not."""
        return len(self.result) if isinstance(self.result, tuple) else 1

    # Forward

    def forward(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[Any, ...]:
        """The context, then the outputs.

        Args:
            tensors: the tensor inputs.
            sizes: the size arguments; then, where `rule` gives them, the outputs' sizes.
        """
        given = self._stand_ins(tensors)
        found = self._outputs(self._apply(given, sizes))
        self._check_outputs(found, sizes)
        context = self._context(given, found) if self.recorded else None
        self._free_of_inputs(given, found)
        found += [given[i] for i in self.returned]
        return (context, *(f.detach() if f.requires_grad else f for f in found))

    def on_fakes(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
        """Tensors like the outputs, when capture or the proof of its guards runs the call on fake tensors."""
        if self.rule is not None:
            shapes = self.rule([t.shape for t in tensors], sizes)
            found = [
                torch.empty(shape, dtype=o.dtype, device=o.device)
                for o, shape in zip(self.outputs, shapes, strict=True)
            ]
            return found + [torch.empty_like(tensors[i]) for i in self.returned]
        with uncaptured(), torch.no_grad():
            given = [t.clone() if i in self.copied else t for i, t in enumerate(tensors)]
            found = self._outputs(self._apply(given, sizes))
        found += [given[i] for i in self.returned]
        return [torch.empty_strided(f.size(), f.stride(), dtype=f.dtype, device=f.device) for f in found]

    def _stand_ins(self, tensors: Sequence[Any]) -> list[torch.Tensor]:
        """What the function gets in the place of the program's tensors, which know nothing of gradients.

        Parameters and the module's inputs come as they are: functions find attributes on them.
        """
        given: list[torch.Tensor] = []
        for i, (tensor, known) in enumerate(zip(tensors, self.inputs, strict=True)):
            if not isinstance(tensor, torch.Tensor):  # a size that is used as a tensor
                tensor = torch.tensor(tensor, dtype=known.dtype, device=known.device)
            if i in self.copied:
                tensor = tensor.detach().clone()
            elif tensor.requires_grad and known.argument >= 0 and not known.requires_grad:
                tensor = tensor.detach()
            given.append(tensor)
        marked = [
            i for i, k in enumerate(self.inputs) if k.requires_grad and k.argument >= 0 and not given[i].requires_grad
        ]
        for i, tensor in zip(marked, requiring_grad([given[i] for i in marked]), strict=True):
            given[i] = tensor
        return given

    def _apply(self, given: Sequence[torch.Tensor], sizes: Sizes) -> Any:
        arguments = [filled(a, given, sizes) for a in self.arguments]
        keywords = {k: filled(a, given, sizes) for k, a in self.keywords.items()}
        with under(self.autocast), torch.set_grad_enabled(self.recorded):
            return self.function.apply(*arguments, **keywords)

    def _outputs(self, result: Any) -> list[torch.Tensor]:
        """The tensors in what the function returned, if it is what it returned when it was captured."""
        found: list[torch.Tensor] = []
        wrong = collect(self.result, result, found)
        if wrong:
            raise PythonOpError(
                f"forward of {self.name} returned something else than when it was captured",
                where=line_of(self.function, "forward"),
                expected=wrong[0],
                got=wrong[1],
                todo="let forward return tensors, and what is always the same",
            )
        return found

    def _check_outputs(self, found: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
        expected = iter(sizes[self.size_arguments :]) if self.rule is not None else None
        for i, (tensor, known) in enumerate(zip(found, self.outputs, strict=True)):
            shape = [next(expected) for _ in range(known.rank)] if expected else None
            if tensor.dtype == known.dtype and tensor.dim() == known.rank and shape in (None, list(tensor.shape)):
                continue
            raise PythonOpError(
                f"output {i} of {self.name} is of another type than when it was captured",
                where=line_of(self.function, "forward"),
                expected=f"{known.dtype} {shape or f'of {known.rank} dimensions'}",
                got=f"{tensor.dtype} {list(tensor.shape)}",
                todo="define infer_shape(node, tensor_input_shapes, tensor_input_dtypes) on the function",
            )

    @property
    def size_arguments(self) -> int:
        """How many sizes are arguments."""
        return sum(s.kind == "size" for s in slots((self.arguments, self.keywords)))

    def _context(self, given: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> Context:
        own = next((f for f in found if isinstance(f.grad_fn, autograd.backward_class(self.function))), None)
        edge = None if own is None else get_gradient_edge(own)
        return Context(edge, list(map(_facts, given)), list(map(_facts, found)))

    def _free_of_inputs(self, given: Sequence[torch.Tensor], found: list[torch.Tensor]) -> None:
        """Copies outputs that lie in an input's memory where nothing said that they would."""
        memory = {storage_id(t): i for i, t in enumerate(given) if i not in self.copied}
        for i, (tensor, known) in enumerate(zip(found, self.outputs, strict=True)):
            if known.alias >= 0:
                continue
            source = memory.get(storage_id(tensor))
            if source is not None:
                found[i] = tensor.clone()
                self._warn_of_alias(i, source)

    def _warn_of_alias(self, output: int, source: int) -> None:
        text = (
            f"{self.name}: output {output} of forward lies in the memory of tensor input {source}, which did not show "
            "when it was captured; it is copied. Declare it in a static method alias_input of the function to save the "
            "copy."
        )
        if text not in _WARNED:
            _WARNED.add(text)
            warnings.warn(text, UserWarning, stacklevel=2)

    # Backward

    def backward(
        self,
        learned: Learned,
        wanted: Sequence[int],
        free: Sequence[bool],
        context: Context,
        cotangents: Sequence[torch.Tensor | None],
    ) -> tuple[torch.Tensor | None, ...] | torch.Tensor | None:
        """The gradients of the tensor inputs in `wanted`, or the one gradient.

        Args:
            learned: which gradients lack; added to.
            wanted: numbers of tensor inputs.
            free: for each of them, whether its gradient only leaves the program, and may be None.
            context: of the forward run.
            cotangents: one per output; None for one that is missing.

        Raises:
            GradientsChangedError: the program was made for other inputs' gradients. It has to be made again.
        """
        gradients = self._known_gradients(learned, context, cotangents)
        _learn(learned, wanted, free, gradients)
        found: list[torch.Tensor | None] = []
        for index, may_lack in zip(wanted, free, strict=True):
            gradient = gradients[index]
            if gradient is None and not may_lack:
                shape, dtype, device = context.inputs[index]
                gradient = torch.zeros(shape, dtype=dtype, device=device)
            found.append(gradient)
        return found[0] if len(found) == 1 else tuple(found)

    def _known_gradients(
        self, place: Learned, context: Context, cotangents: Sequence[torch.Tensor | None]
    ) -> Sequence[Any]:
        """The gradients of all tensor inputs; computed once for all attempts at one backward.

        Known by their place in the graph: a context that was made again in backward is another one at each attempt.
        """
        done = BACKWARD.gradients
        if done is None:
            return self._gradients(context, cotangents)
        if place not in done:
            done[place] = self._gradients(context, cotangents)
        return done[place]

    def _gradients(self, context: Context, cotangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        node = context.node
        if node is None:
            return [None] * len(self.inputs)
        with under(BACKWARD.autocast):  # that of the caller: programs run without
            result = node.apply(*self._arguments_of_backward(context, cotangents))
        node.maybe_clear_saved_tensors()  # unless the graph is retained
        returned = list(result) if isinstance(result, tuple) else [result]
        while len(returned) > len(self.arguments) and returned[-1] is None:
            returned.pop()
        if len(returned) != len(self.arguments):
            raise self._wrong(
                "returned the wrong number of gradients", len(self.arguments), len(returned),
                "return one per argument of forward, None where there is none",
            )  # fmt: skip
        tensors = {known.argument: i for i, known in enumerate(self.inputs) if known.argument >= 0}
        gradients: list[torch.Tensor | None] = [None] * len(self.inputs)
        for argument, gradient in enumerate(returned):
            index = tensors.get(argument)
            if gradient is None:
                continue
            if index is None:
                what = f"returned a gradient for argument {argument}, which was no tensor"
                raise self._wrong(what, None, type(gradient).__name__, "return None for it")
            if not isinstance(gradient, torch.Tensor):
                what = f"returned something else than a tensor as gradient {argument}"
                raise self._wrong(what, "a tensor or None", type(gradient).__name__, "return a tensor")
            if self.inputs[index].requires_grad:
                gradients[index] = self._fit(argument, gradient, context.inputs[index])
        return gradients

    def _arguments_of_backward(self, context: Context, cotangents: Sequence[torch.Tensor | None]) -> list[Any]:
        """One per result of forward, as the engine gives them."""
        node = context.node
        found: list[Any] = [None] * self.results
        for output, cotangent, (shape, dtype, device) in zip(self.outputs, cotangents, context.outputs, strict=True):
            if output.result < 0:
                continue
            if cotangent is None and node.materialize_grads and (
                output.differentiable or autograd.materializes_non_differentiable(node)
            ):  # fmt: skip
                cotangent = torch.zeros(shape, dtype=dtype, device=device)
            found[output.result] = cotangent
        return found

    def _fit(self, argument: int, gradient: torch.Tensor, facts: tuple[torch.Size, torch.dtype, torch.device]) -> Any:
        """A gradient in the shape, type and place of its input; broadcast dimensions are summed."""
        shape, dtype, device = facts
        if gradient.shape != shape:
            try:
                gradient = gradient.sum_to_size(shape)
            except RuntimeError:
                what = f"returned a gradient of another shape for argument {argument}"
                raise self._wrong(
                    what, list(shape), list(gradient.shape), "return it in the argument's shape"
                ) from None
        if gradient.device != device:
            if gradient.dim() > 0:
                what = f"returned a gradient on another device for argument {argument}"
                raise self._wrong(what, device, gradient.device, "return it on the argument's device")
            gradient = gradient.to(device)
        if gradient.is_complex() and not dtype.is_complex:
            gradient = gradient.real
        return gradient.to(dtype)

    def _wrong(self, what: str, expected: object, got: object, todo: str) -> PythonOpError:
        return PythonOpError(f"backward of {self.name} {what}", line_of(self.function, "backward"), expected, got, todo)


def _learn(
    learned: Learned, wanted: Sequence[int], free: Sequence[bool], gradients: Sequence[torch.Tensor | None]
) -> None:
    """Notes which inputs get no gradient. Eager computes nothing upstream of those, and neither shall the graph."""
    gone = {i for i, f in zip(wanted, free, strict=True) if gradients[i] is None and not f} - learned.varying
    back = {i for i in learned.lacking if i not in wanted and gradients[i] is not None}
    if gone or back:
        learned.lacking |= gone
        learned.lacking -= back
        learned.varying |= back
        raise GradientsChangedError


_WARNED: set[str] = set()


def qualified_name(function: Any) -> str:
    """`module.Outer.<locals>.Name`: equal names in different scopes stay apart."""
    return f"{function.__module__}.{function.__qualname__}"


def line_of(function: Any, method: str) -> str | None:
    """Where a method of the user's function is defined."""
    code = getattr(inspect.unwrap(getattr(function, method)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}" if code else None


def requiring_grad(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Tensors in the memory of these that require a gradient and are no leaves, so that a function may change them.

    They hang on a node that raises if autograd ever goes on past the function, and that holds no tensor.
    """
    if not tensors:
        return ()
    return autograd.raising_views(_PAST, tensors)


_PAST = b"onnxtrain: autograd ran past a PythonOp's function; report this"


def _facts(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


# PyTorch lets `set_materialize_grads` be set and not be read: a context of a captured function remembers it.


def _materializes(context: BackwardCFunction) -> bool:
    value: bool = context.__dict__.get("_onnxtrain_materializes", True)
    return value


def _set_materializes(context: BackwardCFunction, value: bool) -> None:
    autograd.set_materialize_grads(context, value)
    context.__dict__["_onnxtrain_materializes"] = value
