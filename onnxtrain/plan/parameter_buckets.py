"""Join the collectives of sharded parameters into buckets, so that small ones do not each wait for the network.

    before   GatherParameters(w1) … GatherParameters(w2) …          ReduceGradients(dw2) … ReduceGradients(dw1)
    after    GatherParameters(w1, w2) …                                                  … ReduceGradients(dw2, dw1)

A bucket is gathered before the first reader of any of its parameters, and reduced when the last of its gradients is
complete. Its tensors keep memory of their own, which is freed after the last reader of each. Parameters that backward
gathers again are in other buckets than those that it does not, so that no byte is gathered in vain.

Buckets depend on the graph alone and never on the sizes of a rank's batches: all ranks communicate alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace

import onnx_ir as ir

from onnxtrain.autodiff import Joint
from onnxtrain.graph import traversal
from onnxtrain.graph.values import dtype_of, set_type, type_of
from onnxtrain.ops import OpDef, definition_of, view
from onnxtrain.ops.collective.parameters import GATHER_PARAMETERS, REDUCE_GRADIENTS
from onnxtrain.plan.cut import cut
from onnxtrain.plan.gathered_parameters import gathers_of, read_in_backward
from onnxtrain.plan.parameter_order import whole_bytes

Buckets = list[list[ir.Node]]


def join_collectives(joint: Joint) -> Joint:
    """Join the collectives of a joint graph, in place, before it is planned what backward recomputes."""
    graph = joint.model.graph
    gathers = gathers_of(joint)
    if not gathers:
        return joint
    again = read_in_backward(cut(joint), [gather for gather in gathers if not view(gather).keep])
    removed, added = _join_gathers(graph, lambda node: node in again)
    for bucket in _buckets(graph, REDUCE_GRADIENTS, lambda node: None):
        _move_after(graph, bucket[-1], _dependents(graph, bucket))
        _join(graph, bucket, bucket[-1])
    return replace(joint, forward_nodes=joint.forward_nodes - removed | added)


def join_forward_collectives(graph: ir.Graph) -> None:
    """Join the collectives of a graph without gradients, in place."""
    _join_gathers(graph, lambda node: None)


def _join_gathers(graph: ir.Graph, kind: Callable[[ir.Node], Hashable]) -> tuple[set[ir.Node], set[ir.Node]]:
    """Join gathers of one kind; return the nodes that were removed and added."""
    removed, added = set[ir.Node](), set[ir.Node]()
    for bucket in _buckets(graph, GATHER_PARAMETERS, kind):
        _move_before(graph, bucket[0], _sources(graph, bucket))
        removed.update(bucket)
        added.add(_join(graph, bucket, bucket[0]))
    return removed, added


def _buckets(graph: ir.Graph, definition: OpDef, kind: Callable[[ir.Node], Hashable]) -> Buckets:
    """Return the nodes of an op to be joined: of one dtype and kind, in graph order, up to the bytes of a bucket."""
    complete: Buckets = []
    filling: dict[Hashable, list[ir.Node]] = {}
    for node in (node for node in graph if definition_of(node) is definition):
        key = kind(node), dtype_of(node.inputs[0])  # type: ignore[arg-type]  # an input is there
        bucket = filling.setdefault(key, [])
        limit = view(node).bucket_bytes
        if whole_bytes(node) >= limit:
            continue
        if sum(map(whole_bytes, (*bucket, node))) > limit:
            complete.append(bucket)
            bucket = filling[key] = []
        bucket.append(node)
    return [bucket for bucket in (*complete, *filling.values()) if len(bucket) > 1]


def _join(graph: ir.Graph, bucket: Sequence[ir.Node], position: ir.Node) -> ir.Node:
    """Replace nodes by one, which is where one of them was; its outputs keep their names.

    If a parameter of a bucket is kept for backward, backward reads none of the others, so all may be kept.
    """
    first = bucket[0]
    joined = ir.Node(
        first.domain,
        first.op_type,
        [value for node in bucket for value in node.inputs],
        [_joined_attribute(bucket, name) for name in first.attributes],
        num_outputs=len(bucket),
        name=first.name,
        metadata_props=dict(first.metadata_props),
    )
    graph.insert_before(position, joined)
    for node, value in zip(bucket, joined.outputs, strict=True):
        old = node.outputs[0]
        set_type(value, type_of(old))
        value.name, old.name = old.name, None
        for user, index in tuple(old.uses()):
            user.replace_input_with(index, value)
        traversal.detach(node)
        graph.remove(node)
    return joined


def _joined_attribute(bucket: Sequence[ir.Node], name: str) -> ir.Attr:
    if name == "keep":
        return ir.AttrInt64(name, max(view(node).keep for node in bucket))
    if name == "orders":
        return ir.AttrInt64s(name, [order for node in bucket for order in view(node).orders])
    return bucket[0].attributes[name]


def _sources(graph: ir.Graph, bucket: Sequence[ir.Node]) -> list[ir.Node]:
    """Return the nodes after the first of a bucket, such as the padding of shards, that compute what it reads."""
    needed = set(bucket)
    for node in reversed(_between(graph, bucket)):
        if any(user in needed for value in node.outputs for user in traversal.users(value)):
            needed.add(node)
    return [node for node in _between(graph, bucket) if node in needed and node not in bucket]


def _dependents(graph: ir.Graph, bucket: Sequence[ir.Node]) -> list[ir.Node]:
    """Return the nodes before the last of a bucket, such as waits, that depend on its results."""
    dependent = set(bucket)
    for node in _between(graph, bucket):
        if any(value.producer() in dependent for value in traversal.reads(node)):
            dependent.add(node)
    return [node for node in _between(graph, bucket) if node in dependent and node not in bucket]


def _between(graph: ir.Graph, bucket: Collection[ir.Node]) -> list[ir.Node]:
    """Return the nodes from the first to the last of a bucket."""
    nodes = list(graph)
    positions = [index for index, node in enumerate(nodes) if node in bucket]
    return nodes[positions[0] : positions[-1] + 1]


def _move_before(graph: ir.Graph, position: ir.Node, nodes: Sequence[ir.Node]) -> None:
    if nodes:
        graph.remove(nodes)
        graph.insert_before(position, nodes)


def _move_after(graph: ir.Graph, position: ir.Node, nodes: Sequence[ir.Node]) -> None:
    if nodes:
        graph.remove(nodes)
        graph.insert_after(position, nodes)
