"""What passes that replace several nodes by one share: where new nodes go, and which nodes may go away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import onnx_ir as ir

from onnxtrain.graph import traversal
from onnxtrain.graph.alias import view_source
from onnxtrain.graph.builder import Builder
from onnxtrain.ops import definition_of
from onnxtrain.ops.native import NOTE

_CARRIED = ("module", "line", "gradient_of", "checkpoint", NOTE)


@contextmanager
def nodes_before(op: Builder, anchor: ir.Node) -> Iterator[None]:
    """Nodes that `op` makes inside come before `anchor`, and carry its module, line and notes, and own names.

    The names are made from its. Sizes have one too: differentiation names those that it computes, and a graph has each
    name once.
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
    """The node that alone reads the value; None where several do, or the graph's caller does."""
    readers = traversal.users(value)
    return readers[0] if len(readers) == 1 and not value.is_graph_output() else None


def same_checkpoint(node: ir.Node, other: ir.Node) -> bool:
    """Whether the model's own checkpoints compute both again, or neither: what is behind one is kept."""
    return node.metadata_props.get("checkpoint") == other.metadata_props.get("checkpoint")


def leaves(value: ir.Value) -> bool:
    """Whether the value, or a view of it, is an output of the graph."""
    return value.is_graph_output() or any(
        view_source(user, output.index() or 0, definition_of(user)) is value and leaves(output)
        for user in traversal.users(value)
        for output in user.outputs
    )


def substitute(graph: ir.Graph, old: ir.Value, new: ir.Value, gone: Sequence[ir.Node]) -> None:
    """Lets `new` take the place and the name of `old`, and removes `gone`, the last node first."""
    name = old.name
    traversal.replace(graph, old, new)
    if new.producer() is not None and not new.is_graph_output():
        old.name, new.name = None, name
    for node in gone:
        graph.remove(node, safe=True)
