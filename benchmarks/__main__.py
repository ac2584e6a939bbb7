"""Time training steps of eager PyTorch, onnxtrain and torch.compile, and print the results. Nothing is asserted.

Usage: python -m benchmarks [--only NAME ...] [--no-compile] [--quick] [--rounds N] [--minutes N] [--write]
"""

from __future__ import annotations

import argparse
import datetime
import math
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import background_compilation, processes, results, tables
from benchmarks.chart import speed_chart
from benchmarks.cpu_workloads import CPU_WORKLOADS, MLP
from benchmarks.gpu_workloads import GPU_GROUPS
from benchmarks.machine import Machine, describe_machine, measured_commit
from benchmarks.op_times import OpTime
from benchmarks.other_programs import MAX_OTHERS_CORES, wait_and_count
from benchmarks.page import write_page
from benchmarks.progress import Watch
from benchmarks.real_workloads import REAL_REHEARSAL, real_group
from benchmarks.results import BackgroundCompilation, Circumstances, Measured, Timed
from benchmarks.variants import COMPILING, EAGER, ONNXTRAIN, OWN, USUAL, VARIANTS, can_compile, variants_of
from benchmarks.workload import Workload
from benchmarks.workloads import WORKLOADS
from onnxtrain.system.machine import current_machine

_BACKGROUND = "background"
_GROUPS = {
    "cpu": (*CPU_WORKLOADS, _BACKGROUND),
    **{group: tuple(workload.name for workload in workloads) for group, workloads in GPU_GROUPS.items()},
    "real": tuple(workload.name for workload in real_group(current_machine())),
    "real-rehearsal": tuple(workload.name for workload in REAL_REHEARSAL),
}
_REHEARSALS = (*_GROUPS["gpu-rehearsal"], *_GROUPS["real-rehearsal"])
_NAMES = (*WORKLOADS, _BACKGROUND)
_QUICK_ROUNDS = 3
_GPU_MINUTES = 6.5  # a workload of the group "gpu" takes about a minute: with the last one, all end within eight
_WIDTH = 150  # of tables, if the output is not a terminal


@dataclass(frozen=True)
class Plan:
    """The settings of one run of the benchmark."""

    names: tuple[str, ...]
    variants: tuple[str, ...]
    rounds: int | None  # None: the default of each workload
    # Processes for the first steps of eager and onnxtrain, None: the default of each workload; other variants have one.
    repeats: int | None
    warm: bool
    folder: Path
    command: str
    pages: Path | None  # the folder to write the page to; None: do not write it
    loaded: bool
    minutes: float  # after which no workload is begun


def parse(arguments: Sequence[str]) -> Plan:
    """Parse a command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add(
        "--only",
        nargs="*",
        choices=(*_GROUPS, *_NAMES),
        default=["cpu", "gpu"],
        help="workloads to measure (default: cpu and gpu; without names: none)",
    )
    usual = "those without fused regions"
    add("--variants", nargs="+", choices=tuple(VARIANTS), default=USUAL, help=f"variants to time (default: {usual})")
    add("--no-compile", action="store_true", help="skip torch.compile, which takes longest")
    add("--quick", action="store_true", help=f"{_QUICK_ROUNDS} rounds without warm-up, to check that everything runs")
    add("--rounds", "--steps", type=int, help="maximum number of timed rounds (default: by workload, 3 to 300)")
    repeats = "processes for the first steps of eager and onnxtrain; 0 skips first steps (default: by workload, 1 or 5)"
    add("--repeats", type=int, help=repeats)
    add("--out", type=Path, default=Path("build/bench"), help="the folder for times, table and chart (%(default)s)")
    add(
        "--write",
        nargs="?",
        type=Path,
        const=Path("docs/explanation"),
        help="also write the documentation's table and charts",
    )
    add(
        "--loaded",
        action="store_true",
        help="measure even if other programs are busy; the figures are marked as disturbed",
    )
    minutes = f"begin no workload after so many minutes (default: no limit; with --only gpu {_GPU_MINUTES:g})"
    add("--minutes", type=float, help=minutes)
    options = parser.parse_args(arguments)
    if options.minutes is None:
        options.minutes = _GPU_MINUTES if options.only == ["gpu"] else math.inf
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds: expected 1 or more, got {options.rounds}")
    if options.repeats is not None and options.repeats < 0:
        parser.error(f"--repeats: expected 0 or more, got {options.repeats}")
    selected = {name for choice in options.only for name in _GROUPS.get(choice, (choice,))}
    skipped = COMPILING if options.no_compile or not can_compile() else ()
    return Plan(
        names=tuple(name for name in _NAMES if name in selected),
        variants=tuple(name for name in VARIANTS if name in options.variants and name not in skipped),
        rounds=_QUICK_ROUNDS if options.quick and options.rounds is None else options.rounds,
        repeats=1 if options.quick and options.repeats is None else options.repeats,
        warm=not options.quick,
        folder=options.out,
        command=" ".join(("python -m benchmarks", *arguments)),
        pages=options.write,
        loaded=options.loaded,
        minutes=options.minutes,
    )


class Run:
    """Runs a plan."""

    def __init__(self, plan: Plan, machine: Machine, scratch: Path, watch: Watch) -> None:
        self._plan = plan
        self._machine = machine
        self._watch = watch
        self._caches = processes.Caches(scratch, plan.folder / "cache")
        self._read_files = False

    def measure(self, name: str) -> Measured | BackgroundCompilation:
        """Measure one workload, or steps while kernels compile."""
        self._watch.begin(name)
        result = self._background() if name == _BACKGROUND else self._workload(WORKLOADS[name])
        self._watch.done()
        return result

    def _background(self) -> BackgroundCompilation:
        values = processes.run("benchmarks.background_compilation", [], self._caches.empty(), self._watch.doing)
        circumstances = self._circumstances(values.pop("others_cores"))
        during_s, alone_s = (tuple(map(tuple, values[name])) for name in ("during_s", "alone_s"))
        return BackgroundCompilation(
            background_compilation.WORKLOAD.title, circumstances, during_s, alone_s, values["compiling_s"]
        )

    def _workload(self, workload: Workload) -> Measured:
        variants = [name for name in variants_of(workload) if name in self._plan.variants]
        firsts: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
        inductor = []
        repeats = workload.repeats if self._plan.repeats is None or not workload.repeats else self._plan.repeats
        if repeats and self._plan.warm and not self._read_files:  # a first process fills the page cache
            self._watch.doing("a first process, not counted")
            processes.run("benchmarks.first_step", [MLP.name, ONNXTRAIN], self._caches.empty(), self._watch.doing)
            self._read_files = True
        for repeat in range(0 if workload.cold else repeats):
            for name in variants:
                if repeat and name not in (EAGER, *OWN):  # first steps of the others have no goal, and may take minutes
                    continue
                self._watch.doing(f"first step of {name}, process {repeat + 1} of {repeats}")
                caches = self._caches.empty()
                arguments = [workload.name, name]
                firsts[name].append(processes.run("benchmarks.first_step", arguments, caches, self._watch.doing))
                inductor.append(caches)
        rounds = self._plan.rounds or workload.rounds
        arguments = [workload.name, str(rounds), "warm" if self._plan.warm else "at once", *variants]
        caches = self._caches.empty() if workload.cold else self._caches.warm(inductor)
        values = processes.run("benchmarks.steady_state", arguments, caches, self._watch.doing)
        return Measured(
            workload=workload.name,
            circumstances=self._circumstances(values["others_cores"]),
            items=values["items"],
            variants=tuple(_timed(variant, firsts[variant["variant"]]) for variant in values["variants"]),
            gemms_s=tuple(values["gemms_s"]),
            gemms=values["gemms"],
            gemm_flops=values["gemm_flops"],
            gemm_fraction=values["gemm_fraction"],
            peak_flops=values["peak_flops"],
            log=tuple(values["log"]),
            steps_per_round=values["steps_per_round"],
        )

    def _circumstances(self, others_cores: float) -> Circumstances:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return Circumstances(self._machine, self._plan.command, today, others_cores, measured_commit())


def _timed(values: dict[str, Any], firsts: Sequence[dict[str, float]]) -> Timed:
    return Timed(
        variant=values["variant"],
        first_s=tuple(first["first_s"] for first in firsts),
        second_s=tuple(first["second_s"] for first in firsts),
        rounds_s=tuple(values["rounds_s"]),
        peak_bytes=values["peak_bytes"],
        losses=tuple(values["losses"]),
        op_times=tuple(OpTime(**op_time) for op_time in values["op_times"]),
        parts_s=values["parts_s"],
    )


def show(result: Measured | BackgroundCompilation) -> list[tables.Rows]:
    """Format a result as tables."""
    if isinstance(result, BackgroundCompilation):
        return [tables.background_rows(result)]
    op_times = tables.op_time_rows(result)
    return [tables.workload_rows(WORKLOADS[result.workload], result), *([op_times] if op_times else [])]


def measurable(names: Sequence[str], console: Console) -> list[str]:
    """Return the names of the workloads that can run here; print the others, with the reason."""
    reasons = {name: _reason_to_skip(name) for name in names}
    for reason in dict.fromkeys(filter(None, reasons.values())):
        skipped = ", ".join(name for name in names if reasons[name] == reason)
        console.print(f"{reason}; not measured: {skipped}.", highlight=False, markup=False)
    return [name for name in names if not reasons[name]]


def _reason_to_skip(name: str) -> str:
    """Return why a workload cannot run here; "" if it can."""
    if name == _BACKGROUND:
        return ""
    if WORKLOADS[name].device == "cuda" and not torch.cuda.is_available():
        return "No GPU found"
    missing = WORKLOADS[name].missing()
    return f"Not installed: {', '.join(missing)} (pip install onnxtrain[qlora])" if missing else ""


def write_all(plan: Plan, console: Console) -> None:
    """Write table, chart and page of all results in the folder, including those of earlier runs."""
    stored = results.read(plan.folder, _NAMES)
    measured = [
        (WORKLOADS[result.workload], result)
        for result in stored
        if isinstance(result, Measured) and result.workload not in _REHEARSALS
    ]
    with (plan.folder / "table.txt").open("w", encoding="utf-8") as file:
        text = Console(file=file, width=_WIDTH)
        for result in stored:
            for rows in show(result):
                text.print(rows.for_terminal())
    (plan.folder / "speeds.svg").write_text(speed_chart(measured), encoding="utf-8")
    console.print(f"Times, table and chart: {plan.folder.resolve()}", soft_wrap=True, highlight=False)
    if plan.pages is not None:
        console.print(f"The page: {write_page(measured, plan.pages).resolve()}", soft_wrap=True, highlight=False)


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write the results; return the exit status."""
    plan = parse(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    machine = describe_machine()
    console.print(tables.machine_table(machine, plan.command), highlight=False)
    names = measurable(plan.names, console)
    if names and (busy := wait_and_count()) > MAX_OTHERS_CORES:
        console.print(f"Other programs keep {busy:.2f} of {machine.processors} cores busy.", style="bold red")
        if not plan.loaded:
            console.print("End them, or pass --loaded: the figures are then marked as disturbed.")
            return 2
    with tempfile.TemporaryDirectory() as scratch, Watch(console, len(names)) as watch:
        run = Run(plan, machine, Path(scratch), watch)
        started = time.monotonic()
        for name in names:
            if time.monotonic() - started > 60 * plan.minutes:
                console.print(f"Not begun, for --minutes {plan.minutes:g}: {name}.", highlight=False)
                continue
            result = run.measure(name)
            results.write(result, plan.folder)
            for rows in show(result):
                console.print(rows.for_terminal())
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_all(plan, console)
    return 0


if __name__ == "__main__":
    processes.end_on_termination()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
