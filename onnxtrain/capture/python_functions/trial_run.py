"""Run a user's custom function outside the traced graph, to observe what a call of it does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from onnxtrain.errors import CaptureError
from onnxtrain.ops.python_function.call import Input, Output, line_of, qualified_name, requiring_grad
from onnxtrain.ops.python_function.run_context import uncaptured
from onnxtrain.ops.python_function.template import SizeResult, Slot, fill_slots, parts, rebuilt
from onnxtrain.torch_compat.fake_tensors import fake_mode_of
from onnxtrain.torch_compat.tensors import storage_id, version_of

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class CallArguments(Protocol):
    """The arguments of a call; see `calls.Arguments`."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    tensors: list[torch.Tensor]
    inputs: list[Input]
    sizes: list[torch.SymInt]


@dataclass(frozen=True)
class TrialRun:
    """The result and the effects of a call.

    Attributes:
        raw: the result that it returned.
        result: the same, with a Slot for each tensor and a SizeResult for each size.
        outputs: the tensors in the result.
        shapes: the shapes of these tensors.
        copied: indices of the tensor inputs that it mutated.
        returned: those of them that are not in the result, because they were not marked dirty.
        recorded: whether autograd recorded the call.
    """

    raw: Any
    result: Any
    outputs: tuple[Output, ...]
    shapes: tuple[torch.Size, ...]
    copied: frozenset[int]
    returned: tuple[int, ...]
    recorded: bool


def try_call(call: CallArguments, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> TrialRun:
    """Run the function on aliases of `tensors`, in the current grad mode and autocast state.

    Args:
        call: the function and its arguments.
        tensors: the tensors to run it on.
        sizes: the sizes to run it with.

    Raises:
        CaptureError: the function mutates an input that shares memory with another, or returns an unsupported object.
    """
    grad = torch.is_grad_enabled()
    recorded = grad and any(call_input.requires_grad and call_input.argument >= 0 for call_input in call.inputs)
    with ExitStack() as stack:
        stack.enter_context(uncaptured())
        stack.enter_context(disable_proxy_modes_tracing())
        mode = fake_mode_of(tensors)
        if mode is not None and mode.shape_env is not None:  # the operator's meta function makes the unbacked symbols
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(torch.inference_mode(False))  # inference tensors count no versions
        stack.enter_context(torch.set_grad_enabled(grad))
        aliases = _aliases(call, tensors)
        versions = [version_of(t) for t in aliases]
        arguments = [fill_slots(a, aliases, sizes) for a in call.arguments]
        keywords = {k: fill_slots(a, aliases, sizes) for k, a in call.keywords.items()}
        raw = call.function.apply(*arguments, **keywords)
    copied = [i for i, (t, version) in enumerate(zip(aliases, versions, strict=True)) if version_of(t) != version]
    _refuse_shared_memory(call, aliases, copied)
    returned_tensors: list[tuple[torch.Tensor, int]] = []
    result = _template(call, raw, returned_tensors, is_top=True)
    last = {id(tensor): index for index, (tensor, _) in enumerate(returned_tensors)}
    # A tensor that is returned twice is one tensor to autograd, whose gradient arrives at its last position.
    result = fill_slots(result, [Slot("tensor", last[id(tensor)]) for tensor, _ in returned_tensors], ())
    input_of = {storage_id(t): i for i, t in enumerate(aliases) if i not in copied}
    changed = [next((i for i in copied if aliases[i] is t), -1) for t, _ in returned_tensors]
    outputs = tuple(
        Output(
            dtype=tensor.dtype,
            rank=tensor.dim(),
            device=tensor.device,
            differentiable=recorded and position >= 0 and tensor.requires_grad,
            result=position,
            alias=input_of.get(storage_id(tensor), -1),
            changed=changed[index],
        )
        for index, (tensor, position) in enumerate(returned_tensors)
    )
    returned = tuple(i for i in copied if i not in changed)
    shapes = tuple(tensor.shape for tensor, _ in returned_tensors)
    return TrialRun(raw, result, outputs, shapes, frozenset(copied), returned, recorded)


def _aliases(call: CallArguments, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Make aliases of the tensors with version counters of their own, and requires_grad as in the call."""
    differentiable = [
        i for i, call_input in enumerate(call.inputs) if call_input.requires_grad and call_input.argument >= 0
    ]
    aliases = [t.clone() if t.is_inference() else t.data for t in tensors]
    for i, tensor in zip(differentiable, requiring_grad([aliases[i] for i in differentiable]), strict=True):
        aliases[i] = tensor
    return aliases


def _refuse_shared_memory(call: CallArguments, aliases: Sequence[torch.Tensor], copied: Sequence[int]) -> None:
    for i in copied:
        others = [j for j, t in enumerate(aliases) if j != i and storage_id(t) == storage_id(aliases[i])]
        if others:
            raise CaptureError(
                f"forward of {qualified_name(call.function)} changes tensor input {i} in place, and input {others[0]} "
                "shares its memory",
                where=line_of(call.function, "forward"),
                todo=f"the module runs in PyTorch; pass a copy of input {others[0]}",
            )


def _template(call: CallArguments, value: Any, tensors: list[tuple[torch.Tensor, int]], is_top: bool) -> Any:
    """Replace the tensors of a result by Slots.

    Args:
        call: the function and its arguments.
        value: the result, or a part of it.
        tensors: the tensors are appended here, with their positions in the result's tuple; -1 for a nested tensor.
        is_top: whether `value` is the whole result.
    """
    if isinstance(value, torch.Tensor):
        tensors.append((value, 0 if is_top else -1))
        return Slot("tensor", len(tensors) - 1)
    if isinstance(value, torch.SymInt):
        static_size = value.node.maybe_as_int()
        return SizeResult() if static_size is None else static_size
    if isinstance(value, (list, tuple, dict)):
        content = []
        for index, part in enumerate(parts(value)):
            if is_top and isinstance(value, tuple) and isinstance(part, torch.Tensor):
                tensors.append((part, index))
                content.append(Slot("tensor", len(tensors) - 1))
            else:
                content.append(_template(call, part, tensors, is_top=False))
        return rebuilt(value, content)
    if isinstance(value, _CONSTANTS):
        return value
    raise CaptureError(
        f"forward of {qualified_name(call.function)} returns an object that a graph cannot hold",
        where=line_of(call.function, "forward"),
        expected="tensors, plain constants, and lists, tuples and dicts of them",
        got=type(value).__qualname__,
        todo="the module runs in PyTorch; return tensors, and keep other objects on ctx",
    )
