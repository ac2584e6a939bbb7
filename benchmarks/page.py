"""Write the measured part of the documentation's performance page: tables, two charts, machine and commit."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chart import overview_chart, speed_chart
from benchmarks.real_workloads import REAL_WORKLOADS
from benchmarks.results import Measured, Timed, speed_over
from benchmarks.tables import Rows, duration
from benchmarks.variants import COMPILE, COMPILE_DYNAMIC, EAGER, ONNXTRAIN
from benchmarks.workload import Workload

_HEADER = (
    "", "eager", "onnxtrain", "× eager", "quartiles", "× torch.compile", "× dynamic", "peak memory", "first step",
    "GEMM share", "limit",
)  # fmt: skip
_REAL_SIZES = "**Real sizes**: models in the configurations that people train, with random weights."


def write_page(results: Sequence[tuple[Workload, Measured]], folder: Path) -> Path:
    """Write `_measured.md`, `speeds.svg` and `speeds-overview.svg` into a folder; return the path of the page."""
    small, real = (
        [pair for pair in results if (pair[0].name in REAL_WORKLOADS) is is_real] for is_real in (False, True)
    )
    (folder / "speeds.svg").write_text(speed_chart(small), encoding="utf-8")
    (folder / "speeds-overview.svg").write_text(overview_chart(small), encoding="utf-8")
    parts = [*_table(small), *([_REAL_SIZES, *_table(real)] if real else [])]
    page = folder / "_measured.md"
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return page


def _table(results: Sequence[tuple[Workload, Measured]]) -> list[str]:
    """Return a table in Markdown, then the sources of its figures."""
    rows = tuple(row for workload, measured in results if (row := _row(workload, measured)))
    return [Rows("", _HEADER, rows).as_markdown(), *dict.fromkeys(_source(measured) for _, measured in results)]


def _row(workload: Workload, measured: Measured) -> tuple[str, ...]:
    """Return a row of figures; () if eager or onnxtrain was not timed."""
    eager, ours = measured.timed(EAGER), measured.timed(ONNXTRAIN)
    if eager is None or ours is None:
        return ()
    low, middle, high = speed_over(ours, eager)
    share, limit, later = measured.share(ours), measured.limit(), measured.later()
    times = (eager.total_s, ours.total_s) if workload.cold else (eager.median_s, ours.median_s)
    return (
        workload.title,
        *map(duration, times),
        f"**{times[0] / times[1] if workload.cold else middle:.2f}**",
        "" if workload.cold else f"{low:.2f} – {high:.2f}",
        *(_ratio(workload, ours, measured.timed(name)) for name in (COMPILE, COMPILE_DYNAMIC)),
        f"{eager.peak_bytes / 2**20:,.0f} → {ours.peak_bytes / 2**20:,.0f} MiB" if eager.peak_bytes >= 2**20 else "",
        f"{statistics.median(later):+.1f} s" if later else "",
        "" if share is None else f"{share:.0%}",
        "" if limit is None else f"{limit:.2f}",
    )


def _ratio(workload: Workload, ours: Timed, other: Timed | None) -> str:
    if other is None:
        return ""
    return f"{other.total_s / ours.total_s if workload.cold else speed_over(ours, other)[1]:.2f}"


def _source(measured: Measured) -> str:
    """Name the machine, the versions, the commit and the command."""
    run = measured.circumstances
    machine = run.machine
    hardware = f"{machine.processor}, {machine.threads} threads, {machine.memory_gib:.0f} GiB, {run.date}"
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions)
    disturbed = " **Disturbed by other programs.**" if run.disturbed else ""
    return f"{hardware}; {versions}; commit {run.commit or 'unknown'}; `{run.command}`.{disturbed}"
