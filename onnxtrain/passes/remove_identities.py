"""Lets readers of a copied name read the value itself.

    before   y = Identity(x);  f(x), g(y)          `x.to(torch.float32)` of what is float32 already
    after    f(x), g(x)

Neighbours are neighbours then, which may become one kernel. Results of the graph keep their names and their memory:
an Identity stays where it gives one, or names an input.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.changes import Changes, counted


def remove_identities(graph: ir.Graph, changes: Changes) -> None:
    """Removes the Identity nodes of `graph` that stand between two nodes."""
    removed = 0
    for node in list(graph):
        if node.domain or node.op_type != "Identity":
            continue
        (source,), (result,) = node.inputs, node.outputs
        if source is None or source.producer() is None or source.is_graph_output() or result.is_graph_output():
            continue
        result.replace_all_uses_with(source)
        graph.remove(node, safe=True)
        removed += 1
    if removed:
        changes.applied.append(f"removed {counted(removed, 'node')} that named a value again")
