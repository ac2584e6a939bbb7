"""The progress of training, as schedules and loss scalers take it."""

from __future__ import annotations

from dataclasses import dataclass, field

from onnxtrain.optim.config import OptimizerConfig


@dataclass
class TrainStepInfo:
    """The progress of training.

    Attributes:
        optimizer_config: its `lr` is the peak learning rate of schedules.
        all_finite: whether the last gradients had only finite elements.
        fetches: the names of the outputs that the caller wants.
        optimization_step: the number of optimizer steps so far.
        step: the number of batches so far.
    """

    optimizer_config: OptimizerConfig
    all_finite: bool = True
    fetches: list[str] = field(default_factory=list)
    optimization_step: int = 0
    step: int = 0
