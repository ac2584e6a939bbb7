"""Puts subscribers on every module of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from onnxtrain.capture.patches import capture_is_under_way
from onnxtrain.capture.refusals import runs_in_graph
from onnxtrain.observe.hooks.subscriber import RuntimeStates, SubscriberBase

_ImplOfTensor = Callable[[SubscriberBase, int, torch.Tensor], torch.Tensor]


class SubscriberManager:
    """Subscribers of one model.

    The step of `get_run_context()` goes up at the end of the outermost module's forward; a capture is no step.
    """

    def __init__(self) -> None:
        self._subscribers: list[SubscriberBase] = []
        self._run_ctx = RuntimeStates()
        self._handles: list[Any] = []

    def subscribe(self, module: torch.nn.Module, subscribers: Sequence[SubscriberBase]) -> None:
        """Puts hooks on `module` and all modules in it; an ORTModule's are those of the module that it wraps.

        Args:
            module: the model. One manager watches one model: subscribing again replaces the subscribers.
            subscribers: each sees what the one before it gives.

        Raises:
            TypeError: a subscriber is none.
        """
        for subscriber in subscribers:
            if not isinstance(subscriber, SubscriberBase):
                raise TypeError(f"Expected subscribers of type SubscriberBase, got {type(subscriber).__name__}.")
        self.unsubscribe()
        self._subscribers = list(subscribers)
        modules = list(module.modules())
        self._run_ctx.global_states.module_index = {each: number for number, each in enumerate(modules)}
        for number, each in enumerate(modules):
            if isinstance(each, torch.nn.ModuleList | torch.nn.ModuleDict):
                continue  # they are not called
            self._handles.append(each.register_forward_pre_hook(self._before(), with_kwargs=True))
            self._handles.append(each.register_forward_hook(self._after(outermost=number == 0)))

    def unsubscribe(self) -> None:
        """Takes the hooks away, and counts steps from zero again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._subscribers.clear()
        self._run_ctx.global_states.execution_step = 0

    def get_subscriber(self, subscriber_type: type[SubscriberBase]) -> SubscriberBase:
        """The subscriber of this type.

        Raises:
            RuntimeError: there is none.
        """
        for subscriber in self._subscribers:
            if isinstance(subscriber, subscriber_type):
                return subscriber
        raise RuntimeError(f"There is no subscriber of type {subscriber_type.__name__}: subscribe one first.")

    def get_run_context(self) -> RuntimeStates:
        """The step, and the number of each module."""
        return self._run_ctx

    def _before(self) -> Any:
        @runs_in_graph
        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            for subscriber in self._subscribers:
                args, kwargs = subscriber.pre_forward_module_apply_impl(self._run_ctx, module, args, kwargs)
            return self._each_tensor(
                (args, kwargs),
                lambda subscriber, number, tensor: subscriber.pre_forward_tensor_apply_impl(
                    self._run_ctx, module, number, tensor
                ),
            )

        return before

    def _after(self, *, outermost: bool) -> Any:
        @runs_in_graph
        def after(module: torch.nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
            for subscriber in self._subscribers:
                args, outputs = subscriber.post_forward_module_apply_impl(self._run_ctx, module, args, outputs)
            outputs = self._each_tensor(
                outputs,
                lambda subscriber, number, tensor: subscriber.post_forward_tensor_apply_impl(
                    self._run_ctx, module, number, tensor
                ),
            )
            if outermost:
                for subscriber in self._subscribers:
                    args, outputs = subscriber.post_forward_outmost_module_apply_impl(
                        self._run_ctx, module, args, outputs
                    )
                outputs = self._end_step(outputs)
            return outputs

        return after

    def _each_tensor(self, value: Any, apply: _ImplOfTensor) -> Any:
        leaves, structure = pytree.tree_flatten(value)
        number = 0
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                for subscriber in self._subscribers:
                    leaf = apply(subscriber, number, leaf)
                leaves[place] = leaf
                number += 1
        return pytree.tree_unflatten(leaves, structure)

    def _end_step(self, outputs: Any) -> Any:
        """Counts the step when the first output is there: in a graph too, where hooks do not run again."""
        leaves, structure = pytree.tree_flatten(outputs)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[place] = _EndOfStep.apply(leaf, self._run_ctx)  # type: ignore[no-untyped-call]  # PyTorch's
                break
        else:
            self._run_ctx.global_states.execution_step += not capture_is_under_way()
        return pytree.tree_unflatten(leaves, structure)


def is_computed(tensor: torch.Tensor) -> bool:
    """Whether the tensor has elements: not so while a graph is made."""
    return not capture_is_under_way() and not isinstance(tensor, FakeTensor)


class _EndOfStep(torch.autograd.Function):
    """Gives its tensor as it is, and counts."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, run_ctx: RuntimeStates) -> torch.Tensor:
        run_ctx.global_states.execution_step += is_computed(tensor)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None

    @staticmethod
    def alias_input(node_proto_str: str) -> tuple[list[int], list[int]]:
        return [0], [0, -1]


GlobalSubscriberManager = SubscriberManager()
