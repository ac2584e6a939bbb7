"""`onnxtrain ops`: list all operators. `tools/reference_pages.py` writes the same rows into the documentation."""

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
    ONNX: f"Standard operators of ai.onnx, at opset {OPSET} or as named.",
    MICROSOFT: "Training operators, with the names of ONNX Runtime Training.",
    OWN: "Operators of onnxtrain: PyTorch operators that ONNX lacks or defines differently.",
    ATEN: "PyTorch operators without an ONNX form.",
}


@dataclass(frozen=True)
class Row:
    """The cells of one operator."""

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
    """Return the cells of a definition."""
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
    nondeterministic = sum(not kernel.deterministic for kernel in definition.kernels)
    return f"{count}, {nondeterministic} nondeterministic" if nondeterministic else str(count)


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
    """Return the axis map, if it is the same for every node."""
    no_node: Any = None
    try:
        text = definition.axes(no_node)
    except (AttributeError, TypeError):
        return "by node"
    return text or "none"


def _effects(effects: Effects) -> str:
    words = [str(effect.name).lower().replace("_", " ") for effect in Effects if effect and effect in effects]
    return ", ".join(words)


def selected(pattern: str = "") -> dict[str, list[OpDef]]:
    """Return the definitions whose domain, name or ATen overloads match `pattern`, by domain."""
    by_domain: dict[str, list[OpDef]] = {domain: [] for domain in DOMAINS}
    for (domain, name), definition in sorted(OPS.items()):
        texts = (f"{domain or 'ai.onnx'}::{name}", *definition.from_torch)
        if any(re.search(pattern, text, re.IGNORECASE) for text in texts):
            by_domain.setdefault(domain, []).append(definition)
    return {domain: definitions for domain, definitions in by_domain.items() if definitions}


# In the terminal


def table(domain: str, definitions: Iterable[OpDef]) -> Table:
    """Return the operators of one domain for a terminal."""
    result = Table(title=domain or "ai.onnx", title_justify="left", header_style="bold")
    for column in ("operator", "kernels", "body", "gradient", "axes", "effects"):
        result.add_column(column, overflow="fold")
    for cells in map(row, definitions):
        columns = (cells.kernels, cells.body, cells.gradient, cells.axes, cells.effects)
        result.add_row(f"{cells.name}[dim]{_escaped(cells.signature)}[/dim]", *map(_escaped, columns))
    return result


def _escaped(text: str) -> str:
    """Escape square brackets, which are markup to rich; axis maps contain them."""
    return text.replace("[", r"\[")


# The command


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "pattern",
        nargs="?",
        default="",
        help="a regular expression that the name or an ATen overload must match (default: list all operators)",
    )


def run(options: argparse.Namespace) -> int:
    """Print the operators that match the pattern."""
    console = Console()
    try:
        by_domain = selected(options.pattern)
    except re.error as error:
        raise OptionError(
            "The pattern is invalid.", "onnxtrain ops", "a regular expression", f"{options.pattern}: {error}"
        ) from error
    if not by_domain:
        raise OptionError(
            "No operator matches the pattern.",
            "onnxtrain ops",
            got=options.pattern,
            todo="call onnxtrain ops without a pattern to list all operators",
        )
    for domain, definitions in by_domain.items():
        console.print(table(domain, definitions))
    console.print(f"{sum(map(len, by_domain.values()))} operators")
    return 0
