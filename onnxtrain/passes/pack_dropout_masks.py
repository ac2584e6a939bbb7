"""Dropout that draws eager PyTorch's numbers keeps its mask in bits, an eighth of its bytes.

    before   y, mask = Dropout(x, 0.1, True)                       dx = DropoutGrad(dy, mask)
    after    y, bits = BitmaskDropout(x, 0.1, True)                dx = BitmaskDropoutGrad(dy, bits)

The same elements are kept. To pack takes a few hundredths of what the draws take. On a CPU only: PyTorch's dropout on a
GPU hands out its mask in bytes. Where `rng="fast"` a key takes the mask's place (`regenerate_dropout_masks`).
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.traversal import is_used
from onnxtrain.ops import builder, view
from onnxtrain.ops.randomness import DROPOUT, MASKS, draws_fast, trains
from onnxtrain.passes.changes import Changes, counted
from onnxtrain.passes.rewriting import nodes_before, substitute


def pack_dropout_masks(graph: ir.Graph, changes: Changes) -> None:
    """Puts BitmaskDropout in the place of Dropout."""
    op = builder(graph)
    done = 0
    for node in list(graph):
        n = view(node)
        if n.definition is not DROPOUT or MASKS not in node.metadata_props or draws_fast(n) or not trains(n):
            continue
        if len(node.outputs) > 1 and is_used(node.outputs[1]):
            changes.refuse(node, f"its mask {node.outputs[1].name} is read by others than its gradient")
            continue
        with nodes_before(op, node):
            y, _ = op.ms.BitmaskDropout(n.x, n.ratio, n.training_mode)
        substitute(graph, node.outputs[0], y, [node])
        done += 1
    if done:
        changes.applied.append(f"keeps the mask of {counted(done, 'Dropout')} in bits")
