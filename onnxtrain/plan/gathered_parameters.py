"""Gather sharded parameters again in backward, instead of keeping them from forward.

    before   shard ─GatherParameters─> w ─Linear─> y                  backward reads w: kept
    after    shard ─GatherParameters─> w ─Linear─> y
             shard ─GatherParameters─> w'                             just before backward's first reader

So is everything computed from parameters alone, such as a cast. Those with `keep=1` are kept: forward reads them last,
and backward first.

All ranks must communicate alike and in one order, but what else they recompute may depend on the sizes of their
batches. So the parameters depend on the graph alone: those that backward reads if nothing is recomputed. Nodes that
read them are not recomputed to fit a budget. If a recomputed node reads another one, such as a bias, that is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import onnx_ir as ir

from onnxtrain.autodiff import Joint
from onnxtrain.graph import traversal
from onnxtrain.ops import definition_of, view
from onnxtrain.ops.collective.parameters import GATHER_PARAMETERS
from onnxtrain.ops.collective.transfers import WAIT
from onnxtrain.plan.cut import Cut, cut
from onnxtrain.plan.recompute import is_recomputable


def gathers_of(joint: Joint) -> list[ir.Node]:
    """Return the nodes of forward that gather parameters."""
    return [n for n in joint.model.graph if definition_of(n) is GATHER_PARAMETERS and n in joint.forward_nodes]


def gathered_again(joint: Joint) -> list[ir.Value]:
    """Return the values of forward that are computed from gathered parameters alone."""
    gathers = [gather for gather in gathers_of(joint) if not view(gather).keep]
    if not gathers:
        return []
    parts = cut(joint)
    values = _derived(parts, read_in_backward(parts, gathers))
    results = set(parts.forward.outputs[: parts.forward.num_user_outputs])
    return [value for value in values if value not in results]


def read_in_backward(parts: Cut, gathers: Sequence[ir.Node]) -> list[ir.Node]:
    """Return those of these gathers whose results, or values computed from them alone, backward reads."""
    derived = set(_derived(parts, gathers))
    needed = _producers(value for value in parts.kept if value in derived)
    return [gather for gather in gathers if gather in needed]


def _derived(parts: Cut, gathers: Collection[ir.Node]) -> list[ir.Value]:
    """Return the values of forward that are computed from the results of these gathers alone, and from constants."""
    shards = [value for gather in gathers for value in traversal.reads(gather)]
    padding = _producers(shards)
    values = dict.fromkeys(shards)
    for node in parts.forward.nodes:
        if parts.forward.host.issuperset(node.outputs):
            continue
        if node in padding or node in gathers or _follows(node, values):
            values.update(dict.fromkeys(node.outputs))
    return [value for value in values if value not in shards or value.producer() is not None]


def _follows(node: ir.Node, values: Collection[ir.Value]) -> bool:
    """Return whether a node computes from some of these values, and else from constants, the same each time."""
    reads = [value for value in traversal.reads(node) if value.const_value is None]
    return bool(reads) and all(v in values for v in reads) and (is_recomputable(node) or definition_of(node) is WAIT)


def _producers(values: Iterable[ir.Value]) -> set[ir.Node]:
    """Return the nodes from which values are computed."""
    pending, nodes = list(values), set[ir.Node]()
    while pending:
        producer = pending.pop().producer()
        if producer is not None and producer not in nodes:
            nodes.add(producer)
            pending += traversal.reads(producer)
    return nodes
