"""Measure how much compiling kernels in the background slows down training steps.

A fresh process with empty caches trains with onnxtrain. The first step, which captures the model, is skipped. Of each
16 steps, four run alone, with the compilers stopped by this benchmark, so that both kinds of steps are timed in the
same state of the machine and on the same program. The measurement ends when no compiler has run for two such periods.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import processes
from benchmarks.other_programs import OtherPrograms
from benchmarks.processes import Tell
from benchmarks.steady_state import is_compiling
from benchmarks.variants import ONNXTRAIN, Stepper, make_batches, make_model
from benchmarks.workload import Workload
from benchmarks.workloads import WORKLOADS
from onnxtrain.native import background

WORKLOAD = WORKLOADS["llama"]  # native kernels, and regions fused by Inductor, which take far longer to compile
_BESIDE, _ALONE = 12, 4  # steps of a period
_QUIET = 2  # periods without a compiler: there may be a pause between two compilations
_MAX_S = 600.0


def measure(workload: Workload, tell: Tell, *, max_s: float = _MAX_S) -> dict[str, Any]:
    """Return the fields of a `BackgroundCompilation` without its circumstances."""
    batch, *_ = make_batches(workload)
    stepper = Stepper(workload, ONNXTRAIN, make_model(workload))
    tell("first step")
    stepper.step(batch)
    others = OtherPrograms()
    started = last = time.monotonic()
    during: list[list[float]] = []
    alone: list[list[float]] = []
    quiet = 0
    while quiet < _QUIET and time.monotonic() - started < max_s:
        during.append([])
        quiet += 1
        for _ in range(_BESIDE):
            during[-1].append(stepper.step(batch))
            if is_compiling():
                last, quiet = time.monotonic(), 0
            tell(f"step {sum(map(len, during + alone))}, {'no compiler runs' if quiet else 'a compiler runs'}")
        with compilers_stopped():
            alone.append([stepper.step(batch) for _ in range(_ALONE)])
    periods = max(1, len(during) - quiet)
    return {
        "during_s": during[:periods],
        "alone_s": alone[:periods],
        "compiling_s": last - started,
        "others_cores": others.cores(),
    }


@contextlib.contextmanager
def compilers_stopped() -> Iterator[None]:
    """Stop the running compilers and background Python work inside the block; resume them afterwards."""
    with background.throttle_lock:
        groups = background.process_groups()
        _signal(groups, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(groups, signal.SIGCONT)


def _signal(groups: list[int], number: signal.Signals) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)


if __name__ == "__main__":
    os.environ.setdefault("ONNXTRAIN_KERNELS", "fused")  # off by default; it takes longest to compile
    processes.end_on_termination()
    processes.send(result=measure(WORKLOAD, lambda text: processes.send(doing=text)))
