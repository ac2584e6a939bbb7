"""Remove Identity nodes.

    before   y = Identity(x);  f(x), g(y)          `x.to(torch.float32)` of a float32 tensor
    after    f(x), g(x)

Producer and users are then adjacent and can be fused. An Identity of a graph input or before a graph output stays: it
gives the output its own name.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ops import definition_of
from onnxtrain.ops.elementwise.copies import IDENTITY
from onnxtrain.passes.changes import Changes, counted


def remove_identities(graph: ir.Graph, changes: Changes) -> None:
    """Remove the Identity nodes between two nodes of `graph`."""
    removed = 0
    for node in list(graph):
        if definition_of(node) is not IDENTITY:
            continue
        (source,), (result,) = node.inputs, node.outputs
        if source is None or source.producer() is None or source.is_graph_output() or result.is_graph_output():
            continue
        result.replace_all_uses_with(source)
        graph.remove(node, safe=True)
        removed += 1
    if removed:
        changes.applied.append(f"removed {counted(removed, 'Identity', 'Identity nodes')}")
