"""The measured times of kernels on this machine.

A question is an op with its attributes and element type, at sizes rounded up to two binary digits. All nodes of all
programs with the same question share the answer, and it outlives the process (`stored.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SAMPLES = 3  # undisturbed calls after the first, in which a library prepares for these sizes
MAX_CALLS = 10  # on a busy machine few calls are undisturbed
HOPELESS = {1: 3.0, 2: 1.5}  # by the number of samples: a candidate that took so many times the best is dropped
DISTURBED = 0.03  # a call is disturbed if its threads waited for a core for more than this share of it
SHARE = 0.05  # on a busy machine, trials may take this share of the time of all calls
CLEARLY = 0.97  # a gain counts below this share of the expected kernel's time; above it is noise
FAR_OFF = 4.0  # a candidate that is expected to take so many times the best is not tried
WORTH_SECONDS = 30e-6  # nothing is measured if the fastest is expected to take less


def rounded(size: int) -> int:
    """Round a size up to the next of 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on."""
    if size < 4:
        return size
    shift = size.bit_length() - 2
    return -(-size >> shift) << shift


@dataclass
class Samples:
    """The calls of one candidate.

    Attributes:
        calls: the number of calls.
        clean: the number of undisturbed calls, without the first.
        seconds: the shortest of these.
        at_least: the shortest of all calls but the first, minus the time that its threads waited.
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
    """The times for one question.

    Attributes:
        sizes: the shapes at which it was first asked; times are of these shapes.
        samples: the times of each candidate.
        spent: seconds of all calls together.
        tried: the share of `spent` in seconds for candidates other than the best so far.
        disturbed: whether threads had to wait for a core in the last call.
        choice: the fastest, once it is settled.
        reference: the expected seconds at these shapes; 0 before this process asked.
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
        """Whether it is settled and all candidates were measured: other processes may use it."""
        return bool(self.choice) and all(s.clean for s in self.samples.values())

    def _best(self, candidates: Sequence[str]) -> str:
        """Return the fastest so far; the first if nothing is measured."""
        return min(candidates, key=lambda c: self._samples_of(c).seconds)

    def next(self, candidates: Sequence[str]) -> str:
        """Return the candidate to call now: the choice, or the one with the fewest calls.

        On a busy machine, such as while kernels compile, a call says little and takes longer. The best so far is then
        called, unless trials have taken only a small share of the time.
        """
        if self.choice in candidates:
            return self.choice
        if self.disturbed and self.tried > SHARE * self.spent:
            return self._best(candidates)
        # Empty if another thread is about to settle it, or while a candidate is still compiling.
        unfinished = (c for c in candidates if not self.is_done(c))
        return min(unfinished, key=lambda c: self._samples_of(c).calls, default=self._best(candidates))

    def _samples_of(self, candidate: str) -> Samples:
        return self.samples.get(candidate, Samples())

    def is_done(self, candidate: str) -> bool:
        """Return whether it was called often enough."""
        samples = self._samples_of(candidate)
        best = min(s.seconds for s in (samples, *self.samples.values()))
        hopeless = any(samples.clean >= count and samples.seconds > times * best for count, times in HOPELESS.items())
        hopeless |= samples.calls > 1 and samples.at_least > HOPELESS[1] * best
        return samples.clean >= SAMPLES or samples.calls >= MAX_CALLS or hopeless

    def add(self, candidate: str, seconds: float, waited: float = 0.0) -> None:
        """Add one call; its threads waited for a core for `waited` seconds."""
        self.spent += seconds
        self.disturbed = waited > DISTURBED * seconds
        if candidate != self._best((*self.samples, candidate)):
            self.tried += seconds
        self.samples.setdefault(candidate, Samples()).add(seconds, waited)

    def settle(self, candidates: Sequence[str], at_once: bool = False) -> None:
        """Choose a candidate if all were called often enough.

        The first candidate is chosen unless both it and a clearly faster one were measured.

        Args:
            candidates: the names of kernels, the expected best first.
            at_once: choose from the calls so far, even if they are few.
        """
        if self.choice in candidates or not (at_once or all(map(self.is_done, candidates))):
            return
        first, best = candidates[0], self._best(candidates)
        first_samples, least = self._samples_of(first), self._samples_of(best).seconds
        self.choice = best if first_samples.clean > 0 and least < CLEARLY * first_samples.seconds else first


Answers = dict[str, Answer]


def merged(older: Mapping[str, Answer], newer: Mapping[str, Answer]) -> Answers:
    """Return all clean answers, from `newer` if both have one."""
    return {key: answer for answers in (older, newer) for key, answer in answers.items() if answer.is_clean}
