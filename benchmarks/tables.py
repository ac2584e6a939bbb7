"""Format the results as tables: for the terminal by rich, for the documentation in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.machine import Machine
from benchmarks.op_times import OpTime
from benchmarks.results import (
    MAX_ABOVE_S,
    MAX_SLOWDOWN,
    BackgroundCompilation,
    Circumstances,
    Measured,
    Timed,
    speed_over,
)
from benchmarks.variants import CUDA_GRAPHS, EAGER, ONNXTRAIN
from benchmarks.workload import Workload

MAX_AFTER_EAGER_S = 2.0  # the goal for each first step


@dataclass(frozen=True)
class Rows:
    """A table: names in the first column, figures in the others, and notes below it."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def for_terminal(self) -> Table:
        table = Table(title=self.title, title_justify="left", caption="\n".join(self.notes), caption_justify="left")
        for number, name in enumerate(self.header):
            table.add_column(name, justify="left" if number == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        return table

    def as_markdown(self) -> str:
        lines = [self.header, ("---", *["---:"] * (len(self.header) - 1)), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine_table(machine: Machine, command: str) -> Table:
    """Return the machine and the command of a measurement."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in (*machine.lines(), ("command", command)):
        table.add_row(name, value)
    return table


def workload_rows(workload: Workload, measured: Measured) -> Rows:
    """Return one row per variant, with onnxtrain's speedup over it."""
    ours = measured.timed(ONNXTRAIN)
    own = f"{workload.unit}/s"
    header = (
        "",
        "first step",
        "median step",
        own,
        "peak memory",
        "GEMM share",
        "speedup of onnxtrain",
        "in total",
        "goal",
    )
    rows = []
    for timed in measured.variants:
        share = measured.share(timed)
        row = (
            timed.variant,
            "" if timed.first_median_s is None else f"{timed.first_median_s:.2f} s",
            _with_quartiles(timed),
            f"{measured.items / timed.total_s:,.0f}",
            "in its pool" if _has_pool(workload, timed) else f"{timed.peak_bytes / 2**20:,.1f} MiB",
            "" if share is None else f"{share:.0%}",
        )
        rows.append((*row, *_compared(workload, ours, timed)))
    return Rows(workload.title, header, tuple(rows), tuple(_notes(workload, measured)))


def _has_pool(workload: Workload, timed: Timed) -> bool:
    """Return whether a variant's memory is that of CUDA graphs, which have it before the step that is measured."""
    return timed.variant == CUDA_GRAPHS and workload.device == "cuda"


def _with_quartiles(timed: Timed) -> str:
    """Format the median of a step and its quartiles."""
    low, middle, high = timed.quartiles_s
    return f"{duration(middle)} ({duration(low)} – {duration(high)})"


def _compared(workload: Workload, ours: Timed | None, timed: Timed) -> tuple[str, str, str]:
    if ours is None or timed is ours:
        return "", "", ""
    low, middle, high = speed_over(ours, timed)
    total = timed.total_s / ours.total_s
    goal = workload.goals.speed.get(timed.variant)
    said = "" if goal is None else f"{goal:g} ×: {verdict(total if workload.cold else middle, goal)}"
    return f"{middle:.2f} × ({low:.2f} – {high:.2f})", f"{total:.2f} ×", said


def verdict(reached: float, goal: float) -> str:
    """Return whether a figure reaches its goal, compared with the two digits that are shown."""
    return "met" if round(reached, 2) >= goal else "missed"


def _notes(workload: Workload, measured: Measured) -> Iterator[str]:
    first, *_ = measured.variants
    ran = "Forward, backward and AdamW" if workload.optimized else "Forward and backward"
    steps = f" of {measured.steps_per_round} steps each" if measured.steps_per_round > 1 else ""
    yield f"{ran}; {len(first.rounds_s)} rounds{steps}, interleaved in one process."
    ours, eager = measured.timed(ONNXTRAIN), measured.timed(EAGER)
    if measured.gemms_s:
        note = f"GEMM share: the time of the step's {measured.gemms} GEMMs and convolutions alone"
        goal = workload.goals.share
        reached = measured.share(ours) if ours else None
        yield f"{note}." if goal is None or reached is None else f"{note}; goal {goal:.0%}: {verdict(reached, goal)}."
        if measured.gemm_flops:
            rate = measured.gemm_flops / statistics.median(measured.gemms_s)
            peak = measured.peak_flops
            of_peak = "" if peak is None else f", {rate / peak:.0%} of the processor's {peak / 1e9:.0f}"
            yield f"They run at {rate / 1e9:.0f} GFLOP/s{of_peak}."
        if measured.gemm_fraction < 0.995:
            yield f"onnxtrain's step has {measured.gemm_fraction:.0%} of their FLOPs: it skips dead rows."
        if (limit := measured.limit()) is not None:
            wanted = workload.goals.speed.get(EAGER)
            less = f": less than the goal of {wanted:g} ×" if wanted is not None and limit < wanted else ""
            yield f"A step of these GEMMs alone would be {limit:.2f} × as fast as eager{less}."
    if later := measured.later():
        middle = statistics.median(later)
        met = "met" if middle <= MAX_AFTER_EAGER_S else "missed"
        spread = f" ({min(later):+.1f} to {max(later):+.1f} in {len(later)} pairs of processes)"
        when = f"First step {middle:+.1f} s after eager's{spread if len(later) > 1 else ''}"
        yield f"{when}; goal {MAX_AFTER_EAGER_S:g} s: {met}."
    if ours and eager and ours.parts_s and eager.parts_s:
        parts = (f"{part} {duration(eager.parts_s[part])} and {duration(s)}" for part, s in ours.parts_s.items())
        yield f"A step in parts, {EAGER} and {ONNXTRAIN}: {', '.join(parts)}."
    if any(_has_pool(workload, timed) for timed in measured.variants):
        yield "in its pool: CUDA graphs keep the memory of a step between steps; its size was not measured."
    common = min(len(timed.losses) for timed in measured.variants)
    losses = ", ".join(f"{timed.variant} {timed.losses[common - 1]:.3f}" for timed in measured.variants)
    yield f"Loss of step {common}: {losses}."
    yield from measured.log
    yield _beside(measured.circumstances)


def _beside(circumstances: Circumstances) -> str:
    load = f"load average before the run {circumstances.machine.load:.2f}"
    others = f"other programs kept {circumstances.others_cores:.2f} cores busy meanwhile"
    return f"{'DISTURBED, not to be quoted' if circumstances.disturbed else 'Undisturbed'}: {others}; {load}."


_KINDS = 8  # of ops that a table shows


def op_time_rows(measured: Measured) -> Rows | None:
    """Return the op times of onnxtrain's step next to those of eager's; None if they were not profiled."""
    ours, eager = measured.timed(ONNXTRAIN), measured.timed(EAGER)
    if ours is None or eager is None or not ours.op_times or not eager.op_times:
        return None
    rows = tuple(
        (*left, *right)
        for left, right in zip(_largest_op_times(ours.op_times), _largest_op_times(eager.op_times), strict=True)
    )
    header = (ONNXTRAIN, "a step", "share", EAGER, "a step", "share")
    return Rows("Time by op", header, rows)


def _largest_op_times(op_times: Sequence[OpTime]) -> list[tuple[str, str, str]]:
    """Return the slowest kinds of ops, the others together, and the rest, always in the same number of rows."""
    *kinds, rest = op_times
    total_ms = sum(each.ms for each in op_times)
    shown = [(f"{each.op} × {each.count}", each.ms) for each in kinds[:_KINDS]]
    shown += [("", 0.0)] * (_KINDS - len(shown))
    shown += [("other ops", sum(each.ms for each in kinds[_KINDS:])), (rest.op, rest.ms)]
    return [(name, duration(ms / 1e3), f"{ms / total_ms:.0%}") if name else ("", "", "") for name, ms in shown]


def background_rows(result: BackgroundCompilation) -> Rows:
    """Return the times of steps while kernels are compiled, next to those of steps without."""
    low, middle, high = result.slowdown
    slow = "met" if middle <= MAX_SLOWDOWN else "missed"
    above = "met" if result.longest_above_s <= MAX_ABOVE_S else "missed"
    limit = duration(MAX_SLOWDOWN * result.alone_median_s + MAX_ABOVE_S)
    rows = (
        ("median step, compilers stopped", duration(result.alone_median_s), ""),
        ("median step while compiling", duration(result.during_median_s), ""),
        ("slowdown", f"{middle:.2f} × ({low:.2f} – {high:.2f})", f"at most {MAX_SLOWDOWN:g} ×: {slow}"),
        ("slowest step while compiling", duration(result.slowest_s), f"at most {limit}: {above}"),
    )
    beside, alone = len(result.during_s[0]), len(result.alone_s[0])
    notes = (
        f"{len(result.during_s)} periods of {beside} steps with compilers and {alone} without.",
        f"The last compiler ended after {result.compiling_s:.0f} s.",
        "The slowdown is taken per period. The very first step, which captures the model, is skipped.",
        f"No step may exceed {MAX_SLOWDOWN:g} × the median with compilers stopped by more than {MAX_ABOVE_S:g} s.",
        _beside(result.circumstances),
    )
    return Rows(f"While kernels compile, caches empty: {result.workload}", ("", "", "goal"), rows, notes)


def duration(seconds: float) -> str:
    """Format a duration with few digits: "12.3 ms"."""
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    return f"{1e6 * seconds:,.1f} µs" if seconds < 0.001 else f"{1e3 * seconds:,.1f} ms"
