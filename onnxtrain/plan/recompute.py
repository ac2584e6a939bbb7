"""Values of forward that backward computes again instead of keeping them.

    before   a ─Gelu─> b ─Linear─> c            backward reads b: kept
    after    a ─Gelu─> b ─Linear─> c            backward reads b': a is kept
             a ─Gelu─> b'    just before the first node that reads it

A node is computed again exactly as it was: it has no effects, or its definition says how it is replayed from what it
drew, or that it repeats (a custom autograd function that its author declares `recomputable`). What is chosen stands in
a `RecomputeChoice`; `apply_choice` writes it into a joint graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxtrain.autodiff import Joint
from onnxtrain.capture.checkpoints import REGION
from onnxtrain.graph import traversal
from onnxtrain.graph.alias import AliasSets
from onnxtrain.graph.host import host_values, reads_shape
from onnxtrain.ops import Effects, builder, definition_of
from onnxtrain.passes.rewriting import nodes_before
from onnxtrain.plan.cut import Cut

RECOMPUTED = "recomputed"  # the metadata of a node that is one of forward computed again: the name of that node


@dataclass(frozen=True)
class RecomputeChoice:
    """What backward computes again.

    Attributes:
        values: the names of forward's values that it does not get.
        seconds: what that is expected to take.
        peak: the bytes that a step is then predicted to hold at most.
        early: whether gradients must be handed over while backward goes on (`split`), for that peak to hold.
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
            facts.append("gradients handed over while backward goes on")
        return ", ".join(facts)


KEEP_ALL = RecomputeChoice()


def is_recomputable(node: ir.Node) -> bool:
    """Whether a node can be computed again with the same result, bit for bit."""
    definition = definition_of(node)
    if definition.repeats(node):
        return True
    if definition.objects:
        return False
    return definition.effects == Effects.NONE or bool(replay_inputs(node))


def recomputable_nodes(nodes: Sequence[ir.Node], changed: Collection[ir.Value]) -> set[ir.Node]:
    """Those of `nodes` that can be computed again: not where they read an input in `changed`, or a view of one."""
    sets = AliasSets(nodes, definition_of)
    roots = {sets.root(v) for v in changed}
    return {n for n in nodes if is_recomputable(n) and not any(sets.root(v) in roots for v in recompute_inputs(n))}


def choose_by_checkpoints(joint: Joint, changed: Collection[ir.Value]) -> RecomputeChoice:
    """What the user's regions of torch.utils.checkpoint ask for: all inside but what other nodes of forward read."""
    nodes = [n for n in joint.model.graph if n in joint.forward_nodes]
    if not any(REGION in n.metadata_props for n in nodes):
        return KEEP_ALL
    again = recomputable_nodes(nodes, changed)
    apart = {*joint.model.graph.outputs[: joint.outputs], *host_values(nodes, definition_of)}
    found = []
    for node in nodes:
        region = node.metadata_props.get(REGION)
        if region is None or node not in again:
            continue
        for value in node.outputs:
            readers = [n for n in traversal.users(value) if n in joint.forward_nodes]
            inside = all(n.metadata_props.get(REGION) == region for n in readers)
            if inside and value not in apart and value not in replay_inputs(node):
                found.append(str(value.name))
    return RecomputeChoice(frozenset(found))


def replay_inputs(node: ir.Node) -> tuple[ir.Value, ...]:
    """The outputs of a random node that must be kept, so that it can be replayed; () where it cannot be."""
    definition = definition_of(node)
    if definition.replay is None:
        return ()
    view = definition.view(node)
    found = tuple(getattr(view, name) for name in definition.replay.reads)
    return () if None in found else found


def recompute_inputs(node: ir.Node) -> Iterator[ir.Value]:
    """What a node reads when it is computed again."""
    yield from traversal.reads(node)
    yield from replay_inputs(node)


def interleave_recomputed(
    backward: Sequence[ir.Node], again: Collection[ir.Value], sources: Collection[ir.Node]
) -> Iterator[tuple[ir.Node, ir.Node | None]]:
    """The nodes of backward in order, each as (node, None), with those that compute `again` before their first use.

    These come as (node, the node of backward that is the first to need it). Only `sources` are computed again.
    """
    done: set[ir.Node] = set()
    for node in backward:
        for needed in _needed(node, again, sources, done):
            yield needed, node
        yield node, None


def _needed(
    node: ir.Node, again: Collection[ir.Value], sources: Collection[ir.Node], done: set[ir.Node]
) -> list[ir.Node]:
    """The nodes to run before `node`, in order; adds them to `done`."""
    if reads_shape(definition_of(node)):  # reads sizes, which cross by themselves
        return []
    order: list[ir.Node] = []
    waiting: list[tuple[ir.Node, bool]] = [(node, False)]
    while waiting:
        current, ready = waiting.pop()
        if ready:
            order.append(current)
            continue
        if current is not node:
            if current in done:
                continue
            done.add(current)
            waiting.append((current, True))
        reads = traversal.reads(node) if current is node else recompute_inputs(current)
        for value in reversed(list(reads)):
            producer = value.producer()
            if producer is not None and value in again and producer in sources and producer not in done:
                waiting.append((producer, False))
    return order


def predict_cut(parts: Cut, again: Collection[ir.Value]) -> Cut:
    """The cut as it will be, on the nodes of the graph as it is: for predictions, not to be run."""
    sources = set(parts.forward.nodes)
    nodes = tuple(node for node, _ in interleave_recomputed(parts.backward.nodes, again, sources))
    needed: set[ir.Value] = set()
    for node in nodes:
        if node in sources:
            needed.update(recompute_inputs(node))
        elif not reads_shape(definition_of(node)):
            needed.update(traversal.reads(node))
    needed.update(v for v in parts.backward.outputs if v is not None)
    made = (*parts.forward.inputs, *(v for n in parts.forward.nodes for v in n.outputs))
    kept = tuple(v for v in made if v in needed and v not in again and v not in parts.forward.host)
    cotangents = [v for v in parts.backward.inputs if v not in parts.kept]
    results = parts.forward.outputs[: parts.forward.num_user_outputs]
    forward = replace(parts.forward, outputs=(*results, *kept))
    return Cut(forward, replace(parts.backward, nodes=nodes, inputs=(*kept, *cotangents)), kept, parts.sizes)


def apply_choice(joint: Joint, choice: RecomputeChoice) -> Joint:
    """The joint graph with what is chosen computed again in backward. Changes the graph in place."""
    if not choice.values:
        return joint
    graph = joint.model.graph
    again = {v for n in joint.forward_nodes for v in n.outputs if v.name in choice.values}
    backward = [n for n in graph if n not in joint.forward_nodes]
    op = builder(graph)
    copies: dict[ir.Value, ir.Value] = {}
    for node, user in list(interleave_recomputed(backward, again, joint.forward_nodes)):
        if user is not None:
            copy = _copied(node, copies)
            replay = definition_of(node).replay
            if replay is None:
                graph.insert_before(user, copy)
                copies.update((v, c) for v, c in zip(node.outputs, copy.outputs, strict=True) if v in again)
                continue
            with nodes_before(op, user):
                replayed = replay.build(op, definition_of(copy).view(copy), *replay_inputs(node))
            copies[node.outputs[0]] = replayed
            made = replayed.producer()
            assert made is not None, "a replay computes something"
            made.metadata_props.update(copy.metadata_props)
            copy.resize_inputs(0)  # it was only what the replay was built from
        elif not reads_shape(definition_of(node)):
            for index, value in enumerate(node.inputs):
                if value in copies:
                    node.replace_input_with(index, copies[value])
    traversal.name_uniquely(graph)
    return joint


def _copied(node: ir.Node, copies: dict[ir.Value, ir.Value]) -> ir.Node:
    """The node, reading what is computed again before it."""
    copy = traversal.clone_node(node, dict(copies))
    copy.metadata_props[RECOMPUTED] = node.name or ""
    copy.name = f"{node.name}/again"
    for value in copy.outputs:
        value.name = f"{value.name}/again"
    return copy
