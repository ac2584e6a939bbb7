"""Learning rate schedules: linear warmup, then constant, cosine, linear or polynomial.

schedule = LinearWarmupLRScheduler(total_steps=1000, warmup=0.1)
schedule.get_lr(info)                                           [rate], with info.optimizer_config.lr as the peak
torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor)   the same for an optimizer of PyTorch
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from onnxtrain.optim.step_info import TrainStepInfo


class WarmupLRScheduler(ABC):
    """Linear warmup from 0 to the peak, then the schedule of the subclass.

    Args:
        total_steps: the number of optimizer steps, including warmup.
        warmup: the share of them that is warmup, in [0, 1).

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, total_steps: int, warmup: float = 0.002) -> None:
        if isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps <= 0:
            raise ValueError(f"total_steps is {total_steps!r}; expected an integer >= 1.")
        if not 0 <= warmup < 1:
            raise ValueError(f"warmup is {warmup!r}; expected a number in [0, 1).")
        self.total_steps = total_steps
        self.warmup = warmup
        self._warmup_steps = warmup * total_steps
        self._last_lr: list[float] = []

    def factor(self, step: int) -> float:
        """Return the learning rate at `step`, as a share of the peak."""
        if step < self._warmup_steps:
            return step / max(1, self._warmup_steps)
        return self._after_warmup(step)

    @abstractmethod
    def _after_warmup(self, step: int) -> float:
        """Return the share of the peak at a step after warmup."""

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """Return the learning rate at `train_step_info.optimization_step`, as a list of one."""
        self._last_lr = [train_step_info.optimizer_config.lr * self.factor(train_step_info.optimization_step)]
        return self._last_lr

    def get_last_lr(self) -> list[float]:
        """Return the last result of `get_lr`.

        Raises:
            RuntimeError: `get_lr` was never called.
        """
        if not self._last_lr:
            raise RuntimeError("get_last_lr() was called before get_lr(): expected at least one call of get_lr.")
        return self._last_lr

    def _progress(self, step: int) -> float:
        """Return the share of the steps after warmup that are done."""
        return min(1.0, (step - self._warmup_steps) / max(1, self.total_steps - self._warmup_steps))


class ConstantWarmupLRScheduler(WarmupLRScheduler):
    """Linear warmup, then constant."""

    def _after_warmup(self, step: int) -> float:
        return 1.0


class CosineWarmupLRScheduler(WarmupLRScheduler):
    """Linear warmup, then cosine decay. With `cycles` of 0.5 it ends at zero."""

    def __init__(self, total_steps: int, cycles: float = 0.5, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        if not cycles > 0:
            raise ValueError(f"cycles is {cycles!r}; expected a number > 0.")
        self.cycles = cycles

    def _after_warmup(self, step: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * 2 * self.cycles * self._progress(step)))


class LinearWarmupLRScheduler(WarmupLRScheduler):
    """Linear warmup, then linear decay to zero."""

    def _after_warmup(self, step: int) -> float:
        return 1 - self._progress(step)


class PolyWarmupLRScheduler(WarmupLRScheduler):
    """Linear warmup, then polynomial decay to `lr_end`. `factor` assumes an `lr_end` of zero."""

    def __init__(self, total_steps: int, lr_end: float = 1e-7, power: float = 1.0, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        if not lr_end > 0:
            raise ValueError(f"lr_end is {lr_end!r}; expected a number > 0.")
        if not power > 0:
            raise ValueError(f"power is {power!r}; expected a number > 0.")
        self.lr_end = lr_end
        self.power = power

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """Return the learning rate at `train_step_info.optimization_step`, as a list of one.

        Raises:
            ValueError: the peak learning rate is not above `lr_end`.
        """
        peak, step = train_step_info.optimizer_config.lr, train_step_info.optimization_step
        if not peak > self.lr_end:
            raise ValueError(f"lr_end is {self.lr_end}; expected less than the peak learning rate, {peak}.")
        share = self.factor(step)
        self._last_lr = [peak * share if step < self._warmup_steps else self.lr_end + (peak - self.lr_end) * share]
        return self._last_lr

    def _after_warmup(self, step: int) -> float:
        return math.pow(1 - self._progress(step), self.power)
