"""Recompute as ONNX Runtime Training's users steer it: by patterns of subgraphs, and layer by layer.

    kept ◀─ Add ◀─ Mul ◀─ (not cheap, or kept itself)        the pattern "Mul+Add+"

A kept activation is a candidate where cheap nodes compute it from what is kept anyway; or, "with compromise", from
something smaller that is then kept in its place. "Mul+Add+:1:-1" computes all such activations again, "Mul+Add+:1:3"
the first three. Which nodes are cheap is asked of their definitions.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.ops import definition_of
from onnxtrain.options import MemoryOptLevel, Options, SubgraphConfig
from onnxtrain.plan.budget import node_seconds
from onnxtrain.plan.cut import Cut
from onnxtrain.plan.lifetimes import timeline
from onnxtrain.plan.recompute import RecomputeChoice, predict_cut, recomputable_nodes, recompute_inputs, replay_inputs
from onnxtrain.plan.storage import Storages
from onnxtrain.report import SubgraphReport

_LOG = logging.getLogger(__name__)
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


def find_subgraphs(
    parts: Cut, storages: Storages, changed: Collection[ir.Value] = (), with_products: bool = False
) -> tuple[Subgraph, ...]:
    """All subgraphs, by the bytes that they save.

    Args:
        parts: the cut in which everything is kept.
        storages: the sizes for which bytes are counted.
        changed: inputs of the graph whose contents are others when backward runs.
        with_products: whether matrix products may be computed again too.
    """
    usable = {n for n in _usable(parts, storages, changed) if with_products or _is_cheap(n, storages)}
    position = {node: index for index, node in enumerate(parts.forward.nodes)}
    found: dict[str, list[Candidate]] = {}
    for value in parts.kept:
        nodes = _chain(value, parts, usable)
        if not nodes:
            continue
        again = frozenset(v for n in nodes for v in n.outputs if v not in replay_inputs(n))
        candidate = _candidate(value, again, parts, storages)
        if candidate.saved > 0:
            pattern = "".join(f"{node.op_type}+" for node in sorted(nodes, key=position.__getitem__))
            found.setdefault(pattern, []).append(candidate)
    subgraphs = (Subgraph(pattern, tuple(candidates)) for pattern, candidates in found.items())
    return tuple(sorted(subgraphs, key=lambda subgraph: -subgraph.saved))


def _usable(parts: Cut, storages: Storages, changed: Collection[ir.Value]) -> set[ir.Node]:
    """The nodes of forward that give the same results in backward."""
    return recomputable_nodes([n for n in parts.forward.nodes if not storages.host.issuperset(n.outputs)], changed)


def _is_cheap(node: ir.Node, storages: Storages) -> bool:
    definition = definition_of(node)
    elements = sum(storages.bytes_of(v) / v.dtype.itemsize for v in node.outputs if v.dtype is not None)
    return storages.number(definition.flops(definition.view(node))) <= _CHEAP * max(elements, 1)


def _chain(value: ir.Value, parts: Cut, usable: set[ir.Node]) -> set[ir.Node]:
    """The nodes that compute a kept value from what is kept, or from what no usable node makes."""
    kept = set(parts.kept)
    producer = value.producer()
    if producer not in usable or value in replay_inputs(producer):
        return set()
    nodes, waiting = {producer}, [producer]
    while waiting:
        for read in recompute_inputs(waiting.pop()):
            source = read.producer()
            if source in usable and source not in nodes and read not in kept and read not in parts.forward.host:
                nodes.add(source)
                waiting.append(source)
    return nodes if len(nodes) <= _MOST_NODES else set()


def _candidate(value: ir.Value, again: frozenset[ir.Value], parts: Cut, storages: Storages) -> Candidate:
    before, after = _kept(parts, storages), _kept(predict_cut(parts, again), storages)
    saved = sum(before.values()) - sum(after.values())
    return Candidate(value, again, saved, compromise=not after.keys() <= before.keys())


def _kept(parts: Cut, storages: Storages) -> dict[ir.Value, int]:
    """The memory that is kept: what a kept value is a view of, with its bytes. Inputs are there anyway."""
    roots = map(storages.root, parts.kept)
    return {root: storages.bytes_of(root) for root in roots if root.producer() is not None}


# What to compute again


def choose_by_options(
    parts: Cut, storages: Storages, options: Options, changed: Collection[ir.Value]
) -> tuple[RecomputeChoice, list[SubgraphReport]]:
    """What memory_opt_level and memory_opt_config compute again, and all that the latter can name.

    The summary is logged at INFO, as ONNX Runtime Training did. Takes what `find_subgraphs` does, and the options.
    """
    subgraphs = find_subgraphs(parts, storages, changed, options.memory_opt_probe_recompute_level == "1")
    if options.memory_opt_level is MemoryOptLevel.USER_SPECIFIED:
        again = _by_patterns(subgraphs, options.memory_opt_config)
    else:
        again = _by_layers(parts, _usable(parts, storages, changed))
        if options.memory_opt_level is MemoryOptLevel.TRANSFORMER_LAYERWISE_RECOMPUTE_WITH_COMPROMISE:
            again.update(v for s in subgraphs for c in s.candidates if _is_outside(c) for v in c.again)
    rows = subgraph_reports(subgraphs, again)
    _LOG.info("%s", _summary(options, rows))
    planned, own = predict_cut(parts, again), set(parts.forward.nodes)
    seconds = sum(node_seconds(n, storages) for n in planned.backward.nodes if n in own)
    return RecomputeChoice(frozenset(str(v.name) for v in again), seconds, timeline(planned, storages).peak), rows


def subgraph_reports(subgraphs: Sequence[Subgraph], again: Collection[ir.Value]) -> list[SubgraphReport]:
    """One row for each pattern."""
    return [
        SubgraphReport(
            pattern=subgraph.pattern,
            frequency=len(subgraph.candidates),
            saved_bytes=subgraph.saved,
            recomputed=sum(candidate.value in again for candidate in subgraph.candidates),
            config=f"{subgraph.pattern}:{2 if any(c.compromise for c in subgraph.candidates) else 1}:-1",
        )
        for subgraph in subgraphs
    ]


def _by_patterns(subgraphs: Sequence[Subgraph], config: Iterable[SubgraphConfig]) -> set[ir.Value]:
    known = {subgraph.pattern: subgraph for subgraph in subgraphs}
    again: set[ir.Value] = set()
    for entry in config:
        subgraph = known.get(entry.pattern)
        if subgraph is None:
            near = difflib.get_close_matches(entry.pattern, known, 1)
            meant = f": is {near[0]} meant?" if near else ""
            _LOG.warning("memory_opt_config: no kept activation is computed by %s%s", entry.pattern, meant)
            continue
        fitting = [c for c in subgraph.candidates if entry.kind == 2 or not c.compromise] if entry.kind else []
        for candidate in fitting if entry.count < 0 else fitting[: entry.count]:
            again |= candidate.again
    return again


def _by_layers(parts: Cut, usable: Collection[ir.Node]) -> set[ir.Value]:
    """All that a layer makes for itself; what other modules read of it, and what is drawn, is kept."""
    own = set(parts.forward.nodes)
    results = set(parts.forward.outputs[: parts.forward.num_user_outputs])
    again: set[ir.Value] = set()
    for node in usable:
        layer = _layer_of(node)
        for value in node.outputs:
            readers = (reader for reader, _ in value.uses() if reader in own)
            inside = layer is not None and all(_layer_of(reader) == layer for reader in readers)
            if inside and value not in results and value not in replay_inputs(node):
                again.add(value)
    if not again:
        _LOG.warning("memory_opt_level: there is no layer: no submodule with a number in its name can run again")
    return again


def _is_outside(candidate: Candidate) -> bool:
    """Whether no layer makes it: what a layer hands to the next is kept, or all layers would be computed at once."""
    producers = (v.producer() for v in candidate.again)
    return all(_layer_of(node) is None for node in producers if node is not None)


def _layer_of(node: ir.Node) -> str | None:
    """The outermost numbered submodule that a node belongs to, as `encoder.layer.3`; None outside of any."""
    found = re.match(r"(?:.*?\.)?\d+(?=\.|$)", node.metadata_props.get("module", ""))
    return found[0] if found else None


def _summary(options: Options, rows: Sequence[SubgraphReport]) -> str:
    table = [("pattern", "freq", "saves MiB", "status", "memory_opt_config")]
    table += [(r.pattern, str(r.frequency), f"{r.saved_bytes / 2**20:.1f}", r.status, r.config) for r in rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    config = ",".join(map(str, options.memory_opt_config)) or "none"
    head = f"memory optimization: level {int(options.memory_opt_level)}, config {config}"
    return "\n".join([head, *lines])
