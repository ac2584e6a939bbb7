"""Capture each call of a user's `torch.autograd.Function` as one PythonOp.

    y = F.apply(x, w, 3)     ──>     python_op([x, w], [], "F#0") -> [y]

A trial run of the function on fake tensors shows what it returns, which results can have a gradient, which inputs it
mutates, and which results share memory with an input. The traced graph then gets one operator without side effects,
followed by copies for the mutations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakValueDictionary

import torch

from onnxtrain.capture import source_location
from onnxtrain.capture.python_functions.output_sizes import (
    declared_rule,
    deduced_rule,
    node_proto,
    record_specialization,
)
from onnxtrain.capture.python_functions.trial_run import TrialRun, try_call
from onnxtrain.errors import CaptureError
from onnxtrain.ops.python_function.call import Input, PythonCall, ShapeRule, line_of, qualified_name
from onnxtrain.ops.python_function.node import TORCH_OP, register
from onnxtrain.ops.python_function.run_context import current_autocast
from onnxtrain.ops.python_function.template import SizeResult, Slot, parts, rebuilt, slots
from onnxtrain.torch_compat.fake_tensors import FakeTensor
from onnxtrain.torch_compat.tensors import version_of

_CALLS: WeakValueDictionary[Any, PythonCall] = WeakValueDictionary()


class FunctionCalls:
    """The calls of functions in one capture. They live until the next one, when the graph holds them."""

    _latest: FunctionCalls | None = None

    def __init__(self) -> None:
        self._calls: list[PythonCall] = []
        self._aliases: list[tuple[PythonCall, int, torch.Tensor, int]] = []
        FunctionCalls._latest = self

    @staticmethod
    def watched() -> list[torch.Tensor]:
        """Return the tensors whose versions the current capture compares when it ends (`check`)."""
        latest = FunctionCalls._latest
        return [] if latest is None else [tensor for _, _, tensor, _ in latest._aliases]

    def apply(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Capture `function.apply(*args, **kwargs)`, and return its results.

        Raises:
            CaptureError: the call cannot become a node; the error says why.
        """
        arguments = Arguments(function, args, kwargs)
        run, rule = _observe(arguments)
        call = self._deduplicated(_python_call(arguments, run, rule))
        tensors = [t if k.argument >= 0 else t.detach() for t, k in zip(arguments.tensors, call.inputs, strict=True)]
        return self._results(arguments, run, call, TORCH_OP(tensors, arguments.sizes, call.key))

    def check(self) -> None:
        """Check that no result that shares an input's memory, and no such input, was mutated after the call.

        In eager both would change; in the graph they are two tensors.

        Raises:
            CaptureError: one was mutated.
        """
        for call, output, tensor, version in self._aliases:
            if version_of(tensor) != version:
                raise CaptureError(
                    f"output {output} of {call.name} shares the memory of an input, and one of the two is changed in "
                    "place later",
                    where=line_of(call.function, "forward"),
                    todo="the module runs in PyTorch; return a copy from the function's forward",
                )

    def _deduplicated(self, call: PythonCall) -> PythonCall:
        """Return an equal call of an earlier capture, if there is one: equal captures then have equal graphs."""
        shared = _CALLS.setdefault(_identity(call), call)
        if not shared.key:
            shared.key = register(shared)
        self._calls.append(shared)
        return shared

    def _results(self, arguments: Arguments, run: TrialRun, call: PythonCall, computed: Sequence[torch.Tensor]) -> Any:
        """Copy mutated inputs back, and return the results to the user's code.

        Args:
            arguments: the call's arguments.
            run: the trial run.
            call: the call.
            computed: the results of the operator: the outputs, then the new values of inputs that are not returned.
        """
        tensors: list[torch.Tensor] = []
        for index, (tensor, output) in enumerate(zip(computed, call.outputs, strict=False)):
            if output.changed >= 0:
                tensors.append(arguments.tensors[output.changed].copy_(tensor))
                continue
            tensors.append(self._output(arguments, call, index, _detached(tensor, output.differentiable)))
        for offset, i in enumerate(call.returned):
            arguments.tensors[i].copy_(_detached(computed[len(call.outputs) + offset], False))
        return _fill_result(call.result, run.raw, tensors)

    def _output(self, arguments: Arguments, call: PythonCall, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a view of the input that it is if autograd records nothing: they share mutations."""
        output = call.outputs[index]
        if output.alias < 0:
            return tensor
        source = arguments.tensors[output.alias]
        if not call.recorded and source.dtype == tensor.dtype and source.shape == tensor.shape:
            return source.view_as(source)
        self._aliases += [(call, index, t, version_of(t)) for t in (source, tensor) if not t.is_inference()]
        return tensor


def _detached(tensor: torch.Tensor, differentiable: bool) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad and not differentiable else tensor


def _observe(arguments: Arguments) -> tuple[TrialRun, ShapeRule | None]:
    """Run the function on trial, and find a rule for the sizes of its outputs if the fake tensors do not tell them."""
    if getattr(arguments.function, "has_checked_sizes", False):
        return deduced_rule(arguments, None)
    infer = getattr(arguments.function, "infer_shape", None)
    failure: Exception | None = None
    is_specialized = False
    try:
        with record_specialization() as specialization:
            run = try_call(arguments, arguments.tensors, arguments.sizes)
        is_specialized = specialization.happened
    except CaptureError:
        raise
    except Exception as error:  # noqa: BLE001  # the user's forward may raise anything on fake tensors
        failure, run = error, None
    if infer is not None:
        return declared_rule(arguments, run, infer)
    if run is not None and not is_specialized:
        return run, None
    try:
        run_at_example, rule = deduced_rule(arguments, failure)
    except CaptureError:
        if run is None:
            raise
        return run, None  # PyTorch's guards then fix the sizes
    return run or run_at_example, rule


def _python_call(arguments: Arguments, run: TrialRun, rule: ShapeRule | None) -> PythonCall:
    for i in run.returned:
        if arguments.tensors[i].requires_grad:
            raise CaptureError(
                f"forward of {qualified_name(arguments.function)} changes its tensor input {i} in place without "
                "ctx.mark_dirty, and a gradient flows through that input",
                where=source_location.of_caller(),
                todo="the module runs in PyTorch; mark the input as dirty and return it",
            )
    call = PythonCall(
        function=arguments.function,
        arguments=arguments.arguments,
        keywords=arguments.keywords,
        inputs=tuple(arguments.inputs),
        outputs=run.outputs,
        result=run.result,
        copied=run.copied,
        returned=run.returned,
        recorded=run.recorded,
        autocast=current_autocast(),
        rule=rule,
    )
    return _with_declared_aliases(call)


def _with_declared_aliases(call: PythonCall) -> PythonCall:
    """Add the aliases that the user's `alias_input` declares to those that the trial run showed."""
    declare = getattr(call.function, "alias_input", None)
    if declare is None:
        return call
    forward, backward = declare(node_proto(call.name, len(call.inputs)).SerializeToString())
    for kind, aliases, count in (
        ("outputs", forward, len(call.outputs)),
        ("arguments", backward, len(call.arguments)),
    ):
        if len(aliases) != count:
            raise CaptureError(
                f"alias_input of {call.name} returned a list of the wrong length",
                where=line_of(call.function, "alias_input"),
                expected=f"{count} entries, one for each of forward's {kind}",
                got=len(aliases),
                todo="return two lists: for each output of forward, and for each argument, the index of the argument "
                "whose memory it reuses, or -1",
            )
    input_of = {call_input.argument: i for i, call_input in enumerate(call.inputs) if call_input.argument >= 0}
    outputs = tuple(
        replace(output, alias=input_of[argument]) if argument in input_of and output.alias < 0 else output
        for output, argument in zip(call.outputs, forward, strict=True)
    )
    return replace(call, outputs=outputs, backward_reuse=tuple(backward))


def _fill_result(template: Any, raw: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the result of the trial run with the graph's tensors in the place of its own."""
    if isinstance(template, Slot):
        return tensors[template.index]
    if next(slots(template), None) is None:
        return raw
    return rebuilt(raw, [_fill_result(t, r, tensors) for t, r in zip(parts(template), parts(raw), strict=True)])


# Arguments


class Arguments:
    """The arguments of one call, separated into templates, tensors and sizes.

    Attributes:
        function: the user's class.
        arguments, keywords: the arguments, with a Slot for each tensor, size and float computed from sizes.
        tensors: the tensors.
        inputs: the description of each tensor.
        sizes: the symbolic sizes.
    """

    def __init__(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.tensors: list[torch.Tensor] = []
        self.inputs: list[Input] = []
        self.sizes: list[torch.SymInt] = []
        self.arguments = tuple(self._template(value, index) for index, value in enumerate(args))
        self.keywords = {k: self._template(a, -1) for k, a in kwargs.items()}

    def _template(self, value: Any, argument: int) -> Any:
        match value:
            case torch.Tensor():
                self._refuse_leaf_of_forward(value)
                return self._tensor(value, argument)
            case torch.SymInt():
                static_size = value.node.maybe_as_int()
                if static_size is not None:
                    return static_size
                self.sizes.append(value)
                return Slot("size", len(self.sizes) - 1)
            case torch.SymFloat():
                static_float = value.node.maybe_as_float()
                if static_float is not None:
                    return static_float
                scalar = torch.full((), value, dtype=torch.float64, device="cpu")  # type: ignore[call-overload]  # takes it
                return Slot("number", self._tensor(scalar, -1).index)
            case torch.SymBool():
                return bool(value)
            case list() | tuple() | dict():
                content = [self._template(part, -1) for part in parts(value)]
                if next(slots(content), None) is None:
                    return value
                return tuple(content) if isinstance(value, torch.Size) else rebuilt(value, content)  # a Size holds ints
        tensor = next(_tensors_in(value, set(), _DEPTH), None)
        if tensor is not None:
            raise CaptureError(
                f"an argument of {qualified_name(self.function)} is an object that holds a tensor of this forward",
                where=source_location.of_caller(),
                expected="tensors as arguments, or in lists, tuples or dicts",
                got=f"{type(value).__qualname__} with a tensor of shape {list(tensor.shape)}",
                todo="the module runs in PyTorch; pass the tensor itself, or in a list, tuple or dict",
            )
        return value

    def _tensor(self, tensor: torch.Tensor, argument: int) -> Slot:
        self.tensors.append(tensor)
        self.inputs.append(Input(tensor.dtype, tensor.dim(), tensor.requires_grad, argument, tensor.device))
        return Slot("tensor", len(self.tensors) - 1)

    def _refuse_leaf_of_forward(self, tensor: torch.Tensor) -> None:
        """Refuse a leaf that forward created and that requires a gradient: backward runs even if no input needs one.

        Under no_grad there is no backward, and `ravel` of an input that requires a gradient is such a leaf.
        """
        is_leaf = tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled()
        if not (is_leaf and isinstance(tensor, FakeTensor)):
            return
        if not _represents_real_tensor(tensor):
            raise CaptureError(
                f"an argument of {qualified_name(self.function)} is a tensor that forward created with "
                "requires_grad=True",
                where=source_location.of_caller(),
                todo="the module runs in PyTorch; make the tensor a parameter of the module",
            )


_DEPTH = 4  # levels of nested objects that are searched for tensors


def _represents_real_tensor(tensor: FakeTensor) -> bool:
    """Return whether a fake tensor stands for a tensor of the user, not for an operator's result (on device "meta")."""
    converter = tensor.fake_mode.fake_tensor_converter.meta_converter
    ids = {tensor_id for tensor_id, fake in converter.tensor_memo.items() if fake is tensor}
    sources = converter.describer.lookup_tensor.items()
    return any(tensor_id in ids and source.device.type != "meta" for source, tensor_id in sources)


def _tensors_in(value: Any, visited: set[int], depth: int) -> Iterator[torch.Tensor]:
    """Yield the fake tensors that an object holds in attributes, containers or closures."""
    if isinstance(value, FakeTensor):
        yield value
        return
    if depth == 0 or id(value) in visited or isinstance(value, (type, torch.nn.Module, torch.Tensor)):
        return
    visited.add(id(value))
    inner: list[Any] = []
    if isinstance(value, (list, tuple, set, frozenset)):
        inner += value
    elif isinstance(value, dict):
        inner += value.values()
    elif isinstance(value, FunctionType):
        inner += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        inner += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, MethodType):
        inner += [value.__self__, value.__func__]
    elif isinstance(value, partial):
        inner += [value.func, *value.args, *value.keywords.values()]
    else:
        inner += getattr(value, "__dict__", {}).values()
        inner += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    for part in inner:
        yield from _tensors_in(part, visited, depth - 1)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises if it is empty
    except ValueError:
        return False
    return True


# Comparing calls


def _identity(call: PythonCall) -> Any:
    return (
        call.function, _template_key(call.arguments), _template_key(call.keywords), call.inputs, call.outputs,
        _template_key(call.result), call.copied, call.returned, call.recorded, call.autocast, call.rule,
        call.backward_reuse,
    )  # fmt: skip


def _template_key(template: Any) -> Any:
    """Return a key: constants by type and text, containers by content, other objects by identity."""
    if isinstance(template, (Slot, SizeResult)):
        return template
    if type(template) in (list, tuple):
        return type(template), *map(_template_key, template)
    if type(template) is dict:
        return dict, *((key, _template_key(part)) for key, part in template.items())
    if type(template) in (type(None), bool, int, float, complex, str, bytes):
        return type(template), repr(template)
    return "object", id(template)
