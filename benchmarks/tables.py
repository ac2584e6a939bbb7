"""The benchmark's results as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from benchmarks.contenders import EAGER
from benchmarks.first_step import FirstStep
from benchmarks.machine import Machine
from benchmarks.steady import Steady


def machine_table(machine: Machine, command: str) -> Table:
    """Where and how the numbers below it came about."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in (*machine.lines(), ("command", command)):
        table.add_row(name, value)
    return table


def first_step_table(title: str, results: Sequence[FirstStep]) -> Table:
    """One line a contender: its first step, how much longer than eager's, and the second for scale."""
    table = _table(f"First step: {title}", ("first step", "fastest", "after eager", "second step"))
    eager = next((result for result in results if result.contender == EAGER), None)
    for result in results:
        later = "" if eager is None or result is eager else f"{result.median_s - eager.median_s:+.2f} s"
        table.add_row(
            result.contender,
            f"{result.median_s:.2f} s",
            f"{min(result.first_s):.2f} s",
            later,
            f"{min(result.second_s):.2f} s",
        )
    count = len(results[0].first_s)
    table.caption = (
        f"Preparation, forward and backward in a fresh process; median of {count}. Imports of onnxtrain count."
    )
    return table


def steady_table(title: str, results: Sequence[Steady]) -> Table:
    """One line a contender: its step, and how many times as fast as eager it was, with quartiles."""
    table = _table(f"Steady step: {title}", ("median", "fastest", "times eager's speed", "quartiles"))
    for result in results:
        low, middle, high = result.speedup
        compared = ("", "") if result.contender == EAGER else (f"{middle:.2f}", f"{low:.2f} – {high:.2f}")
        table.add_row(result.contender, _duration(result.median_s), _duration(result.least_s), *compared)
    rounds = len(results[0].times_s)
    table.caption = f"Forward and backward, in turn in one process; {rounds} rounds, the ratio taken round by round."
    return table


def _table(title: str, headers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("")
    for header in headers:
        table.add_column(header, justify="right")
    return table


def _duration(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} µs" if seconds < 0.001 else f"{1e3 * seconds:,.1f} ms"
