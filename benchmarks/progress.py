"""Shows a benchmark while it runs: a live line on a terminal, plain lines elsewhere.

Only what the measuring processes say between their timed parts is shown, so that the display costs no variant time.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_LINE_EVERY_S = 5.0


class Watch:
    """Told of each measurement and of what it does just now."""

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
        """A measurement begins."""
        self._name = name
        self.doing("")

    def doing(self, text: str) -> None:
        """What it does now."""
        said = f"{self._name}: {text}" if text else self._name
        self._bar.update(self._task, description=said)
        if not self._console.is_terminal and time.monotonic() - self._shown > _LINE_EVERY_S:
            self._shown = time.monotonic()
            self._console.print(f"… {said}", style="dim", highlight=False)

    def done(self) -> None:
        """A measurement ended."""
        self._bar.advance(self._task)
