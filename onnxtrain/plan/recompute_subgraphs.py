"""Recompute by subgraph patterns, or layer by layer, as ONNX Runtime Training did: the option `recompute`.

    kept ◀─ Add ◀─ Mul ◀─ (not cheap, or kept)        the pattern "Mul+Add+"

A kept activation is a candidate if cheap nodes compute it from values that are kept anyway or, "with compromise", from
smaller values that are then kept in its place. "Mul+Add+:1:-1" recomputes all such activations, "Mul+Add+:1:3" the
first three. Definitions say which nodes are cheap.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxtrain.log import LOG, warn
from onnxtrain.ops.interfaces.cost import flops_of
from onnxtrain.options import Options, SubgraphConfig
from onnxtrain.options.kinds import RECOMPUTE
from onnxtrain.plan.budget import node_seconds
from onnxtrain.plan.cut import Cut
from onnxtrain.plan.lifetimes import timeline
from onnxtrain.plan.recompute import RecomputeChoice, predict_cut, recomputable_nodes, recompute_inputs, replay_inputs
from onnxtrain.plan.storage import Storages
from onnxtrain.report import SubgraphReport

_CHEAP_FLOPS = 64  # per element written: covers elementwise ops, norms and softmax; no GEMM
_MAX_NODES = 50  # of a subgraph, as in ONNX Runtime Training


@dataclass(frozen=True)
class Candidate:
    """A kept activation that can be recomputed.

    Attributes:
        value: the activation.
        recomputed: the values to recompute for it, itself among them.
        saved: the bytes that recomputing saves.
        compromise: whether another value is kept in its place.
    """

    value: ir.Value
    recomputed: frozenset[ir.Value]
    saved: int
    compromise: bool


@dataclass(frozen=True)
class Subgraph:
    """The candidates of one pattern, in execution order.

    Attributes:
        pattern: the op types in order, each followed by "+".
        candidates: one per occurrence.
        has_gemms: whether GEMMs are recomputed too.
    """

    pattern: str
    candidates: tuple[Candidate, ...]
    has_gemms: bool = False

    @property
    def saved(self) -> int:
        """The bytes saved by recomputing all candidates."""
        return sum(candidate.saved for candidate in self.candidates)


def find_subgraphs(parts: Cut, storages: Storages, mutated: Collection[ir.Value] = ()) -> tuple[Subgraph, ...]:
    """Find all subgraphs: those of cheap nodes first, then those with GEMMs, each ordered by the bytes that they save.

    Args:
        parts: the cut that keeps everything.
        storages: at the sizes for which bytes are counted.
        mutated: values that recomputed nodes may not read, such as inputs of the graph that forward mutates.
    """
    usable = _usable(parts, storages, mutated)
    cheap = _subgraphs_of({node for node in usable if _is_cheap(node, storages)}, parts, storages)
    patterns = {subgraph.pattern for subgraph in cheap}
    others = (s for s in _subgraphs_of(usable, parts, storages) if s.pattern not in patterns)
    return (*cheap, *(replace(subgraph, has_gemms=True) for subgraph in others))


def _subgraphs_of(usable: set[ir.Node], parts: Cut, storages: Storages) -> tuple[Subgraph, ...]:
    position = {node: index for index, node in enumerate(parts.forward.nodes)}
    candidates: dict[str, list[Candidate]] = {}
    for value in parts.kept:
        nodes = _chain(value, parts, usable)
        if not nodes:
            continue
        recomputed = frozenset(v for n in nodes for v in n.outputs if v not in replay_inputs(n))
        candidate = _candidate(value, recomputed, parts, storages)
        if candidate.saved > 0:
            pattern = "".join(f"{node.op_type}+" for node in sorted(nodes, key=position.__getitem__))
            candidates.setdefault(pattern, []).append(candidate)
    subgraphs = (Subgraph(pattern, tuple(members)) for pattern, members in candidates.items())
    return tuple(sorted(subgraphs, key=lambda subgraph: -subgraph.saved))


def _usable(parts: Cut, storages: Storages, mutated: Collection[ir.Value]) -> set[ir.Node]:
    """Return the nodes of forward that give the same values in backward."""
    return recomputable_nodes([n for n in parts.forward.nodes if not storages.host.issuperset(n.outputs)], mutated)


def _is_cheap(node: ir.Node, storages: Storages) -> bool:
    elements = sum(storages.bytes_of(v) / v.dtype.itemsize for v in node.outputs if v.dtype is not None)
    return storages.number(flops_of(node)) <= _CHEAP_FLOPS * max(elements, 1)


def _chain(value: ir.Value, parts: Cut, usable: set[ir.Node]) -> set[ir.Node]:
    """Return the nodes that compute a kept value from other kept values, or from outputs of unusable nodes."""
    kept = set(parts.kept)
    producer = value.producer()
    if producer not in usable or value in replay_inputs(producer):
        return set()
    nodes, pending = {producer}, [producer]
    while pending:
        for read in recompute_inputs(pending.pop()):
            source = read.producer()
            if source in usable and source not in nodes and read not in kept and read not in parts.forward.host:
                nodes.add(source)
                pending.append(source)
    return nodes if len(nodes) <= _MAX_NODES else set()


def _candidate(value: ir.Value, recomputed: frozenset[ir.Value], parts: Cut, storages: Storages) -> Candidate:
    before, after = _kept(parts, storages), _kept(predict_cut(parts, recomputed), storages)
    saved = sum(before.values()) - sum(after.values())
    return Candidate(value, recomputed, saved, compromise=not after.keys() <= before.keys())


def _kept(parts: Cut, storages: Storages) -> dict[ir.Value, int]:
    """Return the roots of the kept values, with their bytes. Inputs are allocated anyway and do not count."""
    roots = map(storages.root, parts.kept)
    return {root: storages.bytes_of(root) for root in roots if root.producer() is not None}


# The choice


def choose_by_options(
    parts: Cut,
    storages: Storages,
    options: Options,
    mutated: Collection[ir.Value],
    checkpointed: Collection[str],
    by_default: Collection[str],
) -> tuple[RecomputeChoice, list[SubgraphReport]]:
    """Return the values that the option `recompute` chooses, and the subgraphs that it can name.

    Layers never raise the peak over that of the default values: where those of the layers alone would, the default ones
    are recomputed in addition, or in their place. The summary is logged at INFO, as ONNX Runtime Training did.

    Args:
        parts: see `find_subgraphs`, as for `storages` and `mutated`.
        storages: at the sizes of the first call.
        mutated: values that recomputed nodes may not read, such as inputs of the graph that forward mutates.
        options: whose option `recompute` names patterns or layers.
        checkpointed: the names of the values in the user's checkpoints, which are recomputed in any case.
        by_default: the names of the values that are recomputed without the option.
    """
    subgraphs = find_subgraphs(parts, storages, mutated)
    always, default = (_named(parts, names) for names in (checkpointed, by_default))
    if not isinstance(options.recompute, str):
        recomputed = _by_patterns(subgraphs, options.recompute) | always
    else:
        layers = _by_layers(parts, _usable(parts, storages, mutated)) | always
        if options.recompute == "all":
            layers.update(v for c in _outside_layers(subgraphs) for v in c.recomputed)
        choices = (layers, layers | default, default)
        recomputed = min(choices, key=lambda choice: timeline(predict_cut(parts, choice), storages).peak)
        if recomputed != layers:
            relation = "in addition" if layers <= recomputed else "in their place"
            LOG.info(
                "recompute=%s: the values of layers alone would raise the peak; the default ones are recomputed %s",
                options.recompute, relation,
            )  # fmt: skip
    rows = subgraph_reports(subgraphs, recomputed)
    LOG.info("%s", _summary(options, rows))
    planned, own = predict_cut(parts, recomputed), set(parts.forward.nodes)
    seconds = sum(node_seconds(n, storages) for n in planned.backward.nodes if n in own)
    return RecomputeChoice(frozenset(str(v.name) for v in recomputed), seconds, timeline(planned, storages).peak), rows


def _named(parts: Cut, names: Collection[str]) -> set[ir.Value]:
    return {v for node in parts.forward.nodes for v in node.outputs if v.name in names}


def subgraph_reports(subgraphs: Sequence[Subgraph], recomputed: Collection[ir.Value]) -> list[SubgraphReport]:
    """Report each pattern on one row."""
    return [
        SubgraphReport(
            pattern=subgraph.pattern,
            frequency=len(subgraph.candidates),
            saved_bytes=subgraph.saved,
            recomputed=sum(candidate.value in recomputed for candidate in subgraph.candidates),
            config=f"{subgraph.pattern}:{2 if any(c.compromise for c in subgraph.candidates) else 1}:-1",
        )
        for subgraph in subgraphs
    ]


def _by_patterns(subgraphs: Sequence[Subgraph], config: Iterable[SubgraphConfig]) -> set[ir.Value]:
    by_pattern = {subgraph.pattern: subgraph for subgraph in subgraphs}
    recomputed: set[ir.Value] = set()
    for entry in config:
        subgraph = by_pattern.get(entry.pattern)
        if subgraph is None:
            near = difflib.get_close_matches(entry.pattern, by_pattern, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            warn(f"recompute: no kept activation matches the pattern {entry.pattern}{hint}")
            continue
        fitting = [c for c in subgraph.candidates if entry.kind == 2 or not c.compromise] if entry.kind else []
        for candidate in fitting if entry.count < 0 else fitting[: entry.count]:
            recomputed |= candidate.recomputed
    return recomputed


def _by_layers(parts: Cut, usable: Collection[ir.Node]) -> set[ir.Value]:
    """Return the values that only their own layer reads. Values read by other modules, and random states, are kept."""
    own = set(parts.forward.nodes)
    results = set(parts.forward.outputs[: parts.forward.num_user_outputs])
    recomputed: set[ir.Value] = set()
    for node in usable:
        layer = _layer_of(node)
        for value in node.outputs:
            readers = (reader for reader, _ in value.uses() if reader in own)
            inside = layer is not None and all(_layer_of(reader) == layer for reader in readers)
            if inside and value not in results and value not in replay_inputs(node):
                recomputed.add(value)
    if not recomputed:
        warn("recompute has no effect: no layer (a submodule with a number in its name) has values that it alone reads")
    return recomputed


def _outside_layers(subgraphs: Iterable[Subgraph]) -> Iterator[Candidate]:
    """The cheap candidates that no layer computes. A layer's output stays kept: else all layers would be recomputed."""
    for candidate in (c for subgraph in subgraphs if not subgraph.has_gemms for c in subgraph.candidates):
        producers = (v.producer() for v in candidate.recomputed)
        if all(_layer_of(node) is None for node in producers if node is not None):
            yield candidate


def _layer_of(node: ir.Node) -> str | None:
    """Return the outermost numbered submodule of a node, such as `encoder.layer.3`; None if it has none."""
    match = re.match(r"(?:.*?\.)??\d+(?=\.|$)", node.metadata_props.get("module", ""))
    return match[0] if match else None


def _summary(options: Options, rows: Sequence[SubgraphReport]) -> str:
    table = [("pattern", "freq", "saves MiB", "status", "recompute")]
    table += [(r.pattern, str(r.frequency), f"{r.saved_bytes / 2**20:.1f}", r.status, r.config) for r in rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([f"memory optimization: recompute={RECOMPUTE.text(options.recompute)}", *lines])
