"""Which nodes may write their result over an input: fresh memory costs more than many an elementwise kernel.

    linear = F.linear(x, w)         # its own memory, which nobody reads after relu
    relu = linear.relu_()

An input may be written over when it was made in this program (no argument, no constant), is no view but of all of it in
another shape, and nothing that may lie in its memory is read later or leaves the program.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.graph.alias import AliasSets, view_source
from onnxtrain.graph.values import ATEN, type_of
from onnxtrain.ops import Effects, definition_of
from onnxtrain.ops.definition import Kernel
from onnxtrain.plan.cut import Part


def in_place_inputs(
    part: Part, last_uses: Mapping[ir.Value, int], kernels: Mapping[ir.Node, Kernel]
) -> dict[ir.Node, int]:
    """For each such node, the index of that input.

    Args:
        part: the nodes of the program.
        last_uses: for each tensor that is read, the position of the last node that does; past the end for outputs.
        kernels: those of all nodes but size arithmetic.
    """
    sets = AliasSets(part.nodes, definition_of)
    own = set(part.nodes)
    found: dict[ir.Node, int] = {}
    for position, node in enumerate(part.nodes):
        index = kernels[node].in_place if node in kernels else None
        value = node.inputs[index] if index is not None and index < len(node.inputs) else None
        if index is None or value is None or value in part.host:
            continue
        root = sets.root(value)
        if not _is_fresh(root, own) or not _is_all_of(value, root):
            continue
        members = sets.aliases_of(value)
        alone = sum(v in members for v in node.inputs) == 1
        dead = all(last_uses.get(member, -1) <= position for member in members)
        if alone and dead and type_of(value) == type_of(node.outputs[0]) and not any(map(_is_kept, members)):
            found[node] = index
    return found


def _is_kept(value: ir.Value) -> bool:
    """Whether a user's function or an ATen operator reads it, which may keep it for its own backward."""
    readers = [node for node, _ in value.uses()]
    return any(node.domain == ATEN or Effects.PYTHON in definition_of(node).effects for node in readers)


def _is_all_of(value: ir.Value, root: ir.Value) -> bool:
    """Whether a view holds each element of its root once."""
    while value is not root:
        node = value.producer()
        if node is None or not definition_of(node).same_elements:
            return False
        source = view_source(node, value.index() or 0, definition_of(node))
        assert source is not None, "what is no root is a view"
        value = source
    return True


def _is_fresh(value: ir.Value, own: set[ir.Node]) -> bool:
    """Whether a kernel of ours made it: what a user's function or any ATen operator gives may be someone else's."""
    producer = value.producer()
    if producer is None or producer not in own:
        return False
    return producer.domain != ATEN and Effects.PYTHON not in definition_of(producer).effects


def last_uses(part: Part) -> dict[ir.Value, int]:
    """For each tensor that is read, the position of the last node that reads it; outputs are read at the end."""
    last: dict[ir.Value, int] = {}
    for position, node in enumerate(part.nodes):
        for value in node.inputs:
            if value is not None:
                last[value] = position
    for output in part.outputs:
        if output is not None:
            last[output] = len(part.nodes)
    return last
