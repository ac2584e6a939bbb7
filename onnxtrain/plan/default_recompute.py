"""Choose what backward recomputes by default: values that cost little more than reading them from memory.

    gate, up ─GatedActivation─> p ─Linear─> …           kept: gate, up, p
                                                        after: gate, up; backward recomputes p

Such a value is a function of values that are kept anyway, by ops that do little work per element. No other value is
then kept in its place. Sizes are those of the first call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.alias import AliasSets
from onnxtrain.graph.values import dtype_of
from onnxtrain.ops import definition_of
from onnxtrain.ops.definition import numel
from onnxtrain.ops.interfaces.cost import flops_of
from onnxtrain.plan.cut import Cut
from onnxtrain.plan.recompute import RecomputeChoice, recomputable_nodes, recompute_inputs, replay_inputs

_CHEAP_FLOPS = 16  # per element written: covers elementwise ops, norms, softmax; not a convolution of few channels
_MAX_TRAFFIC = 3  # bytes read and written by recompute, for each byte saved
_MIN_SHARE = 0.01  # of all bytes kept: a smaller saving is not worth a call


def choose_by_default(
    parts: Cut,
    symbol_values: Mapping[str, int],
    mutated: Collection[ir.Value] = (),
    count_of: Callable[[ir.Value], int] = lambda _: 1,
) -> RecomputeChoice:
    """Choose the values to recompute by default.

    Args:
        parts: the cut that keeps everything.
        symbol_values: the integer of each symbol in the shapes of the graph's inputs.
        mutated: values that recomputed nodes may not read, such as inputs of the graph that forward mutates.
        count_of: returns for how many values of repeated blocks a value stands (`omitted_blocks`).
    """
    search = _Search(parts, symbol_values, mutated)
    groups = search.groups()
    min_bytes = _MIN_SHARE * sum(search.bytes_of(root) * count_of(root) for root in groups)
    recomputed: set[ir.Value] = set()
    for root, members in groups.items():
        nodes = search.chain(members)
        if search.bytes_of(root) >= min_bytes and search.pays(root, nodes):
            recomputed.update(v for n in nodes for v in n.outputs if v not in replay_inputs(n))
    return RecomputeChoice(frozenset(str(v.name) for v in recomputed))


class _Search:
    def __init__(self, parts: Cut, symbol_values: Mapping[str, int], mutated: Collection[ir.Value]) -> None:
        self._symbol_values, self._host = symbol_values, parts.forward.host
        self._integers: dict[sizes.Size, int | None] = {}
        self._nodes = parts.forward.nodes
        self._kept = dict.fromkeys(parts.kept)
        self._sets = AliasSets(self._nodes, definition_of)
        results = parts.forward.outputs[: parts.forward.num_user_outputs]
        self._visible = {self._sets.root(v) for v in results if v is not None}
        self._usable = {n for n in recomputable_nodes(self._nodes, mutated) if self._is_cheap(n)}

    def groups(self) -> dict[ir.Value, list[ir.Value]]:
        """Return the kept values by their root, for roots that are kept for backward alone."""
        groups: dict[ir.Value, list[ir.Value]] = {}
        for value in self._kept:
            root = self._sets.root(value)
            if root.producer() is not None and root not in self._visible:
                groups.setdefault(root, []).append(value)
        return groups

    def chain(self, values: Iterable[ir.Value]) -> set[ir.Node]:
        """Return the nodes that compute `values` from kept values; none if further values would have to be kept."""
        nodes, pending = set[ir.Node](), list(values)
        while pending:
            value = pending.pop()
            node = value.producer()
            if node in nodes:
                continue
            if node not in self._usable or value in replay_inputs(node):
                return set()
            nodes.add(node)
            pending += [v for v in recompute_inputs(node) if not self._is_available(v)]
        return nodes

    def pays(self, root: ir.Value, nodes: Collection[ir.Node]) -> bool:
        """Return whether the bytes of `root` are worth running `nodes` again."""
        return 0 < sum(map(self._traffic, nodes)) <= _MAX_TRAFFIC * self.bytes_of(root)

    def bytes_of(self, value: ir.Value) -> int:
        """Return the bytes of a value; 0 if its shape is data-dependent."""
        count = self._integer(numel(value))
        return 0 if count is None else math.ceil(count * dtype_of(value).itemsize)

    def _integer(self, size: sizes.Size) -> int | None:
        """Return a size as an integer; None if it is data-dependent. Evaluated once for the layers that share it."""
        if size not in self._integers:
            is_known = sizes.symbols(size) <= self._symbol_values.keys()
            self._integers[size] = sizes.evaluate(size, self._symbol_values) if is_known else None
        return self._integers[size]

    def _is_available(self, value: ir.Value) -> bool:
        return value in self._kept or value in self._host or value.const_value is not None

    def _is_cheap(self, node: ir.Node) -> bool:
        """Return whether a node does little work per element. An ATen op declares no work: it counts as expensive."""
        if self._host.issuperset(node.outputs):
            return False
        flops, written = self._integer(flops_of(node)), 0
        for value in node.outputs:
            elements = self._integer(numel(value))
            if elements is None:
                return False
            written += elements
        if flops is None:
            return False
        is_view = self._sets.root(node.outputs[0]) is not node.outputs[0]
        return is_view or 0 < flops <= _CHEAP_FLOPS * written

    def _traffic(self, node: ir.Node) -> int:
        """Return the bytes that a node reads and writes; 0 if its output may be a view."""
        if self._sets.root(node.outputs[0]) is not node.outputs[0]:
            return 0
        return sum(self.bytes_of(v) for v in (*node.inputs, *node.outputs) if v is not None)
