"""Predict the memory that a step holds at each of its nodes, and its peak.

    forward  ├ node ├ node ├ … ┤ kept, results ├ backward: node ├ node ├ … ┤
             └── allocation: first node ───────────── last node ──┘

Only the allocations of the two programs count: parameters, inputs and accumulated gradients exist before. The caller
holds a result until backward ends. A gradient is held until autograd takes it: all at the end of backward, or each
group at the end of its stage (`backward_stages`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import onnx_ir as ir

from onnxtrain.plan.backward_stages import Groups, stage_ends
from onnxtrain.plan.cut import Cut, Part
from onnxtrain.plan.in_place import in_place_inputs, last_uses
from onnxtrain.plan.storage import Storages


class Kind(enum.Enum):
    """The reason why memory is held."""

    KEPT = "kept"  # backward reads it
    RESULT = "result"
    GRADIENT = "gradient"
    TEMPORARY = "temporary"


@dataclass(frozen=True)
class Allocation:
    """An allocation and its lifetime.

    Attributes:
        value: the value that it was allocated for.
        nbytes: its size in bytes.
        first, last: the positions, among the nodes of forward and then backward, of the first and the last node
            during which it is held.
        kind: why it is held.
    """

    value: ir.Value
    nbytes: int
    first: int
    last: int
    kind: Kind


@dataclass(frozen=True)
class Timeline:
    """The predicted memory of a step.

    Attributes:
        nodes: of forward, then of backward.
        forward: how many of them are forward's.
        allocations: ordered by their first node.
        workspace: for each node, the bytes of its kernel's workspace.
    """

    nodes: tuple[ir.Node, ...]
    forward: int
    allocations: tuple[Allocation, ...]
    workspace: tuple[int, ...]

    def live_bytes(self) -> list[int]:
        """Return the bytes held during each node, in execution order."""
        change = [0] * (len(self.nodes) + 1)
        for allocation in self.allocations:
            change[allocation.first] += allocation.nbytes
            change[min(allocation.last, len(self.nodes) - 1) + 1] -= allocation.nbytes
        return [total + extra for total, extra in zip(accumulate(change), self.workspace, strict=False)]

    @property
    def peak(self) -> int:
        """The most bytes held at any time."""
        return max(self.live_bytes(), default=0)

    @property
    def kept(self) -> int:
        """The bytes held when backward begins: values kept for it, and results."""
        return sum(a.nbytes for a in self.allocations if a.first < self.forward <= a.last)


def timeline(parts: Cut, storages: Storages, groups: Groups = ()) -> Timeline:
    """Predict the memory of forward and backward at the sizes of `storages`.

    Args:
        parts: forward and backward.
        storages: of all their nodes.
        groups: the gradients released together while backward runs; (): all at its end.
    """
    forward, backward = parts.forward, parts.backward
    bounds = stage_ends(parts, groups) if groups else [len(backward.nodes)]
    first = _Program(forward, storages, 0, {}, [len(forward.nodes)])
    # Results stay until backward ends: the caller holds them.
    end = len(forward.nodes) + len(backward.nodes)
    crossing = {
        v: lifetime for v in (*parts.kept, *forward.outputs) if v is not None and (lifetime := first.lifetime(v))
    }
    for value in forward.outputs:
        if value is not None and value in crossing:
            crossing[value].last = len(forward.nodes)
    saved = {v: crossing[v] for v in parts.kept if v in crossing}
    second = _Program(backward, storages, len(forward.nodes), saved, bounds)
    for value in forward.outputs[: forward.num_user_outputs]:
        if value is not None and (lifetime := first.result(value, len(forward.nodes))):
            lifetime.last, lifetime.kind = end, Kind.RESULT
    for group, bound in zip(groups or (range(len(backward.outputs)),), bounds, strict=True):
        stage_end = len(forward.nodes) + bound
        for value in (backward.outputs[index] for index in group):
            if value is not None and (lifetime := second.result(value, stage_end)):
                lifetime.last = max(lifetime.last, end if stage_end == end else stage_end - 1)
                lifetime.kind = Kind.GRADIENT if lifetime.kind is Kind.TEMPORARY else lifetime.kind
    nodes = (*forward.nodes, *backward.nodes)
    allocated = sorted((*first.allocated, *second.allocated), key=lambda lifetime: lifetime.first)
    return Timeline(
        nodes, len(forward.nodes), tuple(map(_allocation, allocated)), tuple(map(storages.workspace, nodes))
    )


class _Lifetime:
    """An allocation whose lifetime is still growing."""

    __slots__ = ("first", "kind", "last", "nbytes", "value")

    def __init__(self, value: ir.Value, nbytes: int, first: int) -> None:
        self.value, self.nbytes, self.first, self.last = value, nbytes, first, first
        self.kind = Kind.TEMPORARY


def _allocation(lifetime: _Lifetime) -> Allocation:
    return Allocation(lifetime.value, lifetime.nbytes, lifetime.first, lifetime.last, lifetime.kind)


class _Program:
    """The allocations of one part, from a walk over its nodes.

    Attributes:
        allocated: in the order of the nodes.
    """

    def __init__(
        self, part: Part, storages: Storages, offset: int, saved: dict[ir.Value, _Lifetime], bounds: Sequence[int]
    ) -> None:
        """Walk the part.

        Args:
            part: the program.
            storages: sizes, views and kernels.
            offset: the position of its first node.
            saved: its inputs that this step allocated.
            bounds: the ends of its stages. A stage does not overwrite what an earlier one allocated.
        """
        self.allocated: list[_Lifetime] = []
        self._lifetimes = dict(saved)
        self._storages = storages
        for lifetime in saved.values():
            lifetime.kind = Kind.KEPT
        overwritten = self._in_place_inputs(part, bounds)
        for position, node in enumerate(part.nodes, offset):
            for read in _lifetimes_of(node.inputs, self._lifetimes):
                read.last = max(read.last, position)
            if part.host.issuperset(node.outputs):
                continue
            for index, value in enumerate(node.outputs):
                if value in saved:  # kept, although its node is recomputed
                    continue
                source = (
                    node.inputs[overwritten[node]] if node in overwritten and index == 0 else storages.source(value)
                )
                if source is None:
                    lifetime = self._lifetimes[value] = _Lifetime(value, storages.bytes_of(value), position)
                    self.allocated.append(lifetime)
                elif source in self._lifetimes:
                    self._lifetimes[value] = self._lifetimes[source]

    def _in_place_inputs(self, part: Part, bounds: Sequence[int]) -> dict[ir.Node, int]:
        """Return the nodes that overwrite an input allocated in their own stage, with the index of that input."""
        in_place: dict[ir.Node, int] = {}
        uses = last_uses(part)
        for start, stop in pairwise([0, *bounds]):
            nodes = part.nodes[start:stop]
            kernels = {n: self._storages.kernel(n) for n in nodes if not part.host.issuperset(n.outputs)}
            stage_uses = {v: last - start for v, last in uses.items()}
            in_place |= in_place_inputs(replace(part, nodes=nodes), stage_uses, kernels)
        return in_place

    def lifetime(self, value: ir.Value) -> _Lifetime | None:
        return self._lifetimes.get(value)

    def result(self, value: ir.Value, end: int) -> _Lifetime | None:
        """Return the allocation of a value that leaves at `end`.

        A copy allocated there, if its memory format is converted.
        """
        lifetime = self.lifetime(value)
        if lifetime is not None and self._storages.copied_result(value):
            lifetime = _Lifetime(value, self._storages.bytes_of(value), end - 1)
            self.allocated.append(lifetime)
        return lifetime


def _lifetimes_of(values: Sequence[ir.Value | None], lifetimes: dict[ir.Value, _Lifetime]) -> Iterator[_Lifetime]:
    return (lifetimes[v] for v in values if v is not None and v in lifetimes)
