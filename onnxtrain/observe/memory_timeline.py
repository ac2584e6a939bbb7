"""The memory of a training step as plain values, and as a stacked area chart in SVG without scripts.

    predicted(plan) ─┐
    measured(step)  ─┴─▶ MemoryTimeline: bytes held in each interval of the step, by band ─draw─▶ <svg>

`STYLE` defines the chart's colours, light and dark; the page includes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

# Uses of memory, from the bottom of the chart to the top.
BANDS = ("parameters", "optimizer state", "gradients", "activations kept", "temporary")

_WIDTH, _HEIGHT = 860, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 16, 22, 46
_PHASE_WIDTH = 70  # of the name of a phase, in pixels
_MAX_INTERVALS = 640  # more are not visible

STYLE = """
:root { --b0: #8d99a8; --b1: #b9a9d6; --b2: #63a583; --b3: #3f7fcf; --b4: #e0803f; --peak: #a3262a; }
@media (prefers-color-scheme: dark) {
  :root { --b0: #5f6b7a; --b1: #7d6ba6; --b2: #4f8f6e; --b3: #4a86d0; --b4: #d97836; --peak: #ff8d85; }
}
.memory .b0 { fill: var(--b0); } .memory .b1 { fill: var(--b1); } .memory .b2 { fill: var(--b2); }
.memory .b3 { fill: var(--b3); } .memory .b4 { fill: var(--b4); }
.memory .grid { stroke: var(--rule); } .memory .tick, .memory .phase { fill: var(--quiet); font-size: 12px; }
.memory .phase-line { stroke: var(--quiet); stroke-dasharray: 2 4; }
.memory .peak-line { stroke: var(--peak); stroke-dasharray: 5 3; }
.memory .peak { fill: var(--peak); font-size: 12px; font-weight: 600; }
.memory .column { fill: transparent; } .memory .column:hover { fill: var(--text); opacity: .12; }
.memory-legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 14px; margin-bottom: 6px; }
.memory-legend span::before {
  content: ""; display: inline-block; width: 12px; height: 12px; margin-right: 6px; border-radius: 3px;
  vertical-align: -1px; background: var(--band);
}
"""


@dataclass(frozen=True)
class Interval:
    """A part of a step in which the memory held is constant.

    Attributes:
        start, end: its position on the axis.
        held: the bytes of each of BANDS.
        doing: the running node or operator, with its module.
    """

    start: float
    end: float
    bytes_by_band: tuple[int, ...]
    doing: str = ""

    @property
    def total(self) -> int:
        return sum(self.bytes_by_band)


@dataclass(frozen=True)
class MemoryTimeline:
    """The memory of a step.

    Attributes:
        title: of the chart.
        axis: the unit of the axis, such as "ms" or "nodes".
        intervals: in order, without gaps.
        phases: (name, start) of each phase, in order.
    """

    title: str
    axis: str
    intervals: tuple[Interval, ...]
    phases: tuple[tuple[str, float], ...] = ()

    @property
    def peak(self) -> Interval:
        """The interval with the most bytes."""
        return max(self.intervals, key=lambda interval: interval.total)


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of a step that equal layers compute at the same source location.

    Attributes:
        name: of the first one, in the graph.
        count: the number of tensors.
        bytes: their total size.
        op: that computes them.
        module: the qualified name of the submodule, with {} for the layer's index if it differs.
        line: the source location in the user's code.
        shape: in this step.
        dtype: of the elements.
        held_for: one of BANDS.
        status: the plan's decision: "kept", "recomputed" or "".
        at_peak: how many of them are held at the peak.
    """

    name: str
    count: int
    bytes: int
    op: str
    module: str
    line: str
    shape: tuple[int, ...]
    dtype: str
    held_for: str
    status: str = ""
    at_peak: int = 0


def as_bytes(count: float) -> str:
    """Format bytes: "12.3 MiB"."""
    power = min(int(math.log(abs(count), 1024)), 3) if abs(count) >= 1024 else 0
    number = count / 1024**power
    return f"{number:,.{0 if power == 0 or number >= 100 else 1}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def legend(timelines: Sequence[MemoryTimeline]) -> str:
    """Return the legend of the bands in these charts, as HTML."""
    present = [any(s.bytes_by_band[band] for t in timelines for s in t.intervals) for band in range(len(BANDS))]
    items = [
        f'<span style="--band: var(--b{band})">{escape(name)}</span>'
        for band, name in enumerate(BANDS)
        if present[band]
    ]
    return f'<div class="memory-legend">{"".join(items)}</div>'


def draw(timeline: MemoryTimeline, top: int | None = None) -> str:
    """Draw the chart as SVG.

    Args:
        timeline: with at least one interval.
        top: the minimum upper end of the vertical axis, in bytes, to give several charts one scale.
    """
    intervals = _coarse(timeline.intervals)
    ticks = _ticks(max(top or 0, timeline.peak.total, 1))
    first, last = intervals[0].start, intervals[-1].end
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def across(x: float) -> float:
        return _LEFT + (x - first) / ((last - first) or 1) * width

    def down(count: float) -> float:
        return _TOP + height * (1 - count / ticks[-1])

    parts = [f'<svg class="memory" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(timeline.title)}">']
    for tick in ticks:
        y = down(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{as_bytes(tick)}</text>')
    parts += _areas(intervals, across, down)
    parts += _phases(timeline, across)
    parts += _peak(timeline, across, down)
    for interval in intervals:
        left, right = across(interval.start), across(interval.end)
        parts.append(
            f'<rect class="column" x="{left:.1f}" y="{_TOP}" width="{max(right - left, 0.6):.1f}" height="{height}">'
            f"<title>{escape(_described(interval))}</title></rect>"
        )
    label = f"{timeline.axis}: {_number(first)} to {_number(last)}"
    parts.append(f'<text class="tick" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 8}" text-anchor="end">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>"])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _described(interval: Interval) -> str:
    rows = [f"{as_bytes(size)} {name}" for name, size in zip(BANDS, interval.bytes_by_band, strict=True) if size]
    return "\n".join([f"{as_bytes(interval.total)} in all", *rows, *([interval.doing] if interval.doing else [])])


def _coarse(intervals: Sequence[Interval]) -> list[Interval]:
    """Merge intervals to at most _MAX_INTERVALS; each keeps the values of its largest one."""
    if len(intervals) <= _MAX_INTERVALS:
        return list(intervals)
    start, end = intervals[0].start, intervals[-1].end
    bin_of: Callable[[Interval], int] = lambda s: int((s.start - start) / ((end - start) or 1) * _MAX_INTERVALS)
    groups: dict[int, list[Interval]] = {}
    for interval in intervals:
        groups.setdefault(bin_of(interval), []).append(interval)
    merged = []
    for group in groups.values():
        most = max(group, key=lambda interval: interval.total)
        merged.append(Interval(group[0].start, group[-1].end, most.bytes_by_band, most.doing))
    return merged


def _ticks(top: int) -> list[int]:
    """Return ticks at round numbers of bytes, from 0 to at least `top`."""
    unit = 1024 ** min(int(math.log(top, 1024)), 3) if top >= 1024 else 1
    rough = top / unit / 4
    scale = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= rough) * unit
    return [round(step * index) for index in range(math.ceil(top / step) + 1)]


def _areas(
    intervals: Sequence[Interval], across: Callable[[float], float], down: Callable[[float], float]
) -> Iterator[str]:
    below = [0] * len(intervals)
    for band in range(len(BANDS)):
        above = [base + interval.bytes_by_band[band] for base, interval in zip(below, intervals, strict=True)]
        if above != below:
            upper = [(x, down(y)) for s, y in zip(intervals, above, strict=True) for x in (s.start, s.end)]
            lower = [(x, down(y)) for s, y in zip(intervals, below, strict=True) for x in (s.start, s.end)]
            points = " ".join(f"{across(x):.1f},{y:.1f}" for x, y in (*upper, *reversed(lower)))
            yield f'<polygon class="b{band}" points="{points}"/>'
        below = above


def _phases(timeline: MemoryTimeline, across: Callable[[float], float]) -> Iterator[str]:
    for name, start in timeline.phases:
        x = across(start)
        yield f'<line class="phase-line" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
        anchor = f'x="{x + 4:.1f}"' if x + _PHASE_WIDTH < _WIDTH else f'x="{_WIDTH - 2}" text-anchor="end"'
        yield f'<text class="phase" {anchor} y="{_HEIGHT - 28}">{escape(name)}</text>'


def _peak(timeline: MemoryTimeline, across: Callable[[float], float], down: Callable[[float], float]) -> Iterator[str]:
    peak = timeline.peak
    x, y = across((peak.start + peak.end) / 2), down(peak.total)
    yield f'<line class="peak-line" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    anchor = "start" if x < _WIDTH / 3 else "end" if x > 2 * _WIDTH / 3 else "middle"
    yield f'<text class="peak" x="{x:.1f}" y="{y - 8:.1f}" text-anchor="{anchor}">peak {as_bytes(peak.total)}</text>'


def held_by_band(amounts: Mapping[str, int]) -> tuple[int, ...]:
    """Return the bytes of each band, in the order of BANDS."""
    return tuple(amounts.get(name, 0) for name in BANDS)
