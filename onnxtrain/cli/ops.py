"""`onnxtrain ops`: the table of all operators. The documentation lists the same rows (`tools/reference_pages.py`)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from onnxtrain.errors import OptionError
from onnxtrain.graph.values import ATEN, MICROSOFT, ONNX, OWN
from onnxtrain.ops import BY_BODY, NOT_DIFFERENTIABLE, OPS, STANDARD, Effects, NoBody, OpDef
from onnxtrain.ops.definition import OPSET

DOMAINS: Mapping[str, str] = {
    ONNX: f"Standard operators, of ai.onnx at opset {OPSET} or as named.",
    MICROSOFT: "Training operators under the names that ONNX Runtime Training gave them.",
    OWN: "Operators of this package: what PyTorch computes and ONNX has no operator for, or means otherwise.",
    ATEN: "PyTorch's own operators, for which there is no ONNX form.",
}


@dataclass(frozen=True)
class Row:
    """What the table says of one operator, as words."""

    name: str
    signature: str
    kernels: str
    body: str
    gradient: str
    nondiff_inputs: str
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
        nondiff_inputs=", ".join(sorted(definition.nondiff_inputs)),
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
    found: dict[str, list[OpDef]] = {domain: [] for domain in DOMAINS}
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


# The command


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pattern", nargs="?", default="", help="a regular expression: only operators whose name or ATen overload match"
    )


def run(options: argparse.Namespace) -> int:
    console = Console()
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
