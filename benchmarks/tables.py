"""The benchmark's results as tables of texts: for the terminal by rich, for the page as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.machine import Machine
from benchmarks.results import MOST_ABOVE_S, MOST_SLOWDOWN, Behind, Circumstances, Measured, Timed, speed_over
from benchmarks.spent import Spent
from benchmarks.variants import EAGER, ONNXTRAIN
from benchmarks.workload import Workload

MOST_AFTER_EAGER_S = 2.0  # the goal for every first step


@dataclass(frozen=True)
class Rows:
    """A table: the first column holds names, all others are figures; `notes` stand below it."""

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
    """Where and how the numbers below it came about."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in (*machine.lines(), ("command", command)):
        table.add_row(name, value)
    return table


def workload_rows(workload: Workload, measured: Measured) -> Rows:
    """One line per variant, with onnxtrain's speedup over it."""
    ours = measured.of(ONNXTRAIN)
    own = f"{workload.unit}/s"
    header = ("", "first step", "median step", own, "peak memory", "products", "onnxtrain is", "in total", "goal")
    rows = []
    for timed in measured.variants:
        share = measured.share(timed)
        row = (
            timed.variant,
            "" if timed.first_median_s is None else f"{timed.first_median_s:.2f} s",
            duration(timed.median_s),
            f"{measured.items / timed.total_s:,.0f}",
            f"{timed.peak_bytes / 2**20:,.1f} MiB",
            "" if share is None else f"{share:.0%}",
        )
        rows.append((*row, *_compared(workload, ours, timed)))
    return Rows(workload.title, header, tuple(rows), tuple(_notes(workload, measured)))


def _compared(workload: Workload, ours: Timed | None, timed: Timed) -> tuple[str, str, str]:
    if ours is None or timed is ours:
        return "", "", ""
    low, middle, high = speed_over(ours, timed)
    total = timed.total_s / ours.total_s
    goal = workload.goals.speed.get(timed.variant)
    said = "" if goal is None else f"{goal:g} ×: {verdict(total if workload.cold else middle, goal)}"
    return f"{middle:.2f} × ({low:.2f} – {high:.2f})", f"{total:.2f} ×", said


def verdict(reached: float, goal: float) -> str:
    """Whether a figure is as high as wanted; compared as it is shown, with two digits."""
    return "met" if round(reached, 2) >= goal else "missed"


def _notes(workload: Workload, measured: Measured) -> Iterator[str]:
    first, *_ = measured.variants
    ran = "Forward, backward and AdamW" if workload.optimized else "Forward and backward"
    turn = f" of {measured.turn} steps each" if measured.turn > 1 else ""
    yield f"{ran}; {len(first.rounds_s)} rounds{turn}, interleaved in one process."
    ours, eager = measured.of(ONNXTRAIN), measured.of(EAGER)
    if measured.products_s:
        note = f"Products: {measured.products} matrix products and convolutions alone take this share of a step"
        goal = workload.goals.share
        reached = measured.share(ours) if ours else None
        yield f"{note}." if goal is None or reached is None else f"{note}; goal {goal:.0%}: {verdict(reached, goal)}."
        if measured.products_flops:
            rate = measured.products_flops / statistics.median(measured.products_s)
            peak = measured.peak_flops
            most = "" if peak is None else f", {rate / peak:.0%} of the processor's {peak / 1e9:.0f}"
            yield f"They run at {rate / 1e9:.0f} GFLOP/s{most}."
        if measured.kept < 0.995:
            yield f"Onnxtrain's step has {measured.kept:.0%} of their operations: rows that nobody reads are left out."
        if (limit := measured.limit()) is not None:
            wanted = workload.goals.speed.get(EAGER)
            less = f": less than the goal of {wanted:g} ×" if wanted is not None and limit < wanted else ""
            yield f"A step of nothing else would have {limit:.2f} × eager's speed{less}."
    if later := measured.later():
        middle = statistics.median(later)
        met = "met" if middle <= MOST_AFTER_EAGER_S else "missed"
        spread = f" ({min(later):+.1f} to {max(later):+.1f} in {len(later)} pairs of processes)"
        when = f"First step {middle:+.1f} s after eager's{spread if len(later) > 1 else ''}"
        yield f"{when}; goal {MOST_AFTER_EAGER_S:g} s: {met}."
    if ours and eager and ours.parts_s and eager.parts_s:
        parts = (f"{part} {duration(eager.parts_s[part])} and {duration(s)}" for part, s in ours.parts_s.items())
        yield f"A step in parts, {EAGER} and {ONNXTRAIN}: {', '.join(parts)}."
    common = min(len(timed.losses) for timed in measured.variants)
    losses = ", ".join(f"{timed.variant} {timed.losses[common - 1]:.3f}" for timed in measured.variants)
    yield f"Loss of step {common}: {losses}."
    yield _beside(measured.circumstances)


def _beside(circumstances: Circumstances) -> str:
    load = f"load average before the run {circumstances.machine.load:.2f}"
    others = f"other programs kept {circumstances.others_cores:.2f} cores busy meanwhile"
    return f"{'DISTURBED, not to be quoted' if circumstances.disturbed else 'Undisturbed'}: {others}; {load}."


_KINDS = 8  # of ops that a table shows


def spent_rows(measured: Measured) -> Rows | None:
    """What takes the time of onnxtrain's step, beside what takes eager's; None where nobody looked."""
    ours, eager = measured.of(ONNXTRAIN), measured.of(EAGER)
    if ours is None or eager is None or not ours.spent or not eager.spent:
        return None
    rows = tuple((*left, *right) for left, right in zip(_most_spent(ours.spent), _most_spent(eager.spent), strict=True))
    header = (ONNXTRAIN, "a step", "share", EAGER, "a step", "share")
    return Rows("What the time goes to", header, rows)


def _most_spent(spent: Sequence[Spent]) -> list[tuple[str, str, str]]:
    """The kinds that take most, the other kinds together, and the rest: always as many lines."""
    *kinds, rest = spent
    whole = sum(each.ms for each in spent)
    shown = [(f"{each.op} × {each.count}", each.ms) for each in kinds[:_KINDS]]
    shown += [("", 0.0)] * (_KINDS - len(shown))
    shown += [("other ops", sum(each.ms for each in kinds[_KINDS:])), (rest.op, rest.ms)]
    return [(name, duration(ms / 1e3), f"{ms / whole:.0%}") if name else ("", "", "") for name, ms in shown]


def behind_rows(behind: Behind) -> Rows:
    """Steps while kernels are compiled, beside those without."""
    low, middle, high = behind.slowdown
    slow = "met" if middle <= MOST_SLOWDOWN else "missed"
    above = "met" if behind.longest_above_s <= MOST_ABOVE_S else "missed"
    limit = duration(MOST_SLOWDOWN * behind.alone_median_s + MOST_ABOVE_S)
    rows = (
        ("median step, compilers held", duration(behind.alone_median_s), ""),
        ("median step while compiling", duration(behind.during_median_s), ""),
        ("slowdown", f"{middle:.2f} × ({low:.2f} – {high:.2f})", f"at most {MOST_SLOWDOWN:g} ×: {slow}"),
        ("slowest step while compiling", duration(behind.slowest_s), f"at most {limit}: {above}"),
    )
    beside, alone = len(behind.during_s[0]), len(behind.alone_s[0])
    notes = (
        f"{len(behind.during_s)} turns of {beside} steps with compilers and {alone} without.",
        f"The last compiler ended after {behind.compiling_s:.0f} s.",
        "The slowdown is taken turn by turn. The first step of all, which captures the model, is left out.",
        f"No step may lie more than {MOST_ABOVE_S:g} s above {MOST_SLOWDOWN:g} × the median with compilers held.",
        _beside(behind.circumstances),
    )
    return Rows(f"While kernels compile, caches empty: {behind.workload}", ("", "", "goal"), rows, notes)


def duration(seconds: float) -> str:
    """In a unit that leaves few digits."""
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    return f"{1e6 * seconds:,.1f} µs" if seconds < 0.001 else f"{1e3 * seconds:,.1f} ms"
