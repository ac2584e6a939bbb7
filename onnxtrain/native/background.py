"""What runs beside a training: compilers, at low priority, one at a time and never longer than the program; Python."""

from __future__ import annotations

import atexit
import contextlib
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
# Such threads wait for each other at each operator. Where the scheduler puts both on one core and leaves the other to a
# compiler, it takes up to 300 ms to put that right: seen in steps of 400 to 680 ms, where others take 210. When the
# compiler pauses, one of them moves to its core at once.
_RUN_S, _PAUSE_S = 0.06, 0.02
_GRACE_S = 1.0
_REST = 10.0  # times what a piece of Python took
_running: set[subprocess.Popen[bytes]] = set()
_lock = threading.Lock()
_pieces = threading.Lock()
_holding = threading.Lock()
_ending = threading.Event()


class Turn:
    """A place in a queue. `with` waits until it is time and all who came before have left; then it leaves."""

    def __init__(self, queue: list[Turn], changed: threading.Condition, earliest: float) -> None:
        self._queue, self._changed, self._earliest = queue, changed, earliest

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue[0] is self)
        time.sleep(max(self._earliest - time.monotonic(), 0.0))
        _end_thread_of_ending_program()

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
    with _pieces:
        before = time.thread_time()
        yield
        time.sleep(_REST * (time.thread_time() - before))


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Nothing is compiled inside: a program that times its steps measures them alone. All goes on afterwards.

    Compilers that were started before stand still; one that is started inside does so within 60 ms.
    """
    with _holding, _pieces:
        time.sleep(_RUN_S)
        yield


def start(command: Sequence[str], output: int | IO[bytes], pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Starts a command at low priority and with pauses, in a process group of its own. `end` it.

    Args:
        command: the program and its arguments.
        output: where what it says goes, errors too: a file, or `subprocess.PIPE`.
        pass_fds: the open files that it gets.
    """
    nice = shutil.which("nice")
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
    threading.Thread(target=_pause, args=(child,), name="onnxtrain pauses a compiler", daemon=True).start()
    return child


def _pause(child: subprocess.Popen[bytes]) -> None:
    """Stops a process and those that it started again and again, as long as it runs.

    Until somebody has waited for its end the number of its group is nobody else's.
    """
    while not _ending.wait(_RUN_S) and child in _running and child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGSTOP)
            _ending.wait(_PAUSE_S)
            with _holding:
                pass
            os.killpg(child.pid, signal.SIGCONT)


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
        os.killpg(child.pid, signal.SIGCONT)  # one that pauses would not end
        try:
            child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)


def _end_thread_of_ending_program() -> None:
    """Nothing new is begun, and no compiler that was ended is called a failure."""
    if _ending.is_set():
        raise SystemExit  # of this thread, without a word


@atexit.register
def _end_all() -> None:
    """No compiler outlives the program that asked for it."""
    with _lock:
        _ending.set()
        for child in tuple(_running):
            _signal(child)
