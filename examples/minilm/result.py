"""The measurements of the demonstration, as plain values that the table and the page show."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.machine import Machine
from examples.minilm.settings import Settings
from onnxtrain.report import StageReport

EAGER = "eager PyTorch"
ONNXTRAIN = "onnxtrain"
NUDGED = "eager, weights nudged"

LAST_STEPS = 10  # single batches differ too much: a loss "at the end" is the mean over this many


@dataclass(frozen=True)
class Step:
    """One training step: forward, backward and optimizer."""

    loss: float
    took_s: float
    tokens: int


@dataclass(frozen=True)
class Evaluation:
    """The held-out paragraphs classified after `step` training steps."""

    step: int
    loss: float
    accuracy: float


@dataclass
class Record:
    """The measurements of one variant in one phase."""

    name: str
    wrap_s: float = 0.0
    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    peak_bytes: int | None = None

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def first_step_s(self) -> float:
        """From the plain model to the end of the first step, with all that is built for it."""
        return self.wrap_s + self.steps[0].took_s

    @property
    def later_steps(self) -> Sequence[Step]:
        """All steps but the first, which builds what the others use."""
        return self.steps[1:] or self.steps

    @property
    def median_step_s(self) -> float:
        return statistics.median(step.took_s for step in self.later_steps)

    @property
    def tokens_per_s(self) -> float:
        return sum(step.tokens for step in self.later_steps) / sum(step.took_s for step in self.later_steps)

    @property
    def last_loss(self) -> float:
        return statistics.fmean(self.losses[-LAST_STEPS:])


@dataclass
class Phase:
    """Variants that were interleaved on the same batches."""

    records: tuple[Record, ...]

    def __getitem__(self, name: str) -> Record:
        return next(record for record in self.records if record.name == name)

    def ratios(self, slow: str, fast: str) -> list[float]:
        """Step time of `slow` over that of `fast`, batch by batch: the two ran one after the other."""
        pairs = zip(self[slow].later_steps, self[fast].later_steps, strict=True)
        return [one.took_s / other.took_s for one, other in pairs]

    def differences(self, one: str, other: str) -> list[float]:
        """Return how far apart two losses were, step by step."""
        return [abs(a - b) for a, b in zip(self[one].losses, self[other].losses, strict=True)]


@dataclass
class Result:
    """One whole run."""

    settings: Settings
    machine: Machine
    command: str
    topics: tuple[str, ...]
    train_paragraphs: int
    held_out_paragraphs: int
    training: Phase
    exact: Phase
    stages: tuple[StageReport, ...]
    peak_batch: tuple[int, int]
    took_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return all values, for whoever wants to look closer."""
        return asdict(self)
