"""Judge programs in separate processes, so that a hang or crash is a finding and does not stop the others."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tests.conftest import queue_no_seeds
from tests.fuzz import configurations, programs
from tests.fuzz.configurations import Configuration
from tests.fuzz.differential import Verdict, judge
from tests.fuzz.programs import Program

_SPAWN = multiprocessing.get_context("spawn")
_PROGRAMS_A_PROCESS = 300  # caches of PyTorch's export grow


@dataclass(frozen=True)
class Case:
    """A program, its configuration, and its verdict."""

    program: Program
    configuration: Configuration
    verdict: Verdict = field(default_factory=lambda: Verdict("equal"))


def case_of(seed: int) -> Case:
    """The program and configuration of a seed."""
    return Case(programs.draw(seed), configurations.draw(random.Random(seed)))


def judged(case: Case | int) -> Case:
    """A case, or that of a seed, with its verdict."""
    if isinstance(case, int):
        case = case_of(case)
    return replace(case, verdict=judge(case.program, case.configuration))


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    queue_no_seeds()
    logging.disable(logging.ERROR)
    while True:
        connection.send(judged(connection.recv()))


class Judges:
    """A pool of processes that judge programs.

    Args:
        jobs: how many.
        limit_s: how long one program may take; one that takes longer hangs.
    """

    def __init__(self, jobs: int, limit_s: float) -> None:
        self._limit_s = limit_s
        self._judges = [_Judge() for _ in range(jobs)]

    def all(self, cases: Iterable[Case | int]) -> Iterator[Case]:
        """The verdicts, in the order in which they come."""
        rest = iter(cases)
        busy: list[_Judge] = []
        for judge_ in self._judges:
            if (case := next(rest, None)) is not None:
                judge_.begin(case)
                busy.append(judge_)
        while busy:
            ready = wait([j.connection for j in busy], timeout=1.0)
            for judge_ in list(busy):
                judged = judge_.result(judge_.connection in ready, self._limit_s)
                if judged is None:
                    continue
                if (case := next(rest, None)) is not None:
                    judge_.begin(case)
                else:
                    busy.remove(judge_)
                yield judged

    def one(self, case: Case) -> Case:
        """The verdict of one case."""
        return next(self.all([case]))

    def close(self) -> None:
        """End the processes."""
        for judge_ in self._judges:
            judge_.end()


class _Judge:
    """One process, which is replaced if it hangs, crashes or has run many programs."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._done = 0
        self._case: Case | int = 0
        self._since = 0.0

    def begin(self, case: Case | int) -> None:
        """Send a case to the process."""
        if self._done >= _PROGRAMS_A_PROCESS:
            self.end()
            self._start()
        self._done += 1
        self._case, self._since = case, time.monotonic()
        self.connection.send(case)

    def result(self, ready: bool, limit_s: float) -> Case | None:
        """The case with its verdict; None if there is none yet."""
        if ready:
            try:
                judged: Case = self.connection.recv()
                return judged
            except EOFError:
                self._process.join()
                code = self._process.exitcode
                return self._lost(Verdict("crash", f"the process ended with code {code}"))
        if time.monotonic() - self._since > limit_s:
            return self._lost(Verdict("hang", f"more than {limit_s:.0f} s"))
        return None

    def _lost(self, verdict: Verdict) -> Case:
        case: Any = self._case
        self.end()
        self._start()
        return replace(case_of(case) if isinstance(case, int) else case, verdict=verdict)

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0))
