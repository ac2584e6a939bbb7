"""Calls of a user's `torch.autograd.Function` while a module is captured: each becomes one PythonOp.

    y = F.apply(x, w, 3)     ──>     python_op([x, w], [], "F#0") -> [y]

The function is run aside first, on fake tensors, to see what it does: what it returns, which results can have a
gradient, what it changes in place, which results lie in an input's memory. PyTorch's graph then gets one operator
without side effects; changes in place show in it as copies.
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
from onnxtrain.capture.python_functions.output_sizes import declared_rule, deduced_rule, node_proto, sizes_fixed
from onnxtrain.capture.python_functions.trial_run import Run, run_aside
from onnxtrain.errors import CaptureError
from onnxtrain.ops.python_function.call import Input, PythonCall, ShapeRule, line_of, qualified_name
from onnxtrain.ops.python_function.node import TORCH_OP, register
from onnxtrain.ops.python_function.run_context import current_autocast
from onnxtrain.ops.python_function.template import SizeResult, Slot, parts, rebuilt, slots
from onnxtrain.torch_compat.fake_tensors import FakeTensor
from onnxtrain.torch_compat.tensors import version_of

_KNOWN: WeakValueDictionary[Any, PythonCall] = WeakValueDictionary()


class FunctionCalls:
    """The calls of functions in one capture. They live until the next one: by then the graph holds them."""

    _latest: FunctionCalls | None = None

    def __init__(self) -> None:
        self._calls: list[PythonCall] = []
        self._aliases: list[tuple[PythonCall, int, torch.Tensor, int]] = []
        FunctionCalls._latest = self

    @staticmethod
    def watched() -> list[torch.Tensor]:
        """The tensors that the capture under way looks at again when it ends (`check`)."""
        latest = FunctionCalls._latest
        return [] if latest is None else [tensor for _, _, tensor, _ in latest._aliases]

    def apply(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Captures `function.apply(*args, **kwargs)`.

        Raises:
            CaptureError: it cannot be a node; says why.
        """
        arguments = Arguments(function, args, kwargs)
        run, rule = _observed(arguments)
        call = self._held(_call(arguments, run, rule))
        given = [t if k.argument >= 0 else t.detach() for t, k in zip(arguments.tensors, call.inputs, strict=True)]
        return self._result(arguments, run, call, TORCH_OP(given, arguments.sizes, call.key))

    def check(self) -> None:
        """Raises where a result in an input's memory, or that input, was changed in place after the call.

        In eager both change; in the graph they are two tensors.
        """
        for call, output, tensor, version in self._aliases:
            if version_of(tensor) != version:
                raise CaptureError(
                    f"output {output} of {call.name} lies in the memory of an input, and one of the two is changed in "
                    "place later",
                    where=line_of(call.function, "forward"),
                    todo="the module runs in PyTorch; return a copy from the function's forward",
                )

    def _held(self, call: PythonCall) -> PythonCall:
        """The call that is like this one in everything, so that two captures that do the same are the same graph."""
        known = _KNOWN.setdefault(_identity(call), call)
        if not known.key:
            known.key = register(known)
        self._calls.append(known)
        return known

    def _result(self, arguments: Arguments, run: Run, call: PythonCall, made: Sequence[torch.Tensor]) -> Any:
        """What the user's code gets, after the changes in place."""
        results: list[torch.Tensor] = []
        for number, (tensor, known) in enumerate(zip(made, call.outputs, strict=False)):
            if known.changed >= 0:
                results.append(arguments.tensors[known.changed].copy_(tensor))
                continue
            results.append(self._in_place_of(arguments, call, number, _detached(tensor, known.differentiable)))
        for offset, i in enumerate(call.returned):
            arguments.tensors[i].copy_(_detached(made[len(call.outputs) + offset], False))
        return _replaced(call.result, run.raw, results)

    def _in_place_of(self, arguments: Arguments, call: PythonCall, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """A result: the input itself where it is that and no gradient is recorded; changes of either show in both."""
        known = call.outputs[number]
        if known.alias < 0:
            return tensor
        source = arguments.tensors[known.alias]
        if not call.recorded and source.dtype == tensor.dtype and source.shape == tensor.shape:
            return source.view_as(source)
        self._aliases += [(call, number, t, version_of(t)) for t in (source, tensor) if not t.is_inference()]
        return tensor


def _detached(tensor: torch.Tensor, differentiable: bool) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad and not differentiable else tensor


def _observed(arguments: Arguments) -> tuple[Run, ShapeRule | None]:
    """What the call does; and a rule for its outputs' sizes, where it cannot be seen on fake tensors."""
    infer = getattr(arguments.function, "infer_shape", None)
    failure: Exception | None = None
    fixed = False
    try:
        with sizes_fixed() as noted:
            run = run_aside(arguments, arguments.tensors, arguments.sizes)
        fixed = noted.fixed
    except CaptureError:
        raise
    except Exception as error:  # noqa: BLE001  # the user's forward raises anything on tensors without elements
        failure, run = error, None
    if infer is not None:
        return declared_rule(arguments, run, infer)
    if run is not None and not fixed:
        return run, None
    try:
        seen, rule = deduced_rule(arguments, failure)
    except CaptureError:
        if run is None:
            raise
        return run, None  # then PyTorch's guards fix the sizes
    return run or seen, rule


def _call(arguments: Arguments, run: Run, rule: ShapeRule | None) -> PythonCall:
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
    """What the user's `alias_input` says beside what was seen."""
    declare = getattr(call.function, "alias_input", None)
    if declare is None:
        return call
    forward, backward = declare(node_proto(call.name, len(call.inputs)).SerializeToString())
    for what, found, count in (
        ("outputs", forward, len(call.outputs)),
        ("arguments", backward, len(call.arguments)),
    ):
        if len(found) != count:
            raise CaptureError(
                f"alias_input of {call.name} returned a list of the wrong length",
                where=line_of(call.function, "alias_input"),
                expected=f"{count}, the number of {what} of forward",
                got=len(found),
                todo="return (for each output the number of an argument or -1, for each argument the same or -1)",
            )
    places = {known.argument: i for i, known in enumerate(call.inputs) if known.argument >= 0}
    outputs = tuple(
        replace(known, alias=places[index]) if index in places and known.alias < 0 else known
        for known, index in zip(call.outputs, forward, strict=True)
    )
    return replace(call, outputs=outputs, backward_reuse=tuple(backward))


def _replaced(template: Any, raw: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """What the function returned, with the graph's tensors in it."""
    if isinstance(template, Slot):
        return tensors[template.index]
    if next(slots(template), None) is None:
        return raw
    return rebuilt(raw, [_replaced(t, r, tensors) for t, r in zip(parts(template), parts(raw), strict=True)])


# Arguments


class Arguments:
    """The arguments of one call, tensors and sizes taken out of them.

    Attributes:
        function: the user's class.
        arguments, keywords: with a Slot for each tensor, size and number made from sizes.
        tensors, inputs: the tensors, and what is known of each.
        sizes: the sizes.
    """

    def __init__(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.tensors: list[torch.Tensor] = []
        self.inputs: list[Input] = []
        self.sizes: list[torch.SymInt] = []
        self.arguments = tuple(self._template(a, number) for number, a in enumerate(args))
        self.keywords = {k: self._template(a, -1) for k, a in kwargs.items()}

    def _template(self, value: Any, argument: int) -> Any:
        match value:
            case torch.Tensor():
                self._refuse_own_leaf(value)
                return self._tensor(value, argument)
            case torch.SymInt():
                known = value.node.maybe_as_int()
                if known is not None:
                    return known
                self.sizes.append(value)
                return Slot("size", len(self.sizes) - 1)
            case torch.SymFloat():
                exact = value.node.maybe_as_float()
                if exact is not None:
                    return exact
                number = torch.full((), value, dtype=torch.float64, device="cpu")  # type: ignore[call-overload]  # takes it
                return Slot("number", self._tensor(number, -1).index)
            case torch.SymBool():
                return bool(value)
            case list() | tuple() | dict():
                content = [self._template(part, -1) for part in parts(value)]
                return value if next(slots(content), None) is None else rebuilt(value, content)
        hidden = next(_tensors_in(value, set(), _DEPTH), None)
        if hidden is not None:
            raise CaptureError(
                f"an argument of {qualified_name(self.function)} is an object that holds a tensor of this forward",
                where=source_location.of_caller(),
                got=f"{type(value).__qualname__} with a tensor of shape {list(hidden.shape)}",
                todo="the module runs in PyTorch; pass the tensor itself, or in a list, tuple or dict",
            )
        return value

    def _tensor(self, tensor: torch.Tensor, argument: int) -> Slot:
        self.tensors.append(tensor)
        self.inputs.append(Input(tensor.dtype, tensor.dim(), tensor.requires_grad, argument, tensor.device))
        return Slot("tensor", len(self.tensors) - 1)

    def _refuse_own_leaf(self, tensor: torch.Tensor) -> None:
        """A leaf made in forward that requires a gradient lets backward run though no input needs one."""
        if not (tensor.requires_grad and tensor.is_leaf and isinstance(tensor, FakeTensor)):
            return
        if not _stands_for_real(tensor):
            raise CaptureError(
                f"{qualified_name(self.function)} is given a tensor that forward itself made require a gradient",
                where=source_location.of_caller(),
                todo="the module runs in PyTorch; make the tensor a parameter of the module",
            )


_DEPTH = 4  # objects inside each other that are searched for tensors


def _stands_for_real(tensor: FakeTensor) -> bool:
    """Whether a fake tensor was made for one of the user's, and not for an operator's result (of the device "meta")."""
    converter = tensor.fake_mode.fake_tensor_converter.meta_converter
    numbers = {number for number, fake in converter.tensor_memo.items() if fake is tensor}
    sources = converter.describer.lookup_tensor.items()
    return any(number in numbers and source.device.type != "meta" for source, number in sources)


def _tensors_in(value: Any, seen: set[int], depth: int) -> Iterator[torch.Tensor]:
    """Fake tensors that an object holds: as attributes, in containers, in what a function closes over."""
    if isinstance(value, FakeTensor):
        yield value
        return
    if depth == 0 or id(value) in seen or isinstance(value, (type, torch.nn.Module, torch.Tensor)):
        return
    seen.add(id(value))
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
        yield from _tensors_in(part, seen, depth - 1)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # asks
    except ValueError:
        return False
    return True


# The same call


def _identity(call: PythonCall) -> Any:
    return (
        call.function, _content(call.arguments), _content(call.keywords), call.inputs, call.outputs,
        _content(call.result), call.copied, call.returned, call.recorded, call.autocast, call.rule, call.backward_reuse,
    )  # fmt: skip


def _content(template: Any) -> Any:
    """A template as a key: constants by type and text, containers by content, other objects by identity."""
    if isinstance(template, (Slot, SizeResult)):
        return template
    if type(template) in (list, tuple):
        return type(template), *map(_content, template)
    if type(template) is dict:
        return dict, *((key, _content(part)) for key, part in template.items())
    if type(template) in (type(None), bool, int, float, complex, str, bytes):
        return type(template), repr(template)
    return "object", id(template)
