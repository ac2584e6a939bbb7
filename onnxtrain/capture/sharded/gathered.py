"""Capture a module whose parameters are sharded over data-parallel ranks: each is gathered where forward reads it.

    before   shard ─GatherParameters─WaitCollective─> parameter        at the beginning of forward
    after    ... shard ─GatherParameters─WaitCollective─> parameter    just before its first reader

Forward computes with whole parameters, on the data of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import onnx_ir as ir
import torch

from onnxtrain.capture.sharded.layout import REPLICATED, Group, Layout, dtensor_class, gathering_of, is_sharded
from onnxtrain.capture.sharded.parameters import LocalTensors, ShardedParameters
from onnxtrain.errors import CaptureError
from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.values import dtype_of
from onnxtrain.ops import definition_of
from onnxtrain.ops.collective.parameters import GATHER_PARAMETERS
from onnxtrain.ops.collective.transfers import OPERATORS, WAIT
from onnxtrain.ops.reshape.slicing import SLICE

_REMEDY = "call shard_parameters on the whole module, after its last change"


class GatheredParameters(LocalTensors):
    """The parameters that `shard_parameters` sharded, which a capture gathers from the ranks of one mesh.

    Raises:
        CaptureError: a parameter or buffer is laid out otherwise.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self._ranks = _ranks_of(module)

    @contextmanager
    def as_values(self) -> Iterator[None]:
        """Let forward see whole parameters, while the module holds the traced shards of an export."""
        traced: list[torch.Tensor] = [table[name] for table, name, _ in self._entries]
        gathered: dict[int, torch.Tensor] = {}
        for (table, name, tensor), shard in zip(self._entries, traced, strict=True):
            if id(shard) not in gathered:
                gathered[id(shard)] = self._gathered(shard, tensor.shape[0])
            table[name] = gathered[id(shard)]
        try:
            yield
        finally:
            for (table, name, _), shard in zip(self._entries, traced, strict=True):
                table[name] = shard

    def _gathered(self, shard: torch.Tensor, rows: int) -> torch.Tensor:
        """Gather a parameter of this many rows; the last shards may be smaller than the others, or empty."""
        group, replicas = self._ranks
        missing = -(-rows // group.size) - shard.shape[0]
        if missing:
            shard = torch.cat([shard, shard.new_zeros((missing, *shard.shape[1:]))])
        pending = torch.ops.onnxtrain.gather_parameter(
            shard, group.size, group.rank, group.name, replicas.size, replicas.name
        )
        padded: torch.Tensor = OPERATORS.wait_collective(pending, shard)
        return padded if padded.shape[0] == rows else padded.narrow(0, 0, rows)


def sharded_parameters(module: torch.nn.Module) -> GatheredParameters | ShardedParameters:
    """Return what the DTensor parameters of a module are while it is captured.

    Raises:
        CaptureError: one has a layout that a graph does not support.
    """
    return ShardedParameters(module) if gathering_of(module) is None else GatheredParameters(module)


class _Ranks(NamedTuple):
    """The ranks that hold parameters: each rank of `shards` has another part, each of `replicas` the same part.

    Without replicas, `replicas` is a group of size 1 without a name.
    """

    shards: Group
    replicas: Group


def _ranks_of(module: torch.nn.Module) -> _Ranks:
    """Return the ranks over which all parameters of a module are sharded.

    Raises:
        CaptureError: they are not all sharded, or not along their first dimension over one mesh.
    """
    groups: dict[tuple[str, str], _Ranks] = {}
    for name, tensor in module.named_parameters():
        if is_sharded(tensor):
            ranks = _ranks_of_mesh(tensor.device_mesh)  # type: ignore[attr-defined]  # of a DTensor
            groups[ranks.shards.name, ranks.replicas.name] = ranks
            placements = tensor.placements  # type: ignore[attr-defined]
            layouts = [Layout.from_placement(placement, tensor.dim()) for placement in placements]
            if layouts != [*[REPLICATED] * (len(layouts) - 1), Layout("sharded", 0)]:
                got = ", ".join(map(str, layouts))
                expected = ", ".join([*["Replicate()"] * (len(layouts) - 1), "Shard(0)"])
                raise _refused("a parameter is not sharded along its first dimension", name, expected, got)
        elif tensor.requires_grad:
            problem = "a parameter is not sharded: the gradients of the ranks would not be averaged"
            raise _refused(problem, name, "a DTensor, or requires_grad=False", type(tensor).__name__)
    if len(groups) != 1:
        problem = "the parameters are not sharded over one group of ranks"
        raise _refused(problem, type(module).__name__, "DTensors on one mesh", f"{len(groups)} meshes")
    for name, buffer in module.named_buffers():
        if is_sharded(buffer):
            raise _refused("a buffer is sharded", name, "a torch.Tensor", dtensor_class().__name__)
    return next(iter(groups.values()))


def _ranks_of_mesh(mesh: Any) -> _Ranks:
    """Return the ranks of a mesh of one dimension, or of two: replicas, and shards.

    Raises:
        CaptureError: the mesh has more dimensions, or this process is not in it.
    """
    if mesh.ndim != 2 or mesh.get_coordinate() is None:
        return _Ranks(Group.from_mesh(mesh), Group(mesh, "", 1, 0))
    replicas, shards = (
        Group(mesh, mesh.get_group(dim).group_name, mesh.size(dim), mesh.get_local_rank(dim)) for dim in range(2)
    )
    return _Ranks(shards, replicas)


def _refused(problem: str, where: str, expected: str, got: str) -> CaptureError:
    return CaptureError(f"after shard_parameters, {problem}", where=where, expected=expected, got=got, todo=_REMEDY)


# The graph


def gather_before_readers(graph: ir.Graph, module: torch.nn.Module) -> None:
    """Move each gathered parameter before its first reader, number it, and remove those that forward does not read.

    Those that forward reads last are kept for backward, as many bytes of them as `shard_parameters` was told.
    """
    gathering = gathering_of(module)
    if gathering is None:
        return
    positions = {node: position for position, node in enumerate(graph)}
    chains = [_chain(node) for node in graph if definition_of(node) is GATHER_PARAMETERS]
    reads: dict[ir.Node, tuple[int, int]] = {}
    for chain in chains:
        value = chain[-1].outputs[0]
        readers = [positions[user] for user in traversal.users(value)]
        readers += [len(positions)] if value.is_graph_output() else []
        if not readers:
            for node in reversed(chain):
                traversal.detach(node)
                graph.remove(node)
            continue
        reads[_gather_of(chain)] = min(readers), max(readers)
    nodes = list(positions)
    used = [chain for chain in chains if _gather_of(chain) in reads]
    kept = _first_of(sorted(reads, key=lambda gather: -reads[gather][1]), gathering.least_bytes)
    for order, chain in enumerate(sorted(used, key=lambda chain: reads[_gather_of(chain)][0])):
        gather = _gather_of(chain)
        gather.attributes["orders"] = ir.AttrInt64s("orders", [order])
        gather.attributes["keep"] = ir.AttrInt64("keep", int(gather in kept))
        for name in ("bucket_bytes", "in_flight_bytes"):
            gather.attributes[name] = ir.AttrInt64(name, getattr(gathering, name))
        first = reads[gather][0]
        graph.remove(chain)
        graph.extend(chain) if first == len(nodes) else graph.insert_before(nodes[first], chain)


def _first_of(gathers: Sequence[ir.Node], least_bytes: int) -> set[ir.Node]:
    """Return the first of these nodes, whose results have this many bytes together."""
    chosen: set[ir.Node] = set()
    total = 0.0
    for gather in gathers:
        if total >= least_bytes:
            break
        chosen.add(gather)
        total += math.prod(map(int, sizes.dims_of(gather.outputs[0]))) * dtype_of(gather.outputs[0]).itemsize
    return chosen


def _chain(gather: ir.Node) -> list[ir.Node]:
    """Return the nodes that gather a parameter: those that pad its shard, the collective, the wait, and the slice."""
    before: list[ir.Node] = []
    pending: Sequence[ir.Value | None] = gather.inputs
    while pending:
        producers = dict.fromkeys(p for v in pending if v is not None and (p := v.producer()) is not None)
        before = [*producers, *before]
        pending = [v for p in producers for v in p.inputs]
    wait = next(user for user in traversal.users(gather.outputs[0]) if definition_of(user) is WAIT)
    users = traversal.users(wait.outputs[0])
    rest = users if len(users) == 1 and definition_of(users[0]) is SLICE else []
    return [*before, gather, wait, *rest]


def _gather_of(chain: Sequence[ir.Node]) -> ir.Node:
    return next(node for node in chain if definition_of(node) is GATHER_PARAMETERS)
