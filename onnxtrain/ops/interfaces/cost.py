"""How many floating-point operations a node takes, for the plans, passes and reports that weigh work."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.graph.sizes import Size
from onnxtrain.ops.definition import NodeView, numel
from onnxtrain.ops.interfaces import OpInterface
from onnxtrain.ops.registry import view

FLOPS = OpInterface[Callable[[NodeView], Size]]("floating-point operations")


def flops_of(node: ir.Node) -> Size:
    """Return the floating-point operations of a node: without an entry, one per element of its first output."""
    count = FLOPS.of(node)
    return numel(node.outputs[0]) if count is None else count(view(node))
