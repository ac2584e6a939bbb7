"""Shows a run while it goes on: a live table on a terminal, plain lines elsewhere.

Both are told of every step after its time was taken, so that the display costs no variant time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from examples.minilm.result import LAST_STEPS, Record

_LINE_EVERY_S = 10.0


class Clock:
    """Says how long the rest of a run takes, from how long its work took so far; one unit is one step of one model."""

    def __init__(self, planned: float) -> None:
        self._left = planned
        self._done = 0.0
        self._started = time.perf_counter()

    def spend(self, units: float) -> None:
        """Count work as done."""
        self._done += units
        self._left -= units

    def left_s(self) -> float | None:
        """Return the seconds that are left; None as long as nothing was done."""
        if self._done <= 0:
            return None
        return max(self._left, 0.0) * (time.perf_counter() - self._started) / self._done


class Progress(Protocol):
    """The events that a run reports."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def begin(self, title: str, records: Sequence[Record], steps: int) -> None:
        """A phase begins."""

    def doing(self, text: str) -> None:
        """Announce the start of work that takes a while."""

    def update(self, left_s: float | None) -> None:
        """A step was done."""

    def __enter__(self) -> Progress: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def as_minutes(seconds: float | None) -> str:
    """Seconds as m:ss."""
    if seconds is None:
        return "–:––"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _recent(record: Record) -> tuple[str, str, str]:
    """Loss, tokens a second and milliseconds a step over the last steps; the first one's time would hide theirs."""
    if not record.steps:
        return "–", "–", "–"
    loss = record.last_loss
    steps = record.later_steps[-LAST_STEPS:]
    took_s = sum(step.took_s for step in steps)
    return f"{loss:.4f}", f"{sum(step.tokens for step in steps) / took_s:,.0f}", f"{1000 * took_s / len(steps):,.0f}"


class PlainProgress:
    """Lines of text, not more than one in ten seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._records: Sequence[Record] = ()
        self._steps = 0
        self._last_line_at = 0.0

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def begin(self, title: str, records: Sequence[Record], steps: int) -> None:
        self._records, self._steps = records, steps
        self._last_line_at = time.perf_counter()
        self.say(title)

    def doing(self, text: str) -> None:
        self.say(f"  {text}")

    def update(self, left_s: float | None) -> None:
        done = len(self._records[0].steps)
        if time.perf_counter() - self._last_line_at < _LINE_EVERY_S and done != self._steps:
            return
        self._last_line_at = time.perf_counter()
        parts = []
        for record in self._records:
            loss, tokens_per_s, _ = _recent(record)
            parts.append(f"{record.name}: loss {loss}, {tokens_per_s} tokens/s")
        self.say(f"  step {done}/{self._steps}  {'  |  '.join(parts)}  |  {as_minutes(left_s)} left")


class LiveProgress:
    """A table that is drawn anew after each step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._title = ""
        self._doing = ""
        self._records: Sequence[Record] = ()
        self._steps = 0
        self._left_s: float | None = None
        # Drawn only when told to: a thread that draws by itself would take time from the steps.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def begin(self, title: str, records: Sequence[Record], steps: int) -> None:
        self._title, self._records, self._steps = title, records, steps
        self._draw()

    def doing(self, text: str) -> None:
        self._doing = text
        self._draw()

    def update(self, left_s: float | None) -> None:
        self._left_s, self._doing = left_s, ""
        self._draw()

    def _draw(self) -> None:
        self._live.update(self._picture(), refresh=True)

    def _picture(self) -> RenderableType:
        if not self._records:
            return Text(self._doing)
        done = max(len(record.steps) for record in self._records)
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column("")
        for header in (f"loss (mean of {LAST_STEPS})", "tokens/s", "ms a step"):
            table.add_column(header, justify="right")
        for record in self._records:
            table.add_row(record.name, *_recent(record))
        state = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=self._steps, completed=done, width=40)
        state.add_row(bar, f"step {done} of {self._steps}", f"{as_minutes(self._left_s)} left")
        return Group(Text(self._title, style="bold"), table, state, Text(self._doing, style="dim"))


def make_progress(console: Console) -> Progress:
    """Live on a terminal, plain lines elsewhere."""
    return LiveProgress(console) if console.is_terminal else PlainProgress(console)
