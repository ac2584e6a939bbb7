"""The steady step: all contenders in one process, one step of each in turn, again and again.

Each round gives one time of each contender, taken within the same moment of the machine. So the ratio is taken round by
round, and its quartiles say how steady it is; who goes first changes with every round.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.contenders import EAGER, Stepper
from benchmarks.workloads import Workload


@dataclass(frozen=True)
class Steady:
    """The times of one contender, a round each, and of eager in the same rounds."""

    contender: str
    times_s: tuple[float, ...]
    eager_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)

    @property
    def least_s(self) -> float:
        return min(self.times_s)

    @property
    def speedup(self) -> tuple[float, float, float]:
        """Eager's time over this contender's: lower quartile, median, upper quartile over the rounds."""
        ratios = [eager / own for eager, own in zip(self.eager_s, self.times_s, strict=True)]
        if len(ratios) == 1:
            return ratios[0], ratios[0], ratios[0]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, middle, high


def measure_steady(
    workload: Workload, contenders: Sequence[str], rounds: int, tell: Callable[[str], None]
) -> tuple[Steady, ...]:
    """Times `rounds` rounds after the warm-up."""
    steppers = {}
    for contender in contenders:
        tell(f"steady step of {workload.name}: preparing {contender}")
        steppers[contender] = Stepper(workload, contender)
        steppers[contender].step()
    tell(f"steady step of {workload.name}: warming up for {workload.warm_up_s:.0f} s")
    times: dict[str, list[float]] = {contender: [] for contender in contenders}
    gc.collect()
    gc.disable()  # else a collection falls on whoever is running just then
    try:
        end = time.monotonic() + workload.warm_up_s
        while time.monotonic() < end:
            for stepper in steppers.values():
                stepper.step()
        tell(f"steady step of {workload.name}: {rounds} rounds")
        for number in range(rounds):
            first = number % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                times[contender].append(steppers[contender].step())
    finally:
        gc.enable()
    eager_s = tuple(times[EAGER])
    return tuple(Steady(contender, tuple(taken), eager_s) for contender, taken in times.items())
