"""Times eager PyTorch, onnxtrain and torch.compile, and prints what came out. It asserts nothing.

Usage: python -m benchmarks [--only NAME ...] [--no-compile] [--steps N] [--repeats N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.contenders import COMPILE, CONTENDERS, can_compile
from benchmarks.first_step import measure_first_steps
from benchmarks.machine import describe_machine
from benchmarks.steady import measure_steady
from benchmarks.tables import first_step_table, machine_table, steady_table
from benchmarks.workloads import MINILM, WORKLOADS

_FIRST_STEP = "first-step"
_NAMES = (_FIRST_STEP, *WORKLOADS)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What a command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=_NAMES, default=_NAMES, help="what to measure (default: all)")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, which takes longest")
    parser.add_argument("--steps", type=int, help="rounds of each steady step (default: 30 of minilm, 3000 of mlp)")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each first step (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all single times here too")
    given = parser.parse_args(arguments)
    for option in ("steps", "repeats"):
        if getattr(given, option) is not None and getattr(given, option) < 1:
            parser.error(f"--{option}: expected 1 or more, got {getattr(given, option)}")
    return given


def main(arguments: Sequence[str]) -> None:
    """Measures and prints, one table after another."""
    given = parse(arguments)
    console = Console()
    without_compile = given.no_compile or not can_compile()
    contenders = [name for name in CONTENDERS if not (without_compile and name == COMPILE)]
    machine = describe_machine()
    command = " ".join(("python -m benchmarks", *arguments))
    console.print(machine_table(machine, command), highlight=False)
    if without_compile:
        console.print(f"{COMPILE} is left out: {'as asked' if given.no_compile else 'no C++ compiler was found'}")
    measured: dict[str, Any] = {"machine": asdict(machine), "command": command}

    def tell(text: str) -> None:
        console.print(f"… {text}", style="dim", highlight=False)

    if _FIRST_STEP in given.only:
        first_steps = measure_first_steps(MINILM.name, contenders, given.repeats, tell)
        console.print(first_step_table(MINILM.title, first_steps))
        measured[_FIRST_STEP] = [asdict(result) for result in first_steps]
    for workload in WORKLOADS.values():
        if workload.name in given.only:
            steady = measure_steady(workload, contenders, given.steps or workload.rounds, tell)
            console.print(steady_table(workload.title, steady))
            measured[workload.name] = [asdict(result) for result in steady]
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(measured, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
