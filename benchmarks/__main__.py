"""Time training steps of eager PyTorch, onnxtrain and torch.compile, and show the results. Nothing is asserted.

Usage: python -m benchmarks [--only NAME ...] [--no-compile] [--quick] [--rounds N] [--repeats N] [--write]
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import behind, processes, results, tables
from benchmarks.chart import speed_chart
from benchmarks.cpu_workloads import CPU_WORKLOADS, MLP
from benchmarks.gpu_workloads import GPU_WORKLOADS
from benchmarks.machine import Machine, describe_machine, measured_commit
from benchmarks.other_programs import MOST, wait_and_count
from benchmarks.page import write_page
from benchmarks.progress import Watch
from benchmarks.results import Behind, Circumstances, Measured, Timed
from benchmarks.spent import Spent
from benchmarks.variants import COMPILING, EAGER, ONNXTRAIN, OWN, USUAL, VARIANTS, can_compile, of_workload
from benchmarks.workload import Workload
from benchmarks.workloads import WORKLOADS

_BEHIND = "behind"
_GROUPS = {"cpu": (*CPU_WORKLOADS, _BEHIND), "gpu": tuple(GPU_WORKLOADS)}
_NAMES = (*WORKLOADS, _BEHIND)
_QUICK_ROUNDS = 3
_REPEATS = 5  # the import of onnxtrain alone takes 0.47 to 0.78 s on a virtual processor, from minute to minute
_WIDTH = 150  # of tables where no terminal says


@dataclass(frozen=True)
class Plan:
    """What one run of the benchmark does."""

    names: tuple[str, ...]
    variants: tuple[str, ...]
    rounds: int | None  # None: each workload's own
    repeats: int  # processes for each first step of eager and onnxtrain; the others have one
    warm: bool
    folder: Path
    command: str
    pages: Path | None  # the folder for the page, where one is to be written
    loaded: bool


def parse(arguments: Sequence[str]) -> Plan:
    """What a command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add(
        "--only",
        nargs="*",
        choices=(*_GROUPS, *_NAMES),
        default=["cpu", "gpu"],
        help="what to measure (default: all; none: nothing)",
    )
    usual = "those without the option regions"
    add("--variants", nargs="+", choices=tuple(VARIANTS), default=USUAL, help=f"what is timed (default: {usual})")
    add("--no-compile", action="store_true", help="without torch.compile, which takes longest")
    add("--quick", action="store_true", help=f"{_QUICK_ROUNDS} rounds without warm-up, to see that all runs")
    add("--rounds", "--steps", type=int, help="how often each step is timed, at most (default: by workload, 15 to 300)")
    several = f"processes for each first step of eager and onnxtrain; 0 leaves first steps out (default: {_REPEATS})"
    add("--repeats", type=int, help=several)
    add("--out", type=Path, default=Path("build/bench"), help="folder for times, table and chart (%(default)s)")
    add(
        "--write",
        nargs="?",
        type=Path,
        const=Path("docs/explanation"),
        help="write the documentation's table and charts too",
    )
    add("--loaded", action="store_true", help="measure beside busy programs; the figures are marked as disturbed")
    given = parser.parse_args(arguments)
    if given.rounds is not None and given.rounds < 1:
        parser.error(f"--rounds: expected 1 or more, got {given.rounds}")
    if given.repeats is not None and given.repeats < 0:
        parser.error(f"--repeats: expected 0 or more, got {given.repeats}")
    asked = {name for one in given.only for name in _GROUPS.get(one, (one,))}
    left_out = COMPILING if given.no_compile or not can_compile() else ()
    return Plan(
        names=tuple(name for name in _NAMES if name in asked),
        variants=tuple(name for name in VARIANTS if name in given.variants and name not in left_out),
        rounds=_QUICK_ROUNDS if given.quick and given.rounds is None else given.rounds,
        repeats=(1 if given.quick else _REPEATS) if given.repeats is None else given.repeats,
        warm=not given.quick,
        folder=given.out,
        command=" ".join(("python -m benchmarks", *arguments)),
        pages=given.write,
        loaded=given.loaded,
    )


class Run:
    """Carries out a plan."""

    def __init__(self, plan: Plan, machine: Machine, scratch: Path, watch: Watch) -> None:
        self._plan = plan
        self._machine = machine
        self._watch = watch
        self._caches = processes.Caches(scratch, plan.folder / "cache")
        self._read_files = False

    def measure(self, name: str) -> Measured | Behind:
        """One workload, or the steps while kernels compile."""
        self._watch.begin(name)
        found = self._behind() if name == _BEHIND else self._workload(WORKLOADS[name])
        self._watch.done()
        return found

    def _behind(self) -> Behind:
        found = processes.run("benchmarks.behind", [], self._caches.empty(), self._watch.doing)
        circumstances = self._circumstances(found.pop("others_cores"))
        during_s, alone_s = (tuple(map(tuple, found[name])) for name in ("during_s", "alone_s"))
        return Behind(behind.WORKLOAD.title, circumstances, during_s, alone_s, found["compiling_s"])

    def _workload(self, workload: Workload) -> Measured:
        variants = [name for name in of_workload(workload) if name in self._plan.variants]
        firsts: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
        inductor = []
        if self._plan.warm and not self._read_files:  # one process first: the files that all read are then in memory
            self._watch.doing("a first process, not counted")
            processes.run("benchmarks.first_step", [MLP.name, ONNXTRAIN], self._caches.empty(), self._watch.doing)
            self._read_files = True
        for repeat in range(0 if workload.cold else self._plan.repeats):
            for name in variants:
                if repeat and name not in (EAGER, *OWN):  # whose first steps have no goal, and may take minutes
                    continue
                self._watch.doing(f"first step of {name}, process {repeat + 1} of {self._plan.repeats}")
                caches = self._caches.empty()
                arguments = [workload.name, name]
                firsts[name].append(processes.run("benchmarks.first_step", arguments, caches, self._watch.doing))
                inductor.append(caches)
        rounds = self._plan.rounds or workload.rounds
        arguments = [workload.name, str(rounds), "warm" if self._plan.warm else "at once", *variants]
        caches = self._caches.empty() if workload.cold else self._caches.warm(inductor)
        found = processes.run("benchmarks.steady", arguments, caches, self._watch.doing)
        return Measured(
            workload=workload.name,
            circumstances=self._circumstances(found["others_cores"]),
            items=found["items"],
            variants=tuple(_timed(one, firsts[one["variant"]]) for one in found["variants"]),
            products_s=tuple(found["products_s"]),
            products=found["products"],
            products_flops=found["products_flops"],
            kept=found["kept"],
            peak_flops=found["peak_flops"],
            turn=found["turn"],
        )

    def _circumstances(self, others_cores: float) -> Circumstances:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return Circumstances(self._machine, self._plan.command, today, others_cores, measured_commit())


def _timed(found: dict[str, Any], firsts: Sequence[dict[str, float]]) -> Timed:
    return Timed(
        variant=found["variant"],
        first_s=tuple(first["first_s"] for first in firsts),
        second_s=tuple(first["second_s"] for first in firsts),
        rounds_s=tuple(found["rounds_s"]),
        peak_bytes=found["peak_bytes"],
        losses=tuple(found["losses"]),
        spent=tuple(Spent(**each) for each in found["spent"]),
        parts_s=found["parts_s"],
    )


def show(result: Measured | Behind) -> list[tables.Rows]:
    """A result as tables."""
    if isinstance(result, Behind):
        return [tables.behind_rows(result)]
    spent = tables.spent_rows(result)
    return [tables.workload_rows(WORKLOADS[result.workload], result), *([spent] if spent else [])]


def write_all(plan: Plan, console: Console) -> None:
    """Table, chart and page of all results in the folder, also of earlier runs."""
    found = results.read(plan.folder, _NAMES)
    measured = [(WORKLOADS[result.workload], result) for result in found if isinstance(result, Measured)]
    with (plan.folder / "table.txt").open("w", encoding="utf-8") as file:
        text = Console(file=file, width=_WIDTH)
        for result in found:
            for rows in show(result):
                text.print(rows.for_terminal())
    (plan.folder / "speeds.svg").write_text(speed_chart(measured), encoding="utf-8")
    console.print(f"Times, table and chart: {plan.folder.resolve()}", soft_wrap=True, highlight=False)
    if plan.pages is not None:
        console.print(f"The page: {write_page(measured, plan.pages).resolve()}", soft_wrap=True, highlight=False)


def main(arguments: Sequence[str]) -> int:
    """Measures, prints one table after another, and writes; the exit status."""
    plan = parse(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    machine = describe_machine()
    console.print(tables.machine_table(machine, plan.command), highlight=False)
    names = [name for name in plan.names if name not in GPU_WORKLOADS or torch.cuda.is_available()]
    if len(names) < len(plan.names):
        left_out = ", ".join(name for name in plan.names if name not in names)
        console.print(f"No GPU here: {left_out} are not measured.", highlight=False)
    if names and (busy := wait_and_count()) > MOST:
        console.print(f"Other programs keep {busy:.2f} of {machine.processors} cores busy.", style="bold red")
        if not plan.loaded:
            console.print("End them, or pass --loaded: the figures are then marked as disturbed.")
            return 2
    with tempfile.TemporaryDirectory() as scratch, Watch(console, len(names)) as watch:
        run = Run(plan, machine, Path(scratch), watch)
        for name in names:
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
