"""Learning rates over a run: a linear warm-up, then constant, cosine, linear or polynomial.

schedule = LinearWarmupLRScheduler(total_steps=1000, warmup=0.1)
schedule.get_lr(info)                                           [rate], info.optimizer_config.lr being the top
torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor)   the same for an optimizer of PyTorch
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from onnxtrain.optim.step_info import TrainStepInfo


class WarmupLRScheduler(ABC):
    """A warm-up, then what the class says.

    Args:
        total_steps: updates of the whole run, the warm-up among them.
        warmup: the share of them that is warm-up, from 0 to below 1.

    Raises:
        ValueError: a number that is out of its range.
    """

    def __init__(self, total_steps: int, warmup: float = 0.002) -> None:
        if isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps <= 0:
            raise ValueError(f"total_steps is {total_steps!r}; expected a whole number from 1 up.")
        if not 0 <= warmup < 1:
            raise ValueError(f"warmup is {warmup!r}; expected a share from 0 to below 1.")
        self.total_steps = total_steps
        self.warmup = warmup
        self._warmup_steps = warmup * total_steps
        self._last_lr: list[float] = []

    def factor(self, step: int) -> float:
        """The share of the top learning rate at this update."""
        if step < self._warmup_steps:
            return step / max(1, self._warmup_steps)
        return self._after(step)

    @abstractmethod
    def _after(self, step: int) -> float:
        """The share after the warm-up."""

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """The learning rate at `train_step_info.optimization_step`, as a list of one."""
        self._last_lr = [train_step_info.optimizer_config.lr * self.factor(train_step_info.optimization_step)]
        return self._last_lr

    def get_last_lr(self) -> list[float]:
        """What `get_lr` gave last.

        Raises:
            RuntimeError: it was never called.
        """
        if not self._last_lr:
            raise RuntimeError("There is no last learning rate before the first get_lr.")
        return self._last_lr

    def _progress(self, step: int) -> float:
        """The share of the steps after the warm-up that is over."""
        return min(1.0, (step - self._warmup_steps) / max(1, self.total_steps - self._warmup_steps))


class ConstantWarmupLRScheduler(WarmupLRScheduler):
    """A warm-up, then the top learning rate."""

    def _after(self, step: int) -> float:
        return 1.0


class CosineWarmupLRScheduler(WarmupLRScheduler):
    """A warm-up, then down along a cosine; `cycles` of 0.5 end at zero."""

    def __init__(self, total_steps: int, cycles: float = 0.5, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        if not cycles > 0:
            raise ValueError(f"cycles is {cycles!r}; expected a number above 0.")
        self.cycles = cycles

    def _after(self, step: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * 2 * self.cycles * self._progress(step)))


class LinearWarmupLRScheduler(WarmupLRScheduler):
    """A warm-up, then down to zero along a line."""

    def _after(self, step: int) -> float:
        return 1 - self._progress(step)


class PolyWarmupLRScheduler(WarmupLRScheduler):
    """A warm-up, then down to `lr_end` along a power of the share that is left; `factor` is that of `lr_end` zero."""

    def __init__(self, total_steps: int, lr_end: float = 1e-7, power: float = 1.0, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        if not lr_end > 0:
            raise ValueError(f"lr_end is {lr_end!r}; expected a number above 0.")
        if not power > 0:
            raise ValueError(f"power is {power!r}; expected a number above 0.")
        self.lr_end = lr_end
        self.power = power

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """The learning rate at `train_step_info.optimization_step`, as a list of one.

        Raises:
            ValueError: the top learning rate is not above `lr_end`.
        """
        top, step = train_step_info.optimizer_config.lr, train_step_info.optimization_step
        if not top > self.lr_end:
            raise ValueError(f"lr_end is {self.lr_end}; expected less than the top learning rate, {top}.")
        share = self.factor(step)
        self._last_lr = [top * share if step < self._warmup_steps else self.lr_end + (top - self.lr_end) * share]
        return self._last_lr

    def _after(self, step: int) -> float:
        return math.pow(1 - self._progress(step), self.power)
