"""Training while kernels are compiled behind it: how much do the steps suffer?

A fresh process with empty caches trains with onnxtrain. The first step, which captures the model, is left out. Steps
count as "during" as long as a compiler runs. Where that takes too long, the rest is waited for: the steps that the same
process takes then, the "after", must have the machine for themselves.
"""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks import processes
from benchmarks.contenders import ONNXTRAIN, Stepper, make_batches, make_model
from benchmarks.other_programs import OtherPrograms
from benchmarks.processes import Tell
from benchmarks.steady import is_compiling
from benchmarks.workload import Workload
from benchmarks.workloads import WORKLOADS

WORKLOAD = WORKLOADS["llama"]  # kernels of ours, and regions fused by Inductor, which take far longer
_AFTER = 20  # steps
_SETTLING = 24  # steps after the compiler's end, in which what it made is tried; they count as neither
_MOST_S = 600.0
_POLL_S = 0.2


def measure(workload: Workload, tell: Tell, *, most_s: float = _MOST_S) -> dict[str, Any]:
    """All but the circumstances of a `Behind`."""
    batch, *_ = make_batches(workload)
    stepper = Stepper(workload, ONNXTRAIN, make_model(workload))
    tell("first step")
    stepper.step(batch)
    others = OtherPrograms()
    started = last = time.monotonic()
    during: list[float] = []
    quiet = 0
    while quiet < _SETTLING and time.monotonic() - started < most_s:
        during.append(stepper.step(batch))
        if is_compiling():
            last, quiet = time.monotonic(), 0
        else:
            quiet += 1
        tell(f"step {len(during)}, {'a compiler runs' if quiet == 0 else 'no compiler runs'}")
    beside_compiler = during[: max(1, len(during) - quiet)]
    while quiet < _SETTLING:
        if is_compiling():
            tell("waiting for the compiler")
            last, quiet = time.monotonic(), 0
            time.sleep(_POLL_S)
        else:
            stepper.step(batch)
            quiet += 1
    after = [stepper.step(batch) for _ in range(_AFTER)]
    return {
        "during_s": beside_compiler,
        "after_s": after,
        "compiling_s": last - started,
        "others_cores": others.cores(),
    }


if __name__ == "__main__":
    os.environ.setdefault("ONNXTRAIN_REGIONS", "auto")  # off by default; what takes longest to compile
    processes.end_on_termination()
    processes.send(result=measure(WORKLOAD, lambda text: processes.send(doing=text)))
