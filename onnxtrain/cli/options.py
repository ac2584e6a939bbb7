"""`onnxtrain options`: every option with its value here and now, what decided it, and what it means."""

from __future__ import annotations

import argparse
import os

from rich.console import Console
from rich.table import Table

from onnxtrain.cli.argument_types import existing_file, new_file
from onnxtrain.cli.page import write_page
from onnxtrain.options import JSON_VARIABLE, PROCESS_VARIABLES, Knob, Resolved, knobs, resolved
from onnxtrain.options.json_file import KEYS
from onnxtrain.options.without_effect import JSON_KEYS, VARIABLES

_INTRODUCTION = """\
# Options

Written by `python -m onnxtrain options --write docs/options.md`. Later wins: the default, then what the code gives
(`ORTModule(model, rng="torch")`, `DebugOptions(config={"rng": "torch"})`), then a JSON file, then the environment
variable. A variable that is set but empty counts as not set. `python -m onnxtrain options` prints each with its present
value and what decided it.

| option | default | variable | values | meaning |
|---|---|---|---|---|
"""

_OF_PROCESS = """
These variables hold for the whole process:

| variable | meaning |
|---|---|
"""

_JSON = f"""
## JSON file

The variable `{JSON_VARIABLE}` names a file that holds for every ORTModule. `model.load_options(path)`, or
`load_from_json(model, path)` of `onnxruntime.training.ortmodule.experimental.json_config`, gives one to a single
module. Its keys are the options' names, or those of ONNX Runtime Training:

| key | option |
|---|---|
"""

_WITHOUT = """
## Without effect

Variables of ONNX Runtime Training that have nothing to switch here. One that is set is answered once in the log, as is
one that begins with `ORTMODULE_` or `ONNXTRAIN_` and is unknown.

| variable | why, and what to do |
|---|---|
"""

_KEYS_WITHOUT = """
The same goes for these keys of a JSON file:

| key | why, and what to do |
|---|---|
"""


def page() -> str:
    """The text of docs/options.md."""
    rows = [f"| `{k.name}` | {_default(k)} | {_variables(k)} | {k.kind.allowed} | {k.meaning} |" for k in knobs()]
    groups = (
        (_INTRODUCTION, rows),
        (_OF_PROCESS, [f"| `{name}` | {meaning} |" for name, meaning in PROCESS_VARIABLES.items()]),
        (_JSON, [f"| `{_key(key)}` | `{option}` |" for key, option in KEYS.items()]),
        (_WITHOUT, [f"| `{name}` | {row.why} |" for name, row in VARIABLES.items()]),
        (_KEYS_WITHOUT, [f"| `{name}` | {row.why} |" for name, row in JSON_KEYS.items()]),
    )
    return "".join(text + "".join(f"{_cell(line)}\n" for line in lines) for text, lines in groups)


def _cell(line: str) -> str:
    """A row of a table: a bar inside a cell would begin another one."""
    return line.replace("joined by |", "joined by \\|")


def _default(knob: Knob) -> str:
    text = _shown(knob, knob.default)
    return "" if not text else " ".join(f"`{name}`" for name in text.split("|"))


def _shown(knob: Knob, value: object) -> str:
    return "" if value is None else knob.kind.text(value)


def _variables(knob: Knob) -> str:
    names = [knob.variable, *(old.variable for old in knob.old_names)]
    return ", ".join(f"`{name}`" for name in names if name)


def _key(key: str) -> str:
    """A key in a group as JSON writes it."""
    group, _, inner = key.partition(".")
    return f'{group}: {{"{inner}": …}}' if inner else key


def table(rows: tuple[Resolved, ...]) -> Table:
    """The options for a terminal; those that are not at their default stand out."""
    result = Table(header_style="bold")
    for column in ("option", "value", "source", "meaning"):
        result.add_column(column, overflow="fold")
    for row in rows:
        cells = (row.knob.name, _shown(row.knob, row.value), row.source, row.knob.meaning)
        result.add_row(*(cell.replace("[", r"\[") for cell in cells), style="" if row.source == "default" else "bold")
    return result


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--json", type=existing_file, metavar="FILE", help="a JSON file of options to look at")
    parser.add_argument("--write", type=new_file, metavar="FILE", help="write the page docs/options.md instead")


def run(options: argparse.Namespace) -> int:
    """Prints the table, and the variables that are set and have no effect."""
    console = Console()
    if options.write is not None:
        write_page(options.write, page())
        return 0
    console.print(table(resolved(path=options.json)))
    for name, meaning in PROCESS_VARIABLES.items():
        console.print(f"{name}={os.environ.get(name, '')}  {meaning}", markup=False)
    for name, row in VARIABLES.items():
        if os.environ.get(name):
            console.print(f"{name} is set and has no effect: {row.why}", markup=False)
    return 0
