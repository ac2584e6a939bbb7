"""Patch PyTorch while a module is captured, for the capturing thread only, and undo all patches at the end.

* A user's `torch.autograd.Function` becomes a PythonOp; torch.export would inline it and silently lose its backward.
* Reentrant `torch.utils.checkpoint` makes torch.export put everything after it under no_grad, so its function is
  called directly. The nodes of either kind of checkpoint are marked as a checkpoint_region (`checkpoint_regions.py`).
* Tensor hooks and random seeds set inside forward are refused; the graph would lose them.
* Imports inside forward run outside of the trace.
* The user's saved_tensors_hooks (save_on_cpu, a checkpoint around the ORTModule) are disabled; they would see fake
  tensors.
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
from onnxtrain.capture.export.checkpoint_regions import checkpoint_region, mark_checkpoints
from onnxtrain.capture.export.data_attribute import trace_data_as_detach
from onnxtrain.capture.export.torch_reports import needless_warnings_dropped
from onnxtrain.capture.export.untraced_imports import untraced_imports
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
from onnxtrain.torch_compat.tracing import release_exported_nodes

CAPTURE_LOCK = threading.RLock()
_STATE = threading.local()


@contextmanager
def capturing() -> Iterator[FunctionCalls]:
    """Hold the capture lock and apply the patches; return the calls of custom functions that become nodes."""
    with CAPTURE_LOCK, ExitStack() as stack:
        stack.enter_context(needless_warnings_dropped())
        stack.enter_context(untraced_imports())
        stack.callback(release_exported_nodes)
        if has_saved_tensors_hooks():
            stack.enter_context(saved_tensors_hooks(_identity, _identity))
        # A graph of torch.compile enters and leaves the transforms of `torch.func` by calls. After an error in between,
        # the transform would stay entered, and wrap the tensors of everything that runs next.
        stack.callback(leave_transforms, transform_depth())
        owner = threading.get_ident()
        calls = FunctionCalls()
        stack.enter_context(FUNCTION_APPLY.wrapped(lambda _: classmethod(_capturing_apply(owner, calls))))
        stack.enter_context(FUNCTION_IN_TRANSFORM.wrapped(partial(_refuse_in_transform, owner)))
        stack.enter_context(preserve_node_meta())  # without it, nodes carry no checkpoint region
        stack.enter_context(CHECKPOINT_GENERATOR.wrapped(partial(mark_checkpoints, owner)))
        if INFER_SIZE is not None:
            stack.enter_context(INFER_SIZE.replaced_in_thread(torch.broadcast_shapes))
        stack.enter_context(CREATE_ARGUMENT.replaced_in_thread(partial(_create_argument, CREATE_ARGUMENT.original)))
        stack.enter_context(trace_data_as_detach())
        stack.enter_context(FILL_DIAGONAL.replaced_in_thread(partial(_fill_diagonal, FILL_DIAGONAL.original)))
        for call in _UNREPEATABLE_CALLS:
            stack.enter_context(call.point.wrapped(partial(_refusal, owner, call)))
        _STATE.is_capturing = True
        stack.callback(setattr, _STATE, "is_capturing", False)
        yield calls
        calls.check()


def _create_argument(original: Callable[[Any, Any], Any], tracer: Any, argument: Any) -> Any:
    """Refuse a parameter that is not the module's: the tracer makes a constant of it, which would not be trained."""
    if isinstance(argument, torch.nn.Parameter) and not any(argument is p for p in tracer.root.parameters()):
        refuse_outside_tensor(argument)
    return original(tracer, argument)


def _fill_diagonal(
    original: Callable[..., torch.Tensor], tensor: torch.Tensor, fill_value: Any, wrap: bool = False
) -> torch.Tensor:
    """Fill the diagonal of a matrix through a view: functionalization ignores the strides of `fill_diagonal_`."""
    if wrap or tensor.ndim != 2:
        return original(tensor, fill_value, wrap)
    tensor.diagonal().fill_(fill_value)
    return tensor


def is_capturing() -> bool:
    """Return whether this thread is capturing a module. An ORTModule inside that module then runs as a part of it."""
    return getattr(_STATE, "is_capturing", False)


@dataclass(frozen=True)
class _UnrepeatableCall:
    """A function that forward may call, and whose effect a graph would not repeat.

    Attributes:
        point: the attribute of PyTorch that holds the function.
        todo: what the user should do instead.
        pytorch_may_call: whether PyTorch's own code also calls it, and undoes its effect.
    """

    point: PatchPoint
    todo: str
    pytorch_may_call: bool = False


_UNREPEATABLE_CALLS = (
    *(
        _UnrepeatableCall(point, "return the tensor from forward and register the hook on the result")
        for point in HOOK_REGISTRATIONS
    ),
    *(
        _UnrepeatableCall(point, "set the generator's seed or state outside of forward", pytorch_may_call=True)
        for point in RANDOM_STATES
    ),
)


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _refusal(owner: int, call: _UnrepeatableCall, original: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        is_by_user = not call.pytorch_may_call or source_location.is_user_file(sys._getframe(1).f_code.co_filename)
        if threading.get_ident() != owner or not is_by_user:
            return original(*args, **kwargs)
        raise CaptureError(
            f"{call.point.attribute} inside forward cannot be captured: a graph would not repeat it",
            where=source_location.of_caller(),
            todo=f"the module runs in PyTorch; {call.todo}",
        )

    return refuse


def _capturing_apply(owner: int, calls: FunctionCalls) -> Callable[..., Any]:
    """Make the `Function.apply` for the time of a capture."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        is_captured = threading.get_ident() == owner and not is_uncaptured()
        if is_captured and cls is CheckpointFunction:
            return _run_checkpoint(*args, **kwargs)
        if is_captured and not cls.__module__.startswith(_PYTORCH_MODULES):
            convert = _LIBRARY_FUNCTIONS.get(f"{cls.__module__}.{cls.__qualname__}")
            result = convert(*args, **kwargs) if convert is not None else NotImplemented
            return calls.apply(cls, args, kwargs) if result is NotImplemented else result
        return super(SingleLevelFunction, cls).apply(*args, **kwargs)

    return apply


_PYTORCH_MODULES = ("torch._", "torch.utils.checkpoint")  # PyTorch itself applies their functions while it traces


# Functions of libraries for which the graph has an op. One that returns NotImplemented becomes a PythonOp.
_LIBRARY_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"bitsandbytes.autograd._functions.MatMul4Bit": matmul_4bit}


def _run_checkpoint(run: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
    if any(isinstance(t, torch.Tensor) and t.requires_grad for t in args):
        with checkpoint_region():
            return run(*args)
    with torch.no_grad():  # as in eager: a reentrant checkpoint whose inputs need no gradients propagates none
        return run(*args)


def _refuse_in_transform(owner: int, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != owner or is_uncaptured() or cls.__module__.startswith(_PYTORCH_MODULES):
            return original(cls, *args, **kwargs)
        raise CaptureError(
            f"the custom autograd.Function {qualified_name(cls)} is applied inside a torch.func transform",
            where=source_location.of_caller(),
            todo="the module runs in PyTorch; apply the function outside of vmap, grad, jvp and other transforms",
        )

    return call
