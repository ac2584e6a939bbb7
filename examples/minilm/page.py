"""Writes the page: one HTML file with everything in it, readable without a network."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from examples.minilm.charts import Level, Series, chart, running_mean
from examples.minilm.progress import as_minutes
from examples.minilm.result import EAGER, LAST_STEPS, NUDGED, ONNXTRAIN, Phase, Record, Result
from examples.minilm.table import as_bytes, as_difference, notes, rows

_STYLES = {EAGER: "eager", ONNXTRAIN: "ours", NUDGED: "nudged"}


@dataclass(frozen=True)
class Tile:
    """A number to see first."""

    value: str
    label: str


def write_page(result: Result, folder: Path) -> Path:
    """Write `index.html` into the folder, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    path.write_text(render(result), encoding="utf-8")
    return path


def render(result: Result) -> str:
    """Return the page as text."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("page.html.j2").render(
        result=result,
        tiles=_tiles(result),
        rows=rows(result),
        notes=notes(result),
        took=as_minutes(result.took_s),
        training_losses=Markup(_training_losses(result.training)),
        step_times=Markup(_step_times(result.training)),
        exact_losses=Markup(_exact_losses(result.exact)),
        exact_differences=Markup(_exact_differences(result.exact)),
        largest_difference=as_difference(max(result.exact.differences(EAGER, ONNXTRAIN))),
        evaluations=_evaluations(result.training),
        medians=[
            (f"{record.name}, median {1000 * record.median_step_s:,.0f} ms", _STYLES[record.name])
            for record in result.training.records
        ],
        stages=result.stages,
        stages_ms=sum(stage.took_ms for stage in result.stages),
        slowest_ms=max((stage.took_ms for stage in result.stages), default=1.0),
        window=LAST_STEPS,
        eager=EAGER,
        ours=ONNXTRAIN,
        nudged=NUDGED,
    )


def _tiles(result: Result) -> tuple[Tile, ...]:
    eager, ours = result.training[EAGER], result.training[ONNXTRAIN]
    ratio = statistics.median(result.training.ratios(EAGER, ONNXTRAIN))
    tiles = [
        Tile(f"{ratio:.2f}×", "the speed of eager, median step"),
        Tile(
            as_difference(max(result.exact.differences(EAGER, ONNXTRAIN))),
            "largest loss difference with equal dropout masks",
        ),
        Tile(f"{ours.evaluations[-1].accuracy:.0%}", f"held-out accuracy; eager {eager.evaluations[-1].accuracy:.0%}"),
    ]
    if eager.peak_bytes and ours.peak_bytes:
        label = f"peak memory of a step; eager {as_bytes(eager.peak_bytes)}"
        tiles.insert(1, Tile(as_bytes(ours.peak_bytes), label))
    return tuple(tiles)


def _numbers(record: Record) -> list[float]:
    return [float(number) for number in range(1, len(record.steps) + 1)]


def _training_losses(phase: Phase) -> str:
    series = []
    for record in phase.records:
        style = _STYLES[record.name]
        series.append(Series(record.name, f"{style} faint", _numbers(record), record.losses, hover=False))
    for record in phase.records:
        means = running_mean(record.losses, LAST_STEPS)
        series.append(Series(f"{record.name}, step", _STYLES[record.name], _numbers(record), means))
    return chart(series, title="Training losses", x_label="step", y_label="training loss", from_zero=True)


def _step_times(phase: Phase) -> str:
    """Skip the first step, which captures and compiles, and has its own line in the table."""
    series = []
    levels = []
    for record in phase.records:
        numbers = _numbers(record)[-len(record.later_steps) :]
        times = [1000 * step.took_s for step in record.later_steps]
        series.append(Series(f"{record.name}, step", _STYLES[record.name], numbers, times, points=True))
        levels.append(Level(_STYLES[record.name], statistics.median(times)))
    return chart(
        series,
        title="Step times",
        x_label="step",
        y_label="milliseconds",
        levels=levels,
        from_zero=True,
        show=lambda value: f"{value:,.0f} ms",
    )


def _exact_losses(phase: Phase) -> str:
    series = []
    for name, style in ((EAGER, "eager wide"), (ONNXTRAIN, "ours")):
        series.append(Series(f"{name}, step", style, _numbers(phase[name]), phase[name].losses))
    return chart(series, title="Losses with equal masks", x_label="step", y_label="training loss", show="{:.7f}".format)


def _exact_differences(phase: Phase) -> str:
    series = []
    for name in (NUDGED, ONNXTRAIN):
        differences = phase.differences(EAGER, name)
        series.append(Series(f"{name}, step", _STYLES[name], _numbers(phase[name]), differences))
    return chart(
        series,
        title="Loss differences",
        x_label="step",
        y_label="|loss − eager's loss|",
        log=True,
        show="{:.1e}".format,
    )


def _evaluations(phase: Phase) -> Sequence[tuple[int, str, str]]:
    pairs = zip(phase[EAGER].evaluations, phase[ONNXTRAIN].evaluations, strict=True)
    return [(eager.step, f"{eager.accuracy:.1%}", f"{ours.accuracy:.1%}") for eager, ours in pairs]
