"""Record the allocations and frees of PyTorch's allocator with torch.profiler.

    record(step) ─▶ allocations: bytes, lifetime, enclosing range      peak_bytes(allocations)

Exact on CPU and GPU. Memory from other allocators (oneDNN's internal buffers) is not recorded.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Range:
    """A named interval of time with a name (`torch.profiler.record_function`), in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Allocation:
    """An allocation.

    Attributes:
        bytes: its size.
        start: when it was allocated, in microseconds; None if before the recording.
        end: when it was freed, in microseconds; None if not during the recording.
        address: its address.
        allocated_by: the innermost enclosing range or operator; "" without one.
    """

    bytes: int
    start: float | None
    end: float | None
    address: int
    allocated_by: str


@dataclass(frozen=True)
class Recording:
    """The allocations and frees during a recording, and its ranges."""

    allocations: tuple[Allocation, ...]
    ranges: tuple[Range, ...]

    def range(self, name: str) -> Range:
        """Return the first range with this name."""
        return next(r for r in self.ranges if r.name == name)


@contextlib.contextmanager
def profiled(**options: Any) -> Iterator[profile]:
    """Run the body under `torch.profiler.profile(**options)`, without the profiler's own messages on stderr."""
    profiler = profile(**options)
    with _without_notes():
        profiler.start()
    try:
        yield profiler
    finally:
        with _without_notes():
            profiler.stop()


@contextlib.contextmanager
def _without_notes() -> Iterator[None]:
    """Drop lines such as `USDT:… profiler_start`, which C++ writes to stderr; other lines are written afterwards."""
    sys.stderr.flush()
    errors = os.dup(_ERRORS)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), _ERRORS)
        try:
            yield
        finally:
            os.dup2(errors, _ERRORS)
            os.close(errors)
            written.seek(0)
            for line in written:
                if not line.startswith(b"USDT:"):
                    os.write(_ERRORS, line)


_ERRORS = 2  # the file descriptor of stderr


def record(run: Callable[[], object]) -> Recording:
    """Call `run` once and record it. Programs of onnxtrain have one range per node."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profiled(activities=activities, profile_memory=True) as profiler:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    events = sorted((event for event in events if "ts" in event), key=lambda event: event["ts"])
    timed = [event for event in events if event.get("cat") in ("user_annotation", "cpu_op")]
    ranges = [Range(e["name"], e["ts"], e["ts"] + e["dur"]) for e in timed if e["cat"] == "user_annotation"]
    spans = [Range(e["name"], e["ts"], e["ts"] + e["dur"]) for e in timed]
    return Recording(tuple(_allocations((e for e in events if e["name"] == "[memory]"), spans)), tuple(ranges))


def _allocations(events: Iterable[dict[str, Any]], spans: Sequence[Range]) -> list[Allocation]:
    starts = [span.start for span in spans]
    live: dict[tuple[int, int], tuple[float, int, str]] = {}
    allocations: list[Allocation] = []
    for event in events:
        facts, time = event["args"], event["ts"]
        key = facts["Device Type"], facts["Addr"]
        if facts["Bytes"] > 0:
            live[key] = time, facts["Bytes"], _innermost(spans, starts, time)
        elif key in live:
            start, size, span = live.pop(key)
            allocations.append(Allocation(size, start, time, key[1], span))
        else:
            allocations.append(Allocation(-facts["Bytes"], None, time, key[1], ""))
    allocations += [Allocation(size, start, None, key[1], span) for key, (start, size, span) in live.items()]
    return sorted(allocations, key=lambda one: one.start if one.start is not None else float("-inf"))


def _innermost(spans: Sequence[Range], starts: Sequence[float], time: float) -> str:
    """Return the name of the last span that started before `time` and ends after it; "" without one."""
    for index in range(bisect.bisect_right(starts, time) - 1, -1, -1):
        if spans[index].end >= time:
            return spans[index].name
    return ""


def peak_bytes(allocations: Iterable[Allocation]) -> int:
    """Return the peak of bytes held at once, relative to the start of the recording."""
    changes = [(one.start, one.bytes) for one in allocations if one.start is not None]
    changes += [(one.end, -one.bytes) for one in allocations if one.end is not None]
    live, peak = 0, 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        live += change
        peak = max(peak, live)
    return peak
