"""The choice before anything is measured: a cost model of each candidate, from the definition.

Where a size is not known before the program runs, it is taken to be moderately large. So the choice depends on the
graph and the machine alone: with it, two runs compute the same bits.
"""

from __future__ import annotations

from operator import itemgetter

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.ops import definition_of
from onnxtrain.ops.cost_model import Shapes
from onnxtrain.ops.definition import Kernel
from onnxtrain.system.machine import current_machine

_UNKNOWN = 32  # for batch and length each: a thousand rows


def expected_kernel(node: ir.Node, device: str) -> Kernel:
    """The kernel that is expected to be fastest; for most nodes the only one there is."""
    return min(expected_seconds(node, device), key=itemgetter(1))[0]


def expected_seconds(node: ir.Node, device: str) -> list[tuple[Kernel, float]]:
    """The candidates of a node, with what each is expected to take; 0 where there is no choice."""
    definition = definition_of(node)
    found = definition.candidates(node, device)
    if len(found) == 1:
        return [(found[0], 0.0)]
    view, shapes, machine = definition.view(node), expected_shapes(node), current_machine()
    return [(kernel, kernel.seconds(view, shapes, machine)) for kernel in found]


class ExpectedOnce:
    """`expected_kernel` for graphs that do not change any more: each node is asked once, by whichever program."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[ir.Node, str], list[tuple[Kernel, float]]] = {}

    def __call__(self, node: ir.Node, device: str) -> Kernel:
        return min(self.seconds(node, device), key=itemgetter(1))[0]

    def seconds(self, node: ir.Node, device: str) -> list[tuple[Kernel, float]]:
        """See `expected_seconds`."""
        found = self._seconds.get((node, device))
        if found is None:
            found = self._seconds[node, device] = expected_seconds(node, device)
        return found


def expected_shapes(node: ir.Node) -> Shapes:
    """The shapes of a node's inputs, with a number for every size."""
    return tuple(() if v is None else tuple(map(_number, sizes.dims_of(v))) for v in node.inputs)


def _number(size: sizes.Size) -> int:
    return sizes.evaluate(size, dict.fromkeys(sizes.symbols(size), _UNKNOWN))
