"""Common subexpression elimination: compute each expression once.

    before   a = Shape(x);  b = Shape(x);  f(a), g(b)
    after    a = Shape(x);                 f(a), g(a)

Two nodes are merged if op, attributes and inputs are equal and the op has no side effects: two Dropouts of one tensor
stay two. Kept apart are:

* nodes whose merging would make two graph outputs share memory: the caller may change one of them in place;
* a backward node and a forward one: merged, the forward value would be saved for backward although the gradient rule
  recomputes it on purpose;
* before differentiation, equal casts to a narrower type: merged, the gradients of their users would be accumulated in
  the narrower type;
* before differentiation, equal nodes that an ATen node depends on. Merged, the gradients of their users would be added
  before the gradient of the node instead of after it, which rounds differently: an operator of PyTorch in the graph
  gives eager's gradients to the last bit.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.graph.alias import AliasSets
from onnxtrain.graph.traversal import detach, reads, replace
from onnxtrain.graph.values import ATEN, dtype_of, is_float
from onnxtrain.ops import NOT_DIFFERENTIABLE, definition_of
from onnxtrain.passes.changes import Changes, counted


def eliminate_common_subexpressions(graph: ir.Graph, changes: Changes) -> None:
    """Merge equal nodes of `graph`."""
    first: dict[Any, ir.Node] = {}
    differentiated = any("gradient_of" in node.metadata_props for node in graph)
    feeding_aten = set() if differentiated else _feeding_aten(graph)
    merged: list[ir.Node] = []
    sets = AliasSets(graph, definition_of)
    visible = {sets.root(output) for output in graph.outputs}  # memory that the caller receives
    for node in list(graph):
        if definition_of(node).effects or not node.outputs or (_narrows(node) and not differentiated):
            continue
        equal = _first_equal(first, node)
        if equal is node or any(new.is_graph_output() for new in node.outputs):
            continue
        if not feeding_aten.isdisjoint((*node.outputs, *equal.outputs)):
            continue
        own, shared = {sets.root(v) for v in node.outputs}, {sets.root(v) for v in equal.outputs}
        if own & visible and own != shared:
            if shared & visible:
                continue
            visible |= shared
        for old, new in zip(node.outputs, equal.outputs, strict=True):
            replace(graph, old, new)
        detach(node)
        merged.append(node)
    graph.remove(merged)
    if merged:
        changes.applied.append(f"merged {counted(len(merged), 'duplicate node')}")


def _feeding_aten(graph: ir.Graph) -> set[ir.Value]:
    """Return the floating-point values that an ATen node depends on differentiably."""
    values: set[ir.Value] = set()
    for node in reversed(graph):
        if definition_of(node).gradient is NOT_DIFFERENTIABLE:
            continue
        if node.domain == ATEN or not values.isdisjoint(node.outputs):
            values.update(v for v in reads(node) if is_float(dtype_of(v)))
    return values


def _narrows(node: ir.Node) -> bool:
    """Return whether the node converts a floating-point input to a narrower floating-point type."""
    value = node.inputs[0] if node.inputs else None
    if value is None or not (is_float(dtype_of(value)) and is_float(dtype_of(node.outputs[0]))):
        return False
    return dtype_of(node.outputs[0]).itemsize < dtype_of(value).itemsize


def _attribute_key(attribute: ir.Attr) -> tuple[ir.AttributeType, str]:
    if attribute.type != ir.AttributeType.TENSOR:
        return attribute.type, repr(attribute.value)
    tensor = attribute.as_tensor()  # its repr is abbreviated
    return attribute.type, f"{tensor.dtype} {tensor.shape} {tensor.tobytes()!r}"


def _attributes_key(node: ir.Node) -> Any:
    return tuple(sorted((name, _attribute_key(attribute)) for name, attribute in node.attributes.items()))


def _first_equal(first: dict[Any, ir.Node], node: ir.Node) -> ir.Node:
    """Return the first node that is equal to `node`: itself if there is none before it.

    Args:
        first: the nodes so far by a key without attributes, and by one with attributes if they share the former. Few
            nodes have equal inputs, and a key of attributes takes longest.
        node: the next node.
    """
    phase = "gradient_of" in node.metadata_props
    key = node.domain, node.op_type, node.overload, node.inputs, phase, len(node.outputs)
    similar = first.setdefault(key, node)
    if similar is node:
        return node
    attributes = _attributes_key(node)
    return similar if _attributes_key(similar) == attributes else first.setdefault((key, attributes), node)
