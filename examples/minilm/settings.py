"""The two sizes of the demonstration: the whole one and the quick one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The model, the data and the length of the training."""

    quick: bool = False
    seed: int = 0
    batch_size: int = 16
    max_length: int = 128  # tokens; longer paragraphs are cut
    max_topics: int | None = None  # None: all topics that have enough paragraphs
    training_steps: int = 108  # two epochs of the default corpus
    exact_steps: int = 30
    learning_rate: float = 3e-4
    warm_up_steps: int = 10
    evaluations: int = 2  # during training, the last one at its end; one more is done before it

    def evaluate_after(self) -> frozenset[int]:
        """Return the numbers of training steps after which the held-out paragraphs are classified."""
        return frozenset(round(self.training_steps * (i + 1) / self.evaluations) for i in range(self.evaluations))


FULL = Settings()
QUICK = Settings(
    quick=True,
    max_length=64,
    max_topics=6,
    training_steps=30,
    exact_steps=10,
    warm_up_steps=3,
    evaluations=1,
)
