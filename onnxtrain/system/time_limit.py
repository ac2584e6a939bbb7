"""Limit the processor time of a thread's work, and tell which part of the work took it.

    with time_limit(60.0, error):
        with part("tracing forward"):
            for op in ops:
                check_time()              # raises error("tracing forward 60.1 s")

Work under a limit calls `check_time` at each op or node. Waiting, other threads and other programs do not use up a
limit, so that it does not depend on what else runs.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_MOST_PARTS = 4  # in the text of an error


class _Limit:
    """A limit that is in effect.

    Attributes:
        end: the thread's processor time at which it is exceeded.
        error: the error that was raised because it is exceeded; None if it is not.
    """

    __slots__ = ("_make_error", "end", "error")

    def __init__(self, seconds: float, make_error: Callable[[str], Exception]) -> None:
        self.end = time.thread_time() + seconds
        self.error: Exception | None = None
        self._make_error = make_error

    def exceeded(self, parts: str) -> Exception:
        if self.error is None:
            self.error = self._make_error(parts)
        return self.error


class _Work(threading.local):
    """The limits in effect in this thread, innermost last, and the time of each part of its work so far."""

    def __init__(self) -> None:
        self.limits: list[_Limit] = []
        self.parts: dict[str, float] = defaultdict(float)
        self.current: list[str] = []
        self.since = 0.0

    def enter(self, name: str) -> None:
        self._account()
        self.current.append(name)

    def leave(self) -> None:
        self._account()
        self.current.pop()

    def _account(self) -> None:
        now = time.thread_time()
        if self.current:
            self.parts[self.current[-1]] += now - self.since
        self.since = now

    def text(self) -> str:
        """Return the parts that took longest: "tracing forward 58.2 s, guards 1.8 s"."""
        self._account()
        longest = sorted(self.parts.items(), key=lambda item: -item[1])[:_MOST_PARTS]
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in longest)


_WORK = _Work()


@contextmanager
def time_limit(seconds: float | None, make_error: Callable[[str], Exception]) -> Iterator[None]:
    """Limit this thread's processor time in a block; an inner limit does not extend an outer one.

    Args:
        seconds: the limit; None: no limit.
        make_error: returns the error to raise, from the times of the parts that took longest.

    Raises:
        Exception: the error, even if the block has caught it, or has raised another one because of it.
    """
    if seconds is None:
        yield
        return
    limit = _Limit(seconds, make_error)
    if not _WORK.limits:
        _WORK.parts.clear()
    _WORK.limits.append(limit)
    try:
        yield
    except Exception as error:
        if limit.error is None or error is limit.error:
            raise
        raise limit.error from None
    finally:
        _WORK.limits.remove(limit)
    if limit.error is not None:
        raise limit.error


@contextmanager
def part(name: str) -> Iterator[None]:
    """Account the time of a block to this part of the work, except that of parts inside of it."""
    _WORK.enter(name)
    try:
        yield
    finally:
        _WORK.leave()


def check_time() -> None:
    """Raise the error of a limit that this thread has exceeded, the outermost first."""
    limits = _WORK.limits
    if not limits:
        return
    now = time.thread_time()
    for limit in limits:
        if now > limit.end:
            raise limit.exceeded(_WORK.text())
