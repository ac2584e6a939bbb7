"""`onnxtrain ops`: the table of all operators, in the terminal or as the page docs/operators.md."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from onnxtrain.cli.argument_types import new_file
from onnxtrain.cli.page import write_page
from onnxtrain.errors import OptionError
from onnxtrain.graph.values import ATEN, MICROSOFT, ONNX, OWN
from onnxtrain.ops import BY_BODY, FROM_TORCH, NOT_DIFFERENTIABLE, OPS, STANDARD, Effects, NoBody, OpDef
from onnxtrain.ops.definition import OPSET
from onnxtrain.ops.left_out import (
    ONNX_OPERATORS,
    PYTORCH_AT_RUN_TIME,
    PYTORCH_OPERATORS,
    PYTORCH_RUNS,
    PYTORCH_USES,
    TRAINING_OPERATORS,
    TRAINING_SIGNATURES,
)

_DOMAINS: Mapping[str, str] = {
    ONNX: f"Standard operators, of ai.onnx at opset {OPSET} or as named.",
    MICROSOFT: "Training operators under the names that ONNX Runtime Training gave them.",
    OWN: "Operators of this package: what PyTorch computes and ONNX has no operator for, or means otherwise.",
    ATEN: "PyTorch's own operators, for which there is no ONNX form.",
}

_INTRODUCTION = """\
# Operators

Written by `python -m onnxtrain ops --write docs/operators.md`: every operator that onnxtrain knows, as its definition in
`onnxtrain/ops` says. How to add one stands in [adding-an-op.md](adding-an-op.md).

| column | what it says |
|---|---|
| operator | its name, its inputs (`x?` may be absent, `xs...` stands for several) and outputs |
| kernels | how many torch kernels it has, best first; *nondeterministic* where one adds in no fixed order: it is left out under `torch.use_deterministic_algorithms` |
| body | *standard*: it is ONNX itself; *written out*: a function of standard operators, which is what other runtimes run; or why there is none |
| gradient | *rule*, with the inputs and outputs whose elements are kept for backward; *by body*: where a gradient flows through it, its body takes its place; *none*: no gradient flows |
| stops | inputs that never get a gradient |
| axes | which output axis comes from which input axis: passes move slices and padding along them. *by node*: it depends on ranks and attributes; *none*: no axis passes |
| effects | what a node does besides computing |
| from PyTorch | the ATen operators that it is captured from |
"""  # noqa: E501  # a table's row is one line


_HEAD = """\
| operator | kernels | body | gradient | stops | axes | effects | from PyTorch |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Row:
    """What the table says of one operator, as words."""

    name: str
    signature: str
    kernels: str
    body: str
    gradient: str
    stops: str
    axes: str
    effects: str
    captured: tuple[str, ...]


def row(definition: OpDef) -> Row:
    """What a definition says, in words."""
    return Row(
        name=definition.name,
        signature=f"({', '.join(definition.inputs)}) -> {', '.join(definition.outputs)}",
        kernels=_kernels(definition),
        body=_body(definition),
        gradient=_gradient(definition),
        stops=", ".join(sorted(definition.stops)),
        axes=_axes(definition),
        effects=_effects(definition.effects),
        captured=tuple(sorted(definition.from_torch)),
    )


def _kernels(definition: OpDef) -> str:
    count = len(definition.kernels)
    loose = sum(not kernel.deterministic for kernel in definition.kernels)
    return f"{count}, {loose} nondeterministic" if loose else str(count)


def _body(definition: OpDef) -> str:
    if definition.body is STANDARD:
        return "standard"
    if isinstance(definition.body, NoBody):
        return f"none: {definition.body.reason}"
    return "written out"


def _gradient(definition: OpDef) -> str:
    if definition.gradient is NOT_DIFFERENTIABLE:
        return "none"
    if definition.gradient is BY_BODY:
        return "by body"
    assert isinstance(definition.gradient, tuple)
    rules = [f"rule, reads {', '.join(rule.reads)}" if rule.reads else "rule" for rule in definition.gradient]
    return " or ".join(rules)


def _axes(definition: OpDef) -> str:
    """The axis map, where it is the same for every node."""
    nothing: Any = None
    try:
        text = definition.axes(nothing)
    except (AttributeError, TypeError):
        return "by node"
    return text or "none"


def _effects(effects: Effects) -> str:
    words = [str(effect.name).lower().replace("_", " ") for effect in Effects if effect and effect in effects]
    return ", ".join(words)


def selected(pattern: str = "") -> dict[str, list[OpDef]]:
    """The definitions whose domain, name or ATen overloads match `pattern`, by domain."""
    found: dict[str, list[OpDef]] = {domain: [] for domain in _DOMAINS}
    for (domain, name), definition in sorted(OPS.items()):
        texts = (f"{domain or 'ai.onnx'}::{name}", *definition.from_torch)
        if any(re.search(pattern, text, re.IGNORECASE) for text in texts):
            found.setdefault(domain, []).append(definition)
    return {domain: definitions for domain, definitions in found.items() if definitions}


# In the terminal


def table(domain: str, definitions: Iterable[OpDef]) -> Table:
    """The operators of one domain for a terminal."""
    result = Table(title=domain or "ai.onnx", title_justify="left", header_style="bold")
    for column in ("operator", "kernels", "body", "gradient", "axes", "effects"):
        result.add_column(column, overflow="fold")
    for each in map(row, definitions):
        result.add_row(f"{each.name}[dim]{_escaped(each.signature)}[/dim]", *map(_escaped, _columns(each)))
    return result


def _columns(each: Row) -> tuple[str, ...]:
    return each.kernels, each.body, each.gradient, each.axes, each.effects


def _escaped(text: str) -> str:
    """Square brackets are markup to rich, and whole axes to an axis map."""
    return text.replace("[", r"\[")


# As a page


def page() -> str:
    """The text of docs/operators.md."""
    parts = [_INTRODUCTION]
    for domain, definitions in selected().items():
        parts.append(f"## {domain or 'ai.onnx'}\n\n{_DOMAINS.get(domain, '')}\n")
        parts.append("\n".join([_HEAD, *map(_line, map(row, definitions)), ""]))
    composed = sorted(FROM_TORCH.keys() - {name for definition in OPS.values() for name in definition.from_torch})
    parts.append(f"## Written as several\n\nPyTorch's operators that become several of these:\n{_code(composed)}.\n")
    parts.append("## Left out\n")
    parts.append(_reasons("Operators of ai.onnx without a definition here:", ONNX_OPERATORS))
    parts.append(_reasons("Operators of ONNX Runtime Training without a definition here:", TRAINING_OPERATORS))
    parts.append(_reasons("Those of its operators whose signature is another one here:", TRAINING_SIGNATURES))
    parts.append("## PyTorch's own\n")
    parts.append(_reasons("Operators that stay ATen nodes, with PyTorch's kernel and gradient:", PYTORCH_OPERATORS))
    parts.append(_reasons("Operators of which only these uses stay ATen nodes:", PYTORCH_USES))
    parts.append("Of PyTorch's operator database, which `tests/ops/test_op_db.py` runs:\n")
    parts.append(
        _reasons("Entries whose gradient is taken at run time, in some of their samples:", PYTORCH_AT_RUN_TIME)
    )
    parts.append(_reasons("Entries that run in PyTorch, some of their samples at least:", PYTORCH_RUNS))
    return "\n".join(parts)


def _code(overloads: Iterable[str]) -> str:
    return ", ".join(f"`{name.removeprefix('aten.').removesuffix('.default')}`" for name in overloads)


def _line(each: Row) -> str:
    captured = _code(each.captured)
    axes = f"`{each.axes}`" if "->" in each.axes else each.axes
    cells = (
        f"**{each.name}** `{each.signature}`",
        each.kernels,
        each.body,
        each.gradient,
        each.stops,
        axes,
        each.effects,
        captured,
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _reasons(title: str, left_out: Mapping[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(reason, []).append(name)
    lines = [f"| {', '.join(sorted(names))} | {reason} |" for reason, names in by_reason.items()]
    return "\n".join([title, "", "| operators | reason |", "|---|---|", *lines, ""])


# The command


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pattern", nargs="?", default="", help="a regular expression: only operators whose name or ATen overload match"
    )
    parser.add_argument("--write", type=new_file, metavar="FILE", help="write the page docs/operators.md instead")


def run(options: argparse.Namespace) -> int:
    console = Console()
    if options.write is not None:
        write_page(options.write, page())
        return 0
    try:
        found = selected(options.pattern)
    except re.error as error:
        raise OptionError("The pattern is no regular expression.", got=f"{options.pattern}: {error}") from error
    if not found:
        raise OptionError(f"There is no operator that matches {options.pattern!r}.", todo="onnxtrain ops lists all")
    for domain, definitions in found.items():
        console.print(table(domain, definitions))
    console.print(f"{sum(map(len, found.values()))} operators")
    return 0
