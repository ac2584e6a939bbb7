"""Measure in separate processes, so that no measurement helps or disturbs another.

    this process ─start─▶ python -m benchmarks.steady_state … ─lines on stdout─▶ progress …, one result

A line that begins with the mark is a message in JSON. Other lines are output of libraries and are ignored.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
_MARK = "benchmark: "

# As with an installed package, sources are compiled to bytecode once: by the first process, which is not counted.
_COMPILED_SOURCES = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

Tell = Callable[[str], None]


def send(**message: Any) -> None:
    """Send a message from the measuring process: `doing`, its current activity, or `result`."""
    print(_MARK + json.dumps(message), flush=True)


def run(module: str, arguments: Sequence[str], environment: Mapping[str, str], tell: Tell) -> Any:
    """Run a module of the benchmark in a fresh process, and return its result.

    Raises:
        RuntimeError: it ended without a result; the message has its error output.
    """
    result = None
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=CHECKOUT,
            env={**_COMPILED_SOURCES, **environment},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith(_MARK):
                    message = json.loads(line.removeprefix(_MARK))
                    result = message.get("result", result)
                    if "doing" in message:
                        tell(message["doing"])
            child.wait()
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
        if child.returncode or result is None:
            errors.seek(0)
            raise RuntimeError(f"{module} {' '.join(arguments)} ended with {child.returncode}:\n{errors.read()}")
    return result


def end_on_termination() -> None:
    """Unwind the stack on SIGTERM, so that no child process is left running."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class Caches:
    """Cache folders: an empty one for each first step, and one for everything else.

    The steady-state steps of torch.compile reuse the caches of its first steps, else they would compile again.
    """

    def __init__(self, scratch: Path, kept: Path) -> None:
        """`kept` is the folder that keeps onnxtrain's kernels and their times between runs."""
        self._scratch = scratch
        self._kept = kept

    def empty(self) -> dict[str, str]:
        """Environment variables that set all caches to a new folder."""
        return _variables(Path(tempfile.mkdtemp(dir=self._scratch)))

    def warm(self, inductor: Sequence[Mapping[str, str]]) -> dict[str, str]:
        """Environment variables for steady-state steps, with the Inductor caches of first steps."""
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        for variables in inductor:
            written = Path(variables["TORCHINDUCTOR_CACHE_DIR"])
            if written.exists():
                shutil.copytree(written, folder / "inductor", dirs_exist_ok=True)
        return _variables(folder) | {"ONNXTRAIN_CACHE_DIR": str(self._kept.resolve())}


def _variables(folder: Path) -> dict[str, str]:
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "XDG_CACHE_HOME": str(folder),
        "ONNXTRAIN_CACHE_DIR": str(folder / "onnxtrain"),
    }
