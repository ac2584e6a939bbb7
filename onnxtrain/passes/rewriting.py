"""Helpers of passes that replace several nodes by one: inserting new nodes, and deciding which may be removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import onnx_ir as ir

from onnxtrain.graph import traversal
from onnxtrain.graph.alias import view_source
from onnxtrain.graph.builder import Builder
from onnxtrain.ops import definition_of
from onnxtrain.ops.native_kernels import NOTE

_CARRIED = ("module", "line", "gradient_of", "checkpoint", NOTE)


@contextmanager
def nodes_before(op: Builder, anchor: ir.Node) -> Iterator[None]:
    """Insert the nodes that `op` makes inside the block before `anchor`, with its origin and names derived from its.

    Size computations get such names too: differentiation names those it creates, and names must be unique.
    """
    last = op.graph[-1]
    origin = {key: text for key, text in anchor.metadata_props.items() if key in _CARRIED}
    with op.at(origin):
        yield
    added: list[ir.Node] = []
    for node in reversed(op.graph):
        if node is last:
            break
        added.append(node)
    added.reverse()
    op.graph.remove(added)
    op.graph.insert_before(anchor, added)
    names: dict[str, int] = op.graph.meta.setdefault("names_made", {})
    prefix = anchor.outputs[0].name or ""
    for number, node in enumerate(added, names.get(prefix, 0)):
        node.name = f"{prefix}/{node.op_type}_{number}"
        names[prefix] = number + 1
        for value in node.outputs:
            value.name = node.name if len(node.outputs) == 1 else f"{node.name}.{value.index()}"


def only_user(value: ir.Value) -> ir.Node | None:
    """Return the only user of the value; None if there are several, or if the value is a graph output."""
    users = traversal.users(value)
    return users[0] if len(users) == 1 and not value.is_graph_output() else None


def same_checkpoint(node: ir.Node, other: ir.Node) -> bool:
    """Return whether both nodes lie in the same torch.utils.checkpoint region, or both in none."""
    return node.metadata_props.get("checkpoint") == other.metadata_props.get("checkpoint")


def reaches_output(value: ir.Value) -> bool:
    """Return whether the value, or a view of it, is an output of the graph."""
    return value.is_graph_output() or any(
        view_source(user, output.index() or 0, definition_of(user)) is value and reaches_output(output)
        for user in traversal.users(value)
        for output in user.outputs
    )


def substitute(graph: ir.Graph, old: ir.Value, new: ir.Value, removed: Sequence[ir.Node]) -> None:
    """Replace `old` by `new`, which takes over its name, and remove the nodes `removed`, users first."""
    name = old.name
    traversal.replace(graph, old, new)
    if new.producer() is not None and not new.is_graph_output():
        old.name, new.name = None, name
    for node in removed:
        graph.remove(node, safe=True)
