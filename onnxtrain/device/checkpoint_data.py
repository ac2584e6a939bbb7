"""The content of a checkpoint, independent of the file format."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from onnxtrain.device.values import Array
from onnxtrain.errors import CheckpointError

Property = int | float | str


@dataclass
class Checkpoint:
    """The state of training.

    Attributes:
        parameters: trainable and frozen parameters and buffers, in the training graph's order.
        trainable: the names of those that the optimizer updates.
        optimizer: state name (`first_order_moment`) → parameter → tensor; empty before the first step.
        gradients: accumulated since the last reset; empty if a reset is due.
        step: the number of optimizer steps.
        learning_rate: None if it was never set.
        seed: of the random number generator.
        draws: the number of training calls since that sampled random numbers.
        properties: the user's own values.
        nominal: whether parameters have only dtypes and shapes; their values are set later.
    """

    parameters: dict[str, Array]
    trainable: Collection[str]
    optimizer: dict[str, dict[str, Array]] = field(default_factory=dict)
    gradients: dict[str, Array] = field(default_factory=dict)
    step: int = 0
    learning_rate: float | None = None
    seed: int = 0
    draws: int = 0
    properties: dict[str, Property] = field(default_factory=dict)
    nominal: bool = False


def corrupt_file_error(path: Path, expected: str, got: object) -> CheckpointError:
    """Return the error for a file that violates its format."""
    problem = "The checkpoint file is damaged, truncated, or no checkpoint."
    return CheckpointError(problem, str(path), expected, got, "Use another copy of the file. Nothing of it was loaded.")
