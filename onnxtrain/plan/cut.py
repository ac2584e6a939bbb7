"""Cut a joint graph into a forward and a backward part.

    inputs ──[forward]──> outputs, kept
    kept, cotangents ──[backward]──> gradients

Values of forward that backward reads are kept. Shape arithmetic is cheap and runs in both parts: only the dimensions
that it starts from cross the cut, as Python ints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxtrain.autodiff import Joint
from onnxtrain.graph.host import host_values, reads_shape
from onnxtrain.ops import Effects, definition_of
from onnxtrain.plan.parameter_order import overlapped, waits_for


@dataclass(frozen=True)
class Part:
    """Nodes of a graph that run as one program.

    Attributes:
        nodes: in execution order.
        inputs: tensors.
        sizes_in: dimensions, as Python ints.
        outputs: tensors; None for one that is not wanted.
        sizes_out: dimensions, as Python ints.
        host: the values of the whole graph that are Python ints.
        num_user_outputs: how many of the outputs, from the first, are returned to the user.
        early_reads: nodes that read a number from the device, whose copy is launched before they run (`streams`).
    """

    nodes: tuple[ir.Node, ...]
    inputs: tuple[ir.Value, ...]
    sizes_in: tuple[ir.Value, ...]
    outputs: tuple[ir.Value | None, ...]
    sizes_out: tuple[ir.Value, ...]
    host: frozenset[ir.Value]
    num_user_outputs: int
    early_reads: frozenset[ir.Node] = frozenset()


@dataclass(frozen=True)
class Cut:
    """The two parts, with the tensors (`kept`) and the dimensions (`sizes`) that cross from one to the other."""

    forward: Part
    backward: Part
    kept: tuple[ir.Value, ...]
    sizes: tuple[ir.Value, ...]

    def unsaved(self) -> list[int]:
        """Return the positions of forward's inputs that are not kept for backward."""
        kept = set(self.kept)
        return [i for i, value in enumerate(self.forward.inputs) if value not in kept]


def single_part(model: ir.Model) -> Part:
    """Make one part of a graph without gradients."""
    nodes = tuple(model.graph)
    host = frozenset(host_values(nodes, definition_of))
    results = tuple(model.graph.outputs)
    return Part(overlapped(nodes, results), tuple(model.graph.inputs), (), results, (), host, len(results))


def cut(joint: Joint, wanted: Sequence[bool] | None = None) -> Cut:
    """Cut `joint` for the `wanted` gradients: one flag per input of forward; None for all."""
    graph = joint.model.graph
    nodes = tuple(graph)
    host = frozenset(host_values(nodes, definition_of))
    gradients = tuple(g if wanted is None or wanted[i] else None for i, g in enumerate(joint.gradients))
    cotangents = {c for c in joint.cotangents if c is not None}
    forward_nodes = _forward_nodes(joint, nodes, cotangents)
    backward_nodes = [n for n in nodes if n not in forward_nodes]
    backward_goals = [g for g in gradients if g is not None]
    backward, reads = nodes_computing(backward_nodes, backward_goals, host, nodes, Effects.PYTHON)
    kept = tuple(v for v in reads if v not in host and v not in cotangents and v.const_value is None)
    crossing = tuple(v for v in reads if v in host)

    results = tuple(graph.outputs)[: joint.outputs]
    goals = [v for v in (*results, *kept, *crossing) if v.const_value is None]
    forward, _ = nodes_computing([n for n in nodes if n in forward_nodes], goals, host, nodes, ~Effects.NONE)
    inputs = tuple(v for v in graph.inputs if v not in cotangents)
    return Cut(
        Part(overlapped(forward, goals), inputs, (), (*results, *kept), crossing, host, len(results)),
        Part(
            overlapped(backward, gradients),
            (*kept, *(c for c in joint.cotangents if c is not None)),
            crossing,
            gradients,
            (),
            host,
            len(gradients),
        ),
        kept,
        crossing,
    )


def _forward_nodes(joint: Joint, nodes: Sequence[ir.Node], cotangents: set[ir.Value]) -> set[ir.Node]:
    """Return the nodes of the forward graph, and those that differentiation added to read a forward value's shape.

    Reading a shape in backward would keep a whole tensor alive for one integer.
    """
    forward_nodes = set(joint.forward_nodes)
    for node in nodes:
        if node not in forward_nodes and reads_shape(definition_of(node)):
            source = node.inputs[0]
            if (
                source is not None
                and source not in cotangents
                and (source.producer() is None or source.producer() in forward_nodes)
            ):
                forward_nodes.add(node)
    return forward_nodes


def nodes_computing(
    candidates: Sequence[ir.Node],
    goals: Sequence[ir.Value],
    host: frozenset[ir.Value],
    nodes: Sequence[ir.Node],
    effects: Effects,
) -> tuple[tuple[ir.Node, ...], list[ir.Value]]:
    """Return the nodes that compute `goals`, and the values that they read from outside, in graph order.

    Nodes are taken from `candidates`, and shape arithmetic from all `nodes`. Candidates with any of these `effects` are
    always needed, and so are those that wait for a collective which is.
    """
    own = set(candidates)
    pending, visited, used = list(goals), set(goals), set[ir.Node]()
    for node in candidates:
        if definition_of(node).effects & effects:
            used.add(node)
            _push_inputs(node, pending, visited)
    outside: dict[ir.Value, Any] = {}
    while pending:
        value = pending.pop()
        producer = value.producer()
        arithmetic = producer is not None and value in host and not reads_shape(definition_of(producer))
        if producer is None or not (producer in own or arithmetic):
            outside[value] = None
        elif producer not in used:
            for node in (producer, *waits_for(producer, own)):
                used.add(node)
                _push_inputs(node, pending, visited)
    order: dict[ir.Value, int] = {v: i for i, v in enumerate(v for n in nodes for v in n.outputs)}
    ordered = sorted(outside, key=lambda v: order.get(v, -1))
    return tuple(n for n in nodes if n in used), ordered


def _push_inputs(node: ir.Node, pending: list[ir.Value], visited: set[ir.Value]) -> None:
    for value in node.inputs:
        if value is not None and value not in visited:
            visited.add(value)
            pending.append(value)
