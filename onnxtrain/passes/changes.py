"""What a pass did and what it refused: sentences that a report can show."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtrain.graph import traversal
from onnxtrain.report import PassReport, Refusal


def stopped(at: ir.Node, reason: str) -> str:
    """Why a pass that walks through the graph went no further than `at`, with the user's module."""
    module = at.metadata_props.get("module")
    return f"stops at {at.op_type} {at.name!r}{f' of {module}' if module else ''}: {reason}"


def counted(count: int, noun: str) -> str:
    """A count in a sentence: "1 node", "2 nodes"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass
class Changes:
    """Filled by one pass; `passes` by those who run several."""

    pass_name: str = ""
    applied: list[str] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    passes: list[PassReport] = field(default_factory=list)

    def add(self, later: Changes) -> None:
        """Notes what passes did that ran behind these."""
        self.applied += later.applied
        self.refused += later.refused
        self.passes += later.passes

    def refuse(self, node: ir.Node, reason: str) -> None:
        """Notes that `node` was left alone, and why."""
        self.refused.append(Refusal(self.pass_name, node.name or node.op_type, reason, traversal.origin(node) or ""))
