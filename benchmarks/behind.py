"""Training while kernels are compiled behind it: how much do the steps suffer?

A fresh process with empty caches trains with onnxtrain. The first step, which captures the model, is left out. Of each
16 steps four have the machine for themselves, as this benchmark stops compilers meanwhile: both are timed within the
same moments of the machine, on the same program. It ends when no compiler has run for two such turns.
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
from benchmarks.steady import is_compiling
from benchmarks.variants import ONNXTRAIN, Stepper, make_batches, make_model
from benchmarks.workload import Workload
from benchmarks.workloads import WORKLOADS
from onnxtrain.native import background

WORKLOAD = WORKLOADS["llama"]  # kernels of ours, and regions fused by Inductor, which take far longer
_BESIDE, _ALONE = 12, 4  # steps of a turn
_QUIET = 2  # turns without a compiler: between two there may be a pause
_MOST_S = 600.0


def measure(workload: Workload, tell: Tell, *, most_s: float = _MOST_S) -> dict[str, Any]:
    """All but the circumstances of a `Behind`."""
    batch, *_ = make_batches(workload)
    stepper = Stepper(workload, ONNXTRAIN, make_model(workload))
    tell("first step")
    stepper.step(batch)
    others = OtherPrograms()
    started = last = time.monotonic()
    during: list[list[float]] = []
    alone: list[list[float]] = []
    quiet = 0
    while quiet < _QUIET and time.monotonic() - started < most_s:
        during.append([])
        quiet += 1
        for _ in range(_BESIDE):
            during[-1].append(stepper.step(batch))
            if is_compiling():
                last, quiet = time.monotonic(), 0
            tell(f"step {sum(map(len, during + alone))}, {'no compiler runs' if quiet else 'a compiler runs'}")
        with held():
            alone.append([stepper.step(batch) for _ in range(_ALONE)])
    turns = max(1, len(during) - quiet)
    return {
        "during_s": during[:turns],
        "alone_s": alone[:turns],
        "compiling_s": last - started,
        "others_cores": others.cores(),
    }


@contextlib.contextmanager
def held() -> Iterator[None]:
    """The compilers that run stand still inside, and no piece of Python runs. All goes on afterwards."""
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
    os.environ.setdefault("ONNXTRAIN_KERNELS", "fused")  # off by default; what takes longest to compile
    processes.end_on_termination()
    processes.send(result=measure(WORKLOAD, lambda text: processes.send(doing=text)))
