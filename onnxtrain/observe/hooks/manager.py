"""Attach subscribers to all modules of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxtrain.capture.export.patches import is_capturing
from onnxtrain.capture.refusals import runs_in_graph
from onnxtrain.observe.hooks.subscriber import RuntimeStates, SubscriberBase
from onnxtrain.torch_compat import pytree
from onnxtrain.torch_compat.tensors import is_fake

_ImplOfTensor = Callable[[SubscriberBase, int, torch.Tensor], torch.Tensor]


class SubscriberManager:
    """The subscribers of one model.

    The step of `get_run_context()` is incremented at the end of the outermost module's forward, except in a capture.
    """

    def __init__(self) -> None:
        self._subscribers: list[SubscriberBase] = []
        self._run_ctx = RuntimeStates()
        self._handles: list[Any] = []

    def subscribe(self, module: torch.nn.Module, subscribers: Sequence[SubscriberBase]) -> None:
        """Register hooks on `module` and its submodules; for an ORTModule, on those of the module that it wraps.

        Args:
            module: the model. A manager observes one model: subscribing again replaces the subscribers.
            subscribers: each receives the result of the one before it.

        Raises:
            TypeError: an element of `subscribers` is not a SubscriberBase.
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
        """Remove the hooks and reset the step to zero."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._subscribers.clear()
        self._run_ctx.global_states.execution_step = 0

    def get_subscriber(self, subscriber_type: type[SubscriberBase]) -> SubscriberBase:
        """Return the first subscriber of this type.

        Raises:
            RuntimeError: no subscriber has this type.
        """
        for subscriber in self._subscribers:
            if isinstance(subscriber, subscriber_type):
                return subscriber
        raise RuntimeError(
            f"Expected a subscriber of type {subscriber_type.__name__}, found none: subscribe one first."
        )

    def get_run_context(self) -> RuntimeStates:
        """Return the current step and the index of each module."""
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
        tensor_index = 0
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                for subscriber in self._subscribers:
                    leaf = apply(subscriber, tensor_index, leaf)
                leaves[position] = leaf
                tensor_index += 1
        return pytree.tree_unflatten(leaves, structure)

    def _end_step(self, outputs: Any) -> Any:
        """Count the step when the first output is computed: hooks do not run in a graph, but a custom function does."""
        leaves, structure = pytree.tree_flatten(outputs)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[position] = _EndOfStep.apply(leaf, self._run_ctx)  # type: ignore[no-untyped-call]  # PyTorch's
                break
        else:
            self._run_ctx.global_states.execution_step += not is_capturing()
        return pytree.tree_unflatten(leaves, structure)


def is_computed(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has values: not during a capture."""
    return not is_capturing() and not is_fake(tensor)


class _EndOfStep(torch.autograd.Function):
    """The identity, which counts the step."""

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
