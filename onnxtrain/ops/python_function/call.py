"""One call of a user's `torch.autograd.Function`, as the graph represents it, and how it runs.

    forward     tensors, sizes      ──> context, outputs
    backward    context, cotangents ──> gradients

PyTorch itself records the call: `apply` runs under autograd on substitutes of the inputs, and the grad_fn of its
outputs is the context. That node is the user's `ctx`, with everything that forward saved. Backward calls the user's
backward with it and does what autograd's engine does around such a call: it fills in missing cotangents and checks the
number, shapes and types of the gradients.
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
from onnxtrain.ops.python_function.run_context import (
    BACKWARD,
    Autocast,
    GradientsChangedError,
    autocast_context,
    uncaptured,
)
from onnxtrain.ops.python_function.template import Sizes, collect, fill_slots, slots
from onnxtrain.torch_compat import autograd
from onnxtrain.torch_compat.tensors import storage_id

# (sizes of the tensor inputs, the size arguments) -> sizes of the outputs
ShapeRule: TypeAlias = Callable[[Sequence[Sizes], Sizes], list[list[Any]]]
_Metadata: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor argument.

    Attributes:
        requires_grad: whether it required a gradient when the call was captured.
        argument: its index among the arguments; -1 for a tensor inside a container, which autograd does not see.
        device: its device when the call was captured.
    """

    dtype: torch.dtype
    rank: int
    requires_grad: bool
    argument: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that the call returns.

    Attributes:
        differentiable: whether it can have a gradient.
        result: its index among the function's results; -1 for a tensor inside a container.
        alias: the tensor input whose memory it may share; -1 if none.
        changed: the tensor input, changed in place, that is returned as this output; -1 if none.
    """

    dtype: torch.dtype
    rank: int
    device: torch.device
    differentiable: bool
    result: int
    alias: int
    changed: int


class Context:
    """The state that one run of forward saves for backward."""

    __slots__ = ("inputs", "node", "outputs", "owner")

    def __init__(self, edge: GradientEdge | None, inputs: list[Any], outputs: list[Any]) -> None:
        self.node: Any = edge and edge.node  # the user's ctx
        self.owner = edge and edge.ownership_token  # without its C++ half the ctx has lost what it saved (torch 2.11)
        self.inputs = inputs  # shape, dtype and device of each tensor input
        self.outputs = outputs  # and of each output


class MissingGradients:
    """The inputs without gradients, observed in the backward runs of one node.

    Attributes:
        lacking: tensor inputs for which backward returned None.
        varying: tensor inputs for which it returned None in some runs and a gradient in others.
    """

    def __init__(self) -> None:
        self.lacking: set[int] = set()
        self.varying: set[int] = set()


@dataclass(eq=False)
class PythonCall:
    """A call of `function`, with a Slot for each tensor, size, and number computed from sizes.

    Attributes:
        arguments, keywords: of `apply`.
        result: the return value, with a Slot for each tensor.
        copied: tensor inputs that the function changes in place: it is called with copies.
        returned: those of `copied` that are not marked dirty; their new values are further outputs.
        recorded: whether autograd records the call.
        autocast: the autocast state during capture; None: it was off.
        rule: computes the outputs' sizes; None: forward is run on FakeTensors for them.
        backward_reuse: the declaration of the user's `alias_input` for backward.
        key: by which the operator in PyTorch's graph finds the call.
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
    def is_recomputable(self) -> bool:
        """Whether backward may recompute forward: the function is marked `recomputable` and changes no argument."""
        return bool(getattr(self.function, "recomputable", False)) and not self.copied

    @property
    def result_count(self) -> int:
        """The number of results of the function, tensors or not."""
        return len(self.result) if isinstance(self.result, tuple) else 1

    # Forward

    def forward(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[Any, ...]:
        """Run forward; return the context, then the outputs.

        Args:
            tensors: the tensor inputs.
            sizes: the size arguments, followed by the outputs' sizes if there is a `rule`.
        """
        inputs = self._substitutes(tensors)
        outputs = self._outputs(self._apply(inputs, sizes))
        self._check_outputs(outputs, sizes)
        context = self._context(inputs, outputs) if self.recorded else None
        self._copy_undeclared_aliases(inputs, outputs)
        outputs += [inputs[i] for i in self.returned]
        return (context, *(y.detach() if y.requires_grad else y for y in outputs))

    def on_fakes(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
        """Return tensors like the outputs, when capture or the proof of its guards runs the call on FakeTensors."""
        if self.rule is not None:
            shapes = self.rule([t.shape for t in tensors], sizes)
            outputs = [
                torch.empty(shape, dtype=o.dtype, device=o.device)
                for o, shape in zip(self.outputs, shapes, strict=True)
            ]
            return outputs + [torch.empty_like(tensors[i]) for i in self.returned]
        with uncaptured(), torch.no_grad():
            inputs = [t.clone() if i in self.copied else t for i, t in enumerate(tensors)]
            outputs = self._outputs(self._apply(inputs, sizes))
        outputs += [inputs[i] for i in self.returned]
        return [torch.empty_strided(y.size(), y.stride(), dtype=y.dtype, device=y.device) for y in outputs]

    def _substitutes(self, tensors: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors that the function is called with: those of the program do not require gradients.

        Parameters and the module's inputs are passed unchanged: functions read attributes of them.
        """
        inputs: list[torch.Tensor] = []
        for i, (tensor, captured) in enumerate(zip(tensors, self.inputs, strict=True)):
            if not isinstance(tensor, torch.Tensor):  # a size that is used as a tensor
                tensor = torch.tensor(tensor, dtype=captured.dtype, device=captured.device)
            if i in self.copied:
                tensor = tensor.detach().clone()
            elif tensor.requires_grad and captured.argument >= 0 and not captured.requires_grad:
                tensor = tensor.detach()
            inputs.append(tensor)
        to_mark = [
            i for i, k in enumerate(self.inputs) if k.requires_grad and k.argument >= 0 and not inputs[i].requires_grad
        ]
        for i, tensor in zip(to_mark, requiring_grad([inputs[i] for i in to_mark]), strict=True):
            inputs[i] = tensor
        return inputs

    def _apply(self, inputs: Sequence[torch.Tensor], sizes: Sizes) -> Any:
        arguments = [fill_slots(a, inputs, sizes) for a in self.arguments]
        keywords = {k: fill_slots(a, inputs, sizes) for k, a in self.keywords.items()}
        with autocast_context(self.autocast), torch.set_grad_enabled(self.recorded):
            return self.function.apply(*arguments, **keywords)

    def _outputs(self, result: Any) -> list[torch.Tensor]:
        """Return the tensors of a result of the structure that was captured. Raises PythonOpError for any other."""
        outputs: list[torch.Tensor] = []
        mismatch = collect(self.result, result, outputs)
        if mismatch:
            raise PythonOpError(
                f"forward of {self.name} returned a different result from when it was captured",
                where=line_of(self.function, "forward"),
                expected=mismatch[0],
                got=mismatch[1],
                todo="let forward return tensors, or values that are the same in every call",
            )
        return outputs

    def _check_outputs(self, outputs: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
        output_sizes = iter(sizes[self.size_arguments :]) if self.rule is not None else None
        for i, (tensor, captured) in enumerate(zip(outputs, self.outputs, strict=True)):
            shape = [next(output_sizes) for _ in range(captured.rank)] if output_sizes else None
            if tensor.dtype == captured.dtype and tensor.dim() == captured.rank and shape in (None, list(tensor.shape)):
                continue
            raise PythonOpError(
                f"output {i} of {self.name} differs in dtype or shape from when it was captured",
                where=line_of(self.function, "forward"),
                expected=f"{captured.dtype} {shape or f'of {captured.rank} dimensions'}",
                got=f"{tensor.dtype} {list(tensor.shape)}",
                todo="define infer_shape(node, tensor_input_shapes, tensor_input_dtypes) on the function",
            )

    @property
    def size_arguments(self) -> int:
        """The number of sizes among the arguments."""
        return sum(s.kind == "size" for s in slots((self.arguments, self.keywords)))

    def _context(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Context:
        recorded = next((y for y in outputs if isinstance(y.grad_fn, autograd.backward_class(self.function))), None)
        edge = None if recorded is None else get_gradient_edge(recorded)
        return Context(edge, list(map(_metadata, inputs)), list(map(_metadata, outputs)))

    def _copy_undeclared_aliases(self, inputs: Sequence[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Copy outputs that share the memory of an input although neither capture nor the user said so."""
        input_of_storage = {storage_id(t): i for i, t in enumerate(inputs) if i not in self.copied}
        for i, (tensor, captured) in enumerate(zip(outputs, self.outputs, strict=True)):
            if captured.alias >= 0:
                continue
            source = input_of_storage.get(storage_id(tensor))
            if source is not None:
                outputs[i] = tensor.clone()
                self._warn_of_alias(i, source)

    def _warn_of_alias(self, output: int, source: int) -> None:
        text = (
            f"{self.name}: output {output} of forward shares the memory of tensor input {source}, but did not when it "
            "was captured; it is copied. Declare it in a static method alias_input of the function to avoid the copy."
        )
        if text not in _WARNED:
            _WARNED.add(text)
            warnings.warn(text, UserWarning, stacklevel=2)

    # Backward

    def backward(
        self,
        missing: MissingGradients,
        wanted_indices: Sequence[int],
        free: Sequence[bool],
        context: Context,
        cotangents: Sequence[torch.Tensor | None],
    ) -> tuple[torch.Tensor | None, ...] | torch.Tensor | None:
        """Return the gradients of the tensor inputs at `wanted_indices`; a single one without a tuple.

        Args:
            missing: the inputs without gradients so far; updated.
            wanted_indices: indices of tensor inputs.
            free: for each of them, whether its gradient is only a result of the program, and may be None.
            context: of the forward run.
            cotangents: one or None per output.

        Raises:
            GradientsChangedError: the program was built for gradients of other inputs and must be built again.
        """
        gradients = self._computed_gradients(missing, context, cotangents)
        _record_missing_gradients(missing, wanted_indices, free, gradients)
        results: list[torch.Tensor | None] = []
        for index, may_be_none in zip(wanted_indices, free, strict=True):
            gradient = gradients[index]
            if gradient is None and not may_be_none:
                shape, dtype, device = context.inputs[index]
                gradient = torch.zeros(shape, dtype=dtype, device=device)
            results.append(gradient)
        return results[0] if len(results) == 1 else tuple(results)

    def _computed_gradients(
        self, missing: MissingGradients, context: Context, cotangents: Sequence[torch.Tensor | None]
    ) -> Sequence[Any]:
        """Return the gradients of all tensor inputs; computed once for all attempts at one backward.

        They are stored by the node (`missing`): a context that backward recomputes is a new one at each attempt.
        """
        computed = BACKWARD.gradients
        if computed is None:
            return self._gradients(context, cotangents)
        if missing not in computed:
            computed[missing] = self._gradients(context, cotangents)
        return computed[missing]

    def _gradients(self, context: Context, cotangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        node = context.node
        if node is None:
            return [None] * len(self.inputs)
        with autocast_context(BACKWARD.autocast):  # the caller's autocast: programs run without
            result = node.apply(*self._arguments_of_backward(context, cotangents))
        node.maybe_clear_saved_tensors()  # unless the graph is retained
        returned = list(result) if isinstance(result, tuple) else [result]
        while len(returned) > len(self.arguments) and returned[-1] is None:
            returned.pop()
        if len(returned) != len(self.arguments):
            raise self._gradient_error(
                "returned the wrong number of gradients", len(self.arguments), len(returned),
                "return one per argument of forward, None for an argument without a gradient",
            )  # fmt: skip
        tensors = {captured.argument: i for i, captured in enumerate(self.inputs) if captured.argument >= 0}
        gradients: list[torch.Tensor | None] = [None] * len(self.inputs)
        for argument, gradient in enumerate(returned):
            index = tensors.get(argument)
            if gradient is None:
                continue
            if index is None:
                fault = f"returned a gradient for argument {argument}, which is not a tensor"
                raise self._gradient_error(fault, None, type(gradient).__name__, "return None for it")
            if not isinstance(gradient, torch.Tensor):
                fault = f"returned a gradient that is not a tensor for argument {argument}"
                raise self._gradient_error(fault, "a tensor or None", type(gradient).__name__, "return a tensor")
            if self.inputs[index].requires_grad:
                gradients[index] = self._fit(argument, gradient, context.inputs[index])
        return gradients

    def _arguments_of_backward(self, context: Context, cotangents: Sequence[torch.Tensor | None]) -> list[Any]:
        """Return one cotangent or None per result of forward, as autograd's engine passes them."""
        node = context.node
        arguments: list[Any] = [None] * self.result_count
        for output, cotangent, (shape, dtype, device) in zip(self.outputs, cotangents, context.outputs, strict=True):
            if output.result < 0:
                continue
            if cotangent is None and node.materialize_grads and (
                output.differentiable or autograd.materializes_non_differentiable(node)
            ):  # fmt: skip
                cotangent = torch.zeros(shape, dtype=dtype, device=device)
            arguments[output.result] = cotangent
        return arguments

    def _fit(
        self, argument: int, gradient: torch.Tensor, metadata: tuple[torch.Size, torch.dtype, torch.device]
    ) -> Any:
        """Convert a gradient to the shape, dtype and device of its input; broadcast dimensions are summed."""
        shape, dtype, device = metadata
        if gradient.shape != shape:
            try:
                gradient = gradient.sum_to_size(shape)
            except RuntimeError:
                fault = f"returned a gradient of the wrong shape for argument {argument}"
                raise self._gradient_error(
                    fault, list(shape), list(gradient.shape), "return it in the argument's shape"
                ) from None
        if gradient.device != device:
            if gradient.dim() > 0:
                fault = f"returned a gradient on the wrong device for argument {argument}"
                raise self._gradient_error(fault, device, gradient.device, "return it on the argument's device")
            gradient = gradient.to(device)
        if gradient.is_complex() and not dtype.is_complex:
            gradient = gradient.real
        return gradient.to(dtype)

    def _gradient_error(self, fault: str, expected: object, got: object, todo: str) -> PythonOpError:
        return PythonOpError(
            f"backward of {self.name} {fault}", line_of(self.function, "backward"), expected, got, todo
        )


def _record_missing_gradients(
    missing: MissingGradients,
    wanted_indices: Sequence[int],
    free: Sequence[bool],
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """Record which inputs have no gradient. Eager computes nothing upstream of them, nor should the graph.

    Raises:
        GradientsChangedError: they are others than those that the program was built for.
    """
    newly_lacking = {
        i for i, f in zip(wanted_indices, free, strict=True) if gradients[i] is None and not f
    } - missing.varying
    newly_present = {i for i in missing.lacking if i not in wanted_indices and gradients[i] is not None}
    if newly_lacking or newly_present:
        missing.lacking |= newly_lacking
        missing.lacking -= newly_present
        missing.varying |= newly_present
        raise GradientsChangedError


_WARNED: set[str] = set()


def qualified_name(function: Any) -> str:
    """Return `module.Outer.<locals>.Name`: equal names in different scopes stay distinct."""
    return f"{function.__module__}.{function.__qualname__}"


def line_of(function: Any, method: str) -> str | None:
    """Return the source location of a method of the user's function."""
    code = getattr(inspect.unwrap(getattr(function, method)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}" if code else None


def requiring_grad(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return views of these tensors that require gradients and are not leaves, so that a function may change them.

    Their grad_fn raises if autograd ever continues past the function, and holds no tensor.
    """
    if not tensors:
        return ()
    return autograd.raising_views(_CONTINUED_PAST_FUNCTION, tensors)


_CONTINUED_PAST_FUNCTION = b"onnxtrain: autograd continued past a PythonOp's function; report this"


def _metadata(tensor: torch.Tensor) -> _Metadata:
    return tensor.shape, tensor.dtype, tensor.device


# PyTorch has no getter for `set_materialize_grads`: the context of a captured function remembers the value.


def _materializes(context: BackwardCFunction) -> bool:
    return context.__dict__.get("_onnxtrain_materializes", True)


def _set_materializes(context: BackwardCFunction, value: bool) -> None:
    autograd.set_materialize_grads(context, value)
    context.__dict__["_onnxtrain_materializes"] = value
