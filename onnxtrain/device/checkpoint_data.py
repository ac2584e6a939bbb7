"""What a checkpoint holds, in whatever file it stands."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from onnxtrain.device.values import Array
from onnxtrain.errors import CheckpointError

Property = int | float | str


@dataclass
class Checkpoint:
    """The state of a training.

    Attributes:
        parameters: trainable and frozen parameters and buffers, in the training graph's order.
        trainable: the names of those that the optimizer changes.
        optimizer: the name of a state (`first_order_moment`) → parameter → tensor; empty before the first step.
        gradients: what has accumulated since the last reset; empty where a reset is due.
        step: how many updates the optimizer made.
        learning_rate: None where none was set yet.
        seed: what the first random number is drawn from.
        draws: how many training calls drew since.
        properties: the user's own values.
        nominal: whether only types and shapes of the parameters count; their values are filled in later.
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


def damaged(path: Path, expected: str, got: object) -> CheckpointError:
    """The error for a file that breaks a rule of its format."""
    what = "The checkpoint file is damaged, truncated, or no checkpoint."
    return CheckpointError(what, str(path), expected, got, "Use another copy of the file. Nothing of it was loaded.")
