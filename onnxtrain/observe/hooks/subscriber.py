"""What a subscriber can do: everything that passes between the modules of a model comes through it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class GlobalStates:
    """Of a subscribed model.

    Attributes:
        execution_step: how often the outermost module has run.
        module_index: the number of each of its modules, in the order of `modules()`.
        module_to_module_index: the same.
    """

    execution_step: int = 0
    module_index: dict[torch.nn.Module, int] = field(default_factory=dict)

    @property
    def module_to_module_index(self) -> dict[torch.nn.Module, int]:
        return self.module_index


@dataclass
class RuntimeStates:
    """What subscribers are told of the run."""

    global_states: GlobalStates = field(default_factory=GlobalStates)


class SubscriberBase:
    """A subscriber that changes nothing; subclasses override what they care about.

    In a module that runs as a graph the methods run while it is captured: what they compute with tensors becomes part
    of the graph, and what else they do happens once. Work for every step belongs into a `torch.autograd.Function`,
    which stays Python in the graph.

    Args:
        start_step: the first step that is watched; None for the very first.
        end_step: the first step that is no longer watched; None for no end.
    """

    def __init__(self, start_step: int | None = None, end_step: int | None = None) -> None:
        self._start_step = 0 if start_step is None else start_step
        self._end_step = end_step

    def watches(self, step: int) -> bool:
        """Whether this step is watched."""
        return step >= self._start_step and (self._end_step is None or step < self._end_step)

    def pre_forward_module_apply_impl(
        self, run_rtx: RuntimeStates, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the module is given instead of `args` and `kwargs`."""
        return args, kwargs

    def pre_forward_tensor_apply_impl(
        self, run_rtx: RuntimeStates, module: torch.nn.Module, tensor_idx: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """What the module is given instead of its `tensor_idx`-th tensor."""
        return tensor

    def post_forward_module_apply_impl(
        self, run_rtx: RuntimeStates, module: torch.nn.Module, args: tuple[Any, ...], outputs: Any
    ) -> tuple[tuple[Any, ...], Any]:
        """The arguments, and what the module gives instead of `outputs`."""
        return args, outputs

    def post_forward_tensor_apply_impl(
        self, run_rtx: RuntimeStates, module: torch.nn.Module, tensor_idx: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """What the module gives instead of its `tensor_idx`-th tensor."""
        return tensor

    def post_forward_outmost_module_apply_impl(
        self, run_rtx: RuntimeStates, module: torch.nn.Module, args: tuple[Any, ...], outputs: Any
    ) -> tuple[tuple[Any, ...], Any]:
        """As `post_forward_module_apply_impl`, for the outermost module, after all others."""
        return args, outputs
