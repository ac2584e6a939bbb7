"""Computes each expression once.

    before   a = Shape(x);  b = Shape(x);  f(a), g(b)
    after    a = Shape(x);                 f(a), g(a)

Two nodes are one where op, attributes and inputs are the same and the definition says that the op has no effects: two
Dropouts of one tensor stay two. Nor do two results come to share memory: their reader may change one of them. A
backward node is not merged with a forward one: that would keep the forward value alive until backward for a computation
that its gradient rule chose to repeat. Before differentiation, two equal casts to a narrower type stay two: merged, the
gradients of their readers would be summed in the narrower type.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.graph.alias import AliasSets
from onnxtrain.graph.traversal import replace
from onnxtrain.graph.values import dtype_of, is_float
from onnxtrain.ops import definition_of
from onnxtrain.passes.changes import Changes, counted


def eliminate_common_subexpressions(graph: ir.Graph, changes: Changes) -> None:
    """Merges equal nodes of `graph`."""
    first: dict[Any, ir.Node] = {}
    differentiated = any("gradient_of" in node.metadata_props for node in graph)
    merged = 0
    sets = AliasSets(graph, definition_of)
    seen = {sets.root(output) for output in graph.outputs}  # the memory that the reader of the results sees
    for node in list(graph):
        if definition_of(node).effects or not node.outputs or (_narrows(node) and not differentiated):
            continue
        known = first.setdefault(_key(node), node)
        if known is node or any(new.is_graph_output() for new in node.outputs):
            continue
        memory, shared = {sets.root(v) for v in node.outputs}, {sets.root(v) for v in known.outputs}
        if memory & seen and memory != shared:
            if shared & seen:
                continue
            seen |= shared
        for old, new in zip(node.outputs, known.outputs, strict=True):
            replace(graph, old, new)
        graph.remove(node, safe=True)
        merged += 1
    if merged:
        changes.applied.append(f"merged {counted(merged, 'node')} into an equal one")


def _narrows(node: ir.Node) -> bool:
    """Whether a floating input comes out in a type of fewer bits."""
    value = node.inputs[0] if node.inputs else None
    if value is None or not (is_float(dtype_of(value)) and is_float(dtype_of(node.outputs[0]))):
        return False
    return dtype_of(node.outputs[0]).itemsize < dtype_of(value).itemsize


def _attribute_key(attribute: ir.Attr) -> tuple[ir.AttributeType, str]:
    if attribute.type != ir.AttributeType.TENSOR:
        return attribute.type, repr(attribute.value)
    tensor = attribute.as_tensor()  # a large one prints abbreviated
    return attribute.type, f"{tensor.dtype} {tensor.shape} {tensor.tobytes()!r}"


def _key(node: ir.Node) -> Any:
    attributes = tuple(sorted((name, _attribute_key(attribute)) for name, attribute in node.attributes.items()))
    phase = "gradient_of" in node.metadata_props
    inputs = tuple(id(v) for v in node.inputs)
    return node.domain, node.op_type, node.overload, attributes, inputs, phase, len(node.outputs)
