"""Let one of several processes make a capture, while the others wait and load it from disk.

Ranks on one machine need the same captures at the same time. Without a claim each of them would make all of them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnxtrain.log import LOG, warn_once

_fcntl: Any = None  # Windows has none: each process makes its captures
with contextlib.suppress(ImportError):
    import fcntl

    _fcntl = fcntl

_PATIENCE_S = 120.0  # a capture takes seconds; the other process may also be stopped, or wait for this one
_POLL_S = 0.02


class Claim:
    """A process's claim to the capture of a key.

    Attributes:
        waited: whether another process has stored a capture of the key meanwhile.
        is_stored: set by the owner once it has stored the capture. If it does not, those who wait all capture at once.
    """

    def __init__(self, waited: bool) -> None:
        self.waited = waited
        self.is_stored = waited


@contextlib.contextmanager
def claimed(file: Path) -> Iterator[Claim]:
    """Claim a capture, after waiting for a process that has claimed it before.

    Args:
        file: the lock file. It exists while the capture is made; its lock ends with the process.
    """
    lock = _Lock(file)
    claim = Claim(lock.acquire() and not lock.is_marked())
    if lock.is_marked():
        lock.release()
    try:
        yield claim
        if not claim.is_stored:
            lock.mark()
    except BaseException:
        lock.mark()
        raise
    finally:
        lock.release()


class _Lock:
    """A lock file; on a file system without locks every process has it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Lock the file; return whether another process held the lock before."""
        if _fcntl is None:
            return False
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
            return self._wait(self._descriptor)
        except OSError:
            self._close()
            return False

    def _wait(self, descriptor: int) -> bool:
        start = time.monotonic()
        waited = False
        while time.monotonic() - start < _PATIENCE_S:
            try:
                _fcntl.flock(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
            except BlockingIOError:
                waited = True
                time.sleep(_POLL_S)
            else:
                if waited:
                    LOG.info("waited %.1f s for another process to make a capture", time.monotonic() - start)
                return waited
        warn_once(f"another process has claimed {self._file} for {_PATIENCE_S:.0f} s; capturing in this one, too")
        self._close()
        return False

    def mark(self) -> None:
        """Tell those who wait that nothing was stored."""
        if self._descriptor is not None:
            os.pwrite(self._descriptor, b"not stored", 0)

    def is_marked(self) -> bool:
        return self._descriptor is not None and bool(os.pread(self._descriptor, 1, 0))

    def release(self) -> None:
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            self._file.unlink()
            _fcntl.flock(self._descriptor, _fcntl.LOCK_UN)  # also for a child that has inherited the descriptor
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
