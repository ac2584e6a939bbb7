"""Draw speedups as horizontal bars in an SVG without scripts, for light and dark pages.

workload ─▶ a bar per variant: speedup over eager, quartiles as a thin line, the value at its end

For cold runs it is the total speedup, compilation included. A bar that would dwarf the others is cut off and ends in a
point.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from html import escape

from benchmarks.results import Measured, speed_over
from benchmarks.variants import EAGER, VARIANTS
from benchmarks.workload import Workload

_WIDTH, _LEFT, _RIGHT, _TOP = 860, 330, 70, 60
_BAR, _GAP, _BETWEEN, _LINE = 13, 3, 16, 15
_MAX_SPEED = 5.0  # longer bars are cut
_COLOURS = {
    "eager, oneDNN Linears": ("#8a7fc4", "#a79ee0"),
    "onnxtrain": ("#d9541e", "#f08350"),
    "torch.compile": ("#2a6fc9", "#6aa5f0"),
    "torch.compile dynamic": ("#7fb2e8", "#3c6ea8"),
}
# The workloads and variants that README shows.
_OVERVIEW = ("minilm-lengths", "bert-mlm", "t5", "minilm", "gpt2", "cnn", "vit", "llama", "lstm")
_OVERVIEW_VARIANTS = ("onnxtrain", "torch.compile")
_CLASSES = {variant: f"bar{number}" for number, variant in enumerate(_COLOURS)}


Speeds = tuple[str, float, float, float]  # variant, lower quartile, median, upper quartile


def speed_chart(results: Sequence[tuple[Workload, Measured]]) -> str:
    """Draw all results; workloads without eager's times are skipped."""
    return draw([(workload.title, _speeds(workload, measured)) for workload, measured in results])


def overview_chart(results: Sequence[tuple[Workload, Measured]]) -> str:
    """Draw the workloads and variants that README shows."""
    by_name = {workload.name: (workload, measured) for workload, measured in results}
    chosen = [by_name[name] for name in _OVERVIEW if name in by_name]
    return draw([
        (workload.title, [each for each in _speeds(workload, measured) if each[0] in _OVERVIEW_VARIANTS])
        for workload, measured in chosen
    ])  # fmt: skip


def draw(all_groups: Sequence[tuple[str, Sequence[Speeds]]]) -> str:
    """Draw a group of bars for each title."""
    groups = [(title, speeds) for title, speeds in all_groups if speeds]
    most = max([1.0, *(high for _, speeds in groups for _, _, _, high in speeds)])
    scale = (_WIDTH - _LEFT - _RIGHT) / min(most, _MAX_SPEED)
    parts: list[str] = []
    top = _TOP
    for title, speeds in groups:
        middle = top + (len(speeds) * (_BAR + _GAP) - _GAP) / 2
        parts += _label(title, middle)
        for variant, low, speed, high in speeds:
            parts += _bar(variant, top, scale, low, speed, high)
            top += _BAR + _GAP
        top += _BETWEEN
    height = top + 10
    line = _LEFT + scale
    parts.append(f'<line class="level" x1="{line:.1f}" x2="{line:.1f}" y1="{_TOP - 8}" y2="{top - _BETWEEN + 6}"/>')
    parts.append(_text(line, _TOP - 13, "eager", "note", "middle"))
    label = "Speed of a training step, in multiples of eager PyTorch's"
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">'
    background = f'<rect class="background" width="{_WIDTH}" height="{height}"/>'
    return "\n".join(
        [
            frame,
            _style(),
            background,
            *_legend({speed[0] for _, speeds in groups for speed in speeds}),
            *parts,
            "</svg>",
            "",
        ]
    )


def _speeds(workload: Workload, measured: Measured) -> list[Speeds]:
    eager = measured.timed(EAGER)
    if eager is None:
        return []
    of_others = [timed for name in VARIANTS if name in _COLOURS and (timed := measured.timed(name)) is not None]
    if workload.cold:
        totals = [(timed.variant, eager.total_s / timed.total_s) for timed in of_others]
        return [(variant, speed, speed, speed) for variant, speed in totals]
    return [(timed.variant, *speed_over(timed, eager)) for timed in of_others]


def _bar(variant: str, top: float, scale: float, low: float, speed: float, high: float) -> list[str]:
    middle = top + _BAR / 2
    quartiles = f" (quartiles {low:.2f} – {high:.2f})" if low < high else ""
    title = f"<title>{escape(f'{variant}: {speed:.2f} ×{quartiles}')}</title>"
    start, end = (_LEFT + min(value, _MAX_SPEED) * scale for value in (low, high))
    right, bottom = _LEFT + min(speed, _MAX_SPEED) * scale, top + _BAR
    tip = right + (_BAR / 2 if speed > _MAX_SPEED else 0)
    corners = f"{_LEFT},{top} {right:.1f},{top} {tip:.1f},{middle} {right:.1f},{bottom} {_LEFT},{bottom}"
    return [
        f'<polygon class="{_CLASSES[variant]}" points="{corners}">{title}</polygon>',
        f'<line class="range" x1="{start:.1f}" x2="{end:.1f}" y1="{middle}" y2="{middle}"/>',
        _text(max(tip, end) + 6, top + _BAR - 2.5, f"{speed:.2f}", "figure", "start"),
    ]


def _legend(shown: Collection[str]) -> list[str]:
    parts = []
    left = 20
    for variant, style in _CLASSES.items():
        if variant not in shown:
            continue
        parts.append(f'<rect class="{style}" x="{left}" y="14" width="12" height="12"/>')
        parts.append(_text(left + 18, 24, variant, "note", "start"))
        left += 48 + 7 * len(variant)
    return parts


def _text(x: float, y: float, text: str, style: str, anchor: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _label(title: str, middle: float) -> list[str]:
    """Return the title of a group left of its bars, on as many lines as it needs."""
    lines = textwrap.wrap(title, 46)
    first = middle + 4 - _LINE / 2 * (len(lines) - 1)
    return [_text(_LEFT - 10, first + i * _LINE, line, "name", "end") for i, line in enumerate(lines)]


def _style() -> str:
    light = "".join(f".{_CLASSES[name]} {{ fill: {colours[0]} }}\n" for name, colours in _COLOURS.items())
    dark = "".join(f".{_CLASSES[name]} {{ fill: {colours[1]} }}\n" for name, colours in _COLOURS.items())
    return f"""<style>
text {{ font: 12.5px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1c1c1a }}
.note, .figure {{ font-size: 11.5px }}
.note {{ fill: #62625c }}
.level {{ stroke: #62625c; stroke-dasharray: 2 4 }}
.range {{ stroke: #1c1c1a; opacity: .55 }}
.background {{ fill: #ffffff }}
{light}@media (prefers-color-scheme: dark) {{
text {{ fill: #ecebe6 }}
.note {{ fill: #a5a49c }}
.level {{ stroke: #a5a49c }}
.range {{ stroke: #ecebe6 }}
.background {{ fill: #16191d }}
{dark}}}
</style>"""
