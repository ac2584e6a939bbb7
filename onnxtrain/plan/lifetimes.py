"""Which memory a step holds at each of its nodes, and so its peak, before it runs.

    forward  ├ node ├ node ├ … ┤ kept, results ├ backward: node ├ node ├ … ┤
             └── allocation: first node ───────────── last node ──┘

Counted is what the two programs allocate: parameters, inputs and accumulated gradients are there before. A result is
held by the caller until backward ends, as is a gradient until autograd takes it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import onnx_ir as ir

from onnxtrain.plan.cut import Cut, Part
from onnxtrain.plan.in_place import last_uses, overwritten
from onnxtrain.plan.storage import Storages


class Kind(enum.Enum):
    """What memory is held for."""

    KEPT = "kept"  # backward reads it
    RESULT = "result"
    GRADIENT = "gradient"
    TEMPORARY = "temporary"


@dataclass(frozen=True)
class Allocation:
    """A stretch of memory and how long it is held.

    Attributes:
        value: the value that it was made for.
        nbytes: its size.
        first, last: the positions, among the nodes of forward and then backward, of the first and the last node
            during which it is held.
        kind: what for.
    """

    value: ir.Value
    nbytes: int
    first: int
    last: int
    kind: Kind


@dataclass(frozen=True)
class Timeline:
    """The memory of a step.

    Attributes:
        nodes: of forward, then of backward.
        forward: how many of them are forward's.
        allocations: in the order in which they are made.
        workspace: for each node, the scratch bytes of its kernel.
    """

    nodes: tuple[ir.Node, ...]
    forward: int
    allocations: tuple[Allocation, ...]
    workspace: tuple[int, ...]

    def held(self) -> list[int]:
        """The bytes held during each node, in order."""
        change = [0] * (len(self.nodes) + 1)
        for allocation in self.allocations:
            change[allocation.first] += allocation.nbytes
            change[min(allocation.last, len(self.nodes) - 1) + 1] -= allocation.nbytes
        return [total + extra for total, extra in zip(accumulate(change), self.workspace, strict=False)]

    @property
    def peak(self) -> int:
        """The most bytes held at any time."""
        return max(self.held(), default=0)

    @property
    def kept(self) -> int:
        """The bytes that backward finds: kept for it and results."""
        return sum(a.nbytes for a in self.allocations if a.first < self.forward <= a.last)


def timeline(parts: Cut, storages: Storages) -> Timeline:
    """The memory of forward and backward at the sizes of `storages`."""
    forward, backward = parts.forward, parts.backward
    first = _Program(forward, storages, 0, {})
    # What the caller sees of the first part stays until the second ends.
    end = len(forward.nodes) + len(backward.nodes)
    crossing = {v: spot for v in (*parts.kept, *forward.outputs) if v is not None and (spot := first.spot(v))}
    for value in forward.outputs:
        if value is not None and value in crossing:
            crossing[value].last = len(forward.nodes)
    second = _Program(backward, storages, len(forward.nodes), {v: crossing[v] for v in parts.kept if v in crossing})
    for value in forward.outputs[: forward.leaving]:
        if value is not None and (spot := first.result(value)):
            spot.last, spot.kind = end, Kind.RESULT
    for value in backward.outputs:
        if value is not None and (spot := second.result(value)):
            spot.last, spot.kind = end, Kind.GRADIENT if spot.kind is Kind.TEMPORARY else spot.kind
    nodes = (*forward.nodes, *backward.nodes)
    made = sorted((*first.made, *second.made), key=lambda spot: spot.first)
    return Timeline(nodes, len(forward.nodes), tuple(map(_allocation, made)), tuple(map(storages.workspace, nodes)))


class _Spot:
    """A stretch of memory while its life is being found out."""

    __slots__ = ("first", "kind", "last", "nbytes", "value")

    def __init__(self, value: ir.Value, nbytes: int, first: int) -> None:
        self.value, self.nbytes, self.first, self.last = value, nbytes, first, first
        self.kind = Kind.TEMPORARY


def _allocation(spot: _Spot) -> Allocation:
    return Allocation(spot.value, spot.nbytes, spot.first, spot.last, spot.kind)


class _Program:
    """The memory of one part: walks its nodes in order.

    Attributes:
        made: what it allocates.
    """

    def __init__(self, part: Part, storages: Storages, offset: int, given: dict[ir.Value, _Spot]) -> None:
        """Finds where the part's values lie.

        Args:
            part: the program.
            storages: sizes, views and kernels.
            offset: the position of its first node.
            given: what of its inputs lies in memory of the step.
        """
        self.made: list[_Spot] = []
        self._spots = dict(given)
        self._storages, self._end = storages, offset + len(part.nodes)
        for spot in given.values():
            spot.kind = Kind.KEPT
        tensors = [n for n in part.nodes if not part.host.issuperset(n.outputs)]
        reused = overwritten(part, last_uses(part), {n: storages.kernel(n) for n in tensors})
        for position, node in enumerate(part.nodes, offset):
            for read in _spots_of(node.inputs, self._spots):
                read.last = max(read.last, position)
            if part.host.issuperset(node.outputs):
                continue
            for index, value in enumerate(node.outputs):
                if value in given:  # kept, though its node runs again
                    continue
                source = node.inputs[reused[node]] if node in reused and index == 0 else storages.source(value)
                if source is None:
                    spot = self._spots[value] = _Spot(value, storages.bytes_of(value), position)
                    self.made.append(spot)
                elif source in self._spots:
                    self._spots[value] = self._spots[source]

    def spot(self, value: ir.Value) -> _Spot | None:
        return self._spots.get(value)

    def result(self, value: ir.Value) -> _Spot | None:
        """Where a value lies that leaves the program: in a copy, made at its end, where its order of memory is another."""
        spot = self.spot(value)
        if spot is not None and self._storages.copied_result(value):
            spot = _Spot(value, self._storages.bytes_of(value), self._end - 1)
            self.made.append(spot)
        return spot


def _spots_of(values: Sequence[ir.Value | None], spots: dict[ir.Value, _Spot]) -> Iterator[_Spot]:
    return (spots[v] for v in values if v is not None and v in spots)
