"""Find the nodes that may write their output into an input: allocation costs more than many elementwise kernels.

    linear = F.linear(x, w)         # a new allocation that nothing reads after relu
    relu = linear.relu_()

An input may be overwritten if this program computed it (it is not an argument or constant), it holds all elements of
its root, and no value that may share its memory is read later or leaves the program.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.graph.alias import AliasSets, view_source
from onnxtrain.graph.values import type_of
from onnxtrain.ops import definition_of
from onnxtrain.ops.definition import Kernel
from onnxtrain.ops.interfaces.in_place import MAY_KEEP_INPUTS
from onnxtrain.plan.cut import Part


def in_place_inputs(
    part: Part, last_uses: Mapping[ir.Value, int], kernels: Mapping[ir.Node, Kernel]
) -> dict[ir.Node, int]:
    """Return, for each node that may overwrite an input, the index of that input.

    Args:
        part: the nodes of the program.
        last_uses: for each tensor that is read, the position of its last reader; past the end for outputs.
        kernels: of all nodes except shape arithmetic.
    """
    sets = AliasSets(part.nodes, definition_of)
    own = set(part.nodes)
    in_place: dict[ir.Node, int] = {}
    for position, node in enumerate(part.nodes):
        index = kernels[node].in_place_input if node in kernels else None
        value = node.inputs[index] if index is not None and index < len(node.inputs) else None
        if index is None or value is None or value in part.host:
            continue
        root = sets.root(value)
        if not _is_fresh(root, own) or not _holds_all_elements(value, root):
            continue
        members = sets.aliases_of(value)
        alone = sum(v in members for v in node.inputs) == 1
        dead = all(last_uses.get(member, -1) <= position for member in members)
        if alone and dead and type_of(value) == type_of(node.outputs[0]) and not any(map(_may_be_saved, members)):
            in_place[node] = index
    return in_place


def _may_be_saved(value: ir.Value) -> bool:
    """Return whether a custom autograd function or an ATen op reads the value, and may save it for its own backward."""
    return any(node in MAY_KEEP_INPUTS for node, _ in value.uses())


def _holds_all_elements(value: ir.Value, root: ir.Value) -> bool:
    """Return whether a view holds each element of its root exactly once."""
    while value is not root:
        node = value.producer()
        if node is None or not definition_of(node).preserves_elements:
            return False
        source = view_source(node, value.index() or 0, definition_of(node))
        assert source is not None, "a value other than its root is a view"
        value = source
    return True


def _is_fresh(value: ir.Value, own: set[ir.Node]) -> bool:
    """Return whether a kernel of this program allocated it: outputs of custom functions and ATen ops may be aliases."""
    producer = value.producer()
    return producer is not None and producer in own and producer not in MAY_KEEP_INPUTS


def last_uses(part: Part) -> dict[ir.Value, int]:
    """Return the position of the last reader of each tensor that is read; one past the last node for outputs."""
    last: dict[ir.Value, int] = {}
    for position, node in enumerate(part.nodes):
        for value in node.inputs:
            if value is not None:
                last[value] = position
    for output in part.outputs:
        if output is not None:
            last[output] = len(part.nodes)
    return last
