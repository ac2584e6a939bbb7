"""The compiling process: it starts for the first region, compiles one at a time, and ends after the last."""

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

import torch

from onnxtrain.native import background
from onnxtrain.native.build import BuildError

_TRITON_COMPILERS = 4  # processes; one compiles the Triton kernels of a layer in half a minute
_SHOWN_LINES = 5
_CRASH, _CRASHED_THREAD = "Fatal Python error", "Current thread"  # how lines of faulthandler's report begin
_MODULE = "onnxtrain.execute.regions.child"


class _Running(NamedTuple):
    child: subprocess.Popen[bytes]
    connection: Connection
    output: IO[bytes]


class Process:
    """A process that compiles regions, shared by all users."""

    def __init__(self) -> None:
        self._users = 0
        self._lock = threading.Lock()
        self._running: _Running | None = None

    @contextlib.contextmanager
    def keep_alive(self) -> Iterator[None]:
        """Keep the process running once it is started: importing Inductor takes as long as compiling a region."""
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
        """Compile the request in a folder, and wait for the result. For one thread at a time, inside of `keep_alive`.

        Args:
            folder: holds the request.
            cache: the folder of Inductor's cache; read when the process starts.
            limit_s: the timeout in seconds.

        Raises:
            BuildError: with the last lines of the output.
        """
        if self._running is None:
            self._running = _start(cache)
        connection = self._running.connection
        try:
            connection.send(str(folder))
            if not connection.poll(limit_s):
                self._end()
                raise BuildError(f"the compiler of regions did not finish within {limit_s:g} s")
            error = connection.recv()
        except (EOFError, OSError):  # the next region gets another process
            code, output = self._end()
            raise BuildError(f"the compiler of regions exited with status {code}: {output}") from None
        if error:
            raise BuildError(f"the compiler of regions failed: {error}")

    def _end(self) -> tuple[int, str]:
        """End the process; returns its status and the last lines of its output."""
        if self._running is None:
            return 0, ""
        child, connection, output = self._running
        self._running = None
        connection.close()
        with output:
            code = background.end(child)
            output.seek(0)
            return code, _reason(output.read().decode(errors="replace"))


def _reason(output: str) -> str:
    """Return the lines of the process's output that say why it ended: of a crash, its signal and innermost frames."""
    lines = output.strip().splitlines()
    crash = next((i for i, line in enumerate(lines) if line.startswith(_CRASH)), None)
    if crash is None:
        return "\n".join(lines[-_SHOWN_LINES:])
    thread = next((i for i, line in enumerate(lines) if line.startswith(_CRASHED_THREAD)), crash)
    frames = [line.strip() for line in lines[thread:] if line.startswith("  File ")]
    return "\n".join([lines[crash], *frames[:_SHOWN_LINES]])


def _start(cache: Path) -> _Running:
    ours, theirs = Pipe()
    with theirs:
        command = [
            "env",
            "OMP_NUM_THREADS=1",
            f"TORCHINDUCTOR_COMPILE_THREADS={_TRITON_COMPILERS if torch.cuda.is_available() else 1}",
            f"TORCHINDUCTOR_CACHE_DIR={cache}",
            f"PYTHONPATH={os.pathsep.join(sys.path)}",  # to import the same packages
            *(sys.executable, "-X", "faulthandler", "-P", "-m", _MODULE, str(theirs.fileno())),
        ]
        output = tempfile.TemporaryFile()  # noqa: SIM115  # `_end` closes it
        return _Running(background.start(command, output, (theirs.fileno(),)), ours, output)
