"""Recompute as ONNX Runtime Training's users steer it: by patterns of subgraphs, and layer by layer.

    kept ◀─ Add ◀─ Mul ◀─ (not cheap, or kept itself)        the pattern "Mul+Add+"

A kept activation is a candidate where cheap nodes compute it from what is kept anyway; or, "with compromise", from
something smaller that is then kept in its place. `"Mul+Add+:1:-1"` computes all such activations again, `"Mul+Add+:1:3"`
the first three. Which nodes are cheap is asked of their definitions.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.ops import definition_of
from onnxtrain.options import MemoryOptLevel, SubgraphConfig
from onnxtrain.plan.cut import Cut
from onnxtrain.plan.recompute import drawn, reads_again, recomputable, with_recomputed
from onnxtrain.plan.storage import Storages

_CHEAP = 64  # operations per element that is written: all that is elementwise, norms and softmax, and no product
_MOST_NODES = 50  # of a subgraph, as in the predecessor


@dataclass(frozen=True)
class Candidate:
    """A kept activation that can be computed again.

    Attributes:
        value: the activation.
        again: the values that are computed again, itself among them.
        saved: the bytes that are kept less.
        compromise: whether something else is kept in its place.
    """

    value: ir.Value
    again: frozenset[ir.Value]
    saved: int
    compromise: bool


@dataclass(frozen=True)
class Subgraph:
    """Candidates of one pattern, in the order of forward.

    Attributes:
        pattern: the operators in order, each with "+" behind it.
        candidates: one for each time that it occurs.
    """

    pattern: str
    candidates: tuple[Candidate, ...]

    @property
    def saved(self) -> int:
        """The bytes that all of them together save."""
        return sum(candidate.saved for candidate in self.candidates)


def find_subgraphs(parts: Cut, storages: Storages, with_products: bool = False) -> tuple[Subgraph, ...]:
    """All subgraphs, by the bytes that they save.

    Args:
        parts: the cut in which everything is kept.
        storages: the sizes for which bytes are counted.
        with_products: whether matrix products may be computed again too.
    """
    usable = {n for n in parts.forward.nodes if recomputable(n) and (with_products or _is_cheap(n, storages))}
    position = {node: index for index, node in enumerate(parts.forward.nodes)}
    found: dict[str, list[Candidate]] = {}
    for value in parts.kept:
        nodes = _chain(value, parts, usable)
        if not nodes:
            continue
        again = frozenset(v for n in nodes for v in n.outputs if v not in drawn(n))
        candidate = _candidate(value, again, parts, storages)
        if candidate.saved > 0:
            pattern = "".join(f"{node.op_type}+" for node in sorted(nodes, key=position.__getitem__))
            found.setdefault(pattern, []).append(candidate)
    subgraphs = (Subgraph(pattern, tuple(candidates)) for pattern, candidates in found.items())
    return tuple(sorted(subgraphs, key=lambda subgraph: -subgraph.saved))


def _is_cheap(node: ir.Node, storages: Storages) -> bool:
    if storages.host.issuperset(node.outputs):
        return False
    definition = definition_of(node)
    elements = sum(storages.bytes_of(v) / v.dtype.itemsize for v in node.outputs if v.dtype is not None)
    return storages.number(definition.flops(definition.view(node))) <= _CHEAP * max(elements, 1)


def _chain(value: ir.Value, parts: Cut, usable: set[ir.Node]) -> set[ir.Node]:
    """The nodes that compute a kept value from what is kept, or from what no usable node makes."""
    kept = set(parts.kept)
    producer = value.producer()
    if producer not in usable or value in drawn(producer):
        return set()
    nodes, waiting = {producer}, [producer]
    while waiting:
        for read in reads_again(waiting.pop()):
            source = read.producer()
            if source in usable and source not in nodes and read not in kept and read not in parts.forward.host:
                nodes.add(source)
                waiting.append(source)
    return nodes if len(nodes) <= _MOST_NODES else set()


def _candidate(value: ir.Value, again: frozenset[ir.Value], parts: Cut, storages: Storages) -> Candidate:
    before, after = _kept(parts, storages), _kept(with_recomputed(parts, again), storages)
    saved = sum(before.values()) - sum(after.values())
    return Candidate(value, again, saved, compromise=not after.keys() <= before.keys())


def _kept(parts: Cut, storages: Storages) -> dict[ir.Value, int]:
    """The memory that is kept: what a kept value is a view of, with its bytes. Inputs are there anyway."""
    roots = {}
    for value in parts.kept:
        while (source := storages.source(value)) is not None:
            value = source
        if value.producer() is not None:
            roots[value] = storages.bytes_of(value)
    return roots


# What to compute again


def by_patterns(subgraphs: Sequence[Subgraph], config: Iterable[SubgraphConfig], warn: Callable[[str], None]) -> set[ir.Value]:
    """What the user's configuration computes again.

    Args:
        subgraphs: those that there are.
        config: what to do with each pattern.
        warn: is told of patterns that there are not.
    """
    known = {subgraph.pattern: subgraph for subgraph in subgraphs}
    again: set[ir.Value] = set()
    for entry in config:
        subgraph = known.get(entry.pattern)
        if subgraph is None:
            near = difflib.get_close_matches(entry.pattern, known, 1)
            warn(f"no activation is computed by {entry.pattern}" + (f": is {near[0]} meant?" if near else ""))
            continue
        fitting = [c for c in subgraph.candidates if entry.kind == 2 or not c.compromise] if entry.kind else []
        for candidate in fitting if entry.count < 0 else fitting[: entry.count]:
            again |= candidate.again
    return again


def by_layers(parts: Cut, level: MemoryOptLevel, subgraphs: Sequence[Subgraph]) -> set[ir.Value]:
    """What layer-wise recompute computes again: all that a layer makes for itself.

    A layer is a submodule with a number in its name; what other modules read of it is kept.

    Args:
        parts: the cut in which everything is kept.
        level: with compromise, all `subgraphs` outside the layers are computed again too.
        subgraphs: those that there are.
    """
    again: set[ir.Value] = set()
    own = set(parts.forward.nodes)
    for node in parts.forward.nodes:
        layer = layer_of(node)
        if layer is None or not recomputable(node):
            continue
        for value in node.outputs:
            readers = [reader for reader, _ in value.uses() if reader in own]
            if value not in drawn(node) and all(layer_of(reader) == layer for reader in readers):
                again.add(value)
    again -= set(parts.forward.outputs[: parts.forward.leaving]) | set(parts.forward.host)
    if level is MemoryOptLevel.TRANSFORMER_LAYERWISE_RECOMPUTE_WITH_COMPROMISE:
        again.update(v for subgraph in subgraphs for candidate in subgraph.candidates for v in candidate.again)
    return again


def layer_of(node: ir.Node) -> str | None:
    """The name of the numbered submodule that a node belongs to, as `encoder.layer.3`; None outside of any."""
    found = re.match(r"(?:.*?\.)?\d+(?=\.|$)", node.metadata_props.get("module", ""))
    return found[0] if found else None


# The summary


def summary(subgraphs: Sequence[Subgraph], again: set[ir.Value], bytes_text: Callable[[int], str]) -> list[Mapping[str, str]]:
    """The rows of the table of subgraphs: pattern, frequency, bytes saved, what is done, and how to ask for it."""
    rows = []
    for subgraph in subgraphs:
        done = sum(candidate.again <= again for candidate in subgraph.candidates)
        kind = 2 if any(candidate.compromise for candidate in subgraph.candidates) else 1
        rows.append(
            {
                "pattern": subgraph.pattern,
                "frequency": str(len(subgraph.candidates)),
                "saves": bytes_text(subgraph.saved),
                "status": f"{done} of {len(subgraph.candidates)} computed again" if done else "kept",
                "config": f"{subgraph.pattern}:{kind}:-1",
            }
        )
    return rows
