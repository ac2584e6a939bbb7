"""Find fusion regions: adjacent nodes of one part whose loops a compiler can fuse into one kernel.

    before   x ─QuickGelu─> s ─Add(s, z)─> y                      s is written and read back
    after    x, z ─[QuickGelu, Add]─> y

`FUSIBLE` has the ops that fuse. All nodes of a region loop over one shape, its iteration shape. They are moved side by
side, to a position after the producers of their inputs and before the readers of their outputs; so no cycle arises.
Views and nodes with effects are never part of a region, and no region may raise the peak of its part.
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
from onnxtrain.ops.interfaces.fused_regions import FUSIBLE, GAINS_FROM_FUSION
from onnxtrain.plan.cut import Part
from onnxtrain.plan.in_place import in_place_inputs, last_uses
from onnxtrain.plan.storage import Storages

_FUSIBLE_DTYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_MAX_NODES = 32  # compiling more takes minutes


@dataclass(frozen=True)
class Region:
    """Nodes that one kernel may compute.

    Attributes:
        part: the nodes, with their inputs and outputs.
        frame: the iteration shape.
        saved: how many writes and reads of tensors of that shape fusion saves.
    """

    part: Part
    frame: Sizes
    saved: int

    @property
    def elements(self) -> Size:
        """The number of elements of the iteration shape."""
        return sizes.multiply(1, *self.frame)

    @property
    def gains(self) -> bool:
        """Whether it has at least two nodes, one of them of an op whose fusion was measured to gain."""
        return len(self.part.nodes) > 1 and any(node in GAINS_FROM_FUSION for node in self.part.nodes)

    def __str__(self) -> str:
        return " + ".join(node.op_type for node in self.part.nodes)


class FoundRegions(NamedTuple):
    """The result of `find_regions`.

    Attributes:
        part: reordered, with the nodes of each region side by side.
        regions: disjoint.
        refused: the fusible nodes that are in no region, with the reason.
    """

    part: Part
    regions: tuple[Region, ...]
    refused: Sequence[tuple[ir.Node, str]]


def find_regions(part: Part, storages: Storages) -> FoundRegions:
    """Find the regions of a part.

    Args:
        part: the nodes to run.
        storages: of its nodes, at the sizes of a call.
    """
    groups = _Groups(part)
    refused: dict[ir.Node, str] = {}
    for node in part.nodes:
        if node not in FUSIBLE or part.host.issuperset(node.outputs):
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
        group = sorted(members, key=order.position.__getitem__)
        region = _region(part, group, frame, storages)
        moved = order.moved(set(group)) if region.saved else None
        increase = memory.peak(moved) - peak if moved is not None else 0
        if moved is not None and increase <= 0:
            order, peak = moved, peak + increase
            regions.append(region)
        elif moved is not None:
            refused |= dict.fromkeys(group, f"{region} as one kernel would raise the peak by {increase} bytes")
        elif region.saved:
            refused |= dict.fromkeys(
                group, f"{region}: its nodes cannot be moved side by side, given the other regions"
            )
        else:
            refused |= dict.fromkeys(group, "no adjacent node has the same iteration shape: fusion would save nothing")
    ordered = [(node, refused[node]) for node in part.nodes if node in refused]
    return FoundRegions(replace(part, nodes=order.nodes), tuple(regions), ordered)


def _obstacle(node: ir.Node, part: Part) -> str:
    """Return why a node whose op fuses may be in no region; "" if it may."""
    definition = definition_of(node)
    if definition.effects != Effects.NONE or definition.aliases:
        return "it has effects, or its output is a view"
    values = _tensors_of(node)
    if len(values) == len(node.outputs):
        return "it reads only constants"
    if any(v in part.host for v in values):
        return "it reads a dimension"
    dtypes = {str(v.dtype) for v in values if v.dtype not in _FUSIBLE_DTYPES}
    if dtypes:
        return f"it has tensors of {' and '.join(sorted(dtypes))}"
    if any(v.shape is None for v in values) or _frame(node) not in map(sizes.dims_of, values):
        return "none of its tensors has its iteration shape"
    return ""


def _tensors_of(node: ir.Node) -> list[ir.Value]:
    """Return the tensors that a node reads and writes, without constants."""
    return [*(v for v in node.inputs if v is not None and v.const_value is None), *node.outputs]


def _frame(node: ir.Node) -> Sizes:
    """Return the iteration shape of a node."""
    return sizes.broadcast(*map(sizes.dims_of, _tensors_of(node)))


class _Order:
    """An execution order of a part's nodes, which can be changed."""

    def __init__(
        self, part: Part, nodes: Sequence[ir.Node] | None = None, blocks: Mapping[ir.Node, ir.Node] | None = None
    ) -> None:
        self._part = part
        self.nodes = tuple(part.nodes if nodes is None else nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.blocks = dict(blocks or {})  # for a node of a region, the first node of that region

    def moved(self, members: set[ir.Node]) -> _Order | None:
        """Return the order with `members` side by side; None if moving only them cannot give one."""
        position = self._position_for(members)
        if position is None:
            return None
        block = sorted(members, key=self.position.__getitem__)
        before = [n for n in self.nodes[:position] if n not in members]
        after = [n for n in self.nodes[position:] if n not in members]
        first_of = {node: owner for node, owner in self.blocks.items() if node not in members}
        first_of.update((node, block[0]) for node in block)
        return _Order(self._part, [*before, *block, *after], first_of)

    def _position_for(self, members: set[ir.Node]) -> int | None:
        """Return a position after all producers of their inputs and before all readers of their outputs.

        None if none is.
        """
        producers = [v.producer() for node in members for v in node.inputs if v is not None]
        latest = max((self.position[n] for n in producers if n in self.position and n not in members), default=-1)
        users = {use.node for node in members for v in node.outputs for use in v.uses()}
        readers = [n for n in users if n in self.position and n not in members]
        earliest = min((self.position[self._first(n)] for n in readers), default=len(self.nodes))
        position = min(max(self.position[n] for n in members) + 1, earliest)
        return position if latest < position and self._is_boundary(position, members) else None

    def _first(self, node: ir.Node) -> ir.Node:
        return self.blocks.get(node, node)

    def _is_boundary(self, position: int, members: set[ir.Node]) -> bool:
        """Return whether the position splits no other region."""
        if position in (0, len(self.nodes)):
            return True
        left, right = (self.blocks.get(n) for n in self.nodes[position - 1 : position + 1])
        return left is None or left is not right or self.nodes[position] in members


class _Groups:
    """Groups of adjacent nodes of one frame: one reads an output of the other, or both read the same value."""

    def __init__(self, part: Part) -> None:
        self._order = _Order(part)
        self._groups: dict[ir.Node, list[ir.Node]] = {}
        self._frames: dict[ir.Node, Sizes] = {}

    def __iter__(self) -> Iterator[tuple[list[ir.Node], Sizes]]:
        """Yield each group with its frame."""
        for group in {id(group): group for group in self._groups.values()}.values():
            yield group, self._frames[group[0]]

    def add(self, node: ir.Node, frame: Sizes) -> None:
        """Join a node with the adjacent groups, unless that makes a cycle."""
        group = [node]
        for other in self._adjacent_groups(node, frame):
            joined = [*other, *group]
            order = self._order.moved(set(joined)) if len(joined) <= _MAX_NODES else None
            if order is not None:
                self._order, group = order, joined
        self._frames[node] = frame
        self._groups.update((member, group) for member in group)

    def _adjacent_groups(self, node: ir.Node, frame: Sizes) -> list[list[ir.Node]]:
        read = [v for v in node.inputs if v is not None and v.const_value is None]
        neighbours = [v.producer() for v in read]
        neighbours += [use.node for v in read if sizes.dims_of(v) == frame for use in v.uses()]
        nodes = (n for n in neighbours if n is not None and n in self._groups and self._frames[n] == frame)
        groups = {id(self._groups[n]): self._groups[n] for n in nodes}
        return sorted(groups.values(), key=lambda group: min(self._order.position[n] for n in group))


def _region(part: Part, group: Sequence[ir.Node], frame: Sizes, storages: Storages) -> Region:
    members = set(group)
    part_outputs = {v for v in part.outputs if v is not None}
    own = set(part.nodes)
    reader_counts: dict[ir.Value, int] = {}  # of each input
    outputs = []
    saved = 0
    for node in group:
        for value in node.inputs:
            if value is not None and value.const_value is None and value.producer() not in members:
                reader_counts[value] = reader_counts.get(value, 0) + 1
        for value in node.outputs:
            users = {use.node for use in value.uses()} & own
            leaves = value in part_outputs or not users <= members
            if leaves:
                outputs.append(value)
            if sizes.dims_of(value) == frame:
                saved += len(users & members) + (not leaves)
        saved += 2 * _scratch_tensors(node, frame, storages)
    saved += sum(readers - 1 for value, readers in reader_counts.items() if sizes.dims_of(value) == frame)
    own_part = Part(tuple(group), tuple(reader_counts), (), tuple(outputs), (), part.host, 0)
    return Region(own_part, frame, saved)


def _scratch_tensors(node: ir.Node, frame: Sizes, storages: Storages) -> int:
    """Return how many tensors of the frame's shape the workspace of the node's kernel holds."""
    element = int(dtype_of(node.outputs[0]).itemsize)
    return storages.workspace(node) // max(1, element * storages.number(sizes.multiply(1, *frame)))


class _Memory:
    """The peak of a part, in bytes. Facts that do not depend on the order are computed once."""

    def __init__(self, part: Part, storages: Storages) -> None:
        self._inputs = frozenset(part.inputs)
        self._outputs = [storages.root(v) for v in part.outputs if v is not None]
        tensors = [n for n in part.nodes if not part.host.issuperset(n.outputs)]
        in_place = in_place_inputs(part, last_uses(part), {n: storages.kernel(n) for n in tensors})
        self._touched: dict[ir.Node, Sequence[ir.Value]] = {}  # the roots that a node reads and writes
        self._transient = dict.fromkeys(part.nodes, 0)  # workspace, less an input that it overwrites
        for node in part.nodes:
            values = [v for v in _tensors_of(node) if v not in part.host]
            self._touched[node] = list(dict.fromkeys(map(storages.root, values)))
        for node in tensors:
            overwritten = storages.bytes_of(node.outputs[0]) if node in in_place else 0
            self._transient[node] = storages.workspace(node) - overwritten
        roots = dict.fromkeys(v for touched in self._touched.values() for v in touched)
        self._bytes = {v: storages.bytes_of(v) for v in roots if v.producer() is not None}  # inputs count elsewhere

    def peak(self, order: _Order) -> int:
        """Return the peak if each region is one call, which holds its inputs until its outputs are written."""
        first_use: dict[ir.Value, int] = {}
        last: dict[ir.Value, int] = {}
        change = [0] * (len(order.nodes) + 2)
        position, block = -1, None
        for node in order.nodes:
            own = order.blocks.get(node)
            if own is None or own is not block:
                position, block = position + 1, own
                if own is None:
                    change[position] += self._transient[node]
                    change[position + 1] -= self._transient[node]
            for value in self._touched[node]:
                first_use.setdefault(value, position)
                last[value] = position
        last |= dict.fromkeys(self._outputs, position + 1)
        for value, first in first_use.items():
            end = last[value] + 1
            if value not in self._bytes or (first == end - 1 and value.producer() in order.blocks):  # in registers
                continue
            begin = 0 if value in self._inputs else first
            change[begin] += self._bytes[value]
            change[end] -= self._bytes[value]
        return max(accumulate(change), default=0)
