"""How much of the processor other programs take: beside them a timing says little."""

from __future__ import annotations

import time

import psutil

MOST = 0.15  # of one core, that others may take before a run counts as disturbed


class OtherPrograms:
    """Counts what others take from here on.

    This process and its children, once they have ended, are not others. Time that a virtual machine's host gives to
    someone else ("steal") is.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._busy_s, self._own_s = _busy_s(), _own_s()

    def cores(self) -> float:
        """The processor time that others took, as a number of cores kept busy all the time."""
        others = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        return max(others, 0.0) / max(time.monotonic() - self._started, 1e-9)


def wait_and_count(seconds: float = 1.0) -> float:
    """The cores that others keep busy while this process sleeps."""
    others = OtherPrograms()
    time.sleep(seconds)
    return others.cores()


def _busy_s() -> float:
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


def _own_s() -> float:
    times = psutil.Process().cpu_times()
    return times.user + times.system + times.children_user + times.children_system
