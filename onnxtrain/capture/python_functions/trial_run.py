"""Runs a user's function aside from the capture, to see what a call of it does."""

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
    """What is known of a call before it runs."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    tensors: list[torch.Tensor]
    inputs: list[Input]
    sizes: list[torch.SymInt]


@dataclass(frozen=True)
class Run:
    """What a call did.

    Attributes:
        raw: what it returned.
        result: the same with a Slot for each tensor and a SizeResult for each size.
        outputs: the tensors.
        shapes: their sizes.
        copied: tensor inputs that it changed in place.
        returned: those of them that were not marked dirty.
        recorded: whether autograd recorded it.
    """

    raw: Any
    result: Any
    outputs: tuple[Output, ...]
    shapes: tuple[torch.Size, ...]
    copied: frozenset[int]
    returned: tuple[int, ...]
    recorded: bool


def run_aside(call: CallArguments, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> Run:
    """Runs the function on `tensors`, which stay as they are, in the grad mode and autocast of now."""
    grad = torch.is_grad_enabled()
    recorded = grad and any(k.requires_grad and k.argument >= 0 for k in call.inputs)
    with ExitStack() as stack:
        stack.enter_context(uncaptured())
        stack.enter_context(disable_proxy_modes_tracing())
        mode = fake_mode_of(tensors)
        if mode is not None and mode.shape_env is not None:  # sizes from elements get their symbols when the graph does
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(torch.inference_mode(False))  # where changes in place would not be counted
        stack.enter_context(torch.set_grad_enabled(grad))
        given = _stand_ins(call, tensors)
        versions = [version_of(t) for t in given]
        arguments = [fill_slots(a, given, sizes) for a in call.arguments]
        keywords = {k: fill_slots(a, given, sizes) for k, a in call.keywords.items()}
        raw = call.function.apply(*arguments, **keywords)
    copied = [i for i, (t, version) in enumerate(zip(given, versions, strict=True)) if version_of(t) != version]
    _refuse_shared(call, given, copied)
    found: list[tuple[torch.Tensor, int]] = []
    result = _template(call, raw, found, top=True)
    last = {id(tensor): number for number, (tensor, _) in enumerate(found)}
    # A tensor that is returned twice is one to autograd, and its gradient comes at its last place.
    result = fill_slots(result, [Slot("tensor", last[id(tensor)]) for tensor, _ in found], ())
    memory = {_memory(t): i for i, t in enumerate(given) if i not in copied}
    changed = [next((i for i in copied if given[i] is t), -1) for t, _ in found]
    outputs = tuple(
        Output(
            dtype=tensor.dtype,
            rank=tensor.dim(),
            device=tensor.device,
            differentiable=recorded and position >= 0 and tensor.requires_grad,
            result=position,
            alias=memory.get(_memory(tensor), -1),
            changed=changed[number],
        )
        for number, (tensor, position) in enumerate(found)
    )
    returned = tuple(i for i in copied if i not in changed)
    return Run(raw, result, outputs, tuple(t.shape for t, _ in found), frozenset(copied), returned, recorded)


def _stand_ins(call: CallArguments, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors in the same memory, with version counters of their own, that require gradients as the real ones do."""
    marked = [i for i, known in enumerate(call.inputs) if known.requires_grad and known.argument >= 0]
    given = [t.clone() if t.is_inference() else t.data for t in tensors]
    for i, tensor in zip(marked, requiring_grad([given[i] for i in marked]), strict=True):
        given[i] = tensor
    return given


def _memory(tensor: torch.Tensor) -> Any:
    return storage_id(tensor)


def _refuse_shared(call: CallArguments, given: Sequence[torch.Tensor], copied: Sequence[int]) -> None:
    for i in copied:
        others = [j for j, t in enumerate(given) if j != i and _memory(t) == _memory(given[i])]
        if others:
            raise CaptureError(
                f"forward of {qualified_name(call.function)} changes tensor input {i} in place, and input {others[0]} "
                "lies in the same memory",
                where=line_of(call.function, "forward"),
                todo="the module runs in PyTorch; pass a copy",
            )


def _template(call: CallArguments, value: Any, found: list[tuple[torch.Tensor, int]], top: bool) -> Any:
    """A result with Slots for its tensors, which are appended to `found`, with their number among the results."""
    if isinstance(value, torch.Tensor):
        found.append((value, 0 if top else -1))
        return Slot("tensor", len(found) - 1)
    if isinstance(value, torch.SymInt):
        known = value.node.maybe_as_int()
        return SizeResult() if known is None else known
    if isinstance(value, (list, tuple, dict)):
        content = []
        for number, part in enumerate(parts(value)):
            if top and isinstance(value, tuple) and isinstance(part, torch.Tensor):
                found.append((part, number))
                content.append(Slot("tensor", len(found) - 1))
            else:
                content.append(_template(call, part, found, top=False))
        return rebuilt(value, content)
    if isinstance(value, _CONSTANTS):
        return value
    raise CaptureError(
        f"forward of {qualified_name(call.function)} returns an object that a graph cannot hold",
        where=line_of(call.function, "forward"),
        expected="tensors, plain constants, and lists, tuples and dicts of them",
        got=type(value).__qualname__,
        todo="the module runs in PyTorch",
    )
