"""Time the first step, in a fresh process with empty caches.

    process: import torch, transformers ─▶ build the model ─▶ [prepare ─▶ first step] ─▶ second step, for scale

The time of the part in brackets is shown. For onnxtrain it includes the import of onnxtrain, for torch.compile the
imports that it does itself.
"""

from __future__ import annotations

import sys
import time

import torch

from benchmarks import processes
from benchmarks.variants import Stepper, make_batches, make_model
from benchmarks.workloads import WORKLOADS


def measure(workload: str, variant: str) -> dict[str, float]:
    """Return the seconds of a variant's first two steps, and the processor time of all threads in the first."""
    work = WORKLOADS[workload]
    first, *more = make_batches(work)
    second = more[0] if more else first
    _start_threads()
    model = make_model(work)
    before = time.process_time()
    stepper = Stepper(work, variant, model)
    first_s = stepper.prepare_s + stepper.step(first)
    return {"first_s": first_s, "first_cpu_s": time.process_time() - before, "second_s": stepper.step(second)}


def _start_threads() -> None:
    """Let PyTorch start its threads, which it does in the first large call, before the timed part."""
    rows = torch.ones(256, 256, requires_grad=True)
    (rows @ rows).relu().sum().backward()


if __name__ == "__main__":
    processes.end_on_termination()
    processes.send(result=measure(*sys.argv[1:]))
