"""Render the page of `onnxtrain memory` as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from onnxtrain.observe.memory_timeline import STYLE, MemoryTimeline, TensorGroup, as_bytes, draw, legend

_STYLE = """
:root { --page: #fafaf8; --card: #ffffff; --text: #1c1c1a; --quiet: #62625c; --rule: #e3e2dc; }
@media (prefers-color-scheme: dark) {
  :root { --page: #161615; --card: #1f1f1d; --text: #ecebe6; --quiet: #a5a49c; --rule: #353531; }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 1080px; margin: 0 auto; padding: 36px 20px 64px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 20px; margin: 36px 0 6px; }
p { margin: 6px 0 12px; max-width: 75ch; }
.quiet, figcaption { color: var(--quiet); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; margin: 22px 0 8px; }
.tile, figure, .scroll { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
.tile { padding: 14px 16px; }
.tile b { display: block; font-size: 25px; line-height: 1.25; font-weight: 650; }
.tile span { color: var(--quiet); font-size: 14px; line-height: 1.35; display: block; }
figure { margin: 14px 0; padding: 14px 14px 10px; }
figcaption { font-size: 14px; margin-top: 4px; }
svg { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; margin: 14px 0; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; text-align: left; border-top: 1px solid var(--rule); vertical-align: top; }
thead th { border-top: 0; font-weight: 600; color: var(--quiet); white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
code { font: 13px/1.5 ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace; white-space: nowrap; }
"""

# The columns of the table of tensors: heading, and whether they hold numbers.
COLUMNS = (
    ("bytes", True), ("count", True), ("shape", False), ("op", False), ("module", False), ("source line", False),
    ("held as", False), ("at the peak", True),
)  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """A headline figure with its label."""

    value: str
    label: str


@dataclass(frozen=True)
class Chart:
    """A timeline with its caption."""

    timeline: MemoryTimeline
    caption: str


def cells(group: TensorGroup) -> tuple[str, ...]:
    """Return the row of a group in the table of tensors, by COLUMNS."""
    sizes = f"{group.dtype} {'×'.join(map(str, group.shape)) or 'scalar'}"
    lifetime = f"{group.held_for}, {group.status}" if group.status == "recomputed" else group.held_for
    return (
        as_bytes(group.bytes), str(group.count), sizes, group.op, group.module or "(model)", group.line, lifetime,
        str(group.at_peak),
    )  # fmt: skip


def render(
    title: str, about: str, tiles: Sequence[Tile], charts: Sequence[Chart], tensors: Sequence[TensorGroup]
) -> str:
    """Render the page. All charts share one scale."""
    top = max(chart.timeline.peak.total for chart in charts)
    body = [f"<h1>{escape(title)}</h1>", f'<p class="quiet">{escape(about)}</p>', '<div class="tiles">']
    body += [f'<div class="tile"><b>{escape(t.value)}</b><span>{escape(t.label)}</span></div>' for t in tiles]
    body.append("</div>")
    for chart in charts:
        body.append(f"<h2>{escape(chart.timeline.title)}</h2>")
        body.append(f"<figure>{legend([chart.timeline])}{draw(chart.timeline, top)}")
        body.append(f"<figcaption>{escape(chart.caption)}</figcaption></figure>")
    if tensors:
        body += ["<h2>Largest tensors</h2>", _table(tensors)]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title><style>{_STYLE}{STYLE}</style></head>",
            "<body><main>",
            *body,
            "</main></body></html>",
            "",
        ]
    )


def section(timeline: MemoryTimeline, tensors: Sequence[TensorGroup]) -> str:
    """Render a chart and the table of the largest tensors, for a page with its own style."""
    return f"<style>{STYLE}</style>{legend([timeline])}{draw(timeline)}<h3>Largest tensors</h3>{_table(tensors)}"


def _table(tensors: Sequence[TensorGroup]) -> str:
    heads = "".join(f"<th{_class(number)}>{escape(name)}</th>" for name, number in COLUMNS)
    rows = []
    for group in tensors:
        inner = "".join(
            f"<td{_class(number)}>{f'<code>{escape(cell)}</code>' if name in _CODE else escape(cell)}</td>"
            for (name, number), cell in zip(COLUMNS, cells(group), strict=True)
        )
        rows.append(f"<tr>{inner}</tr>")
    body = "".join(rows)
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


_CODE = {"shape", "module", "source line"}


def _class(number: bool) -> str:
    return ' class="number"' if number else ""
