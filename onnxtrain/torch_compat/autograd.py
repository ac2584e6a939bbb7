"""Access the running backward and the contexts of custom functions."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils import checkpoint

from onnxtrain.torch_compat.internal import Absent, Internal, missing, required

_current_backward = Internal[Callable[[], int]](
    "current_backward",
    lambda: torch._C._current_graph_task_id,
    why="distinguishes two backwards through one forward, which may run at the same time",
    fallback=lambda: -1,
    cost="early_gradients has no effect: all gradients are released at the end of backward",
    check=lambda part: part() == -1,
)
_queue_callback = Internal[Callable[[Callable[[], None]], None]](
    "queue_callback",
    lambda: Variable._execution_engine.queue_callback,
    why="runs a callback when backward ends, wherever it stops; tensor hooks do not",
    fallback=lambda callback: None,
    cost="early_gradients has no effect; the memory statistics have no entry after backward",
    check=callable,
)
current_backward = _current_backward.get()
queue_callback = _queue_callback.get()


def why_no_stages() -> str | None:
    """Return why backward cannot release gradients while it runs; None if it can."""
    lacking = [entry.name for entry in (_current_backward, _queue_callback) if not entry.is_available]
    return f"this PyTorch lacks {', '.join(lacking)}" if lacking else None


def _raising_views(message: bytes, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    node = torch._C._functions.DelayedError(message, len(tensors) + 1)
    with torch.no_grad():
        *raising, _ = node(*tensors, torch.empty(0, device=tensors[0].device).requires_grad_())
    return raising


def _views_of_leaves(message: bytes, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Make views of new leaves, at which backward silently ends instead of raising."""
    with torch.enable_grad():
        return [t.detach().requires_grad_().view_as(t) for t in tensors]


def _returns_inner_nodes(make_views: Callable[[bytes, Sequence[torch.Tensor]], Sequence[torch.Tensor]]) -> bool:
    (view,) = make_views(b"", [torch.ones(1)])
    return view.requires_grad and view.grad_fn is not None


raising_views = Internal[Callable[[bytes, Sequence[torch.Tensor]], Sequence[torch.Tensor]]](
    "raising_views",
    lambda: _raising_views,
    why="makes inputs for custom functions that require a gradient, can be mutated, and raise if backward reaches them",
    fallback=_views_of_leaves,
    cost="a bug of onnxtrain that lets backward go beyond a custom function is not noticed",
    check=_returns_inner_nodes,
).get()


backward_class = Internal[Callable[[Any], Any]](
    "backward_class",
    lambda: attrgetter("_backward_cls"),
    why="the class of the contexts and grad_fn of a custom function",
    fallback=missing("backward_class"),
    cost="modules with custom autograd functions run in PyTorch",
    check=lambda part: isinstance(part(torch.autograd.Function), type),
).get()


def _call_directly(
    function: Any, backward: Callable[..., Any], boxed_backward: Callable[[Any, list[Any]], Any]
) -> None:
    # From 2.13 on, PyTorch can pass the cotangents in a list: a tuple would keep them alive until backward ends.
    function.boxed_grads_call = True
    function._backward_cls.apply = backward
    function._backward_cls.apply_boxed = boxed_backward


call_backward_directly = Internal[Callable[[Any, Callable[..., Any], Callable[[Any, list[Any]], Any]], None]](
    "call_backward_directly",
    lambda: _call_directly,
    why="skips the Python wrapper by which autograd looks up backward, vjp and boxed gradients",
    fallback=lambda function, backward, boxed_backward: None,
    cost="a backward takes about 4 us longer, and cotangents live until it ends",
    check=lambda part: callable(backward_class(torch.autograd.Function).apply),
).get()


def _always_materializes(node: Any) -> bool:
    return True  # PyTorch's default


materializes_non_differentiable = Internal[Callable[[Any], bool]](
    "materializes_non_differentiable",
    lambda: attrgetter("_materialize_non_diff_grads"),
    why="tells whether a custom function gets zeros as the cotangents of non-differentiable outputs",
    fallback=_always_materializes,
    cost="custom functions that set it get zeros instead of None",
    check=lambda part: part(torch._C._FunctionBase()) is True,
).get()


def _set_by_base_class(context: Any, value: bool) -> None:
    """Set the attribute by the descriptor of the base class that PyTorch's own method sets."""
    descriptors = (vars(base).get("materialize_grads") for base in type(context).__mro__)
    next(each for each in descriptors if each is not None and not isinstance(each, property)).__set__(context, value)


set_materialize_grads = Internal[Callable[[Any, bool], None]](
    "set_materialize_grads",
    lambda: torch._C._FunctionBase.materialize_grads.__set__,  # type: ignore[attr-defined]  # a C descriptor
    why="contexts of captured functions record the setting, which PyTorch does not let them read",
    fallback=_set_by_base_class,
    cost="a call of a custom function that sets it takes about two microseconds longer",
    check=callable,
).get()

_CheckpointInputsNode = (
    Internal[type](
        "checkpoint_inputs_node",
        lambda: backward_class(checkpoint._NoopSaveInputs),  # type: ignore[attr-defined]  # 2.11 has it
        why="the grad_fn of an empty tensor that a checkpoint keeps, because this grad_fn keeps the inputs",
        fallback=Absent,
        cost="blocks with a checkpoint are traced one by one: a capture takes as long as the model has layers",
        versions="2.11",
        check=lambda part: isinstance(part, type),
    ).get()
    if hasattr(checkpoint, "_NoopSaveInputs")
    else Absent
)


def keeps_checkpoint_inputs(tensor: torch.Tensor) -> bool:
    """Return whether a tensor only keeps the inputs of a checkpoint: the user's code has no reference to it."""
    return isinstance(tensor.grad_fn, _CheckpointInputsNode)


SingleLevelFunction: Any = required(
    "single_level_function",
    lambda: importlib.import_module("torch.autograd.function")._SingleLevelFunction,
    "the base class of torch.autograd.Function, whose `apply` a capture replaces",
    check=lambda part: issubclass(torch.autograd.Function, part),
)
