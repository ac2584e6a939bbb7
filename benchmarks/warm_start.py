"""Time the first step with warm caches: eager PyTorch against onnxtrain with its captures on disk.

    one process trains until all is compiled, not counted ─▶ interleaved processes: eager, onnxtrain ─▶ medians

Usage: python -m benchmarks.warm_start [--only NAME] [--repeats N] [--caches FOLDER]

Each time is that of a fresh process, from before wrapping the model to the end of the first step. It includes the
import of onnxtrain, but not those of torch and transformers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import processes
from benchmarks.cpu_workloads import CPU_WORKLOADS, MINILM
from benchmarks.machine import describe_machine
from benchmarks.processes import Tell
from benchmarks.variants import EAGER, ONNXTRAIN


def measure(workload: str, repeats: int, folder: Path, tell: Tell) -> dict[str, list[float]]:
    """Return the seconds of the first steps, by variant. If `folder` has no captures, it is filled first."""
    captures = folder.resolve() / "captures"
    caches = {"ONNXTRAIN_CACHE_DIR": str(folder.resolve() / "kernels"), "ORTMODULE_CACHE_DIR": str(captures)}
    if not captures.exists():
        processes.run("benchmarks.steady_state", [workload, "1", "warm", ONNXTRAIN], caches, tell)
    times: dict[str, list[float]] = {EAGER: [], ONNXTRAIN: []}
    for repeat in range(repeats):
        for variant, own in times.items():
            tell(f"{variant}, process {repeat + 1} of {repeats}")
            own.append(processes.run("benchmarks.first_step", [workload, variant], caches, tell)["first_s"])
    return times


def table(title: str, times: dict[str, list[float]]) -> Table:
    """Return the medians, and their differences from eager's."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("")
    for header in ("median first step", "difference from eager", "fastest to slowest"):
        shown.add_column(header, justify="right")
    eager = statistics.median(times[EAGER])
    for name, own in times.items():
        median = statistics.median(own)
        later = "" if name == EAGER else f"{median - eager:+.2f} s"
        shown.add_row(name, f"{median:.2f} s", later, f"{min(own):.2f} – {max(own):.2f} s")
    return shown


def main(arguments: Sequence[str]) -> None:
    """Measure, and print the results."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warm_start", description=about)
    parser.add_argument("--only", choices=CPU_WORKLOADS, default=MINILM.name, help="the workload (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="processes of each variant (default: 5)")
    parser.add_argument("--caches", type=Path, help="a folder to keep the caches in for later runs (default: none)")
    given = parser.parse_args(arguments)
    if given.repeats < 1:
        parser.error(f"--repeats: expected 1 or more, got {given.repeats}")
    console = Console()
    for line in describe_machine().lines():
        console.print(*line, highlight=False)
    with tempfile.TemporaryDirectory() as scratch, console.status("") as status:
        times = measure(given.only, given.repeats, given.caches or Path(scratch), status.update)
    console.print(table(CPU_WORKLOADS[given.only].title, times))


if __name__ == "__main__":
    processes.end_on_termination()
    main(sys.argv[1:])
