"""What a step's time goes to: onnxtrain's by the ops of its graph, any other's by PyTorch's operators; and its parts.

    steps under the profiler ─▶ time of each op, inner operators with it (a graph's) or without (PyTorch's) ─▶ per step

A graph's ops are ranges around their kernels. The profiler itself takes a microsecond or two an event, so that the sum
is somewhat above what an undisturbed step takes.
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
_PARTS_S = 2.0  # for steps in parts
_GRAPH_OPS = frozenset(name for _, name in OPS)


@dataclass(frozen=True)
class Spent:
    """What one kind of op takes of a step, on average.

    Attributes:
        count: how many there are in a step.
    """

    op: str
    ms: float
    count: int


REST = "everything else"  # autograd, the optimizer, Python


def spent(step: Callable[[], object]) -> list[Spent]:
    """The kinds of ops that a step runs, those that take longest first, and what is left of the step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        step()  # a graph's ranges are compiled in the first profiled step
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        started = time.perf_counter()
        for _ in range(_STEPS):
            step()
        whole = (time.perf_counter() - started) / _STEPS * 1e3
    events = profile.key_averages()
    of_graph = [e for e in events if " " in e.key and e.key.partition(" ")[0] in _GRAPH_OPS]
    total: dict[str, tuple[float, int]] = {}
    for event in of_graph or [e for e in events if e.key.startswith("aten::")]:
        op = event.key.partition(" ")[0]
        us, count = total.get(op, (0.0, 0))
        own = event.cpu_time_total if of_graph else event.self_cpu_time_total
        total[op] = us + own, count + event.count
    found = [Spent(op, us / 1e3 / _STEPS, round(count / _STEPS)) for op, (us, count) in total.items()]
    found.sort(key=lambda each: -each.ms)
    return [*found, Spent(REST, max(0.0, whole - sum(each.ms for each in found)), 0)]


def parts(steppers: Mapping[str, Stepper], batch: Batch, steps: int) -> dict[str, dict[str, float]]:
    """The median seconds of each part of a step on a CPU, by variant; steps interleaved."""
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in steppers}
    started = time.monotonic()
    while not all(times.values()) or time.monotonic() - started < _PARTS_S:
        for name, stepper in steppers.items():
            times[name] += (stepper.parts(batch) for _ in range(steps))
    return {
        name: dict(zip(PARTS, map(statistics.median, zip(*found, strict=True)), strict=True))
        for name, found in times.items()
    }
