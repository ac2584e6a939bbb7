"""Combine consecutive transposes, and remove those that move nothing.

    before   Transpose(Transpose(x, perm=[0, 2, 1]), perm=[0, 2, 1])        after    x
    before   Transpose(x[1, 1, 1024, 4096], perm=[2, 0, 3, 1])              after    Reshape(x, [1024, 1, 4096, 1])

A transpose that only moves axes of size 1 becomes a Reshape, for which no runtime copies.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.alias import view_source
from onnxtrain.ops import builder, definition_of, view
from onnxtrain.ops.body_parts import reshaped
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.reshape.dims import TRANSPOSE, perm_of, transposed
from onnxtrain.passes.changes import Changes, counted
from onnxtrain.passes.rewriting import nodes_before, substitute


def cancel_transposes(graph: ir.Graph, changes: Changes) -> None:
    """Combine and remove transposes of `graph`; a module output remains the view that it is in eager."""
    op = builder(graph)
    combined = reshapes = 0
    for node in list(graph):
        n = view(node)
        if n.definition is not TRANSPOSE or node.outputs[0].is_graph_output():
            continue
        source, perm = n.x, list(perm_of(n))
        before = source.producer()
        if before is not None and view(before).definition is TRANSPOSE:
            first = view(before)
            source, perm = first.x, [perm_of(first)[axis] for axis in perm]
        is_reshape = perm != sorted(perm) and _keeps_element_order(source, perm) and not _is_output_view(n.y)
        if source is n.x and not is_reshape:
            continue
        with nodes_before(op, node):
            new = reshaped(op, source, sizes.dims_of(n.y)) if is_reshape else transposed(op, source, perm)
        combined += source is not n.x
        reshapes += is_reshape
        _replace(graph, n, new, source)
    if combined:
        changes.applied.append(f"combined {counted(combined, 'pair')} of transposes")
    if reshapes:
        changes.applied.append(f"replaced {counted(reshapes, 'Transpose', 'Transpose nodes')} by Reshape")


def _keeps_element_order(x: ir.Value, perm: list[int]) -> bool:
    axes = [axis for axis in perm if sizes.dims_of(x)[axis] != 1]
    return axes == sorted(axes)


def _is_output_view(value: ir.Value) -> bool:
    """Return whether an output may be a view of the value: users see its strides, also those of axes of size 1."""
    stack, visited = [value], set()
    while stack:
        current = stack.pop()
        if current.is_graph_output():
            return True
        visited.add(current)
        for node, _ in current.uses():
            views = (v for i, v in enumerate(node.outputs) if view_source(node, i, definition_of(node)) is current)
            stack += [v for v in views if v not in visited]
    return False


def _replace(graph: ir.Graph, n: NodeView, new: ir.Value, source: ir.Value) -> None:
    if new is source:  # keeps its own name
        n.y.replace_all_uses_with(new)
        graph.remove(n.node, safe=True)
    else:
        substitute(graph, n.y, new, [n.node])
