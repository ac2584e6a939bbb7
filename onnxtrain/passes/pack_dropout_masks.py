"""Save the masks of dropout that reproduces eager's random numbers as bits, an eighth of the bytes.

    before   y, mask = Dropout(x, 0.1, True)                       dx = DropoutGrad(dy, mask)
    after    y, bits = BitmaskDropout(x, 0.1, True)                dx = BitmaskDropoutGrad(dy, bits)

The mask is the same. Packing takes a few percent of the time of sampling. CPU only: PyTorch's dropout on a GPU returns
its mask as bytes. Under `rng="fast"` a key replaces the mask (`regenerate_dropout_masks`).
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.traversal import is_used
from onnxtrain.ops import builder, view
from onnxtrain.ops.random.dropout import DROPOUT, MASKS, drops_elements, uses_fast_rng
from onnxtrain.passes.changes import Changes, counted
from onnxtrain.passes.rewriting import nodes_before, substitute


def pack_dropout_masks(graph: ir.Graph, changes: Changes) -> None:
    """Replace Dropout by BitmaskDropout."""
    op = builder(graph)
    packed = 0
    for node in list(graph):
        n = view(node)
        if n.definition is not DROPOUT or MASKS not in node.metadata_props or uses_fast_rng(n) or not drops_elements(n):
            continue
        if len(node.outputs) > 1 and is_used(node.outputs[1]):
            changes.refuse(node, f"its mask {node.outputs[1].name} has users besides its gradient")
            continue
        with nodes_before(op, node):
            y, _ = op.ms.BitmaskDropout(n.x, n.ratio, n.training_mode)
        substitute(graph, node.outputs[0], y, [node])
        packed += 1
    if packed:
        changes.applied.append(f"saves {counted(packed, 'dropout mask')} as bits")
