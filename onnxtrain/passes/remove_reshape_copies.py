"""Lets a Reshape read what was copied for it alone.

    before   z = Reshape(Clone(x), sizes)      `y.transpose(1, 2).contiguous().view(...)`
    after    z = Reshape(x, sizes)

A Reshape copies by itself what does not lie as it must. Attention's result does: its kernels write it as models turn it
(nine copies of T5's step, 0.4 of 195 ms on 2 threads of an EPYC). A copy of what comes from outside, or leaves, stays.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import traversal
from onnxtrain.graph.alias import AliasSets
from onnxtrain.ops import definition_of
from onnxtrain.ops.elementwise.copies import CLONE
from onnxtrain.ops.reshape.shape import RESHAPE
from onnxtrain.passes.changes import Changes, counted


def remove_reshape_copies(graph: ir.Graph, changes: Changes) -> None:
    """Removes the Clone nodes that only Reshapes read."""
    removed = 0
    aliases = AliasSets(graph, definition_of)
    for node in [node for node in graph if definition_of(node) is CLONE]:
        (source,), (copied,) = node.inputs, node.outputs
        if source is None or not _stays_inside(source, aliases) or not _stays_inside(copied, aliases):
            continue
        if any(definition_of(reader) is not RESHAPE for reader in traversal.users(copied)):
            continue
        copied.replace_all_uses_with(source)
        graph.remove(node, safe=True)
        removed += 1
    if removed:
        changes.applied.append(f"removed {counted(removed, 'node')} that copied for a Reshape")


def _stays_inside(value: ir.Value, aliases: AliasSets) -> bool:
    """Whether the value lies in memory that neither came from outside nor leaves."""
    if aliases.root(value).producer() is None:
        return False
    return not any(each.is_graph_output() for each in aliases.aliases_of(value))
