"""How many floating-point operations a node takes, for the plans, passes and reports that weigh work."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.sizes import Size
from onnxtrain.ops.definition import NodeView, numel
from onnxtrain.ops.interfaces import OpInterface
from onnxtrain.ops.registry import view

FLOPS = OpInterface[Callable[[NodeView], Size]]("floating-point operations")


def flops_of(node: ir.Node) -> Size:
    """Return the floating-point operations of a node: without an entry, one per element of its first output."""
    count = FLOPS.entry(node)
    return numel(node.outputs[0]) if count is None else count(view(node))


MATMUL_FLOPS = 16  # per output element: a norm takes 8, a matmul with an inner dimension of 8 takes 16
_NOMINAL_SIZE = 64  # assumed for symbolic dimensions: those of the rows cancel out


def flops_per_element(node: ir.Node) -> float:
    """Return the operations per element of a node's first output."""
    flops, elements = flops_of(node), numel(node.outputs[0])
    symbol_values = dict.fromkeys(sizes.symbols(flops) | sizes.symbols(elements), _NOMINAL_SIZE)
    return sizes.evaluate(flops, symbol_values) / max(1, sizes.evaluate(elements, symbol_values))
