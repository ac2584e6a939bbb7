"""Computes selected rows only, as far towards the inputs as each op needs no more than the same rows of its inputs.

    before   y = Gelu(Linear(LayerNormalization(x)));  z = Slice(y, 0:1)
    after    z = Gelu(Linear(LayerNormalization(Slice(x, 0:1))))

What passes that leave out work share: each says which rows of which value are read, and how they are picked. The nodes
before it run on these rows where all that they give is read by such nodes only. Where the axis map ends the walk, the
rows are picked.
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
from onnxtrain.ops import Effects, definition_of, view
from onnxtrain.ops.definition import numel
from onnxtrain.ops.reshape.dims import expanded, inverse, transposed, unsqueezed
from onnxtrain.ops.reshape.rows import to_front
from onnxtrain.passes.rewriting import nodes_before
from onnxtrain.passes.rowwise import Axes, NotRowwise, Rows, needed_rows, output_axes, shape_input, with_rows

Use = tuple[ir.Node, int]


Plan = tuple[list[Rows | None], dict[ir.Value, Axes]]  # what a node needs of its inputs; the axes of its outputs' rows


class OtherOp(Protocol):
    """Does on rows what a node does that mixes them."""

    def plan(self, region: Region) -> Plan:
        """The rows of its inputs, and the axes of the rows of its outputs."""

    def replace(self, op: Builder) -> Collection[ir.Value]:
        """Puts the other op in the place of the node, whose inputs are rows now; returns its results."""


class Selection(ABC):
    """How rows are picked.

    Attributes:
        count: how many rows there are then.
        reads: the values that say which.
    """

    count: Size
    reads: Sequence[ir.Value]

    @abstractmethod
    def along(self, op: Builder, value: ir.Value, axis: int) -> ir.Value:
        """The rows of `value` along one axis."""

    def over(self, op: Builder, value: ir.Value) -> ir.Value:
        """The rows of `value` along its first two axes counted together, as [count, ..]."""
        raise NotRowwise("rows of two axes are picked together")

    def of(self, op: Builder, value: ir.Value, axes: Axes) -> ir.Value:
        """The selected rows, as `rowwise.with_rows` says."""
        if len(axes) == 1:
            return self.along(op, value, axes[0])
        perm = to_front(rank_of(value), axes)
        rows = unsqueezed(op, self.over(op, transposed(op, value, perm)), 0)
        return transposed(op, rows, inverse(perm))


@dataclass(frozen=True)
class Region:
    """Nodes that need to compute selected rows only.

    Attributes:
        nodes: in the order of the graph.
        axes: of each value with selected rows, inside and on the edge, the axes along which they are counted.
        ends: why the walk ended, by the node where it did.
    """

    nodes: tuple[ir.Node, ...]
    axes: dict[ir.Value, Axes]
    ends: dict[ir.Node, str]

    def saves_work(self) -> bool:
        """Whether any of the nodes computes; to move rows of views saves nothing."""
        return any(definition_of(node).flops(view(node)) != 0 for node in self.nodes)

    def has_products(self) -> bool:
        """Whether any of the nodes multiplies matrices: worth a copy of the rows, forward and backward."""
        return any(_flops_per_element(node) >= _OF_A_PRODUCT for node in self.nodes)


_OF_A_PRODUCT = 16  # norms have 8, a product of rows of eight has 16
_ANY_SIZE = 64  # stands for sizes that are not known: those of rows, which cancel out


def _flops_per_element(node: ir.Node) -> float:
    flops, elements = definition_of(node).flops(view(node)), numel(node.outputs[0])
    known = dict.fromkeys(sizes.symbols(flops) | sizes.symbols(elements), _ANY_SIZE)
    return sizes.evaluate(flops, known) / max(1, sizes.evaluate(elements, known))


def region_before(
    graph: ir.Graph, read: dict[ir.Value, Axes], uses: Iterable[Use], depends_on: Sequence[ir.Value]
) -> Region:
    """The nodes of which only selected rows are read.

    Args:
        graph: is not changed.
        read: values, and the axes along which `uses` read selected rows of them.
        uses: (node, index of its input) that read nothing else of these values.
        depends_on: which rows are selected depends on these values: what computes them is not part of the region.
    """
    walk = Walk(dict(read), set(uses), _ancestors(depends_on))
    for node in walk.earlier:
        if definition_of(node).effects & ~Effects.HOST_SYNC:
            return Region((), walk.axes, {node: f"which rows are picked depends on {node.op_type}"})
    for node in reversed(graph):
        wanted = {v: walk.axes[v] for v in node.outputs if v in walk.axes}
        if wanted:
            try:
                walk.visit(node, wanted)
            except NotRowwise as end:
                walk.ends[node] = end.reason
    return walk.region(graph)


@dataclass
class Walk:
    """From the last node to the first.

    Attributes:
        axes: values of which only selected rows are read, as far as is known.
        uses: all that read nothing but selected rows.
        earlier: nodes that say which rows are selected.
    """

    axes: dict[ir.Value, Axes]
    uses: set[Use]
    earlier: set[ir.Node]
    inside: set[ir.Node] = field(default_factory=set)
    ends: dict[ir.Node, str] = field(default_factory=dict)

    def region(self, graph: ir.Graph) -> Region:
        """What was found."""
        return Region(tuple(node for node in graph if node in self.inside), self.axes, self.ends)

    def visit(self, node: ir.Node, wanted: dict[ir.Value, Axes]) -> None:
        if node in self.earlier:
            raise NotRowwise(f"which rows are picked depends on {node.op_type}")
        for value in wanted:
            self.check_read_by_rows(value)
        needed = needed_rows(node, wanted)
        found: dict[ir.Value, Axes] = {}
        for read, rows in zip(node.inputs, needed, strict=True):
            if read is None or rows is None or rows.spread is not None:
                continue
            if self.axes.get(read, found.get(read, rows.axes)) != rows.axes:
                raise NotRowwise(f"{node.op_type} counts the rows of {read.name} along other axes than others do")
            found[read] = rows.axes
        self.inside.add(node)
        self.axes.update(found)
        self.uses.update(
            (node, i) for i, (v, rows) in enumerate(zip(node.inputs, needed, strict=True)) if v in found and rows
        )

    def check_read_by_rows(self, value: ir.Value) -> None:
        """Raises NotRowwise where all rows of the value are read."""
        if value.is_graph_output():
            raise NotRowwise(f"{value.name} is an output of the module: keep_outputs can name those that are read")
        for user, index in value.uses():
            if (user, index) not in self.uses:
                raise NotRowwise(f"{user.op_type} {user.name!r} needs all rows of {value.name}")


def _ancestors(values: Sequence[ir.Value]) -> set[ir.Node]:
    """The nodes that these values are computed by."""
    found: set[ir.Node] = set()
    waiting = [v.producer() for v in values]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [v.producer() for v in traversal.reads(node)]
    return found


def compute_selected(
    op: Builder, region: Region, selection: Selection, others: Mapping[ir.Node, OtherOp] | None = None
) -> None:
    """Lets the nodes of the region compute selected rows only: in place, so that names and readers stay.

    Args:
        op: the builder of the graph.
        region: its nodes.
        selection: how rows are picked where the region begins.
        others: nodes of the region that another op does on the rows.
    """
    if not region.nodes:
        return
    graph = op.graph
    _hoist(graph, selection.reads, region.nodes[0])
    others = others or {}
    done: set[ir.Value] = set()
    picked: dict[tuple[ir.Value, Rows], ir.Value] = {}
    plans = [others[node].plan(region) if node in others else _plan(node, region) for node in region.nodes]
    for node, (needed, outputs) in zip(region.nodes, plans, strict=True):  # the plans were made before sizes change
        with nodes_before(op, node):
            for index, (value, rows) in enumerate(zip(node.inputs, needed, strict=True)):
                if rows is None or value is None or value in done:
                    continue
                if (value, rows) not in picked:
                    picked[value, rows] = selection.of(op, *_spread(op, value, rows))
                node.replace_input_with(index, picked[value, rows])
        if node in others:
            done.update(others[node].replace(op))
        else:
            _retype(op, node, outputs, selection.count)
            done.update(outputs)
    # The sizes that the builder reads from values of the graph: some have other values now.
    graph.meta.pop("size_sources", None)
    traversal.sort(graph)


def _plan(node: ir.Node, region: Region) -> Plan:
    """What a node needs of its inputs, and the axes of the rows of its outputs."""
    wanted = {v: region.axes[v] for v in node.outputs if v in region.axes}
    return needed_rows(node, wanted), output_axes(node, wanted)


def _spread(op: Builder, value: ir.Value, rows: Rows) -> tuple[ir.Value, Axes]:
    """The input with all of its rows along the axes, a view; and the axes."""
    axes = rows.axes
    lacking = max(0, -min(axes))
    if lacking:
        value = unsqueezed(op, value, *range(lacking))
        axes = tuple(axis + lacking for axis in axes)
    shape = list(sizes.dims_of(value))
    for axis, size in zip(axes, rows.spread or (), strict=False):
        shape[axis] = size
    wide = expanded(op, value, shape)
    set_type(wide, TensorType(dtype_of(value), tuple(shape)))  # two sizes that are equal under the capture's guards
    return wide, axes


def _retype(op: Builder, node: ir.Node, outputs: dict[ir.Value, Axes], count: Size) -> None:
    """Gives the outputs of a node the sizes of the selected rows, and the node where it takes them as an input."""
    for value, axes in outputs.items():
        shape = with_rows(sizes.dims_of(value), axes, count)
        holder = shape_input(node)
        if holder is not None and value is node.outputs[0]:
            with nodes_before(op, node):
                node.replace_input_with(holder, op.sizes(shape))
            if "allowzero" in definition_of(node).attributes:
                node.attributes["allowzero"] = ir.AttrInt64("allowzero", 1)
        set_type(value, TensorType(dtype_of(value), shape))
    if shape_input(node) is not None and node.outputs[0] not in outputs:
        raise GraphError(f"{traversal.describe(node)} takes the shape of a result that has no rows")


def _hoist(graph: ir.Graph, values: Sequence[ir.Value], anchor: ir.Node) -> None:
    """Moves what these values are computed by before `anchor`."""
    needed = _ancestors(values)
    late = False
    moved: list[ir.Node] = []
    for node in graph:
        late = late or node is anchor
        if late and node in needed:
            moved.append(node)
    if moved:
        graph.remove(moved)
        graph.insert_before(anchor, moved)
