"""Save a 16-byte RNG key for dropout's backward, which regenerates the mask from it.

    before   y, mask = Dropout(x, 0.1, True)                       dx = DropoutGrad(dy, mask)
    after    key = DropoutKey();  y = KeyedDropout(x, key)         dx = KeyedDropout(dy, key)

Regenerating is faster than reading a byte mask: 0.12 against 0.21 ms for [2048, 384] with the compiled kernel, 2
threads of a Xeon at 2.8 GHz. Only for `rng="fast"` on a CPU. Passes that move rows through a Dropout must come before:
an element's position determines its random bits.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.traversal import is_used
from onnxtrain.ops import builder, view
from onnxtrain.ops.random.dropout import DROPOUT, drop_ratio, uses_fast_rng
from onnxtrain.ops.random.keyed_bits import DROP_LEVELS
from onnxtrain.passes.changes import Changes, counted
from onnxtrain.passes.rewriting import nodes_before, substitute


def regenerate_dropout_masks(graph: ir.Graph, changes: Changes) -> None:
    """Replace Dropout by KeyedDropout."""
    op = builder(graph)
    regenerated = 0
    for node in list(graph):
        n = view(node)
        if n.definition is not DROPOUT or not uses_fast_rng(n):
            continue
        if len(node.outputs) > 1 and is_used(node.outputs[1]):
            changes.refuse(node, f"its mask {node.outputs[1].name} has users besides its gradient")
            continue
        with nodes_before(op, node):
            y = op.own.KeyedDropout(n.x, op.own.DropoutKey(), dropped=round(drop_ratio(n) * DROP_LEVELS))
        substitute(graph, node.outputs[0], y, [node])
        regenerated += 1
    if regenerated:
        changes.applied.append(
            f"saves an RNG key instead of the mask of {counted(regenerated, 'Dropout', 'Dropout nodes')}"
        )
