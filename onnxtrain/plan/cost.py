"""Counts what one run of a graph takes: floating-point operations, and the bytes that go through memory."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.alias import view_source
from onnxtrain.graph.host import host_values
from onnxtrain.graph.values import dtype_of
from onnxtrain.ops import definition_of, view
from onnxtrain.ops.definition import numel
from onnxtrain.report import Work


def count_work(graph: ir.Graph, known: Mapping[str, int]) -> Work:
    """The work of all nodes of the graph.

    A node reads its inputs and writes its outputs, once each; one that computes nothing (Gather, Concat) reads as much
    as it writes. Views and the arithmetic of sizes are free.

    Args:
        graph: forward, or forward and backward together.
        known: the size of each symbol; see `unbound_symbols`.
    """
    on_host = set(host_values(tuple(graph), definition_of))
    flops = bytes_ = 0
    for node in graph:
        definition = definition_of(node)
        outputs = [v for v in node.outputs if traversal.is_used(v)]
        if all(v in on_host or view_source(node, v.index() or 0, definition) is not None for v in outputs):
            continue
        own = sizes.evaluate(definition.flops(view(node)), known)
        written = sum(_bytes(v, known) for v in outputs)
        read = sum(_bytes(v, known) for v in node.inputs if v is not None and v not in on_host)
        flops += own
        bytes_ += written + (read if own else min(read, written))
    return Work(flops, bytes_)


def _bytes(value: ir.Value, known: Mapping[str, int]) -> int:
    return math.ceil(sizes.evaluate(numel(value), known) * dtype_of(value).itemsize)  # four bits are half a byte


def unbound_symbols(graph: ir.Graph, known: Mapping[str, int]) -> dict[str, tuple[ir.Value, int]]:
    """Symbols of the graph that `known` lacks, each with a value and its axis that has this size.

    They are the sizes that depend on data: how many tokens have a label.
    """
    found: dict[str, tuple[ir.Value, int]] = {}
    for node in graph:
        for value in node.outputs:
            for axis, size in enumerate(sizes.dims_of(value)):
                if isinstance(size, str) and size.isidentifier() and size not in known:
                    found.setdefault(size, (value, axis))
    return found
