"""`onnxtrain options`: every option with its current value, the source of the value, and the meaning."""

from __future__ import annotations

import argparse
import os

from rich.console import Console
from rich.table import Table

from onnxtrain.cli.argument_types import existing_file
from onnxtrain.options import PROCESS_VARIABLES, Knob, Resolved, resolved
from onnxtrain.options.without_effect import VARIABLES


def _formatted(knob: Knob, value: object) -> str:
    return "" if value is None else knob.kind.text(value)


def table(rows: tuple[Resolved, ...]) -> Table:
    """Return the options for a terminal; those not at their default are bold."""
    result = Table(header_style="bold")
    for column in ("option", "value", "source", "meaning"):
        result.add_column(column, overflow="fold")
    for row in rows:
        cells = (row.knob.name, _formatted(row.knob, row.value), row.source, row.knob.meaning)
        result.add_row(*(cell.replace("[", r"\[") for cell in cells), style="" if row.source == "default" else "bold")
    return result


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", type=existing_file, metavar="FILE", help="a JSON file of options to apply")


def run(options: argparse.Namespace) -> int:
    """Print the table, and the variables that are set without effect."""
    console = Console()
    console.print(table(resolved(path=options.json)))
    for name, meaning in PROCESS_VARIABLES.items():
        console.print(f"{name}={os.environ.get(name, '')}  {meaning}", markup=False)
    for name, row in VARIABLES.items():
        if os.environ.get(name):
            console.print(f"{name} is set and has no effect: {row.reason}", markup=False)
    return 0
