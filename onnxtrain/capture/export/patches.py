"""Patch PyTorch while a module is captured, for the capturing thread only, and undo all patches at the end.

* A user's `torch.autograd.Function` would be inlined and its backward silently lost: it becomes a PythonOp.
* Reentrant `torch.utils.checkpoint` makes torch.export put everything after it under no_grad: its function is called
  directly. What either kind of checkpoint runs is marked as a region (`checkpoint_regions.py`).
* Hooks on tensors inside forward, and seeds that it sets, would be lost: refused.
* The user's saved_tensors_hooks (save_on_cpu, a checkpoint around the ORTModule) would see fake tensors: disabled.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.traceback import preserve_node_meta
from torch.utils.checkpoint import CheckpointFunction

from onnxtrain.capture import source_location
from onnxtrain.capture.export.checkpoint_regions import region, regions_for
from onnxtrain.capture.export.data_attribute import data_is_detached
from onnxtrain.capture.export.torch_reports import needless_warnings_dropped
from onnxtrain.capture.four_bit_weights import matmul_4bit
from onnxtrain.capture.python_functions.calls import FunctionCalls
from onnxtrain.capture.refusals import refuse_outside_tensor
from onnxtrain.errors import CaptureError
from onnxtrain.ops.python_function.call import qualified_name
from onnxtrain.ops.python_function.run_context import is_uncaptured
from onnxtrain.torch_compat.autograd import SingleLevelFunction
from onnxtrain.torch_compat.modes import has_saved_tensors_hooks, leave_transforms, transform_depth
from onnxtrain.torch_compat.patch_points import (
    CHECKPOINT_GENERATOR,
    CREATE_ARGUMENT,
    FILL_DIAGONAL,
    FUNCTION_APPLY,
    FUNCTION_IN_TRANSFORM,
    HOOK_REGISTRATIONS,
    INFER_SIZE,
    RANDOM_STATES,
    PatchPoint,
)

CAPTURE_LOCK = threading.RLock()
_UNDER_WAY = threading.local()


@contextmanager
def capturing() -> Iterator[None]:
    """Hold the capture lock and apply the patches."""
    with CAPTURE_LOCK, ExitStack() as stack:
        stack.enter_context(needless_warnings_dropped())
        if has_saved_tensors_hooks():
            stack.enter_context(saved_tensors_hooks(_itself, _itself))
        # A graph of dynamo's enters and leaves `torch.func`'s transforms by calls, which an error leaves entered: the
        # results of what runs next would be wrapped tensors.
        stack.callback(leave_transforms, transform_depth())
        owner = threading.get_ident()
        calls = FunctionCalls()
        stack.enter_context(FUNCTION_APPLY.wrapped(lambda _: classmethod(_apply_for(owner, calls))))
        stack.enter_context(FUNCTION_IN_TRANSFORM.wrapped(partial(_in_transform_for, owner)))
        stack.enter_context(preserve_node_meta())  # else nothing is noted
        stack.enter_context(CHECKPOINT_GENERATOR.wrapped(partial(regions_for, owner)))
        if INFER_SIZE is not None:
            stack.enter_context(INFER_SIZE.replaced_in_thread(torch.broadcast_shapes))
        stack.enter_context(CREATE_ARGUMENT.replaced_in_thread(partial(_create_argument, CREATE_ARGUMENT.original)))
        stack.enter_context(data_is_detached())
        stack.enter_context(FILL_DIAGONAL.replaced_in_thread(partial(_fill_diagonal, FILL_DIAGONAL.original)))
        for lost in _NOT_REPEATED:
            stack.enter_context(lost.point.wrapped(partial(_refusal, owner, lost)))
        _UNDER_WAY.flag = True
        stack.callback(setattr, _UNDER_WAY, "flag", False)
        yield
        calls.check()


def _create_argument(original: Callable[[Any, Any], Any], tracer: Any, argument: Any) -> Any:
    """Refuse a parameter that the module does not hold: the tracer makes a constant of it, which would not train."""
    if isinstance(argument, torch.nn.Parameter) and not any(argument is p for p in tracer.root.parameters()):
        refuse_outside_tensor(argument)
    return original(tracer, argument)


def _fill_diagonal(
    original: Callable[..., torch.Tensor], tensor: torch.Tensor, fill_value: Any, wrap: bool = False
) -> torch.Tensor:
    """Fill the diagonal of a matrix through a view: functionalization does not follow `fill_diagonal_`'s strides."""
    if wrap or tensor.ndim != 2:
        return original(tensor, fill_value, wrap)
    tensor.diagonal().fill_(fill_value)
    return tensor


def capture_is_under_way() -> bool:
    """Whether this thread captures a module now: an ORTModule in it is a part of that module."""
    return getattr(_UNDER_WAY, "flag", False)


@dataclass(frozen=True)
class _NotRepeated:
    """A function that forward may call, and whose effect a graph would not repeat.

    Attributes:
        point: where the function is.
        todo: what to do instead.
        pytorch_may_call: whether PyTorch's own code calls it too, and undoes its effect.
    """

    point: PatchPoint
    todo: str
    pytorch_may_call: bool = False


_NOT_REPEATED = (
    *(_NotRepeated(point, "return the tensor from forward and use it there") for point in HOOK_REGISTRATIONS),
    *(
        _NotRepeated(point, "set the state of the generator outside of forward", pytorch_may_call=True)
        for point in RANDOM_STATES
    ),
)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _refusal(owner: int, lost: _NotRepeated, original: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        by_user = not lost.pytorch_may_call or source_location.is_user_file(sys._getframe(1).f_code.co_filename)
        if threading.get_ident() != owner or not by_user:
            return original(*args, **kwargs)
        raise CaptureError(
            f"{lost.point.attribute} inside forward cannot be captured: a graph would not repeat it",
            where=source_location.of_caller(),
            todo=f"the module runs in PyTorch; {lost.todo}",
        )

    return refuse


def _apply_for(owner: int, calls: FunctionCalls) -> Callable[..., Any]:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        here = threading.get_ident() == owner and not is_uncaptured()
        if here and cls is CheckpointFunction:
            return _run_checkpoint(*args, **kwargs)
        if here and not cls.__module__.startswith(_TORCHS_OWN):
            known = _KNOWN_FUNCTIONS.get(f"{cls.__module__}.{cls.__qualname__}")
            result = known(*args, **kwargs) if known is not None else NotImplemented
            return calls.apply(cls, args, kwargs) if result is NotImplemented else result
        return super(SingleLevelFunction, cls).apply(*args, **kwargs)

    return apply


# Modules whose functions PyTorch applies itself while it traces.
_TORCHS_OWN = ("torch._", "torch.utils.checkpoint")


# Functions of libraries that the graph has an op for: tried before they become a PythonOp.
_KNOWN_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"bitsandbytes.autograd._functions.MatMul4Bit": matmul_4bit}


def _run_checkpoint(run: Callable[..., Any], _preserve_rng_state: bool, *rest: Any) -> Any:
    if any(isinstance(t, torch.Tensor) and t.requires_grad for t in rest):
        with region():
            return run(*rest)
    with torch.no_grad():  # as in eager: a reentrant checkpoint of inputs without gradients gives none
        return run(*rest)


def _in_transform_for(owner: int, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != owner or is_uncaptured():
            return original(cls, *args, **kwargs)
        raise CaptureError(
            f"the custom autograd.Function {qualified_name(cls)} is applied inside a torch.func transform",
            where=source_location.of_caller(),
            todo="the module runs in PyTorch; apply the function outside of vmap, grad, jvp and their like",
        )

    return call
