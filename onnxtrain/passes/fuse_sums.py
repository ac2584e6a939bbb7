"""Fuse an addition into the op that produces or consumes the sum: one pass over memory instead of two.

    before   y = KeyedDropout(x, key);  h = Add(residual, y)
    after    h = KeyedDropout(x, key, residual)

    before   dx, dscale = SimplifiedLayerNormalizationGrad(dy, x, scale, inv_std);  dh = Add(direct, dx)
    after    dh, dscale = SimplifiedLayerNormalizationGrad(dy, x, scale, inv_std, direct)

    before   dy = Add(one, other);  dx, … = BatchNormalizationGrad(dy, x, …)
    after    dx, … = BatchNormalizationGrad(one, x, …, other)

`OUTPUT_ADDENDS` and `INPUT_ADDENDS` have the ops that can add to their output or to their first input.
Refused if the op's result has other users, or if the other summand is computed later: the op's inputs would stay alive
until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from onnxtrain.graph.values import type_of
from onnxtrain.ops import definition_of, view
from onnxtrain.ops.elementwise.arithmetic import ADD
from onnxtrain.ops.interfaces import OpInterface
from onnxtrain.ops.interfaces.addends import INPUT_ADDENDS, OUTPUT_ADDENDS
from onnxtrain.ops.interfaces.fused_activations import FUSED_ACTIVATIONS
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.rewriting import only_user, same_checkpoint, substitute


def fuse_sums(graph: ir.Graph, changes: Changes) -> None:
    """Fuse the Add nodes of `graph` into the ops that produce a summand."""
    _fuse_into_producers(graph, list(graph), changes)


def fuse_gradient_sums(graph: ir.Graph, changes: Changes) -> None:
    """Fuse the Add nodes that differentiation created into the ops that produce a summand or use the sum."""
    added = [node for node in graph if "gradient_of" in node.metadata_props]
    _fuse_into_producers(graph, added, changes)
    _fuse_into_users(graph, [node for node in added if node.graph is graph], changes)


def _fuse_into_producers(graph: ir.Graph, sums: Iterable[ir.Node], changes: Changes) -> None:
    position = {node: index for index, node in enumerate(graph)}
    fused: dict[str, int] = {}
    for node in sums:
        summand = _summand_producer(node, position, changes)
        if summand is None:
            continue
        producer, other = summand
        _set_input(producer, OUTPUT_ADDENDS, other)
        substitute(graph, node.outputs[0], producer.outputs[0], [node])
        fused[producer.op_type] = fused.get(producer.op_type, 0) + 1
    changes.applied += [f"fused an addition into {count} {name}" for name, count in fused.items()]


def _fuse_into_users(graph: ir.Graph, sums: Iterable[ir.Node], changes: Changes) -> None:
    fused: dict[str, int] = {}
    for node in sums:
        if definition_of(node) is not ADD:
            continue
        y = node.outputs[0]
        user = only_user(y)
        if user is None or not _can_add_to_input(user, y) or not same_checkpoint(user, node):
            continue
        one, other = node.inputs
        if one is None or other is None or not type_of(one) == type_of(other) == type_of(y):
            continue
        user.replace_input_with(0, one)
        _set_input(user, INPUT_ADDENDS, other)
        graph.remove(node, safe=True)
        fused[user.op_type] = fused.get(user.op_type, 0) + 1
    changes.applied += [f"fused the addition before {count} {name}" for name, count in fused.items()]


def _can_add_to_input(node: ir.Node, y: ir.Value) -> bool:
    """Return whether a user of y could read two summands of y instead, and does not yet."""
    addend = INPUT_ADDENDS.entry(node)
    if addend is None or [i for i, v in enumerate(node.inputs) if v is y] != [0]:
        return False
    return getattr(view(node), addend) is None


def _summand_producer(
    node: ir.Node, position: Mapping[ir.Node, int], changes: Changes
) -> tuple[ir.Node, ir.Value] | None:
    """Return the producer of one summand that can add the other to its output, and that other summand; else None."""
    if definition_of(node) is not ADD:
        return None
    first, second = node.inputs
    for y, other in ((second, first), (first, second)):
        if y is None or other is None or y is other or type_of(y) != type_of(other):
            continue
        producer = y.producer()
        if producer is None or not _can_add_to_output(producer, y) or not same_checkpoint(producer, node):
            continue
        if only_user(y) is not node:
            changes.refuse(node, f"not fused into {producer.op_type}: {y.name} has other users")
        elif (source := other.producer()) is not None and position[source] > position[producer]:
            changes.refuse(node, f"not fused into {producer.op_type}: {other.name} is computed later")
        else:
            return producer, other
    return None


def _can_add_to_output(node: ir.Node, y: ir.Value) -> bool:
    """Return whether a node could add a tensor to its output y: it adds none yet and applies no activation."""
    addend, n = OUTPUT_ADDENDS.entry(node), view(node)
    if addend is None or y.index() != 0 or (FUSED_ACTIVATIONS.entry(node) and n.activation):
        return False
    return getattr(n, addend) is None


def _set_input(node: ir.Node, addends: OpInterface[str], value: ir.Value) -> None:
    name = addends.entry(node)
    assert name is not None
    index = definition_of(node).slots[name].position
    node.resize_inputs(max(len(node.inputs), index + 1))
    node.replace_input_with(index, value)
