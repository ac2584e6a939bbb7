"""Dead code elimination: remove nodes that no output depends on, except those with side effects (RNG, Python calls)."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.traversal import remove_unused
from onnxtrain.ops import definition_of
from onnxtrain.passes.changes import Changes, counted


def eliminate_dead_code(graph: ir.Graph, changes: Changes) -> None:
    """Remove dead nodes and initializers of `graph`."""
    removed = remove_unused(graph, lambda node: bool(definition_of(node).effects))
    if removed:
        changes.applied.append(f"removed {counted(removed, 'dead node')}")
