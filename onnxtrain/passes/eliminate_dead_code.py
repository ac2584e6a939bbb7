"""Drops nodes that no output depends on; a node with effects stays: it may draw from the generator."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.traversal import remove_unused
from onnxtrain.ops import definition_of
from onnxtrain.passes.changes import Changes, counted


def eliminate_dead_code(graph: ir.Graph, changes: Changes) -> None:
    """Removes dead nodes and initializers of `graph`."""
    removed = remove_unused(graph, lambda node: bool(definition_of(node).effects))
    if removed:
        changes.applied.append(f"dropped {counted(removed, 'unused node')}")
