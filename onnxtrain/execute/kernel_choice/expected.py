"""The choice before anything is measured: by the cost model of each candidate in its op's definition.

A dynamic size counts as moderately large. The choice then depends on the graph and the machine alone: two runs compute
the same bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from operator import itemgetter

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.signatures import attributes_key, types_key
from onnxtrain.ops import definition_of
from onnxtrain.ops.cost_model import Shapes
from onnxtrain.ops.definition import Kernel
from onnxtrain.ops.native_kernels import NOTE
from onnxtrain.system.machine import current_machine

_DYNAMIC_SIZE = 32  # for batch and sequence length each: a thousand rows


def expected_kernel(node: ir.Node, device: str) -> Kernel:
    """Return the kernel that is expected to be fastest; most nodes have only one."""
    return min(expected_seconds(node, device), key=itemgetter(1))[0]


def expected_seconds(node: ir.Node, device: str) -> list[tuple[Kernel, float]]:
    """Return the candidates of a node with the expected seconds of each; 0 if there is only one."""
    definition = definition_of(node)
    candidates = definition.candidates(node, device)
    if len(candidates) == 1:
        return [(candidates[0], 0.0)]
    view, shapes, machine = definition.view(node), expected_shapes(node), current_machine()
    return [(kernel, kernel.seconds(view, shapes, machine)) for kernel in candidates]


class CachedExpectations:
    """`expected_kernel` with a cache, for graphs that no longer change.

    Nodes with the same `Kernel` candidates, attributes and types are asked once: the layers of a model share them.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, dict[ir.Node, list[tuple[Kernel, float]]]] = defaultdict(dict)
        self._by_signature: dict[Hashable, list[tuple[Kernel, float]]] = {}
        self._single: dict[int, list[tuple[Kernel, float]]] = {}  # by the id of the kernel: one list for many nodes

    def __call__(self, node: ir.Node, device: str) -> Kernel:
        seconds = self.seconds(node, device)
        return seconds[0][0] if len(seconds) == 1 else min(seconds, key=itemgetter(1))[0]

    def seconds(self, node: ir.Node, device: str) -> list[tuple[Kernel, float]]:
        """Return the expected seconds; see `expected_seconds`."""
        by_node = self._seconds[device]
        seconds = by_node.get(node)
        if seconds is None:
            seconds = by_node[node] = self._seconds_of_signature(node, device)
        return seconds

    def _seconds_of_signature(self, node: ir.Node, device: str) -> list[tuple[Kernel, float]]:
        key = _signature(node, device)
        if key in self._by_signature:
            return self._by_signature[key]
        seconds = expected_seconds(node, device)
        if len(seconds) == 1:
            seconds = self._single.setdefault(id(seconds[0][0]), seconds)
        if key is not None:
            self._by_signature[key] = seconds
        return seconds


def _signature(node: ir.Node, device: str) -> Hashable | None:
    """Return a key of all that the kernels of an op with a choice depend on; None if the op has no choice."""
    definition = definition_of(node)
    if not definition.has_alternatives:
        return None
    attributes, types = attributes_key(node), types_key(node)
    if attributes is None or types is None:
        return None
    return device, definition, attributes, types, node.metadata_props.get(NOTE)


def expected_shapes(node: ir.Node) -> Shapes:
    """Return the shapes of a node's inputs, with an integer for every symbolic dimension."""
    return tuple(() if v is None else tuple(map(_expected_size, sizes.dims_of(v))) for v in node.inputs)


def _expected_size(size: sizes.Size) -> int:
    return sizes.evaluate(size, dict.fromkeys(sizes.symbols(size), _DYNAMIC_SIZE))
