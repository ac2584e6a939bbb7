"""Line and point charts as inline SVG: no script, no network, colours from the page's style sheet.

    series(name, style, x[n], y[n]) ─scale─▶ pixels ─▶ <svg> with axes, lines or points, and a title on each point

A chart shows every value that it is given; what to average or leave out is the caller's choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 44


@dataclass(frozen=True)
class Series:
    """One line of a chart; `style` is a class of the page's style sheet."""

    name: str
    style: str
    xs: Sequence[float]
    ys: Sequence[float]
    points: bool = False
    hover: bool = True


@dataclass(frozen=True)
class Level:
    """A horizontal line; the page's legend says what it is."""

    style: str
    y: float


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value between the ends of the axis, from 0 to 1."""
        if self.log:
            return (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return (value - self.low) / (self.high - self.low)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean over up to `window` values that end at each place."""
    return [sum(part) / len(part) for end in range(1, len(values) + 1) for part in [values[max(0, end - window) : end]]]


def chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log: bool = False,
    levels: Sequence[Level] = (),
    from_zero: bool = False,
    show: Callable[[float], str] = "{:,.4g}".format,
) -> str:
    """Return the chart as SVG; on a logarithmic axis, values of zero and below are skipped."""
    xs = [x for line in series for x in line.xs]
    ys = [y for line in series for y in line.ys] + [level.y for level in levels]
    ys = [y for y in ys if math.isfinite(y) and (y > 0 or not log)]
    x_axis = _linear(min(xs, default=0.0), max(xs, default=1.0), 8, tight=True)
    y_axis = _decades(ys) if log else _linear(0.0 if from_zero else min(ys, default=0.0), max(ys, default=1.0), 5)

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + x_axis.share(x) * (WIDTH - _LEFT - _RIGHT)
        return across, HEIGHT - _BOTTOM - y_axis.share(y) * (HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    parts += _grid(x_axis, y_axis, to_pixels, x_label, y_label)
    for level in levels:
        parts.append(_level(level, to_pixels(x_axis.low, level.y)[1]))
    for line in series:
        parts += _line(line, to_pixels, show, log=log)
    parts.append("</svg>")
    return "\n".join(parts)


ToPixels = Callable[[float, float], tuple[float, float]]


def _line(line: Series, to_pixels: ToPixels, show: Callable[[float], str], *, log: bool) -> list[str]:
    pieces: list[list[tuple[float, float]]] = [[]]
    dots = []
    for x, y in zip(line.xs, line.ys, strict=True):
        if not math.isfinite(y) or (log and y <= 0):
            pieces.append([])
            continue
        across, down = to_pixels(x, y)
        pieces[-1].append((across, down))
        radius = 2.5 if line.points else 6  # of an invisible disc that only catches the pointer
        kind = "point" if line.points else "catch"
        dots.append(
            f'<circle class="{kind} {line.style}" cx="{across:.1f}" cy="{down:.1f}" r="{radius}">'
            f"<title>{escape(line.name)}, {x:g}: {escape(show(y))}</title></circle>"
        )
    lines = [] if line.points else [_polyline(piece, line.style) for piece in pieces if piece]
    return lines + (dots if line.points or line.hover else [])


def _polyline(points: Sequence[tuple[float, float]], style: str) -> str:
    return f'<polyline class="line {style}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _level(level: Level, down: float) -> str:
    return (
        f'<line class="line level {level.style}" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>'
    )


def _grid(x_axis: _Axis, y_axis: _Axis, to_pixels: ToPixels, x_label: str, y_label: str) -> list[str]:
    parts = []
    for y in y_axis.ticks:
        down = to_pixels(x_axis.low, y)[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>')
        number = _number(y, y_axis)
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{down + 4:.1f}" text-anchor="end">{number}</text>')
    for x in x_axis.ticks:
        across = to_pixels(x, y_axis.low)[0]
        parts.append(
            f'<text class="tick" x="{across:.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{x:g}</text>'
        )
    middle = (HEIGHT - _BOTTOM + _TOP) / 2
    parts.append(
        f'<text class="label" x="{(WIDTH + _LEFT - _RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
    )
    parts.append(
        f'<text class="label" transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    return parts


def _number(value: float, axis: _Axis) -> str:
    if not axis.log:
        return f"{value:,.6g}"
    return f'10<tspan dy="-5" font-size="9">{"−" if value < 1 else ""}{abs(round(math.log10(value)))}</tspan>'


def _linear(low: float, high: float, about: int, *, tight: bool = False) -> _Axis:
    """Return an axis with round ticks; `tight` lets it end at the data instead of at a tick."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / about
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = tuple(round(index * step, 12) for index in range(first, last + 1))
    if tight:
        return _Axis(low, high, tuple(tick for tick in ticks if low <= tick <= high))
    return _Axis(ticks[0], ticks[-1], ticks)


def _decades(values: Sequence[float]) -> _Axis:
    """Return a logarithmic axis from one power of ten to another."""
    first = math.floor(math.log10(min(values, default=0.1)))
    last = max(math.ceil(math.log10(max(values, default=1.0))), first + 1)
    return _Axis(10.0**first, 10.0**last, tuple(10.0**power for power in range(first, last + 1)), log=True)
