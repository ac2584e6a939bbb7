"""Leaves out casts to a wider type and back, as autocast writes them around ops that only move elements.

    before   Cast(Reshape(Cast(x, float32)), bfloat16)      of x in bfloat16
    after    Reshape(x)

Nothing is rounded in between, forward or backward: the wide value has no other reader, and the op between gives each
element at most once.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.alias import viewed
from onnxtrain.graph.values import TensorType, dtype_of, is_float, set_type
from onnxtrain.ops import definition_of, view
from onnxtrain.ops.definition import numel
from onnxtrain.ops.elementwise.copies import CAST, CLONE
from onnxtrain.passes.changes import Changes, number_of
from onnxtrain.passes.rewriting import only_user


def cancel_casts(graph: ir.Graph, changes: Changes) -> None:
    """Removes pairs of casts of `graph` that give back the type that there was."""
    removed = 0
    for node in list(graph):
        n = view(node)
        if n.definition is not CAST or node.outputs[0].is_graph_output():
            continue
        found = _widened(node)
        if found is None:
            continue
        widening, between = found
        narrow = widening.inputs[0]
        assert narrow is not None
        for mover in between:
            value = mover.outputs[0]
            set_type(value, TensorType(dtype_of(narrow), sizes.of(value)))
        widening.outputs[0].replace_all_uses_with(narrow)
        last = node.inputs[0] if between else narrow
        assert last is not None
        node.outputs[0].replace_all_uses_with(last)
        for gone in (node, widening):
            graph.remove(gone, safe=True)
        removed += 1
    if removed:
        changes.made.append(f"removed {number_of(removed, 'pair')} of casts that round nothing")


def _widened(node: ir.Node) -> tuple[ir.Node, list[ir.Node]] | None:
    """The cast to a wider type that `node` takes back, and what only moves elements in between."""
    value, reader, between = node.inputs[0], node, list[ir.Node]()
    while value is not None and only_user(value) is reader:
        before = value.producer()
        if before is None:
            return None
        if view(before).definition is CAST:
            return (before, between) if _is_undone(before, node) else None
        source = before.inputs[0] if before.inputs else None  # a tensor of random numbers takes none
        if source is None or not _only_moves(before, source, value):
            return None
        between.append(before)
        value, reader = source, before
    return None


def _only_moves(node: ir.Node, source: ir.Value, value: ir.Value) -> bool:
    definition = definition_of(node)
    copies = definition is CLONE or viewed(node, 0, definition) is source
    return copies and numel(source) == numel(value)


def _is_undone(widening: ir.Node, narrowing: ir.Node) -> bool:
    narrow, wide = widening.inputs[0], widening.outputs[0]
    if narrow is None or not all(is_float(dtype_of(v)) for v in (narrow, wide)):
        return False
    return dtype_of(narrow).itemsize < dtype_of(wide).itemsize and dtype_of(narrowing.outputs[0]) == dtype_of(narrow)
