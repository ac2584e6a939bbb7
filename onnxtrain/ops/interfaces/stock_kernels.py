"""Whether stock onnxruntime's own kernel of an op computes the same, for `device/stock.py`."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.graph.values import ONNX
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.interfaces import OpInterface
from onnxtrain.ops.registry import view

# From the node. Without an entry, the kernels of ONNX's own ops do, and those of the same name in other domains do not.
STOCK_KERNELS = OpInterface[Callable[[NodeView], bool]]("stock onnxruntime's kernel")


def has_stock_kernel(node: ir.Node) -> bool:
    """Return whether stock onnxruntime's kernel may run a node instead of the body."""
    condition = STOCK_KERNELS.entry(node)
    return node.domain == ONNX if condition is None else condition(view(node))
