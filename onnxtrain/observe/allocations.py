"""What PyTorch's allocator gives out and takes back while something runs, as torch.profiler records it.

    record(step) ─▶ allocations: bytes, from when to when, in which ranges      peak_bytes(allocations)

Exact on a CPU and a GPU; memory that does not come from PyTorch's allocator (oneDNN's own buffers) is not seen.
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
    """A interval of time with a name (`torch.profiler.record_function`), in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Allocation:
    """A piece of memory.

    Attributes:
        bytes: its size.
        start: when it was given out, in microseconds; None where it was there before.
        end: when it was taken back; None where it stays.
        address: where it lies.
        made_by: the innermost range or operator that asked for it; "" where none did.
    """

    bytes: int
    start: float | None
    end: float | None
    address: int
    made_by: str


@dataclass(frozen=True)
class Recording:
    """What happened to memory; only what was given out or taken back meanwhile is in it."""

    allocations: tuple[Allocation, ...]
    ranges: tuple[Range, ...]

    def range(self, name: str) -> Range:
        """The first range of this name."""
        return next(r for r in self.ranges if r.name == name)


@contextlib.contextmanager
def profiled(**options: Any) -> Iterator[profile]:
    """`torch.profiler.profile(**options)` around what runs inside, without the lines in which it tells of itself."""
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
    """Drops lines like `USDT:… profiler_start`, which C++ writes to the error stream; all others are written after."""
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


_ERRORS = 2  # the error stream's file descriptor


def record(run: Callable[[], object]) -> Recording:
    """Runs `run` once and records it; programs of onnxtrain have a range per node."""
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
    held: dict[tuple[int, int], tuple[float, int, str]] = {}
    found: list[Allocation] = []
    for event in events:
        facts, time = event["args"], event["ts"]
        place = facts["Device Type"], facts["Addr"]
        if facts["Bytes"] > 0:
            held[place] = time, facts["Bytes"], _innermost(spans, starts, time)
        elif place in held:
            start, size, maker = held.pop(place)
            found.append(Allocation(size, start, time, place[1], maker))
        else:
            found.append(Allocation(-facts["Bytes"], None, time, place[1], ""))
    found += [Allocation(size, start, None, place[1], maker) for place, (start, size, maker) in held.items()]
    return sorted(found, key=lambda one: one.start if one.start is not None else float("-inf"))


def _innermost(spans: Sequence[Range], starts: Sequence[float], time: float) -> str:
    """The name of the last span that began before `time` and had not ended."""
    for index in range(bisect.bisect_right(starts, time) - 1, -1, -1):
        if spans[index].end >= time:
            return spans[index].name
    return ""


def peak_bytes(allocations: Iterable[Allocation]) -> int:
    """The most bytes that were held at once, above those at the beginning."""
    changes = [(one.start, one.bytes) for one in allocations if one.start is not None]
    changes += [(one.end, -one.bytes) for one in allocations if one.end is not None]
    held, peak = 0, 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        held += change
        peak = max(peak, held)
    return peak
