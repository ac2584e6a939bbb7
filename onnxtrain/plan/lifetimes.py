"""Which memory a step holds at each of its nodes, and so its peak, before it runs.

    forward  ├ node ├ node ├ … ┤ kept, results ├ backward: node ├ node ├ … ┤
             └── allocation: first node ───────────── last node ──┘

Counted is what the two programs allocate: parameters, inputs and accumulated gradients are there before. A result is
held by the caller until backward ends, as is a gradient until autograd takes it: all of them at the end, or each group
of them when its stage of backward ends (`split`).
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


def timeline(parts: Cut, storages: Storages, groups: Groups = ()) -> Timeline:
    """The memory of forward and backward at the sizes of `storages`.

    Args:
        parts: what runs.
        storages: of all its nodes.
        groups: the gradients that are handed over together while backward goes on; (): all at its end.
    """
    forward, backward = parts.forward, parts.backward
    bounds = stage_ends(parts, groups) if groups else [len(backward.nodes)]
    first = _Program(forward, storages, 0, {}, [len(forward.nodes)])
    # What the caller sees of the first part stays until the second ends.
    end = len(forward.nodes) + len(backward.nodes)
    crossing = {v: spot for v in (*parts.kept, *forward.outputs) if v is not None and (spot := first.spot(v))}
    for value in forward.outputs:
        if value is not None and value in crossing:
            crossing[value].last = len(forward.nodes)
    given = {v: crossing[v] for v in parts.kept if v in crossing}
    second = _Program(backward, storages, len(forward.nodes), given, bounds)
    for value in forward.outputs[: forward.num_user_outputs]:
        if value is not None and (spot := first.result(value, len(forward.nodes))):
            spot.last, spot.kind = end, Kind.RESULT
    for group, bound in zip(groups or (range(len(backward.outputs)),), bounds, strict=True):
        stage_end = len(forward.nodes) + bound
        for value in (backward.outputs[index] for index in group):
            if value is not None and (spot := second.result(value, stage_end)):
                spot.last = max(spot.last, end if stage_end == end else stage_end - 1)
                spot.kind = Kind.GRADIENT if spot.kind is Kind.TEMPORARY else spot.kind
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

    def __init__(
        self, part: Part, storages: Storages, offset: int, given: dict[ir.Value, _Spot], bounds: Sequence[int]
    ) -> None:
        """Finds where the part's values lie.

        Args:
            part: the program.
            storages: sizes, views and kernels.
            offset: the position of its first node.
            given: what of its inputs lies in memory of the step.
            bounds: the ends of its stages: what one makes is not written over in the next.
        """
        self.made: list[_Spot] = []
        self._spots = dict(given)
        self._storages = storages
        for spot in given.values():
            spot.kind = Kind.KEPT
        reused = self._written_over(part, bounds)
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

    def _written_over(self, part: Part, bounds: Sequence[int]) -> dict[ir.Node, int]:
        """The nodes of each stage that write over an input that the stage made, with the input's index."""
        found: dict[ir.Node, int] = {}
        uses = last_uses(part)
        for start, stop in pairwise([0, *bounds]):
            nodes = part.nodes[start:stop]
            kernels = {n: self._storages.kernel(n) for n in nodes if not part.host.issuperset(n.outputs)}
            found |= in_place_inputs(replace(part, nodes=nodes), {v: last - start for v, last in uses.items()}, kernels)
        return found

    def spot(self, value: ir.Value) -> _Spot | None:
        return self._spots.get(value)

    def result(self, value: ir.Value, end: int) -> _Spot | None:
        """Where a value lies that leaves at `end`: in a copy, made there, where its order of memory is another."""
        spot = self.spot(value)
        if spot is not None and self._storages.copied_result(value):
            spot = _Spot(value, self._storages.bytes_of(value), end - 1)
            self.made.append(spot)
        return spot


def _spots_of(values: Sequence[ir.Value | None], spots: dict[ir.Value, _Spot]) -> Iterator[_Spot]:
    return (spots[v] for v in values if v is not None and v in spots)
