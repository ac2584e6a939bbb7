"""The changes that a pass made and refused, in sentences for the report."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtrain.graph import traversal
from onnxtrain.report import PassReport, Refusal


def stopped(at: ir.Node, reason: str) -> str:
    """Format why a pass that walks the graph stopped at the node `at`, with the user's module."""
    module = at.metadata_props.get("module")
    return f"stops at {at.op_type} {at.name!r}{f' of {module}' if module else ''}: {reason}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Format a count: "1 node", "2 nodes"."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or f'{noun}s'}"


@dataclass
class Changes:
    """The changes of one pass, or of several with a report of each in `passes`."""

    pass_name: str = ""
    applied: list[str] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    passes: list[PassReport] = field(default_factory=list)

    def add(self, later: Changes) -> None:
        """Append the changes of passes that ran after these."""
        self.applied += later.applied
        self.refused += later.refused
        self.passes += later.passes

    def refuse(self, node: ir.Node, reason: str) -> None:
        """Record that the pass left `node` unchanged, and why."""
        self.refused.append(Refusal(self.pass_name, node.name or node.op_type, reason, traversal.origin(node) or ""))
