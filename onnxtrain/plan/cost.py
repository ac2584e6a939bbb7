"""Count the work of one run of a graph: floating-point operations and bytes of memory traffic."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.alias import view_source
from onnxtrain.graph.host import host_values
from onnxtrain.graph.values import dtype_of
from onnxtrain.ops import definition_of
from onnxtrain.ops.definition import numel
from onnxtrain.ops.interfaces.cost import flops_of
from onnxtrain.report import Work


def count_work(graph: ir.Graph, symbol_values: Mapping[str, int]) -> Work:
    """Count the work of all nodes of the graph.

    A node reads its inputs and writes its outputs once each; one without arithmetic (Gather, Concat) reads as many
    bytes as it writes. Views and shape arithmetic are free.

    Args:
        graph: forward, or forward and backward together.
        symbol_values: the integer of each symbol; see `unbound_symbols`.
    """
    on_host = set(host_values(tuple(graph), definition_of))
    flops = bytes_ = 0
    for node in graph:
        definition = definition_of(node)
        outputs = [v for v in node.outputs if traversal.is_used(v)]
        if all(v in on_host or view_source(node, v.index() or 0, definition) is not None for v in outputs):
            continue
        own = sizes.evaluate(flops_of(node), symbol_values)
        written = sum(_bytes(v, symbol_values) for v in outputs)
        read = sum(_bytes(v, symbol_values) for v in node.inputs if v is not None and v not in on_host)
        flops += own
        bytes_ += written + (read if own else min(read, written))
    return Work(flops, bytes_)


def _bytes(value: ir.Value, symbol_values: Mapping[str, int]) -> int:
    return math.ceil(
        sizes.evaluate(numel(value), symbol_values) * dtype_of(value).itemsize
    )  # 4-bit elements take half a byte


def unbound_symbols(graph: ir.Graph, symbol_values: Mapping[str, int]) -> dict[str, tuple[ir.Value, int]]:
    """Return the symbols without an integer in `symbol_values`, each with a value and the axis of that dimension.

    They are data-dependent dimensions, such as the number of tokens with a label.
    """
    unbound: dict[str, tuple[ir.Value, int]] = {}
    for node in graph:
        for value in node.outputs:
            for axis, size in enumerate(sizes.dims_of(value)):
                if isinstance(size, str) and size.isidentifier() and size not in symbol_values:
                    unbound.setdefault(size, (value, axis))
    return unbound
