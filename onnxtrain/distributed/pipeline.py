"""DeepSpeed's PipelineModule with each layer as an ONNX graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxtrain.frontend.ort_module import ORTModule
from onnxtrain.options.debug_options import DebugOptions

try:
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.activation_checkpointing import checkpointing
except ImportError as error:
    raise ImportError("ORTPipelineModule requires DeepSpeed 0.9.0 or later: pip install deepspeed") from error


class ORTPipelineModule(PipelineModule):  # type: ignore[misc]  # DeepSpeed has no types
    """`deepspeed.pipe.PipelineModule` whose layers are ORTModules; not supported with ZeRO 2 and 3.

    Takes the arguments of PipelineModule, and `debug_options` as ORTModule does. Functions are not
    wrapped.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], None] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        debug_options: DebugOptions | None = None,
    ) -> None:
        self._ort_debug_options = debug_options
        super().__init__(
            layers=layers,
            num_stages=num_stages,
            topology=topology,
            loss_fn=loss_fn,
            seed_layers=seed_layers,
            seed_fn=seed_fn,
            base_seed=base_seed,
            partition_method=partition_method,
            activation_checkpoint_interval=activation_checkpoint_interval,
            activation_checkpoint_func=activation_checkpoint_func,
            checkpointable_layers=checkpointable_layers,
        )

    def _build(self) -> None:
        """Build this stage's layers and wrap those that are modules."""
        super()._build()
        wrapped: dict[torch.nn.Module, ORTModule] = {}
        for name, layer in self._modules.items():
            if isinstance(layer, torch.nn.Module) and not isinstance(layer, torch.nn.ModuleDict):
                self._modules[name] = wrapped[layer] = ORTModule(layer, self._ort_debug_options)
        self.forward_funcs: list[Any] = [wrapped.get(f, f) for f in self.forward_funcs]
