"""Work beside a training: compilers at low priority, one at a time, and throttled Python work."""

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

# A compiler's share of one core beside two threads on two busy cores, and the resulting time of a step of a Llama-like
# model: at 10, 10 % and 1.10 times as long; at 5, 25 % and 1.32; at 3, 43 % and 1.56. At 19 no compilation finishes.
_NICENESS = "5"
_GRACE_S = 1.0
_PAUSE = 10.0  # times the processor time of a piece of throttled work
throttle_lock = threading.Lock()  # held by `throttled`; a benchmark holds it to time steps without such work
_running: set[subprocess.Popen[bytes]] = set()
_lock = threading.Lock()
_ending = threading.Event()


class Ticket:
    """A place in the queue of compilations. `with` waits until it is first and its time has come; then it leaves."""

    def __init__(self, queue: list[Ticket], changed: threading.Condition, earliest: float) -> None:
        self._queue, self._changed, self._earliest = queue, changed, earliest

    def __enter__(self) -> None:
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._queue[0] is self)
            time.sleep(max(self._earliest - time.monotonic(), 0.0))
            _end_thread_of_ending_program()
        except BaseException:  # an interrupted wait must not block the tickets behind it
            self.leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Leave the queue, if not done yet."""
        with self._changed:
            if self in self._queue:
                self._queue.remove(self)
                self._changed.notify_all()


_queue: list[Ticket] = []
_changed = threading.Condition()


def take_ticket(after_s: float = 0.0) -> Ticket:
    """Join the queue of all compilations of this program.

    Args:
        after_s: seconds to wait at least before the compilation starts.
    """
    _register_end_of_program()
    ticket = Ticket(_queue, _changed, time.monotonic() + after_s)
    with _changed:
        _queue.append(ticket)
    return ticket


@contextlib.contextmanager
def throttled() -> Iterator[None]:
    """Run a piece of Python work beside a training: one at a time, followed by a pause of this thread.

    The work may delay a step by its own duration. The pause is ten times its processor time, so work that is divided
    into pieces takes a tenth of each step's time instead of delaying a single step by all of it.
    """
    with throttle_lock:
        before = time.thread_time()
        yield
        time.sleep(_PAUSE * (time.thread_time() - before))


def process_groups() -> list[int]:
    """Return the ids of the process groups of all running children."""
    with _lock:
        return [child.pid for child in _running if child.returncode is None]


def start(command: Sequence[str], output: int | IO[bytes], pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a command at low priority in its own process group; the caller must `end` it.

    Args:
        command: the program and its arguments.
        output: for stdout and stderr: a file, or `subprocess.PIPE`.
        pass_fds: the file descriptors that it inherits.
    """
    nice = shutil.which("nice")
    _register_end_of_program()
    with _lock:
        _end_thread_of_ending_program()
        child = subprocess.Popen(
            [*([nice, "-n", _NICENESS] if nice else []), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=pass_fds,
            process_group=0,  # in this session: Linux divides processor time by session first, by niceness within one
        )
        _running.add(child)
    return child


def end(child: subprocess.Popen[bytes]) -> int:
    """End a process and its children, if they still run; return its exit status."""
    if child.poll() is None:
        _signal(child)
    _running.discard(child)
    _end_thread_of_ending_program()
    return child.wait()


def run(command: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Run a command at low priority and wait; return its exit status and output."""
    child = start(command, subprocess.PIPE)
    try:
        output, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        end(child)
        return -1, f"timed out after {limit_s:g} s"
    return end(child), output.decode(errors="replace")


def _signal(child: subprocess.Popen[bytes]) -> None:
    """Terminate the compiler driver and the compiler that it started; kill them if they do not end in time."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)


def _end_thread_of_ending_program() -> None:
    """End this thread at the end of the program: start nothing new, and report no ended compiler as a failure."""
    if _ending.is_set():
        raise SystemExit  # ends only this thread, silently


@functools.cache
def _register_end_of_program() -> None:
    """Register `_end_all` once there may be something to end: other programs get no atexit handler."""
    atexit.register(_end_all)


def _end_all() -> None:
    """End all children: no compiler outlives the program."""
    with _lock:
        _ending.set()
        for child in tuple(_running):
            _signal(child)
