"""The first step, each in a fresh process: nothing that another contender built or warmed up can help.

    process: import torch, transformers ─▶ build the model ─▶ [prepare ─▶ first step] ─▶ second step, for scale

What the brackets hold is the time that is shown; for onnxtrain it has the import of onnxtrain in it, for torch.compile
whatever it imports by itself. torch.compile gets an empty cache folder.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders import Stepper
from benchmarks.workloads import WORKLOADS

_CHECKOUT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class FirstStep:
    """The times of one contender, one of each process."""

    contender: str
    first_s: tuple[float, ...]
    second_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.first_s)


def measure_first_steps(
    workload: str, contenders: Sequence[str], repeats: int, tell: Callable[[str], None]
) -> tuple[FirstStep, ...]:
    """Runs `repeats` processes of each contender, in turn."""
    runs: dict[str, list[dict[str, float]]] = {contender: [] for contender in contenders}
    for repeat in range(repeats):
        for contender in contenders:
            tell(f"first step of {workload}: {contender}, process {repeat + 1} of {repeats}")
            runs[contender].append(_in_fresh_process(workload, contender))
    return tuple(
        FirstStep(contender, tuple(run["first_s"] for run in times), tuple(run["second_s"] for run in times))
        for contender, times in runs.items()
    )


def _in_fresh_process(workload: str, contender: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        # An empty home for caches of any kind: what another run left must not be found.
        fresh = {"TORCHINDUCTOR_CACHE_DIR": cache, "XDG_CACHE_HOME": cache, "TRITON_CACHE_DIR": cache}
        finished = subprocess.run(
            [sys.executable, "-m", "benchmarks.first_step", workload, contender],
            cwd=_CHECKOUT,
            env={**os.environ, **fresh},
            capture_output=True,
            text=True,
            check=False,
        )
    if finished.returncode != 0:
        raise RuntimeError(f"{contender}'s first step of {workload} failed:\n{finished.stderr}")
    times: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return times


def _child(workload: str, contender: str) -> None:
    stepper = Stepper(WORKLOADS[workload], contender)
    first_s = stepper.prepare_s + stepper.step()
    print(json.dumps({"first_s": first_s, "second_s": stepper.step()}))


if __name__ == "__main__":
    _child(*sys.argv[1:])
