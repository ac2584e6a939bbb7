"""What runs beside a training: compilers, at low priority, one at a time and never longer than the program; Python."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import IO

# A compiler's share of one core beside two threads that keep two cores busy, and how long steps of a Llama-like model
# then take: at 10, 10 % and 1.10 times as long; at 5, 25 % and 1.32; at 3, 43 % and 1.56. At 19 nothing ever ends.
_NICENESS = "5"
_GRACE_S = 1.0
_REST = 10.0  # times what a piece of Python took
pieces = threading.Lock()  # of `piece`; a benchmark that times steps without any holds it, too
_running: set[subprocess.Popen[bytes]] = set()
_lock = threading.Lock()
_ending = threading.Event()


class Turn:
    """A place in a queue. `with` waits until it is time and all who came before have left; then it leaves."""

    def __init__(self, queue: list[Turn], changed: threading.Condition, earliest: float) -> None:
        self._queue, self._changed, self._earliest = queue, changed, earliest

    def __enter__(self) -> None:
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._queue[0] is self)
            time.sleep(max(self._earliest - time.monotonic(), 0.0))
            _end_thread_of_ending_program()
        except BaseException:  # an interrupted wait must not block all who come after
            self.leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Gives the place up, where that was not done yet."""
        with self._changed:
            if self in self._queue:
                self._queue.remove(self)
                self._changed.notify_all()


_queue: list[Turn] = []
_changed = threading.Condition()


def turn(after_s: float = 0.0) -> Turn:
    """The next place in the queue of all that this program compiles.

    Args:
        after_s: seconds from now, before which it is not taken.
    """
    _end_with_program()
    made = Turn(_queue, _changed, time.monotonic() + after_s)
    with _changed:
        _queue.append(made)
    return made


@contextlib.contextmanager
def piece() -> Iterator[None]:
    """A piece of Python beside a training, whose step it may hold up by as much: one at a time, then a rest.

    The rest, on this thread, is ten times as long as the piece took of a processor. So work that is divided into pieces
    takes a tenth of each step's time, where all at once it would make one step long.
    """
    with pieces:
        before = time.thread_time()
        yield
        time.sleep(_REST * (time.thread_time() - before))


def groups() -> list[int]:
    """The numbers of the process groups of all that runs now."""
    with _lock:
        return [child.pid for child in _running if child.returncode is None]


def start(command: Sequence[str], output: int | IO[bytes], pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Starts a command at low priority, in a process group of its own. `end` it.

    Args:
        command: the program and its arguments.
        output: where what it says goes, errors too: a file, or `subprocess.PIPE`.
        pass_fds: the open files that it gets.
    """
    nice = shutil.which("nice")
    _end_with_program()
    with _lock:
        _end_thread_of_ending_program()
        child = subprocess.Popen(
            [*([nice, "-n", _NICENESS] if nice else []), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=pass_fds,
            process_group=0,  # in this session: Linux shares processors out by session first, by niceness within one
        )
        _running.add(child)
    return child


def end(child: subprocess.Popen[bytes]) -> int:
    """Ends a process and those that it started, if they run yet; its status."""
    if child.poll() is None:
        _signal(child)
    _running.discard(child)
    _end_thread_of_ending_program()
    return child.wait()


def run(command: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Runs a command at low priority and waits: its status and what it said."""
    child = start(command, subprocess.PIPE)
    try:
        said, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        end(child)
        return -1, f"no end after {limit_s:g} s"
    return end(child), said.decode(errors="replace")


def _signal(child: subprocess.Popen[bytes]) -> None:
    """The driver and the compiler proper, which it starts; one that does not end when it is asked to is killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)


def _end_thread_of_ending_program() -> None:
    """Nothing new is begun, and no compiler that was ended is called a failure."""
    if _ending.is_set():
        raise SystemExit  # of this thread, without a word


@functools.cache
def _end_with_program() -> None:
    """Asks for `_end_all` once there is something to end: a program that compiles nothing gets no handler."""
    atexit.register(_end_all)


def _end_all() -> None:
    """No compiler outlives the program that asked for it."""
    with _lock:
        _ending.set()
        for child in tuple(_running):
            _signal(child)
