"""The table at the end: the measurements of both variants, each line with what its number means."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table

from examples.minilm.result import EAGER, LAST_STEPS, NUDGED, ONNXTRAIN, Record, Result


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    label: str
    eager: str
    onnxtrain: str
    compared: str


def as_bytes(count: int | None) -> str:
    """Bytes in MiB."""
    return "–" if count is None else f"{count / 2**20:,.0f} MiB"


def as_ms(seconds: float) -> str:
    """Seconds as milliseconds."""
    return f"{1000 * seconds:,.0f} ms"


def as_difference(difference: float) -> str:
    """Format a difference of losses."""
    return f"{difference:.1e}" if difference else "0"


def rows(result: Result) -> tuple[Row, ...]:
    """Return the lines of the table."""
    eager, ours = result.training[EAGER], result.training[ONNXTRAIN]
    ratio = statistics.median(result.training.ratios(EAGER, ONNXTRAIN))
    evaluated = f"{result.held_out_paragraphs} paragraphs"
    return (
        _row(
            "training loss",
            eager,
            ours,
            lambda record: f"{record.last_loss:.4f}",
            f"mean of last {min(LAST_STEPS, len(eager.steps))} steps",
        ),
        _row("held-out loss", eager, ours, lambda record: f"{record.evaluations[-1].loss:.4f}", evaluated),
        _row(
            "held-out accuracy",
            eager,
            ours,
            lambda record: f"{record.evaluations[-1].accuracy:.1%}",
            f"{eager.evaluations[0].accuracy:.1%} before",
        ),
        Row(
            "largest loss difference",
            f"{as_difference(max(result.exact.differences(EAGER, NUDGED)))} by rounding",
            as_difference(max(result.exact.differences(EAGER, ONNXTRAIN))),
            f'{len(result.exact[EAGER].steps)} steps, rng="torch"',
        ),
        _row(
            "time to first step",
            eager,
            ours,
            lambda record: f"{record.first_step_s:.1f} s",
            f"{ours.first_step_s - eager.first_step_s:+.1f} s",
        ),
        _row("median step", eager, ours, lambda record: as_ms(record.median_step_s), f"{ratio:.2f} times the speed"),
        _row("tokens per second", eager, ours, lambda record: f"{record.tokens_per_s:,.0f}", "padding not counted"),
        _row("peak memory", eager, ours, lambda record: as_bytes(record.peak_bytes), _memory_ratio(result)),
    )


def notes(result: Result) -> tuple[str, ...]:
    """Return the meaning of each line, in a sentence or two."""
    sequences, length = result.peak_batch
    return (
        (
            "Loss, accuracy, times: training with default options, both on the same batches, interleaved in one "
            "process; the order alternates. onnxtrain samples its own, cheaper dropout masks here, so the two losses "
            "differ as with another seed."
        ),
        (
            'Largest loss difference: another training from the same start, with ORTModule(model, rng="torch"), where '
            "both sample the same masks. Rounding alone makes two trainings drift apart: eager's column compares eager "
            "with itself after each starting weight was moved to the next float32 number."
        ),
        (
            "Time to first step: from the plain model to the end of its first step, capture and compilation included, "
            "imports not; PyTorch itself was warmed up by a step of another eager copy."
        ),
        (
            "Median step: forward, backward and AdamW, without the first step. The ratio is the median, over the "
            "batches, of eager's time divided by onnxtrain's."
        ),
        (
            f"Peak memory: what PyTorch's allocator gave out during one forward and backward of {sequences} sequences "
            f"of {length} tokens, on top of parameters, gradients and optimizer state."
        ),
    )


def terminal_table(result: Result) -> Table:
    """Return the table for the terminal."""
    table = Table(title="MiniLM fine-tuned on Python's reference text", title_justify="left")
    table.add_column("")
    table.add_column(EAGER, justify="right")
    table.add_column(ONNXTRAIN, justify="right")
    table.add_column("")
    for row in rows(result):
        table.add_row(row.label, row.eager, row.onnxtrain, row.compared)
    return table


def _row(label: str, eager: Record, ours: Record, show: Callable[[Record], str], compared: str) -> Row:
    return Row(label, show(eager), show(ours), compared)


def _memory_ratio(result: Result) -> str:
    eager, ours = result.training[EAGER].peak_bytes, result.training[ONNXTRAIN].peak_bytes
    return f"{ours / eager:.2f} of eager's" if eager and ours else ""
