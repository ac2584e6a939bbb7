"""Lets an op add another tensor to its result where it writes it: one pass over memory, and not two.

    before   y = KeyedDropout(x, key);  h = Add(residual, y)
    after    h = KeyedDropout(x, key, residual)

    before   dx, dscale = SimplifiedLayerNormalizationGrad(dy, x, scale, inv_std);  dh = Add(direct, dx)
    after    dh, dscale = SimplifiedLayerNormalizationGrad(dy, x, scale, inv_std, direct)

Definitions say which ops can (`adds`). Refuses where the result is read elsewhere too, or where the other tensor is
computed later: what the op reads would be held until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from onnxtrain.graph.values import type_of
from onnxtrain.ops import definition_of, view
from onnxtrain.passes.changes import Changes, counted
from onnxtrain.passes.rewriting import only_user, substitute


def fuse_sums(graph: ir.Graph, changes: Changes) -> None:
    """Makes one node of every result and the tensor that is added to it."""
    _fuse(graph, list(graph), changes)


def fuse_gradient_sums(graph: ir.Graph, changes: Changes) -> None:
    """Does so among the nodes that differentiation added to a graph."""
    _fuse(graph, [node for node in graph if "gradient_of" in node.metadata_props], changes)


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
    changes.made += [f"adds another tensor in {counted(count, name)}" for name, count in done.items()]


def _summand(node: ir.Node, places: Mapping[ir.Node, int], changes: Changes) -> tuple[ir.Node, ir.Value] | None:
    """The node that can add the other operand of the sum `node` to its result, and that operand; None where none is."""
    if node.op_type != "Add":
        return None
    first, second = node.inputs
    for y, other in ((second, first), (first, second)):
        if y is None or other is None or y is other or type_of(y) != type_of(other):
            continue
        summand = y.producer()
        if summand is None or not _adds(summand, y) or not _same_checkpoint(summand, node):
            continue
        if only_user(y) is not node:
            changes.refuse(node, f"is no part of {summand.op_type}: {y.name} is read elsewhere")
        elif (source := other.producer()) is not None and places[source] > places[summand]:
            changes.refuse(node, f"is no part of {summand.op_type}: {other.name} is computed later")
        else:
            return summand, other
    return None


def _adds(node: ir.Node, y: ir.Value) -> bool:
    """Whether a node could add a tensor to its result y, and adds none yet."""
    definition = definition_of(node)
    return bool(definition.adds) and y.index() == 0 and getattr(view(node), definition.adds) is None


def _same_checkpoint(node: ir.Node, other: ir.Node) -> bool:
    """Whether the model's own checkpoints compute both again, or neither: a sum behind one is kept."""
    return node.metadata_props.get("checkpoint") == other.metadata_props.get("checkpoint")
