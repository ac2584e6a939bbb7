"""Profile a step: the time by op (of onnxtrain's graph, or PyTorch's operators), and by part of the training loop.

    steps under the profiler ─▶ time of each op, inclusive (a graph's) or exclusive (PyTorch's) ─▶ per step

An op of a graph is a profiler range around its kernel. The profiler takes one or two microseconds per event, so the sum
is somewhat above the time of an undisturbed step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.variants import PARTS, Stepper
from benchmarks.workload import Batch
from onnxtrain.ops import OPS

_STEPS = 3
_PARTS_S = 2.0  # the time to measure the parts of steps
_GRAPH_OPS = frozenset(name for _, name in OPS)


@dataclass(frozen=True)
class OpTime:
    """The average time of one kind of op in a step.

    Attributes:
        count: the number of such ops in a step.
    """

    op: str
    ms: float
    count: int


REST = "everything else"  # autograd, the optimizer, Python


def op_times(step: Callable[[], object]) -> list[OpTime]:
    """Return the time of each kind of op in a step, longest first, and the rest of the step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        step()  # a graph's ranges are compiled in the first profiled step
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        started = time.perf_counter()
        for _ in range(_STEPS):
            step()
        step_ms = (time.perf_counter() - started) / _STEPS * 1e3
    events = profile.key_averages()
    of_graph = [e for e in events if " " in e.key and e.key.partition(" ")[0] in _GRAPH_OPS]
    total: dict[str, tuple[float, int]] = {}
    for event in of_graph or [e for e in events if e.key.startswith("aten::")]:
        op = event.key.partition(" ")[0]
        us, count = total.get(op, (0.0, 0))
        own = event.cpu_time_total if of_graph else event.self_cpu_time_total
        total[op] = us + own, count + event.count
    times = [OpTime(op, us / 1e3 / _STEPS, round(count / _STEPS)) for op, (us, count) in total.items()]
    times.sort(key=lambda op_time: -op_time.ms)
    return [*times, OpTime(REST, max(0.0, step_ms - sum(op_time.ms for op_time in times)), 0)]


def parts(steppers: Mapping[str, Stepper], batch: Batch, steps: int) -> dict[str, dict[str, float]]:
    """Return the median seconds of each part of a step on a CPU, by variant. Steps are interleaved."""
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in steppers}
    started = time.monotonic()
    while not all(times.values()) or time.monotonic() - started < _PARTS_S:
        for name, stepper in steppers.items():
            times[name] += (stepper.parts(batch) for _ in range(steps))
    return {
        name: dict(zip(PARTS, map(statistics.median, zip(*of_steps, strict=True)), strict=True))
        for name, of_steps in times.items()
    }
