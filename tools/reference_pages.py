"""Generate reference pages: options, operators, the command line, error messages and private parts of PyTorch.

`python tools/reference_pages.py docs/reference` writes them; `docs/conf.py` does the same in a build of the
documentation. They are generated from the package's own tables, and not edited by hand.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from pkgutil import iter_modules

from onnxtrain import cli, errors, torch_compat
from onnxtrain.cli import ops as ops_command
from onnxtrain.errors import OnnxTrainError
from onnxtrain.ops import FROM_TORCH, OPS, interfaces
from onnxtrain.options import JSON_VARIABLE, PROCESS_VARIABLES, Knob, knobs
from onnxtrain.options.former import FORMER, FormerOption
from onnxtrain.options.json_file import KEYS
from onnxtrain.options.without_effect import JSON_KEYS, VARIABLES
from onnxtrain.torch_compat.internal import ENTRIES, VARIABLE
from tools.unsupported import (
    ONNX_OPERATORS,
    PYTORCH_AT_RUN_TIME,
    PYTORCH_OPERATORS,
    PYTORCH_RUNS,
    PYTORCH_USES,
    TRAINING_OPERATORS,
    TRAINING_SIGNATURES,
)

PACKAGE = Path(cli.__file__).parent.parent


def write_pages(folder: Path) -> None:
    """Write every generated page into a folder; files that are already current keep their time stamps."""
    for name, page in PAGES.items():
        file, text = folder / name, page()
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------- options

_OPTIONS = """\
# Options

Every option of {py:class}`onnxtrain.ORTModule` and {py:func}`onnxtrain.prepare`. Later sources override earlier ones:
the default, the code (`ORTModule(model, rng="torch")`), a [JSON file](#json-file), the environment variable. An empty
variable counts as not set. `onnxtrain options` prints each option with its current value and the source of the value.
"""

_JSON = f"""\
## JSON file

The variable `{JSON_VARIABLE}` names a file of options for every ORTModule. `model.load_options(path)` loads one for a
single module. Keys are the options' names, or those of ONNX Runtime Training:

| key | option |
|---|---|
"""

_FORMER = """\
## Former options

These names still work in code and in a JSON file, with a notice. Variables of ONNX Runtime Training among them remain
supported, without a notice.

| option | variables | replacement |
|---|---|---|
"""

_WITHOUT_EFFECT = """\
## Variables without effect

These variables of ONNX Runtime Training have no effect in onnxtrain. If one of them is set, the log says so once.
The same holds for unknown variables that begin with `ORTMODULE_` or `ONNXTRAIN_`.

| variable | reason |
|---|---|
"""


def options_page() -> str:
    """Return a section per option, then variables and JSON keys."""
    parts = [_OPTIONS, *map(_option, knobs())]
    parts.append(
        "## Variables of the process\n\n| variable | meaning |\n|---|---|\n" + _rows(PROCESS_VARIABLES, code=True)
    )
    parts.append(_JSON + _rows({_json_key(key): f"`{option}`" for key, option in KEYS.items()}, code=True))
    parts.append(_FORMER + "\n".join(map(_former_row, FORMER.values())) + "\n")
    parts.append(_WITHOUT_EFFECT + _rows({name: row.reason for name, row in VARIABLES.items()}, code=True))
    keys = {name: row.reason for name, row in JSON_KEYS.items()}
    parts.append(
        "These keys of a JSON file have no effect either:\n\n| key | reason |\n|---|---|\n" + _rows(keys, code=True)
    )
    return "\n".join(parts)


def _option(knob: Knob) -> str:
    default = "None" if knob.default is None else knob.kind.text(knob.default) or "none"
    variables = [f"`{name}`" for name in (knob.variable, *(old.variable for old in knob.old_names)) if name]
    lines = [
        f"## {knob.name}\n",
        _meaning(knob.meaning),
        "| default | values | environment variable |",
        "|---|---|---|",
        f"| {' '.join(f'`{name}`' for name in default.split('|'))} | {knob.kind.allowed} | {', '.join(variables)} |",
    ]
    return "\n".join(lines).replace("joined by |", "joined by \\|") + "\n"


def _meaning(text: str) -> str:
    """Return the meaning of an option as sentences; values explained as "'value': meaning; ..." become a list."""
    text = text[0].upper() + text[1:]
    value = r"(?:'[\w-]+'|true|false|a number): "
    if (first := re.search(rf": (?={value})", text)) is None:
        return f"{text}{'' if text.endswith('.') else '.'}\n"
    values = re.split(rf"; (?={value}|or )", text[first.end() :])
    rows = [re.sub(r"^('[\w-]+'|true|false):", r"`\1`:", row) for row in values]
    return "\n".join([f"{text[: first.start()]}:\n", *(f"* {row}" for row in rows)]) + "\n"


def _former_row(option: FormerOption) -> str:
    variables = ", ".join(f"`{old.variable}`" for old in option.variables)
    return f"| `{option.name}` | {variables} | {option.advice} |"


def _json_key(key: str) -> str:
    """Return a key in a group as JSON writes it."""
    group, _, inner = key.partition(".")
    return f'{group}: {{"{inner}": …}}' if inner else key


# ----------------------------------------------------------------------------------------------------------- operators

_OPERATORS = """\
# Operators

Every operator of onnxtrain, from its definition in `onnxtrain/ops` ([adding one](../development/adding-an-op.md)).
`onnxtrain ops gelu` searches them in a terminal.

kernels
: The number of kernels that implement it. A *nondeterministic* kernel, which accumulates in no fixed order, is not used
  under `torch.use_deterministic_algorithms`.

body
: *standard*: the op is a standard ONNX op. *written out*: a function of standard ops, which other runtimes can run.

gradient
: *rule*: a gradient rule, with the inputs and outputs whose values are saved for backward. *by body*: the body is
  differentiated instead. *none*: not differentiable.

non-differentiable inputs
: Inputs that never have a gradient.

axes
: The mapping from input axes to output axes, by which passes move slices and padding through the op. *by node*: it
  depends on ranks and attributes. *none*: no axis is mapped.

effects
: The side effects of a node.

captured from
: The ATen operators that become this one.
"""


_INTERFACES = """\
The facts about operators that single passes and executors ask for, registered beside the definitions
([more](../development/adding-an-op.md#what-passes-and-executors-ask)).
"""


def operators_page() -> str:
    """Return a section per operator, then the operators without a definition, with reasons."""
    parts = [_OPERATORS]
    for domain, definitions in ops_command.selected().items():
        parts.append(f"## {domain or 'ai.onnx'}\n\n{ops_command.DOMAINS.get(domain, '')}\n")
        parts += map(_operator, map(ops_command.row, definitions))
    parts.append(
        f"## Interfaces\n\n{_INTERFACES}\n| interface | entries |\n|---|---|\n{_rows(_interfaces(), code=True)}"
    )
    several = sorted(FROM_TORCH.keys() - {name for definition in OPS.values() for name in definition.from_torch})
    parts.append(f"## Composite operators\n\nPyTorch operators that become several ops: {_aten(several)}.\n")
    parts.append("## Operators without a definition\n")
    for title, reasons in (
        ("Operators of ai.onnx:", ONNX_OPERATORS),
        ("Operators of ONNX Runtime Training:", TRAINING_OPERATORS),
        ("Operators of ONNX Runtime Training whose signature differs here:", TRAINING_SIGNATURES),
        ("PyTorch operators that stay ATen nodes, with PyTorch's kernel and gradient:", PYTORCH_OPERATORS),
        ("PyTorch operators of which only these uses stay ATen nodes:", PYTORCH_USES),
        ("Entries of PyTorch's operator database whose gradient some samples take at run time:", PYTORCH_AT_RUN_TIME),
        ("Entries of PyTorch's operator database of which some samples run in PyTorch:", PYTORCH_RUNS),
    ):
        parts.append(f"{title}\n\n| operators | reason |\n|---|---|\n{_rows(_by_reason(reasons))}")
    return "\n".join(parts)


def _interfaces() -> dict[str, str]:
    """Return the modules of interfaces, with the sentences that their docstrings begin with."""
    modules = [importlib.import_module(f"{interfaces.__name__}.{m.name}") for m in iter_modules(interfaces.__path__)]
    return {m.__name__.rpartition(".")[2]: (m.__doc__ or "").split("\n\n")[0] for m in modules}


def _operator(row: ops_command.Row) -> str:
    facts = (
        ("kernels", row.kernels),
        ("body", row.body),
        ("gradient", row.gradient),
        ("non-differentiable inputs", row.nondiff_inputs),
        ("axes", f"`{row.axes}`" if "->" in row.axes else row.axes),
        ("effects", row.effects),
        ("captured from", _aten(row.captured)),
    )
    summary = " · ".join(f"*{name}* {text}" for name, text in facts if text)
    return f"### {row.name}\n\n`{row.name}{row.signature}`\n\n{summary}\n"


def _aten(overloads: Iterable[str]) -> str:
    return ", ".join(f"`{name.removeprefix('aten.').removesuffix('.default')}`" for name in overloads)


def _by_reason(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the names that share a reason, joined, with that reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return {", ".join(sorted(group)): reason for reason, group in names.items()}


# -------------------------------------------------------------------------------------------------------- command line

_COMMAND_LINE = """\
# Command line

`onnxtrain COMMAND`, or `python -m onnxtrain COMMAND`. `onnxtrain COMMAND --help` prints the same text as this page.
"""


def command_line_page() -> str:
    """Return a section per command with its help text."""
    parts = [_COMMAND_LINE]
    for name, purpose in cli.COMMANDS.items():
        module: cli.Command = importlib.import_module(f"onnxtrain.cli.{name.replace('-', '_')}")
        parser = argparse.ArgumentParser(
            prog=f"onnxtrain {name}", formatter_class=lambda prog: argparse.HelpFormatter(prog, width=100)
        )
        module.arguments(parser)
        parts.append(f"## {name}\n\n{purpose[0].upper()}{purpose[1:]}.\n\n```text\n{parser.format_help()}```\n")
    return "\n".join(parts)


# -------------------------------------------------------------------------------------------------------------- errors

_ERRORS = """\
# Errors

An error message names the problem, its location, the expected and the actual value, and a solution. All errors derive
from {py:class}`onnxtrain.OnnxTrainError`. If an error derives from `ORTModuleFallbackException` and the option
[fallback_policy](options.md#fallback_policy) covers it, the module
[runs in PyTorch](../how-to/ortmodule.md#what-runs-in-pytorch-instead) instead. `…` is a placeholder.
"""


def errors_page() -> str:
    """Return a section per error class with its messages."""
    messages = dict(sorted(_messages()))
    parts = [_ERRORS]
    for name, error in inspect.getmembers(errors, inspect.isclass):
        if not issubclass(error, OnnxTrainError):
            continue
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
        about = inspect.cleandoc(error.__doc__ or "").split("\n\n")[0]
        parts.append(f"## {name}\n\n{about} Derives from {bases}.\n")
        if texts := sorted({text for text, classes in messages.items() if name in classes}):
            parts.append("\n".join(f"* {_escaped(text)}" for text in texts) + "\n")
    return "\n".join(parts)


def _messages() -> Iterator[tuple[str, set[str]]]:
    """Yield each message in the package's sources, with the error classes that are raised with it."""
    ours = {name for name, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, OnnxTrainError)}
    classes: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ours and node.args:
                if re.search(r"\w", text := _text(node.args[0])):
                    classes.setdefault(text, set()).add(node.func.id)
    yield from classes.items()


def _text(node: ast.expr) -> str:
    """Return the text of a literal or f-string, with `…` for placeholders; "" for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (
            "…" if isinstance(part, ast.FormattedValue) else str(getattr(part, "value", "")) for part in node.values
        )
        return "".join(parts)
    return ""


def _escaped(text: str) -> str:
    return "".join(f"\\{character}" if character in "*_`[]<>|$" else character for character in text)


# ----------------------------------------------------------------------------------------------------------- internals

_INTERNALS = f"""\
# Private parts of PyTorch

Only `onnxtrain/torch_compat` uses private parts of PyTorch. Each one has an entry there, whose behaviour is checked at
first use. If a part is missing or fails its check, its fallback takes its place: either it is slower and gives the same
results, or the module runs in PyTorch. The log names the part at INFO.

`{VARIABLE}=name,name` uses the fallbacks of these entries; `all` stands for every
entry that is not required. Slow tests train models without each entry and without all
(`tests/torch_compat/test_without_internals.py`).
"""


def internals_page() -> str:
    """Return a table of entries for each module of `torch_compat`."""
    modules = [f"{torch_compat.__name__}.{m.name}" for m in iter_modules(torch_compat.__path__)]
    parts = [_INTERNALS]
    for module in map(importlib.import_module, modules):
        entries = [entry for entry in ENTRIES.values() if entry.module == module.__name__]
        if entries:
            title = module.__name__.rpartition(".")[2]
            about = (module.__doc__ or "").split("\n\n")[0]
            rows = "".join(f"| `{e.name}` | {e.why} | {e.cost} |\n" for e in entries)
            parts.append(f"## {title}\n\n{about}\n\n| entry | used because | without it |\n|---|---|---|\n{rows}")
    return "\n".join(parts)


# -------------------------------------------------------------------------------------------------------------- tables


def _rows(cells: Mapping[str, str], code: bool = False) -> str:
    """Return the rows of a table of two columns, the first as code if `code` is set."""
    lines = ((f"`{first}`" if code else first, second) for first, second in cells.items())
    return "".join(f"| {first} | {second} |\n".replace("joined by |", "joined by \\|") for first, second in lines)


PAGES: Mapping[str, Callable[[], str]] = {
    "options.md": options_page,
    "operators.md": operators_page,
    "command-line.md": command_line_page,
    "errors.md": errors_page,
    "internals.md": internals_page,
}

if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
