"""Regions: neighbouring nodes of one part whose loops a compiler can join into one kernel.

    before   x ─QuickGelu─> s ─Add(s, z)─> y                      s is written, and read again
    after    x, z ─[QuickGelu, Add]─> y

What may join stands in the definitions (`OpDef.fuses`). All nodes of a region loop over one shape, its frame. They are
moved together, to a place where all that they read is there and nothing that they compute is read yet: so there is no
cycle. Views and nodes with effects stay outside. A region that makes its part hold more at its peak is not built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import dtype_of
from onnxtrain.ops import Effects, definition_of
from onnxtrain.plan.cut import Part
from onnxtrain.plan.in_place import in_place_inputs, last_uses
from onnxtrain.plan.storage import Storages

_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_MOST_NODES = 32  # more take a compiler minutes


@dataclass(frozen=True)
class Region:
    """Nodes that one kernel may compute.

    Attributes:
        part: the nodes with what they read and what is read of them.
        frame: the shape that they loop over.
        saved: tensors of that shape that are not written or read any more.
    """

    part: Part
    frame: Sizes
    saved: int

    @property
    def elements(self) -> Size:
        """How many elements its loops go over."""
        return sizes.multiply(1, *self.frame)

    @property
    def gains(self) -> bool:
        """Whether a node of it is of a kind that was measured to gain beside a neighbour, and it has one."""
        found = [definition_of(node).fuses for node in self.part.nodes]
        return len(found) > 1 and any(fuses is not None and fuses.gains for fuses in found)

    def __str__(self) -> str:
        return " + ".join(node.op_type for node in self.part.nodes)


class FoundRegions(NamedTuple):
    """What `find_regions` finds.

    Attributes:
        part: in an order in which the nodes of each region stand side by side.
        regions: disjoint.
        refused: the nodes that could be in a region and are in none, with the reason.
    """

    part: Part
    regions: tuple[Region, ...]
    refused: Sequence[tuple[ir.Node, str]]


def find_regions(part: Part, storages: Storages) -> FoundRegions:
    """The regions of a part.

    Args:
        part: what is to run.
        storages: of its nodes, at sizes that it is called with.
    """
    groups = _Groups(part)
    refused: dict[ir.Node, str] = {}
    for node in part.nodes:
        if definition_of(node).fuses is None or part.host.issuperset(node.outputs):
            continue
        reason = _obstacle(node, part)
        if reason:
            refused[node] = reason
        else:
            groups.add(node, _frame(node))
    order, memory = _Order(part), _Memory(part, storages)
    peak = memory.peak(order)
    regions = []
    for members, frame in groups:
        group = sorted(members, key=order.position.__getitem__)  # as they will stand side by side
        region = _region(part, group, frame, storages)
        moved = order.moved(set(group)) if region.saved else None
        more = memory.peak(moved) - peak if moved is not None else 0
        if moved is not None and more <= 0:
            order, peak = moved, peak + more
            regions.append(region)
        elif moved is not None:
            refused |= dict.fromkeys(group, f"{region} as one call would hold {more} bytes more at the peak")
        elif region.saved:
            refused |= dict.fromkeys(group, f"{region} cannot stand side by side beside the other regions")
        else:
            refused |= dict.fromkeys(group, "no neighbour loops over the same shape: there is nothing to save")
    said = [(node, refused[node]) for node in part.nodes if node in refused]
    return FoundRegions(replace(part, nodes=order.nodes), tuple(regions), said)


def _obstacle(node: ir.Node, part: Part) -> str:
    """Why no region may hold a node whose op fuses; "" where one may."""
    definition = definition_of(node)
    if definition.effects != Effects.NONE or definition.aliases:
        return "it has effects, or gives a view"
    values = _looped(node)
    if len(values) == len(node.outputs):
        return "it reads constants only"
    if any(v in part.host for v in values):
        return "it reads a size"
    others = {str(v.dtype) for v in values if v.dtype not in _TYPES}
    if others:
        return f"its elements are {' and '.join(sorted(others))}"
    if any(v.shape is None for v in values) or _frame(node) not in map(sizes.dims_of, values):
        return "none of its tensors has the shape that it loops over"
    return ""


def _looped(node: ir.Node) -> list[ir.Value]:
    """The tensors that a node reads and writes."""
    return [*(v for v in node.inputs if v is not None and v.const_value is None), *node.outputs]


def _frame(node: ir.Node) -> Sizes:
    """The shape that a node loops over."""
    return sizes.broadcast(*map(sizes.dims_of, _looped(node)))


class _Order:
    """The nodes of a part in an order that can be changed."""

    def __init__(
        self, part: Part, nodes: Sequence[ir.Node] | None = None, blocks: Mapping[ir.Node, ir.Node] | None = None
    ) -> None:
        self._part = part
        self.nodes = tuple(part.nodes if nodes is None else nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.blocks = dict(blocks or {})  # of a node in a region, the first node of that region

    def moved(self, members: set[ir.Node]) -> _Order | None:
        """The order with `members` side by side; None where there is no such order that only moves them."""
        place = self._place(members)
        if place is None:
            return None
        block = sorted(members, key=self.position.__getitem__)
        before = [n for n in self.nodes[:place] if n not in members]
        after = [n for n in self.nodes[place:] if n not in members]
        first_of = {node: owner for node, owner in self.blocks.items() if node not in members}
        first_of.update((node, block[0]) for node in block)
        return _Order(self._part, [*before, *block, *after], first_of)

    def _place(self, members: set[ir.Node]) -> int | None:
        """Where they can stand: behind all that makes what they read, before all that reads what they make."""
        made = [v.producer() for node in members for v in node.inputs if v is not None]
        latest = max((self.position[n] for n in made if n in self.position and n not in members), default=-1)
        users = {use.node for node in members for v in node.outputs for use in v.uses()}
        readers = [n for n in users if n in self.position and n not in members]
        earliest = min((self.position[self._first(n)] for n in readers), default=len(self.nodes))
        place = min(max(self.position[n] for n in members) + 1, earliest)
        return place if latest < place and self._is_boundary(place, members) else None

    def _first(self, node: ir.Node) -> ir.Node:
        return self.blocks.get(node, node)

    def _is_boundary(self, place: int, members: set[ir.Node]) -> bool:
        """Whether no other region's nodes stand on both sides of the place."""
        if place in (0, len(self.nodes)):
            return True
        left, right = (self.blocks.get(n) for n in self.nodes[place - 1 : place + 1])
        return left is None or left is not right or self.nodes[place] in members


class _Groups:
    """Nodes of one frame that are neighbours: one reads what the other makes, or both read the same."""

    def __init__(self, part: Part) -> None:
        self._order = _Order(part)
        self._groups: dict[ir.Node, list[ir.Node]] = {}
        self._frames: dict[ir.Node, Sizes] = {}

    def __iter__(self) -> Iterator[tuple[list[ir.Node], Sizes]]:
        """Each group with its frame."""
        for group in {id(group): group for group in self._groups.values()}.values():
            yield group, self._frames[group[0]]

    def add(self, node: ir.Node, frame: Sizes) -> None:
        """Lets a node join the groups around it, where that makes no cycle."""
        group = [node]
        for other in self._around(node, frame):
            joined = [*other, *group]
            order = self._order.moved(set(joined)) if len(joined) <= _MOST_NODES else None
            if order is not None:
                self._order, group = order, joined
        self._frames[node] = frame
        self._groups.update((member, group) for member in group)

    def _around(self, node: ir.Node, frame: Sizes) -> list[list[ir.Node]]:
        read = [v for v in node.inputs if v is not None and v.const_value is None]
        near = [v.producer() for v in read]
        near += [use.node for v in read if sizes.dims_of(v) == frame for use in v.uses()]
        found = {id(g): g for n in near if n is not None and (g := self._groups.get(n)) and self._frames[n] == frame}
        return sorted(found.values(), key=lambda group: min(self._order.position[n] for n in group))


def _region(part: Part, group: Sequence[ir.Node], frame: Sizes, storages: Storages) -> Region:
    members = set(group)
    wanted = {v for v in part.outputs if v is not None}
    own = set(part.nodes)
    inputs: dict[ir.Value, int] = {}  # with how many nodes read them
    outputs = []
    saved = 0
    for node in group:
        for value in node.inputs:
            if value is not None and value.const_value is None and value.producer() not in members:
                inputs[value] = inputs.get(value, 0) + 1
        for value in node.outputs:
            users = {use.node for use in value.uses()} & own
            leaves = value in wanted or not users <= members
            if leaves:
                outputs.append(value)
            if sizes.dims_of(value) == frame:
                saved += len(users & members) + (not leaves)
        saved += 2 * _scratch_tensors(node, frame, storages)
    saved += sum(readers - 1 for value, readers in inputs.items() if sizes.dims_of(value) == frame)
    own_part = Part(tuple(group), tuple(inputs), (), tuple(outputs), (), part.host, 0)
    return Region(own_part, frame, saved)


def _scratch_tensors(node: ir.Node, frame: Sizes, storages: Storages) -> int:
    """How many tensors of the frame's shape the node's own kernel writes for itself."""
    element = int(dtype_of(node.outputs[0]).itemsize)
    return storages.workspace(node) // max(1, element * storages.number(sizes.multiply(1, *frame)))


class _Memory:
    """What a part holds at its peak, in bytes. What does not depend on the order is looked up once."""

    def __init__(self, part: Part, storages: Storages) -> None:
        self._given = frozenset(part.inputs)
        self._outputs = [storages.root(v) for v in part.outputs if v is not None]
        tensors = [n for n in part.nodes if not part.host.issuperset(n.outputs)]
        in_place = in_place_inputs(part, last_uses(part), {n: storages.kernel(n) for n in tensors})
        self._touched: dict[ir.Node, Sequence[ir.Value]] = {}  # the memory that a node reads and writes
        self._at_once = dict.fromkeys(part.nodes, 0)  # what it takes beside: scratch, less what it writes over
        for node in part.nodes:
            values = [v for v in _looped(node) if v not in part.host]
            self._touched[node] = list(dict.fromkeys(map(storages.root, values)))
        for node in tensors:
            over = storages.bytes_of(node.outputs[0]) if node in in_place else 0
            self._at_once[node] = storages.workspace(node) - over
        roots = dict.fromkeys(v for touched in self._touched.values() for v in touched)
        self._bytes = {v: storages.bytes_of(v) for v in roots if v.producer() is not None}  # others are held elsewhere

    def peak(self, order: _Order) -> int:
        """The peak where the nodes of each region are one call: its inputs are held until its outputs are there."""
        made: dict[ir.Value, int] = {}
        last: dict[ir.Value, int] = {}
        change = [0] * (len(order.nodes) + 2)
        position, block = -1, None
        for node in order.nodes:
            own = order.blocks.get(node)
            if own is None or own is not block:
                position, block = position + 1, own
                if own is None:
                    change[position] += self._at_once[node]
                    change[position + 1] -= self._at_once[node]
            for value in self._touched[node]:
                made.setdefault(value, position)
                last[value] = position
        last |= dict.fromkeys(self._outputs, position + 1)
        for value, first in made.items():
            end = last[value] + 1
            if value not in self._bytes or (first == end - 1 and value.producer() in order.blocks):  # in registers
                continue
            begin = 0 if value in self._given else first
            change[begin] += self._bytes[value]
            change[end] -= self._bytes[value]
        return max(accumulate(change), default=0)
