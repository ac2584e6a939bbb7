"""Compute selected rows only, from as close to the inputs as ops are row-wise.

    before   y = Gelu(Linear(LayerNormalization(x)));  z = Slice(y, 0:1)
    after    z = Gelu(Linear(LayerNormalization(Slice(x, 0:1))))

Shared by the passes that skip rows. Each says which rows of a value are used and how to select them. A node before
computes these rows only if all its users do; the rows are selected where that, or an axis map, ends the walk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import TensorType, dtype_of, rank_of, set_type
from onnxtrain.ops import Effects, definition_of
from onnxtrain.ops.interfaces.cost import MATMUL_FLOPS, flops_of, flops_per_element
from onnxtrain.ops.reshape.dims import expanded, inverse, transposed, unsqueezed
from onnxtrain.ops.reshape.rows import permutation_to_front
from onnxtrain.passes.rewriting import nodes_before
from onnxtrain.passes.rowwise import Axes, NotRowwise, Rows, needed_rows, output_axes, shape_input, with_rows

Use = tuple[ir.Node, int]


Plan = tuple[list[Rows | None], dict[ir.Value, Axes]]  # rows needed of each input; axes of the rows of each output


class Replacement(Protocol):
    """Replaces a node that mixes rows by an op that works on the selected rows."""

    def plan(self, region: Region) -> Plan:
        """Return the rows of the node's inputs, and the axes of the rows of its outputs."""

    def replace(self, op: Builder) -> Collection[ir.Value]:
        """Replace the node, whose inputs are selected rows now, and return the results."""


class Selection(ABC):
    """How to select rows.

    Attributes:
        count: the number of selected rows.
        reads: the values that determine which.
    """

    count: Size
    reads: Sequence[ir.Value]

    @abstractmethod
    def along(self, op: Builder, value: ir.Value, axis: int) -> ir.Value:
        """Select rows of `value` along one axis."""

    def over(self, op: Builder, value: ir.Value) -> ir.Value:
        """Select rows of `value` along its first two axes combined, as [count, ..]."""
        raise NotRowwise("rows are numbered along two axes, and the selection supports one only")

    def select(self, op: Builder, value: ir.Value, axes: Axes) -> ir.Value:
        """Select rows of `value` along `axes`, with the result shape of `rowwise.with_rows`."""
        if len(axes) == 1:
            return self.along(op, value, axes[0])
        perm = permutation_to_front(rank_of(value), axes)
        rows = unsqueezed(op, self.over(op, transposed(op, value, perm)), 0)
        return transposed(op, rows, inverse(perm))


@dataclass(frozen=True)
class Region:
    """Nodes that need to compute selected rows only.

    Attributes:
        nodes: in graph order.
        axes: for each value with selected rows, inside and at the boundary, the axes along which rows are numbered.
        ends: the nodes at which the walk ended, with the reason.
    """

    nodes: tuple[ir.Node, ...]
    axes: dict[ir.Value, Axes]
    ends: dict[ir.Node, str]

    def saves_work(self) -> bool:
        """Return whether any of the nodes computes: selecting rows before views saves nothing."""
        return any(flops_of(node) != 0 for node in self.nodes)

    def has_matmuls(self) -> bool:
        """Return whether any of the nodes is a matmul, which is worth copying the rows, forward and backward."""
        return any(flops_per_element(node) >= MATMUL_FLOPS for node in self.nodes)


def region_before(
    graph: ir.Graph,
    read: dict[ir.Value, Axes],
    uses: Iterable[Use],
    depends_on: Sequence[ir.Value],
    most_axes: int = 2,
) -> Region:
    """Find the nodes of which only selected rows are used. Does not change the graph.

    Args:
        graph: the graph.
        read: values of which `uses` read selected rows only, with the axes of these.
        uses: (node, input index) of these users.
        depends_on: the values that determine the selected rows; their producers cannot be part of the region.
        most_axes: along how many axes together the selection can pick rows.
    """
    walk = Walk(dict(read), set(uses), _ancestors(depends_on), most_axes)
    for node in walk.selecting:
        if definition_of(node).effects & ~Effects.HOST_SYNC:
            return Region((), walk.axes, {node: f"the selected rows depend on {node.op_type}"})
    for node in reversed(graph):
        row_axes = {v: walk.axes[v] for v in node.outputs if v in walk.axes}
        if row_axes:
            try:
                walk.visit(node, row_axes)
            except NotRowwise as end:
                walk.ends[node] = end.reason
    return walk.region(graph)


@dataclass
class Walk:
    """A walk over the nodes in reverse order that collects a region.

    Attributes:
        axes: values of which only selected rows are used, as known so far, with the axes of these.
        uses: the uses that read selected rows only.
        selecting: the nodes that determine the selected rows.
        most_axes: along how many axes together rows can be picked.
    """

    axes: dict[ir.Value, Axes]
    uses: set[Use]
    selecting: set[ir.Node]
    most_axes: int = 2
    inside: set[ir.Node] = field(default_factory=set)
    ends: dict[ir.Node, str] = field(default_factory=dict)

    def region(self, graph: ir.Graph) -> Region:
        """Return the nodes collected so far."""
        return Region(tuple(node for node in graph if node in self.inside), self.axes, self.ends)

    def visit(self, node: ir.Node, row_axes: dict[ir.Value, Axes]) -> None:
        if node in self.selecting:
            raise NotRowwise(f"the selected rows depend on {node.op_type}")
        for value in row_axes:
            self.check_selected_only(value)
        needed = needed_rows(node, row_axes)
        if any(rows is not None and len(rows.axes) > self.most_axes for rows in needed):
            raise NotRowwise("rows of two axes are picked together")
        input_axes: dict[ir.Value, Axes] = {}
        for read, rows in zip(node.inputs, needed, strict=True):
            if read is None or rows is None or rows.broadcast_to is not None:
                continue
            if self.axes.get(read, input_axes.get(read, rows.axes)) != rows.axes:
                raise NotRowwise(
                    f"{node.op_type} selects rows of {read.name} along different axes from its other users"
                )
            input_axes[read] = rows.axes
        self.inside.add(node)
        self.axes.update(input_axes)
        self.uses.update(
            (node, i) for i, (v, rows) in enumerate(zip(node.inputs, needed, strict=True)) if v in input_axes and rows
        )

    def check_selected_only(self, value: ir.Value) -> None:
        """Raise NotRowwise if all rows of the value are used."""
        if value.is_graph_output():
            raise NotRowwise(f"{value.name} is an output of the module: keep_outputs can name those that are used")
        for user, index in value.uses():
            if (user, index) not in self.uses:
                raise NotRowwise(f"{user.op_type} {user.name!r} needs all rows of {value.name}")


def _ancestors(values: Sequence[ir.Value]) -> set[ir.Node]:
    """Return the nodes that compute these values."""
    ancestors: set[ir.Node] = set()
    worklist = [v.producer() for v in values]
    while worklist:
        node = worklist.pop()
        if node is not None and node not in ancestors:
            ancestors.add(node)
            worklist += [v.producer() for v in traversal.reads(node)]
    return ancestors


def compute_selected(
    op: Builder, region: Region, selection: Selection, replacements: Mapping[ir.Node, Replacement] | None = None
) -> None:
    """Make the nodes of the region compute selected rows only. They are changed in place and keep their names.

    Args:
        op: the builder of the graph.
        region: the nodes.
        selection: how to select rows at the start of the region.
        replacements: nodes of the region to replace by ops that work on the selected rows.
    """
    if not region.nodes:
        return
    graph = op.graph
    _move_before(graph, selection.reads, region.nodes[0])
    replacements = replacements or {}
    computed: set[ir.Value] = set()
    selected: dict[tuple[ir.Value, Rows], ir.Value] = {}
    # All plans first: sizes change below.
    plans = [replacements[node].plan(region) if node in replacements else _plan(node, region) for node in region.nodes]
    for node, (needed, outputs) in zip(region.nodes, plans, strict=True):
        with nodes_before(op, node):
            for index, (value, rows) in enumerate(zip(node.inputs, needed, strict=True)):
                if rows is None or value is None or value in computed:
                    continue
                if (value, rows) not in selected:
                    selected[value, rows] = selection.select(op, *_broadcast(op, value, rows))
                node.replace_input_with(index, selected[value, rows])
        if node in replacements:
            computed.update(replacements[node].replace(op))
        else:
            _retype(op, node, outputs, selection.count)
            computed.update(outputs)
    # The builder caches values from which it reads sizes; some have other sizes now.
    graph.meta.pop("size_sources", None)
    traversal.sort(graph)


def _plan(node: ir.Node, region: Region) -> Plan:
    """Return the rows that a node needs of its inputs, and the axes of the rows of its outputs."""
    row_axes = {v: region.axes[v] for v in node.outputs if v in region.axes}
    return needed_rows(node, row_axes), output_axes(node, row_axes)


def _broadcast(op: Builder, value: ir.Value, rows: Rows) -> tuple[ir.Value, Axes]:
    """Return a view of the input with all axes of the rows, expanded to their full sizes; and these axes."""
    axes = rows.axes
    missing = max(0, -min(axes))
    if missing:
        value = unsqueezed(op, value, *range(missing))
        axes = tuple(axis + missing for axis in axes)
    shape = list(sizes.dims_of(value))
    for axis, size in zip(axes, rows.broadcast_to or (), strict=False):
        shape[axis] = size
    wide = expanded(op, value, shape)
    set_type(wide, TensorType(dtype_of(value), tuple(shape)))  # sizes that are equal under the capture's guards
    return wide, axes


def _retype(op: Builder, node: ir.Node, outputs: dict[ir.Value, Axes], count: Size) -> None:
    """Set the output shapes of a node to those of the selected rows, also in its `shape` input."""
    for value, axes in outputs.items():
        shape = with_rows(sizes.dims_of(value), axes, count)
        index = shape_input(node)
        if index is not None and value is node.outputs[0]:
            with nodes_before(op, node):
                node.replace_input_with(index, op.sizes(shape))
            if "allowzero" in definition_of(node).attributes:
                node.attributes["allowzero"] = ir.AttrInt64("allowzero", 1)
        set_type(value, TensorType(dtype_of(value), shape))
    if shape_input(node) is not None and node.outputs[0] not in outputs:
        raise GraphError(
            f"{traversal.describe(node)} has a shape input, but its output has no selected rows",
            expected=str(node.outputs[0].name),
            got=", ".join(str(value.name) for value in outputs),
        )


def _move_before(graph: ir.Graph, values: Sequence[ir.Value], anchor: ir.Node) -> None:
    """Move the nodes that compute these values before `anchor`."""
    ancestors = _ancestors(values)
    passed_anchor = False
    moved: list[ir.Node] = []
    for node in graph:
        passed_anchor = passed_anchor or node is anchor
        if passed_anchor and node in ancestors:
            moved.append(node)
    if moved:
        graph.remove(moved)
        graph.insert_before(anchor, moved)
