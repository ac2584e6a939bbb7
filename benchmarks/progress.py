"""Show the progress of a benchmark: a live line on a terminal, plain lines elsewhere.

It changes only with messages that the measuring processes send between timed parts, so it does not disturb them.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_LINE_EVERY_S = 5.0


class Watch:
    """Shows the current measurement and its activity."""

    def __init__(self, console: Console, measurements: int) -> None:
        self._console = console
        self._bar = Progress(
            SpinnerColumn(), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=measurements)
        self._shown = 0.0
        self._name = ""

    def __enter__(self) -> Watch:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, name: str) -> None:
        """Begin a measurement."""
        self._name = name
        self.doing("")

    def doing(self, text: str) -> None:
        """Show the current activity."""
        line = f"{self._name}: {text}" if text else self._name
        self._bar.update(self._task, description=line)
        if not self._console.is_terminal and time.monotonic() - self._shown > _LINE_EVERY_S:
            self._shown = time.monotonic()
            self._console.print(f"… {line}", style="dim", highlight=False)

    def done(self) -> None:
        """End a measurement."""
        self._bar.advance(self._task)
