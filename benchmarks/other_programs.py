"""Measure the processor time of other programs, which make timings unreliable."""

from __future__ import annotations

import time

import psutil

MAX_OTHERS_CORES = 0.15  # the share of one core that other programs may take; above it a run counts as disturbed


class OtherPrograms:
    """Count the processor time of other programs from now on.

    This process and its ended children do not count. Time that the host of a virtual machine gives to others ("steal")
    does.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._busy_s, self._own_s = _busy_s(), _own_s()

    def cores(self) -> float:
        """Return the processor time of other programs, as an average number of busy cores."""
        others = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        return max(others, 0.0) / max(time.monotonic() - self._started, 1e-9)


def wait_and_count(seconds: float = 1.0) -> float:
    """Return the average number of cores that other programs keep busy while this process sleeps."""
    others = OtherPrograms()
    time.sleep(seconds)
    return others.cores()


def _busy_s() -> float:
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


def _own_s() -> float:
    times = psutil.Process().cpu_times()
    return times.user + times.system + times.children_user + times.children_system
