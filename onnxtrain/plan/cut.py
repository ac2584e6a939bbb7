"""Cuts a joint graph into a forward and a backward part.

    inputs ──[forward]──> outputs, kept
    kept, cotangents ──[backward]──> gradients

What backward reads of forward's values is kept. Size arithmetic is cheap and is done in both parts: only the sizes it
starts from cross the cut, as Python ints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxtrain.autodiff import Joint
from onnxtrain.graph.host import host_values, reads_shape
from onnxtrain.ops import Effects, definition_of


@dataclass(frozen=True)
class Part:
    """A stretch of a graph that runs as one program.

    Attributes:
        nodes: in the order of execution.
        inputs: tensors that come in.
        sizes_in: sizes that come in as Python ints.
        outputs: tensors that go out; None for one that is not wanted.
        sizes_out: sizes that go out as Python ints.
        host: the values of the whole graph that are Python ints.
        num_user_outputs: how many of the outputs, from the first, the user gets to see.
    """

    nodes: tuple[ir.Node, ...]
    inputs: tuple[ir.Value, ...]
    sizes_in: tuple[ir.Value, ...]
    outputs: tuple[ir.Value | None, ...]
    sizes_out: tuple[ir.Value, ...]
    host: frozenset[ir.Value]
    num_user_outputs: int


@dataclass(frozen=True)
class Cut:
    """The two parts. `kept` are the tensors that cross, `sizes` the sizes that do."""

    forward: Part
    backward: Part
    kept: tuple[ir.Value, ...]
    sizes: tuple[ir.Value, ...]

    def unsaved(self) -> list[int]:
        """The positions of the forward's inputs that are not kept."""
        return [i for i, value in enumerate(self.forward.inputs) if value not in self.kept]


def single_part(model: ir.Model) -> Part:
    """A graph without gradients as one part."""
    nodes = tuple(model.graph)
    host = frozenset(host_values(nodes, definition_of))
    return Part(nodes, tuple(model.graph.inputs), (), tuple(model.graph.outputs), (), host, len(model.graph.outputs))


def cut(joint: Joint, wanted: Sequence[bool] | None = None) -> Cut:
    """Cuts `joint` for the gradients that are `wanted` (one flag per forward input; None: all that it has)."""
    graph = joint.model.graph
    nodes = tuple(graph)
    host = frozenset(host_values(nodes, definition_of))
    gradients = tuple(g if wanted is None or wanted[i] else None for i, g in enumerate(joint.gradients))
    given = {c for c in joint.cotangents if c is not None}
    earlier = _forward_nodes(joint, nodes, given)
    backward_nodes = [n for n in nodes if n not in earlier]
    asked = [g for g in gradients if g is not None]
    backward, reads = nodes_computing(backward_nodes, asked, host, nodes, Effects.PYTHON | Effects.COLLECTIVE)
    kept = tuple(v for v in reads if v not in host and v not in given and v.const_value is None)
    crossing = tuple(v for v in reads if v in host)

    results = tuple(graph.outputs)[: joint.outputs]
    goals = [v for v in (*results, *kept, *crossing) if v.const_value is None]
    forward, _ = nodes_computing([n for n in nodes if n in earlier], goals, host, nodes, ~Effects.NONE)
    inputs = tuple(v for v in graph.inputs if v not in given)
    return Cut(
        Part(forward, inputs, (), (*results, *kept), crossing, host, len(results)),
        Part(
            backward,
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


def _forward_nodes(joint: Joint, nodes: Sequence[ir.Node], given: set[ir.Value]) -> set[ir.Node]:
    """The forward graph's nodes, and those that differentiation added only to read a forward value's shape.

    A shape read in backward would keep a whole tensor alive for one integer.
    """
    earlier = set(joint.forward_nodes)
    for node in nodes:
        if node not in earlier and reads_shape(definition_of(node)):
            source = node.inputs[0]
            if (
                source is not None
                and source not in given
                and (source.producer() is None or source.producer() in earlier)
            ):
                earlier.add(node)
    return earlier


def nodes_computing(
    candidates: Sequence[ir.Node],
    goals: Sequence[ir.Value],
    host: frozenset[ir.Value],
    nodes: Sequence[ir.Node],
    effects: Effects,
) -> tuple[tuple[ir.Node, ...], list[ir.Value]]:
    """The nodes that compute `goals`, and the values they read from elsewhere, in graph order.

    Nodes come from `candidates`, and size arithmetic from all nodes. Candidates that have some of these `effects` are
    needed in any case.
    """
    own = set(candidates)
    open_values, done, used = list(goals), set(goals), set[ir.Node]()
    for node in candidates:
        if definition_of(node).effects & effects:
            used.add(node)
            _push(node, open_values, done)
    outside: dict[ir.Value, Any] = {}
    while open_values:
        value = open_values.pop()
        producer = value.producer()
        arithmetic = producer is not None and value in host and not reads_shape(definition_of(producer))
        if producer is None or not (producer in own or arithmetic):
            outside[value] = None
        elif producer not in used:
            used.add(producer)
            _push(producer, open_values, done)
    order: dict[ir.Value, int] = {v: i for i, v in enumerate(v for n in nodes for v in n.outputs)}
    ordered = sorted(outside, key=lambda v: order.get(v, -1))
    return tuple(n for n in nodes if n in used), ordered


def _push(node: ir.Node, open_values: list[ir.Value], done: set[ir.Value]) -> None:
    for value in node.inputs:
        if value is not None and value not in done:
            done.add(value)
            open_values.append(value)
