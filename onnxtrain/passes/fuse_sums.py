"""Lets an op add another tensor where it writes its result, or where it reads: one pass over memory, and not two.

    before   y = KeyedDropout(x, key);  h = Add(residual, y)
    after    h = KeyedDropout(x, key, residual)

    before   dx, dscale = SimplifiedLayerNormalizationGrad(dy, x, scale, inv_std);  dh = Add(direct, dx)
    after    dh, dscale = SimplifiedLayerNormalizationGrad(dy, x, scale, inv_std, direct)

    before   dy = Add(one, other);  dx, … = BatchNormalizationGrad(dy, x, …)
    after    dx, … = BatchNormalizationGrad(one, x, …, other)

Definitions say which ops can (`adds`, `adds_first`). Refuses where the result is read elsewhere too, or where the other
tensor is computed later: what the op reads would be held until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from onnxtrain.graph.values import type_of
from onnxtrain.ops import definition_of, view
from onnxtrain.passes.changes import Changes, counted
from onnxtrain.passes.rewriting import only_user, same_checkpoint, substitute


def fuse_sums(graph: ir.Graph, changes: Changes) -> None:
    """Makes one node of every result and the tensor that is added to it."""
    _fuse(graph, list(graph), changes)


def fuse_gradient_sums(graph: ir.Graph, changes: Changes) -> None:
    """Does so among the nodes that differentiation added to a graph; there a node adds first what it reads, too."""
    added = [node for node in graph if "gradient_of" in node.metadata_props]
    _fuse(graph, added, changes)
    _fuse_into_readers(graph, [node for node in added if node.graph is graph], changes)


def _fuse(graph: ir.Graph, sums: Iterable[ir.Node], changes: Changes) -> None:
    places = {node: place for place, node in enumerate(graph)}
    done: dict[str, int] = {}
    for node in sums:
        found = _summand(node, places, changes)
        if found is None:
            continue
        summand, other = found
        definition = definition_of(summand)
        place = definition.places[definition.adds].at
        summand.resize_inputs(max(len(summand.inputs), place + 1))
        summand.replace_input_with(place, other)
        substitute(graph, node.outputs[0], summand.outputs[0], [node])
        done[summand.op_type] = done.get(summand.op_type, 0) + 1
    changes.applied += [f"adds another tensor in {counted(count, name)}" for name, count in done.items()]


def _fuse_into_readers(graph: ir.Graph, sums: Iterable[ir.Node], changes: Changes) -> None:
    done: dict[str, int] = {}
    for node in sums:
        if node.op_type != "Add":
            continue
        y = node.outputs[0]
        reader = only_user(y)
        if reader is None or not _adds_first(reader, y) or not same_checkpoint(reader, node):
            continue
        one, other = node.inputs
        if one is None or other is None or not type_of(one) == type_of(other) == type_of(y):
            continue
        definition = definition_of(reader)
        place = definition.places[definition.adds_first].at
        reader.resize_inputs(max(len(reader.inputs), place + 1))
        reader.replace_input_with(0, one)
        reader.replace_input_with(place, other)
        graph.remove(node, safe=True)
        done[reader.op_type] = done.get(reader.op_type, 0) + 1
    changes.applied += [f"adds first what is read in {counted(count, name)}" for name, count in done.items()]


def _adds_first(node: ir.Node, y: ir.Value) -> bool:
    """Whether a node that reads y could read two tensors that are y in sum, and does not yet."""
    definition = definition_of(node)
    if not definition.adds_first or [i for i, v in enumerate(node.inputs) if v is y] != [0]:
        return False
    return getattr(view(node), definition.adds_first) is None


def _summand(node: ir.Node, places: Mapping[ir.Node, int], changes: Changes) -> tuple[ir.Node, ir.Value] | None:
    """The node that can add the other operand of the sum `node` to its result, and that operand; None where none is."""
    if node.op_type != "Add":
        return None
    first, second = node.inputs
    for y, other in ((second, first), (first, second)):
        if y is None or other is None or y is other or type_of(y) != type_of(other):
            continue
        summand = y.producer()
        if summand is None or not _adds(summand, y) or not same_checkpoint(summand, node):
            continue
        if only_user(y) is not node:
            changes.refuse(node, f"is no part of {summand.op_type}: {y.name} is read elsewhere")
        elif (source := other.producer()) is not None and places[source] > places[summand]:
            changes.refuse(node, f"is no part of {summand.op_type}: {other.name} is computed later")
        else:
            return summand, other
    return None


def _adds(node: ir.Node, y: ir.Value) -> bool:
    """Whether a node could add a tensor to its result y, and neither adds one yet nor does more with the sum."""
    definition, n = definition_of(node), view(node)
    if not definition.adds or y.index() != 0 or (definition.activates and n.activation):
        return False
    return getattr(n, definition.adds) is None
