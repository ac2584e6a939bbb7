"""Let `as_strided` read tensors whose logical order is their memory order.

    x.mT.as_strided(size, strides)            ──>    x.mT.permute(1, 0).as_strided(size, strides)

`as_strided` reads memory, and a graph's values have no strides: only of a contiguous tensor does the graph know the
memory. A transposed tensor, such as the queries of Longformer and LED, is contiguous once its dimensions are permuted.
"""

from __future__ import annotations

import torch
from torch.export.exported_program import ExportedProgram
from torch.fx import GraphModule, Node

from onnxtrain.capture.functionalize.memory_order import add_view, memory_order

_aten = torch.ops.aten


def read_in_memory_order(program: ExportedProgram) -> None:
    """Permute the tensors that `as_strided` reads into their memory order."""
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            for node in list(module.graph.nodes):
                if node.target is _aten.as_strided.default:
                    _permute(node)


def _permute(node: Node) -> None:
    read = node.args[0]
    assert isinstance(read, Node)
    order = memory_order(read.meta["val"])
    if order != sorted(order):
        with node.graph.inserting_before(node):
            node.args = (add_view(node, _aten.permute.default, read, order), *node.args[1:])
