"""The first step, in a fresh process whose caches are empty.

    process: import torch, transformers ─▶ build the model ─▶ [prepare ─▶ first step] ─▶ second step, for scale

What the brackets hold is the time that is shown; for onnxtrain it has the import of onnxtrain in it, for torch.compile
whatever it imports by itself.
"""

from __future__ import annotations

import sys
import time

import torch

from benchmarks import processes
from benchmarks.variants import Stepper, make_batches, make_model
from benchmarks.workloads import WORKLOADS


def measure(workload: str, variant: str) -> dict[str, float]:
    """The seconds of an implementation's first two steps; of the first also the processor time of all threads."""
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
    """Let PyTorch start its threads: it does so at the first large call, which is no part of the variant's time."""
    rows = torch.ones(256, 256, requires_grad=True)
    (rows @ rows).relu().sum().backward()


if __name__ == "__main__":
    processes.end_on_termination()
    processes.send(result=measure(*sys.argv[1:]))
