"""Fuse an addition into the op that produces or consumes the sum: one pass over memory instead of two.

    before   y = KeyedDropout(x, key);  h = Add(residual, y)
    after    h = KeyedDropout(x, key, residual)

    before   dx, dscale = SimplifiedLayerNormalizationGrad(dy, x, scale, inv_std);  dh = Add(direct, dx)
    after    dh, dscale = SimplifiedLayerNormalizationGrad(dy, x, scale, inv_std, direct)

    before   dy = Add(one, other);  dx, … = BatchNormalizationGrad(dy, x, …)
    after    dx, … = BatchNormalizationGrad(one, x, …, other)

`output_addend` and `input_addend` in an op's definition say which ops can add to their output or to their first input.
Refused if the op's result has other users, or if the other summand is computed later: the op's inputs would stay alive
until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from onnxtrain.graph.values import type_of
from onnxtrain.ops import definition_of, view
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
    done: dict[str, int] = {}
    for node in sums:
        found = _summand_producer(node, position, changes)
        if found is None:
            continue
        producer, other = found
        definition = definition_of(producer)
        index = definition.slots[definition.output_addend].position
        producer.resize_inputs(max(len(producer.inputs), index + 1))
        producer.replace_input_with(index, other)
        substitute(graph, node.outputs[0], producer.outputs[0], [node])
        done[producer.op_type] = done.get(producer.op_type, 0) + 1
    changes.applied += [f"fused an addition into {count} {name}" for name, count in done.items()]


def _fuse_into_users(graph: ir.Graph, sums: Iterable[ir.Node], changes: Changes) -> None:
    done: dict[str, int] = {}
    for node in sums:
        if node.op_type != "Add":
            continue
        y = node.outputs[0]
        user = only_user(y)
        if user is None or not _can_add_to_input(user, y) or not same_checkpoint(user, node):
            continue
        one, other = node.inputs
        if one is None or other is None or not type_of(one) == type_of(other) == type_of(y):
            continue
        definition = definition_of(user)
        index = definition.slots[definition.input_addend].position
        user.resize_inputs(max(len(user.inputs), index + 1))
        user.replace_input_with(0, one)
        user.replace_input_with(index, other)
        graph.remove(node, safe=True)
        done[user.op_type] = done.get(user.op_type, 0) + 1
    changes.applied += [f"fused the addition before {count} {name}" for name, count in done.items()]


def _can_add_to_input(node: ir.Node, y: ir.Value) -> bool:
    """Return whether a user of y could read two summands of y instead, and does not yet."""
    definition = definition_of(node)
    if not definition.input_addend or [i for i, v in enumerate(node.inputs) if v is y] != [0]:
        return False
    return getattr(view(node), definition.input_addend) is None


def _summand_producer(
    node: ir.Node, position: Mapping[ir.Node, int], changes: Changes
) -> tuple[ir.Node, ir.Value] | None:
    """Return the producer of one summand that can add the other to its output, and that other summand; else None."""
    if node.op_type != "Add":
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
    definition, n = definition_of(node), view(node)
    if not definition.output_addend or y.index() != 0 or (definition.fusable_activations and n.activation):
        return False
    return getattr(n, definition.output_addend) is None
