"""Where training is, for schedules and loss scalers."""

from __future__ import annotations

from dataclasses import dataclass, field

from onnxtrain.optim.config import OptimizerConfig


@dataclass
class TrainStepInfo:
    """Where training is.

    Attributes:
        optimizer_config: its `lr` is the rate at which schedules aim.
        all_finite: whether the last gradients had no infinite elements and no NaN.
        fetches: names of results that the caller wants.
        optimization_step: updates of the parameters so far.
        step: batches so far.
    """

    optimizer_config: OptimizerConfig
    all_finite: bool = True
    fetches: list[str] = field(default_factory=list)
    optimization_step: int = 0
    step: int = 0
