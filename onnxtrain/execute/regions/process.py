"""The other process: started for the first region, it compiles one after the other and ends with the last."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, NamedTuple

from onnxtrain.native import background
from onnxtrain.native.build import BuildError

_MODULE = "onnxtrain.execute.regions.child"


class _Started(NamedTuple):
    child: subprocess.Popen[bytes]
    connection: Connection
    said: IO[bytes]


class Process:
    """A process that compiles regions, for all who use it at a time."""

    def __init__(self) -> None:
        self._users = 0
        self._lock = threading.Lock()
        self._started: _Started | None = None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Keeps it, once it is started: to import Inductor takes as long as to compile a region."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._end()

    def compile(self, folder: Path, cache: Path, limit_s: float) -> None:
        """Lets it compile the request in a folder, and waits. It is used meanwhile, by one thread at a time.

        Args:
            folder: holds the request.
            cache: where Inductor keeps its files, if the process is not there yet.
            limit_s: the longest time that it may take, in seconds.

        Raises:
            BuildError: with what it said last.
        """
        if self._started is None:
            self._started = _start(cache)
        connection = self._started.connection
        try:
            connection.send(str(folder))
            if not connection.poll(limit_s):
                self._end()
                raise BuildError(f"the compiler of regions came to no end after {limit_s:g} s")
            error = connection.recv()
        except (EOFError, OSError):  # the next region gets another process
            code, said = self._end()
            raise BuildError(f"the compiler of regions ended with {code}: {said}") from None
        if error:
            raise BuildError(f"the compiler of regions failed: {error}")

    def _end(self) -> tuple[int, str]:
        """Its status, and its last lines."""
        if self._started is None:
            return 0, ""
        child, connection, said = self._started
        self._started = None
        connection.close()
        with said:
            code = background.end(child)
            said.seek(0)
            return code, "\n".join(said.read().decode(errors="replace").strip().splitlines()[-5:])


def _start(cache: Path) -> _Started:
    ours, theirs = Pipe()
    with theirs:
        command = [
            "env",
            "OMP_NUM_THREADS=1",
            "TORCHINDUCTOR_COMPILE_THREADS=1",
            f"TORCHINDUCTOR_CACHE_DIR={cache}",
            f"PYTHONPATH={os.pathsep.join(sys.path)}",  # what is imported there is what is imported here
            *(sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())),
        ]
        said = tempfile.TemporaryFile()  # noqa: SIM115  # `_end` closes it
        return _Started(background.start(command, said, (theirs.fileno(),)), ours, said)
