"""The choice before anything is measured: a cost model of each candidate, from the definition.

Where a size is not known before the program runs, it is taken to be moderately large. So the choice depends on the
graph and the machine alone: with it, two runs compute the same bits.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.ops import definition_of
from onnxtrain.ops.definition import Kernel
from onnxtrain.ops.machine import Shapes, this_machine

_UNKNOWN = 32  # for batch and length each: a thousand rows


def expected_kernel(node: ir.Node, device: str) -> Kernel:
    """The kernel that is expected to be fastest; for most nodes the only one there is."""
    definition = definition_of(node)
    found = definition.candidates(node, device)
    if len(found) == 1:
        return found[0]
    view, shapes, machine = definition.view(node), expected_shapes(node), this_machine()
    return min(found, key=lambda kernel: kernel.seconds(view, shapes, machine))


def expected_shapes(node: ir.Node) -> Shapes:
    """The shapes of a node's inputs, with a number for every size."""
    return tuple(() if v is None else tuple(map(_number, sizes.of(v))) for v in node.inputs)


def _number(size: sizes.Size) -> int:
    return sizes.evaluate(size, dict.fromkeys(sizes.symbols(size), _UNKNOWN))
