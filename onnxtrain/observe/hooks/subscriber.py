"""The base class of subscribers, which receive all tensors that pass between the modules of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class GlobalStates:
    """The state of a subscribed model.

    Attributes:
        execution_step: how often the outermost module has run.
        module_index: the index of each module, in the order of `modules()`.
        module_to_module_index: ONNX Runtime Training's other name of `module_index`.
    """

    execution_step: int = 0
    module_index: dict[torch.nn.Module, int] = field(default_factory=dict)

    @property
    def module_to_module_index(self) -> dict[torch.nn.Module, int]:
        return self.module_index


@dataclass
class RuntimeStates:
    """The state of the run that subscribers receive."""

    global_states: GlobalStates = field(default_factory=GlobalStates)


class SubscriberBase:
    """A subscriber that changes nothing. Subclasses override methods.

    In a module that runs as a graph, the methods run during the capture: their tensor operations become part of the
    graph, and their side effects happen once. Put the work of each step into a `torch.autograd.Function`, which runs as
    Python in the graph.

    Args:
        start_step: the first step to observe; None: step 0.
        end_step: the step after the last one to observe; None: no end.
    """

    def __init__(self, start_step: int | None = None, end_step: int | None = None) -> None:
        self._start_step = 0 if start_step is None else start_step
        self._end_step = end_step

    def watches(self, step: int) -> bool:
        """Return whether this step is observed."""
        return step >= self._start_step and (self._end_step is None or step < self._end_step)

    def pre_forward_module_apply_impl(
        self, run_rtx: RuntimeStates, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the module in place of `args` and `kwargs`."""
        return args, kwargs

    def pre_forward_tensor_apply_impl(
        self, run_rtx: RuntimeStates, module: torch.nn.Module, tensor_idx: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Return the tensor for the module in place of its `tensor_idx`-th input tensor."""
        return tensor

    def post_forward_module_apply_impl(
        self, run_rtx: RuntimeStates, module: torch.nn.Module, args: tuple[Any, ...], outputs: Any
    ) -> tuple[tuple[Any, ...], Any]:
        """Return the arguments, and the module's result in place of `outputs`."""
        return args, outputs

    def post_forward_tensor_apply_impl(
        self, run_rtx: RuntimeStates, module: torch.nn.Module, tensor_idx: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Return the tensor in place of the module's `tensor_idx`-th output tensor."""
        return tensor

    def post_forward_outmost_module_apply_impl(
        self, run_rtx: RuntimeStates, module: torch.nn.Module, args: tuple[Any, ...], outputs: Any
    ) -> tuple[tuple[Any, ...], Any]:
        """Like `post_forward_module_apply_impl`, for the outermost module, after all other methods."""
        return args, outputs
