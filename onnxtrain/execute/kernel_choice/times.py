"""What kernels were measured to take on this machine.

A question is an op with its attributes and element type, at sizes rounded up to two binary digits. All nodes of all
programs that ask the same share the answer, and it outlives the process (`stored.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SAMPLES = 3  # undisturbed ones, after the first call, in which a library makes what it needs for these sizes
MOST_CALLS = 10  # on a busy machine few calls are undisturbed
HOPELESS = {1: 3.0, 2: 1.5}  # after so many samples: not tried again where it took so many times the best
DISTURBED = 0.03  # of a call: how long its threads may wait for a core
SHARE = 0.05  # of the time of all calls, which those may take that try something while threads have to wait
CLEARLY = 0.97  # of the expected kernel's time: less is noise
FAR_OFF = 4.0  # times the best: what is expected to take so much is not even tried
WORTH_SECONDS = 30e-6  # where the fastest is expected to take less, nothing is measured


def rounded(size: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, … upwards, which stands for all sizes that are little smaller."""
    if size < 4:
        return size
    shift = size.bit_length() - 2
    return -(-size >> shift) << shift


@dataclass
class Samples:
    """The calls of one candidate.

    Attributes:
        calls: how many there were.
        clean: how many of them, but the first, were not disturbed.
        seconds: the least of these.
        at_least: the least that any but the first took, without what its threads waited.
    """

    calls: int = 0
    clean: int = 0
    seconds: float = math.inf
    at_least: float = math.inf

    def add(self, seconds: float, waited: float) -> None:
        self.calls += 1
        if self.calls == 1:
            return
        self.at_least = min(seconds - waited, self.at_least)
        if waited <= DISTURBED * seconds:
            self.clean += 1
            self.seconds = min(seconds, self.seconds)


@dataclass
class Answer:
    """What is known about one question.

    Attributes:
        sizes: the shapes at which it was first asked; times are of these shapes.
        samples: for each candidate, its times.
        spent: seconds that all calls took together.
        tried: those of them that others than the best so far took.
        disturbed: whether threads had to wait for a core in the last call.
        choice: the fastest, once that is settled.
        reference: what these shapes were expected to take; 0 before this process asked.
    """

    sizes: str
    samples: dict[str, Samples] = field(default_factory=dict)
    spent: float = 0.0
    tried: float = 0.0
    disturbed: bool = False
    choice: str = ""
    reference: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether it is settled, and all candidates were measured: the next process may trust it."""
        return bool(self.choice) and all(s.clean for s in self.samples.values())

    def _best(self, candidates: Sequence[str]) -> str:
        """The fastest so far; the first, where nothing is measured."""
        return min(candidates, key=lambda c: self._of(c).seconds)

    def next(self, candidates: Sequence[str]) -> str:
        """The candidate to call now: the choice, or the one that was called least.

        While the machine is busy, as with compilers at the beginning, a call says little and is longer than others: it
        goes to the best so far, unless trying took but a small share of the time.
        """
        if self.choice in candidates:
            return self.choice
        if self.disturbed and self.tried > SHARE * self.spent:
            return self._best(candidates)
        # None where another thread is about to settle it, or where a candidate is not there yet.
        open_ones = (c for c in candidates if not self.is_done(c))
        return min(open_ones, key=lambda c: self._of(c).calls, default=self._best(candidates))

    def _of(self, candidate: str) -> Samples:
        return self.samples.get(candidate, Samples())

    def is_done(self, candidate: str) -> bool:
        """Whether it was called often enough."""
        own = self._of(candidate)
        best = min(s.seconds for s in (own, *self.samples.values()))
        hopeless = any(own.clean >= count and own.seconds > times * best for count, times in HOPELESS.items())
        hopeless |= own.calls > 1 and own.at_least > HOPELESS[1] * best
        return own.clean >= SAMPLES or own.calls >= MOST_CALLS or hopeless

    def add(self, candidate: str, seconds: float, waited: float = 0.0) -> None:
        """Takes in one call, of which threads `waited` so long for a core."""
        self.spent += seconds
        self.disturbed = waited > DISTURBED * seconds
        if candidate != self._best((*self.samples, candidate)):
            self.tried += seconds
        self.samples.setdefault(candidate, Samples()).add(seconds, waited)

    def settle(self, candidates: Sequence[str], at_once: bool = False) -> None:
        """Chooses, where all candidates were called often enough; `at_once`: from what was measured so far.

        The first candidate stays unless another is clearly faster, or where there is nothing to compare.
        """
        if self.choice in candidates or not (at_once or all(map(self.is_done, candidates))):
            return
        first, best = candidates[0], self._best(candidates)
        clearly = self._of(first).clean > 0 and self._of(best).seconds < CLEARLY * self._of(first).seconds
        self.choice = best if clearly else first


Answers = dict[str, Answer]


def merged(older: Mapping[str, Answer], newer: Mapping[str, Answer]) -> Answers:
    """All clean answers; where both have one, the newer."""
    return {key: answer for answers in (older, newer) for key, answer in answers.items() if answer.is_clean}
