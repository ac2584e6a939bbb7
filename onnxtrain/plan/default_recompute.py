"""What backward computes again without being asked: results that cost little more than to read them from memory.

    gate, up ─GatedActivation─> p ─Linear─> …           kept: gate, up, p
                                                        afterwards: gate, up; backward makes p from them

Such a value is a function of what is kept anyway, by operators that do little for each element; so nothing takes its
place, and no input or result is kept that was not. Sizes are those of the first call.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.alias import AliasSets
from onnxtrain.graph.values import dtype_of
from onnxtrain.ops import definition_of
from onnxtrain.ops.definition import numel
from onnxtrain.plan.cut import Cut
from onnxtrain.plan.recompute import RecomputeChoice, recomputable_nodes, recompute_inputs, replay_inputs

_CHEAP = 16  # operations per element that is written: elementwise ones, norms, softmax; no convolution of few channels
_MOST_MOVED = 3  # bytes that are read and written again, for each that is saved
_LEAST_SHARE = 0.01  # of all that is kept: what saves less is not worth a call


def choose_by_default(parts: Cut, known: Mapping[str, int], changed: Collection[ir.Value] = ()) -> RecomputeChoice:
    """What is computed again by default.

    Args:
        parts: the cut in which everything is kept.
        known: the integer of each symbol in the sizes of the graph's inputs.
        changed: inputs of the graph whose contents are others when backward runs.
    """
    search = _Search(parts, known, changed)
    groups = search.groups()
    least = _LEAST_SHARE * sum(map(search.bytes_of, groups))
    again: set[ir.Value] = set()
    for root, members in groups.items():
        nodes = search.chain(members)
        if search.bytes_of(root) >= least and search.pays(root, nodes):
            again.update(v for n in nodes for v in n.outputs if v not in replay_inputs(n))
    return RecomputeChoice(frozenset(str(v.name) for v in again))


class _Search:
    def __init__(self, parts: Cut, known: Mapping[str, int], changed: Collection[ir.Value]) -> None:
        self._known, self._host = known, parts.forward.host
        self._nodes = parts.forward.nodes
        self._kept = dict.fromkeys(parts.kept)
        self._sets = AliasSets(self._nodes, definition_of)
        results = parts.forward.outputs[: parts.forward.num_user_outputs]
        self._visible = {self._sets.root(v) for v in results if v is not None}
        self._usable = {n for n in recomputable_nodes(self._nodes, changed) if self._is_cheap(n)}

    def groups(self) -> dict[ir.Value, list[ir.Value]]:
        """The kept values by the memory that they lie in, where that is kept for backward alone."""
        found: dict[ir.Value, list[ir.Value]] = {}
        for value in self._kept:
            root = self._sets.root(value)
            if root.producer() is not None and root not in self._visible:
                found.setdefault(root, []).append(value)
        return found

    def chain(self, values: Iterable[ir.Value]) -> set[ir.Node]:
        """The nodes that compute `values` from what is kept; none where something else would be kept."""
        nodes, waiting = set[ir.Node](), list(values)
        while waiting:
            value = waiting.pop()
            node = value.producer()
            if node in nodes:
                continue
            if node not in self._usable or value in replay_inputs(node):
                return set()
            nodes.add(node)
            waiting += [v for v in recompute_inputs(node) if not self._is_there(v)]
        return nodes

    def pays(self, root: ir.Value, nodes: Collection[ir.Node]) -> bool:
        """Whether the memory of `root` is worth running `nodes` again."""
        return 0 < sum(map(self._moved, nodes)) <= _MOST_MOVED * self.bytes_of(root)

    def bytes_of(self, value: ir.Value) -> int:
        """What a value takes; nothing where only the data decides."""
        count = numel(value)
        if not sizes.symbols(count) <= self._known.keys():
            return 0
        return math.ceil(sizes.evaluate(count, self._known) * dtype_of(value).itemsize)

    def _is_there(self, value: ir.Value) -> bool:
        return value in self._kept or value in self._host or value.const_value is not None

    def _is_cheap(self, node: ir.Node) -> bool:
        """Whether a node does little for each element; what does nothing (ATen) does not say what it does."""
        if self._host.issuperset(node.outputs):
            return False
        definition = definition_of(node)
        flops, elements = definition.flops(definition.view(node)), [numel(v) for v in node.outputs]
        if any(not sizes.symbols(size) <= self._known.keys() for size in (flops, *elements)):
            return False
        written = sum(sizes.evaluate(size, self._known) for size in elements)
        is_view = self._sets.root(node.outputs[0]) is not node.outputs[0]
        return is_view or 0 < sizes.evaluate(flops, self._known) <= _CHEAP * written

    def _moved(self, node: ir.Node) -> int:
        """The bytes that a node reads and writes; none for what may be a view."""
        if self._sets.root(node.outputs[0]) is not node.outputs[0]:
            return 0
        return sum(self.bytes_of(v) for v in (*node.inputs, *node.outputs) if v is not None)
