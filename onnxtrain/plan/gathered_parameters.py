"""Gather sharded parameters again in backward, instead of keeping them from forward.

    before   shard ─GatherParameter─> w ─Linear─> y                  backward reads w: kept
    after    shard ─GatherParameter─> w ─Linear─> y
             shard ─GatherParameter─> w'                             just before backward's first reader

So is everything computed from parameters alone, such as a cast. Those with `keep=1` are kept: forward reads them last,
and backward first.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff import Joint
from onnxtrain.graph import traversal
from onnxtrain.graph.host import host_values
from onnxtrain.ops import definition_of, view
from onnxtrain.ops.collective.parameters import GATHER_PARAMETER
from onnxtrain.ops.collective.transfers import WAIT
from onnxtrain.plan.recompute import is_recomputable


def gathered_again(joint: Joint) -> frozenset[str]:
    """Return the names of the values of forward that are computed from gathered parameters alone."""
    nodes = [node for node in joint.model.graph if node in joint.forward_nodes]
    gathers = [node for node in nodes if definition_of(node) is GATHER_PARAMETER]
    if not gathers:
        return frozenset()
    derived: set[ir.Value] = {v for node in gathers if not view(node).keep for v in _shards(node)}
    host = host_values(nodes, definition_of)
    results = set(joint.model.graph.outputs[: joint.outputs])
    names: list[str] = []
    for node in nodes:
        reads = [v for v in traversal.reads(node) if v.const_value is None]
        repeats = is_recomputable(node) or definition_of(node) in (GATHER_PARAMETER, WAIT)
        if reads and repeats and derived.issuperset(reads) and not host.issuperset(node.outputs):
            derived.update(node.outputs)
            names += [str(v.name) for v in node.outputs if v not in results]
    return frozenset(names)


def _shards(gather: ir.Node) -> list[ir.Value]:
    """Return the input of the graph that a gather reads, which may be padded before."""
    pending, shards = list(traversal.reads(gather)), []
    while pending:
        value = pending.pop()
        producer = value.producer()
        if producer is not None:
            pending += traversal.reads(producer)
        elif value.const_value is None:
            shards.append(value)
    return shards
