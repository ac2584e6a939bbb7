"""Adds the rows of an embedding's gradient to the gradient that they are summed with, in its memory.

    before   Add(g, EmbeddingGrad(shape, rows, dy))            or GatherGrad, of a matrix's rows
    after    EmbeddingGrad(shape, rows, dy, g)

So it is of a weight that is the table of an embedding and the last layer too (GPT-2, T5, BERT): a tensor of the
vocabulary's size less, and two passes over one.

Refuses below 32 bits, where what is added to a large sum is lost sooner than in a sum of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.graph.values import dtype_of, type_of
from onnxtrain.ops import builder, view
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.index.gather import EMBEDDING_GRAD, as_embedding_grad
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.rewriting import nodes_before, only_user, substitute

_EXACT_ENOUGH = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def accumulate_rows(graph: ir.Graph, changes: Changes) -> None:
    """Gives every sum with an embedding's gradient to that gradient's node."""
    ops = builder(graph)
    sums = [node for node in graph if node.op_type == "Add"]
    while sums:
        node = sums.pop()
        found = _rows_of(node, changes)
        if found is None:
            continue
        grad, attributes, start = found
        with nodes_before(ops, node):
            added = grad.start if grad.definition is EMBEDDING_GRAD else None
            if added is not None:  # to another sum already: that one takes the new gradient too
                start = ops.Add(added, start)
                sums.append(start.producer())
            new = ops.own.EmbeddingGrad(grad.shape, grad.rows, grad.dy, start, **attributes)
        substitute(graph, node.outputs[0], new, [node, grad.node])
        changes.made.append(f"rows of {new.name} are added to {start.name}")


def _rows_of(node: ir.Node, changes: Changes) -> tuple[NodeView, Mapping[str, int], ir.Value] | None:
    """The embedding's gradient that `node` adds to another tensor of its type, its attributes, and that tensor."""
    first, second = node.inputs
    for x, other in ((second, first), (first, second)):
        producer = None if x is None else x.producer()
        if x is None or other is None or x is other or producer is None or type_of(x) != type_of(other):
            continue
        attributes = as_embedding_grad(view(producer))
        if attributes is None:
            continue
        if only_user(x) is not node:
            changes.refuse(node, f"the rows are not added in place: {x.name} is read elsewhere")
        elif dtype_of(x) not in _EXACT_ENOUGH:
            changes.refuse(node, f"the rows are not added in place: {x.name} is {dtype_of(x).name}")
        else:
            return view(producer), attributes, other
    return None
