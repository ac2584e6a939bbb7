"""Recompute values of forward in backward instead of keeping them.

    before   a ─Gelu─> b ─Linear─> c            backward reads b: kept
    after    a ─Gelu─> b ─Linear─> c            backward reads b': a is kept
             a ─Gelu─> b'    just before its first reader

A recomputed node gives the same values bit for bit: it has no effects, or its op registers how to replay it from
the random state that it saved, or that it repeats (a custom autograd function declared `recomputable`). A
`RecomputeChoice` names the values, and `apply_choice` rewrites a joint graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxtrain.autodiff import Joint
from onnxtrain.capture.export.checkpoint_regions import REGION
from onnxtrain.graph import traversal
from onnxtrain.graph.alias import AliasSets
from onnxtrain.graph.host import host_values, reads_shape
from onnxtrain.ops import Effects, builder, definition_of, view
from onnxtrain.ops.interfaces.recompute import OBJECT_OUTPUTS, REPEATABLE, REPLAYS
from onnxtrain.passes.rewriting import nodes_before
from onnxtrain.plan.cut import Cut
from onnxtrain.plan.parameter_order import overlapped

RECOMPUTED = "recomputed"  # metadata of a recomputed node: the name of the original node in forward


@dataclass(frozen=True)
class RecomputeChoice:
    """The values that backward recomputes.

    Attributes:
        values: the names of the values of forward.
        seconds: the expected time of recomputing them.
        peak: the predicted peak of a step, in bytes.
        early: whether the peak requires that gradients are released while backward runs (`backward_stages`).
    """

    values: frozenset[str] = frozenset()
    seconds: float = 0.0
    peak: int = 0
    early: bool = False

    def __str__(self) -> str:
        facts = [f"recompute: {len(self.values)} values"]
        if self.seconds:
            facts.append(f"in about {self.seconds * 1e3:.1f} ms")
        if self.peak:
            facts.append(f"peak {self.peak / 2**20:.1f} MiB")
        if self.early:
            facts.append("gradients released while backward runs")
        return ", ".join(facts)


KEEP_ALL = RecomputeChoice()


def is_recomputable(node: ir.Node) -> bool:
    """Return whether recomputing a node gives the same values, bit for bit."""
    is_repeatable = REPEATABLE.entry(node)
    if is_repeatable is not None and is_repeatable(node):
        return True
    if OBJECT_OUTPUTS.entry(node):
        return False
    return definition_of(node).effects == Effects.NONE or bool(replay_inputs(node))


def recomputable_nodes(nodes: Sequence[ir.Node], mutated: Collection[ir.Value]) -> set[ir.Node]:
    """Return those of `nodes` that can be recomputed: they read no `mutated` input and no view of one."""
    sets = AliasSets(nodes, definition_of)
    roots = {sets.root(v) for v in mutated}
    return {n for n in nodes if is_recomputable(n) and not any(sets.root(v) in roots for v in recompute_inputs(n))}


def choose_by_checkpoints(joint: Joint, mutated: Collection[ir.Value]) -> RecomputeChoice:
    """Recompute the values inside the user's torch.utils.checkpoint regions, except those read outside of them."""
    nodes = [n for n in joint.model.graph if n in joint.forward_nodes]
    if not any(REGION in n.metadata_props for n in nodes):
        return KEEP_ALL
    recomputable = recomputable_nodes(nodes, mutated)
    never = {*joint.model.graph.outputs[: joint.outputs], *host_values(nodes, definition_of)}
    recomputed = []
    for node in nodes:
        region = node.metadata_props.get(REGION)
        if region is None or node not in recomputable:
            continue
        for value in node.outputs:
            readers = [n for n in traversal.users(value) if n in joint.forward_nodes]
            inside = all(n.metadata_props.get(REGION) == region for n in readers)
            if inside and value not in never and value not in replay_inputs(node):
                recomputed.append(str(value.name))
    return RecomputeChoice(frozenset(recomputed))


def replay_inputs(node: ir.Node) -> tuple[ir.Value, ...]:
    """Return the outputs of a random node that its replay reads and that must be kept; () if it cannot be replayed."""
    replay = REPLAYS.entry(node)
    outputs = () if replay is None else tuple(getattr(view(node), name) for name in replay.reads)
    return () if None in outputs else outputs


def recompute_inputs(node: ir.Node) -> Iterator[ir.Value]:
    """The values that a node reads when it is recomputed."""
    yield from traversal.reads(node)
    yield from replay_inputs(node)


def interleave_recomputed(
    backward: Sequence[ir.Node], recomputed: Collection[ir.Value], sources: Collection[ir.Node]
) -> Iterator[tuple[ir.Node, ir.Node | None]]:
    """Yield the nodes of backward as (node, None), each preceded by those that recompute its inputs.

    The latter are yielded as (node, its first user in backward). Only values in `recomputed` from nodes in
    `sources` are recomputed.
    """
    emitted: set[ir.Node] = set()
    for node in backward:
        for needed in _needed(node, recomputed, sources, emitted):
            yield needed, node
        yield node, None


def _needed(
    node: ir.Node, recomputed: Collection[ir.Value], sources: Collection[ir.Node], emitted: set[ir.Node]
) -> list[ir.Node]:
    """Return the nodes to run before `node`, in order. They are added to `done`."""
    if reads_shape(definition_of(node)):  # dimensions cross from forward by themselves
        return []
    order: list[ir.Node] = []
    pending: list[tuple[ir.Node, bool]] = [(node, False)]
    while pending:
        current, ready = pending.pop()
        if ready:
            order.append(current)
            continue
        if current is not node:
            if current in emitted:
                continue
            emitted.add(current)
            pending.append((current, True))
        reads = traversal.reads(node) if current is node else recompute_inputs(current)
        for value in reversed(list(reads)):
            producer = value.producer()
            if producer is not None and value in recomputed and producer in sources and producer not in emitted:
                pending.append((producer, False))
    return order


def predict_cut(parts: Cut, recomputed: Collection[ir.Value]) -> Cut:
    """Return the cut after recomputing, made of the nodes of the present graph: for predictions, not to be run."""
    sources = set(parts.forward.nodes)
    interleaved = [node for node, _ in interleave_recomputed(parts.backward.nodes, recomputed, sources)]
    nodes = overlapped(interleaved, parts.backward.outputs)
    needed: set[ir.Value] = set()
    for node in nodes:
        if node in sources:
            needed.update(recompute_inputs(node))
        elif not reads_shape(definition_of(node)):
            needed.update(traversal.reads(node))
    needed.update(v for v in parts.backward.outputs if v is not None)
    available = (*parts.forward.inputs, *(v for n in parts.forward.nodes for v in n.outputs))
    kept = tuple(v for v in available if v in needed and v not in recomputed and v not in parts.forward.host)
    cotangents = [v for v in parts.backward.inputs if v not in parts.kept]
    results = parts.forward.outputs[: parts.forward.num_user_outputs]
    forward = replace(parts.forward, outputs=(*results, *kept))
    return Cut(forward, replace(parts.backward, nodes=nodes, inputs=(*kept, *cotangents)), kept, parts.sizes)


def apply_choice(joint: Joint, choice: RecomputeChoice) -> Joint:
    """Recompute the chosen values in backward. Modifies the joint graph in place."""
    if not choice.values:
        return joint
    graph = joint.model.graph
    recomputed = {v for n in joint.forward_nodes for v in n.outputs if v.name in choice.values}
    backward = [n for n in graph if n not in joint.forward_nodes]
    op = builder(graph)
    copies: dict[ir.Value, ir.Value] = {}
    for node, user in list(interleave_recomputed(backward, recomputed, joint.forward_nodes)):
        if user is not None:
            copy = _copied(node, copies)
            replay = REPLAYS.entry(node)
            if replay is None:
                graph.insert_before(user, copy)
                copies.update((v, c) for v, c in zip(node.outputs, copy.outputs, strict=True) if v in recomputed)
                continue
            with nodes_before(op, user):
                replayed = replay.build(op, view(copy), *replay_inputs(node))
            copies[node.outputs[0]] = replayed
            producer = replayed.producer()
            assert producer is not None, "a replay computes its output"
            producer.metadata_props.update(copy.metadata_props)
            copy.resize_inputs(0)  # the replay takes its place
        elif not reads_shape(definition_of(node)):
            for index, value in enumerate(node.inputs):
                if value in copies:
                    node.replace_input_with(index, copies[value])
    traversal.name_uniquely(graph)
    return joint


def _copied(node: ir.Node, copies: dict[ir.Value, ir.Value]) -> ir.Node:
    """Return a copy of the node that reads recomputed values."""
    copy = traversal.clone_node(node, dict(copies))
    copy.metadata_props[RECOMPUTED] = node.name or ""
    copy.name = f"{node.name}/recomputed"
    for value in copy.outputs:
        value.name = f"{value.name}/recomputed"
    return copy
