"""Measure what each name of the option `process_wide` saves.

    one process of each fills the caches, not counted ─▶ interleaved processes: default, option ─▶ medians

Usage: python -m benchmarks.process_options [--only OPTION] [--workloads NAME ...] [--repeats N]

`pause_collector` matters in the first step with empty caches, `reuse_memory` in every step. Elapsed time requires an
idle machine; processor time counts all threads of the process, and other programs disturb it less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import first_step, processes, steady_state
from benchmarks.cpu_workloads import CPU_WORKLOADS
from benchmarks.machine import describe_machine, measured_commit
from benchmarks.processes import Tell
from benchmarks.variants import ONNXTRAIN, Stepper, make_batches, make_model

FIRST, STEADY = "first", "steady"
# By option: the step that it affects, and the workloads.
OPTIONS: Mapping[str, tuple[str, Sequence[str]]] = {
    "pause_collector": (FIRST, ("mlp32", "gpt2", "t5")),
    "reuse_memory": (STEADY, ("mlp32", "minilm", "gpt2", "t5", "cnn")),
}
_STEADY_S = 10.0
_MIN_STEPS = 5
Seconds = dict[str, float]


def child(step: str, workload: str) -> Seconds:
    """Return the elapsed and the processor seconds of a step, in this process."""
    if step == FIRST:
        measured = first_step.measure(workload, ONNXTRAIN)
        return {"elapsed": measured["first_s"], "processor": measured["first_cpu_s"]}
    work = CPU_WORKLOADS[workload]
    batches = make_batches(work)
    stepper = Stepper(work, ONNXTRAIN, make_model(work))
    stepper.step(batches[0])
    steady_state.warm_up({ONNXTRAIN: stepper}, batches, lambda doing: processes.send(doing=doing), work.max_warm_up_s)
    elapsed: list[float] = []
    processor: list[float] = []
    while len(elapsed) < _MIN_STEPS or sum(elapsed) < _STEADY_S:
        before = time.process_time()
        elapsed.append(stepper.step(batches[len(elapsed) % len(batches)]))
        processor.append(time.process_time() - before)
    return {"elapsed": statistics.median(elapsed), "processor": statistics.median(processor)}


def measure(option: str, workload: str, repeats: int, tell: Tell) -> list[tuple[Seconds, Seconds]]:
    """Return the seconds by default and with the option, for each repeat."""
    step, _ = OPTIONS[option]
    pairs: list[tuple[Seconds, Seconds]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(-1, repeats):
            tell(f"{option}, {workload}: " + ("to fill caches" if repeat < 0 else f"{repeat + 1} of {repeats}"))
            pair: list[Seconds] = []
            for enabled in ("0", "1"):
                caches = str(Path(scratch, str(repeat) + enabled if step == FIRST else "kept"))
                file = Path(scratch, f"options-{enabled}.json")
                file.write_text(json.dumps({"process_wide": [option] if enabled == "1" else []}))
                environment = {"ORTMODULE_JSON_CONFIG_PATH": str(file), "ONNXTRAIN_CACHE_DIR": caches}
                arguments = ["--child", step, workload]
                pair.append(processes.run("benchmarks.process_options", arguments, environment, tell))
            if repeat >= 0:
                pairs.append((pair[0], pair[1]))
    return pairs


def row(option: str, workload: str, pairs: Sequence[tuple[Seconds, Seconds]]) -> list[str]:
    """Return the cells of one row: the medians by default and with the option, and their ratios."""
    cells = [option, workload, OPTIONS[option][0]]
    for kind in ("elapsed", "processor"):
        default, own = (statistics.median(pair[side][kind] for pair in pairs) for side in (0, 1))
        cells += [f"{default * 1e3:.1f} ms", f"{own * 1e3:.1f} ms", f"{own / default:.2f}"]
    return cells


def main(arguments: Sequence[str]) -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.process_options", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--only", choices=OPTIONS, help="the option to measure (default: all)")
    parser.add_argument(
        "--workloads", nargs="+", choices=CPU_WORKLOADS, help="the workloads (default: those of each option)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="processes with and without the option (default: 5)")
    parser.add_argument("--child", nargs=2, metavar=("STEP", "WORKLOAD"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        processes.send(result=child(*given.child))
        return
    if given.repeats < 1:
        parser.error(f"--repeats: expected 1 or more, got {given.repeats}")
    console = Console(width=150)
    for line in describe_machine().lines():
        console.print(*line, highlight=False)
    console.print("commit", measured_commit(), highlight=False)
    table = Table()
    for header in ("option", "workload", "step", "elapsed", "with", "×", "processor", "with", "×"):
        table.add_column(header)
    with console.status("") as status:
        for option in [given.only] if given.only else OPTIONS:
            for workload in given.workloads or OPTIONS[option][1]:
                table.add_row(*row(option, workload, measure(option, workload, given.repeats, status.update)))
    console.print(table)


if __name__ == "__main__":
    processes.end_on_termination()
    main(sys.argv[1:])
