"""Choose the values that backward recomputes, to fit a step into a memory budget in the least time.

At a given price per kept byte, the cheapest choice is a minimum cut of forward's dataflow graph:

    source ──seconds──> node ──> value in ──price · bytes──> value out ──> node that reads it ──> … ──> sink
            recomputed                      kept                                        read by backward

Nodes on the sink's side are recomputed. A higher price keeps less. Each choice's peak is predicted (`lifetimes`). When
too little is kept, recomputed values live long and the peak rises; so the search also tries choices that keep every
value crossing certain positions of forward, as one checkpoint per layer does.

If no choice fits, gradients are released while backward runs (`backward_stages`), instead of all at its end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import onnx_ir as ir
import torch

from onnxtrain.errors import MemoryBudgetError
from onnxtrain.ops.cost_model import expected_seconds, moving_seconds
from onnxtrain.ops.interfaces.cost import flops_of
from onnxtrain.plan.backward_stages import group_gradients
from onnxtrain.plan.cut import Cut
from onnxtrain.plan.lifetimes import timeline
from onnxtrain.plan.recompute import RecomputeChoice, predict_cut, recomputable_nodes, recompute_inputs, replay_inputs
from onnxtrain.plan.storage import Storages
from onnxtrain.system.machine import current_machine

_PRICES = (1e-10, 3e-10, 1e-9, 3e-9, 1e-8)  # seconds a byte
_DEEP_PRICE = 1e-8  # keeps only the values at stage borders
_STAGE_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24)
_BISECTIONS = 5  # of an interval of prices or positions
_REFINED = 3  # of the stage counts that fit, the fastest
_SHARE_OF_FREE = 0.9
_UNIT = 1e-15  # seconds: networkx may not terminate with rounded float capacities, so they are integers
_EARLY_SURCHARGE = 0.1  # values of the first nodes are kept longest: their price is higher by this share


def bytes_allowed(budget: int | float | str, inputs: Sequence[torch.Tensor]) -> int | float:
    """Return the budget of `memory_budget_bytes`: in bytes, or a fraction as a float; "auto" is the free memory.

    Gradients that are not allocated yet are expected to take as many bytes as their parameters.
    """
    if budget != "auto":
        assert not isinstance(budget, str)
        return budget
    device = next((t.device for t in inputs if t.device.type == "cuda"), None)
    free = torch.cuda.mem_get_info(device)[0] if device is not None else _free_on_host()
    future_gradients = sum(t.nbytes for t in inputs if t.requires_grad and t.is_leaf and t.grad is None)
    return max(int(_SHARE_OF_FREE * free) - future_gradients, 1)


def _free_on_host() -> int:
    """Return the bytes available without swapping (MemAvailable); on a system without /proc/meminfo, its free pages."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def choose_within_budget(
    parts: Cut,
    storages: Storages,
    budget: int | float,
    mutated: Collection[ir.Value] = (),
    early: bool | None = False,
    always: Collection[str] = (),
) -> RecomputeChoice:
    """Return the fastest of the tried choices whose predicted peak is within the budget.

    Args:
        parts: the cut that keeps everything.
        storages: at the sizes that the budget is for.
        budget: bytes, or a share of the peak without a budget.
        mutated: values that recomputed nodes may not read, such as inputs of the graph that forward mutates.
        early: whether gradients are released while backward runs; None: only if nothing else fits.
        always: the names of values that are recomputed in any case.

    Raises:
        MemoryBudgetError: no choice fits; the error gives the smallest budget that can be met.
    """
    search = _Search(parts, storages, mutated, bool(early), always)
    if isinstance(budget, float):
        budget = int(budget * search.keep_all.peak)
    choice = search.within(budget)
    if choice is None and early is None:
        search = _Search(parts, storages, mutated, True, always)
        choice = search.within(budget)
    if choice is None:
        raise MemoryBudgetError(
            "memory_budget_bytes cannot be met by recompute",
            expected=f"{search.min_peak} bytes or more for these sizes",
            got=budget,
            todo="raise the budget, or use a smaller batch",
        )
    return choice


class _Prices(NamedTuple):
    """The price of keeping a byte, in seconds.

    Attributes:
        first: for values of the first part of forward, up to `share` of its nodes.
        rest: for the other values.
        share: from 0 to 1.
        kept: values that are kept at any price.
    """

    first: float
    rest: float = 0.0
    share: float = 1.0
    kept: Collection[ir.Value] = frozenset()

    def at(self, position: float) -> float:
        return (self.first if position < self.share else self.rest) * (1 + _EARLY_SURCHARGE * (1 - position))


class _Search:
    """The choices tried so far.

    Attributes:
        keep_all: the choice that recomputes nothing but what is recomputed in any case.
        min_peak: the smallest peak of all choices tried, in bytes.
    """

    def __init__(
        self, parts: Cut, storages: Storages, mutated: Collection[ir.Value], early: bool, always: Collection[str]
    ) -> None:
        self._parts, self._storages, self._early = parts, storages, early
        self._nodes = [n for n in parts.forward.nodes if not storages.host.issuperset(n.outputs)]
        self._seconds = {n: node_seconds(n, storages) for n in self._nodes}
        self._recomputable = recomputable_nodes(self._nodes, mutated)
        results = {v for v in parts.forward.outputs[: parts.forward.num_user_outputs] if v is not None}
        self._always = {v for n in self._nodes for v in n.outputs if v.name in always}
        self._bytes = {
            v: 0 if v in self._always else self._bytes_to_keep(v, results) for n in self._nodes for v in n.outputs
        }
        self.keep_all = self._choice(set())
        self.min_peak = self.keep_all.peak

    def _peak(self, parts: Cut) -> int:
        return timeline(parts, self._storages, group_gradients(parts) if self._early else ()).peak

    def _bytes_to_keep(self, value: ir.Value, results: set[ir.Value]) -> int:
        """Return the bytes that keeping a value costs: those of its root; 0 if the root is an input or a result."""
        root = self._storages.root(value)
        return 0 if root.producer() is None or root in results else self._storages.bytes_of(root)

    def within(self, budget: int) -> RecomputeChoice | None:
        """Return the fastest of the tried choices whose predicted peak is within the budget; None if none is."""
        if self.keep_all.peak <= budget:
            return self.keep_all
        fitting = (choice for choice in self._choices(budget) if choice.peak <= budget)
        return min(fitting, key=lambda choice: choice.seconds, default=None)

    def _choices(self, budget: int) -> Iterator[RecomputeChoice]:
        """The choices to try for this budget."""
        plain = [self._at(_Prices(price)) for price in _PRICES]
        yield from plain
        best = min(range(len(plain)), key=lambda i: plain[i].peak)
        if plain[best].peak <= budget:
            first = next(i for i, choice in enumerate(plain) if choice.peak <= budget)
            low = _PRICES[first - 1] if first else _PRICES[0] / 10
            # One price for all values, or the higher one only for the first part of forward.
            yield from self._bisected(budget, lambda share: _Prices(low * (_PRICES[first] / low) ** share))
            yield from self._bisected(budget, lambda share: _Prices(_PRICES[first], low, share))
            return
        crossing = self._crossing()
        borders = [self._at_borders(crossing, stages) for stages in _STAGE_COUNTS if stages <= len(self._nodes)]
        deep = [(self._at(_Prices(_DEEP_PRICE, kept=kept)), kept) for kept in borders]
        yield from (choice for choice, _ in deep)
        fitting = sorted((d for d in deep if d[0].peak <= budget), key=lambda d: d[0].seconds)
        for _, kept in fitting[:_REFINED]:
            yield from self._bisected(budget, partial(_Prices, _DEEP_PRICE, _PRICES[best], kept=kept))

    def _bisected(self, budget: int, prices: Callable[[float], _Prices]) -> Iterator[RecomputeChoice]:
        """The choices of a bisection for the least share that meets the budget."""
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            choice = self._at(prices(middle))
            yield choice
            low, high = (low, middle) if choice.peak <= budget else (middle, high)

    def _at(self, prices: _Prices) -> RecomputeChoice:
        """Return the choice at these prices."""
        nodes = self._cut(prices)
        values = {v for n in nodes for v in n.outputs if v not in replay_inputs(n) and v not in prices.kept}
        choice = self._choice(values, sum(self._seconds[n] for n in nodes))
        self.min_peak = min(self.min_peak, choice.peak)
        return choice

    def _choice(self, values: set[ir.Value], seconds: float = 0.0) -> RecomputeChoice:
        values = values | self._always
        peak = self._peak(predict_cut(self._parts, values) if values else self._parts)
        return RecomputeChoice(frozenset(str(v.name) for v in values), seconds, peak, self._early)

    # The minimum cut

    def _cut(self, prices: _Prices) -> set[ir.Node]:
        """Return the nodes to recompute."""
        import networkx  # noqa: PLC0415  # imports in 0.1 s, and few users set a budget

        graph = networkx.DiGraph()
        source, sink = "source", "sink"
        count = max(len(self._nodes), 1)
        graph.add_nodes_from((source, sink))
        for position, node in enumerate(self._nodes):
            if node in self._recomputable:
                graph.add_edge(source, node, capacity=round(self._seconds[node] / _UNIT))
                for value in recompute_inputs(node):
                    if value in self._bytes:
                        graph.add_edge((value, "out"), node)
            else:
                graph.add_edge(source, node)
            price = prices.at(position / count)
            for value in node.outputs:
                if value in replay_inputs(node) or value in prices.kept:
                    graph.add_edge(source, (value, "in"))
                else:
                    graph.add_edge(node, (value, "in"))
                weight = 0.0 if value in prices.kept else price * self._bytes[value]
                graph.add_edge((value, "in"), (value, "out"), capacity=round(weight / _UNIT))
        for value in self._parts.kept:
            if value in self._bytes:
                graph.add_edge((value, "out"), sink)
        _, (_, far) = networkx.minimum_cut(graph, source, sink)
        return {n for n in self._recomputable if n in far}

    # Stage borders

    def _crossing(self) -> list[list[ir.Value]]:
        """Return, for each node, the values computed before it and read by it or by later nodes of forward."""
        position_of = {n: i for i, n in enumerate(self._nodes)}
        last = {
            v: max((position_of[use.node] for use in v.uses() if use.node in position_of), default=-1)
            for v in self._bytes
        }
        crossing, live = [], dict[ir.Value, None]()
        for position, node in enumerate(self._nodes):
            live = {v: None for v in live if last[v] >= position}
            crossing.append(list(live))
            live.update(dict.fromkeys(node.outputs))
        return crossing

    def _at_borders(self, crossing: Sequence[Sequence[ir.Value]], stages: int) -> set[ir.Value]:
        """Return the values that cross the narrowest position near the end of each stage but the last."""
        total, kept = len(crossing), set[ir.Value]()
        width = [sum(self._bytes[v] for v in values) for values in crossing]
        for border in range(1, stages):
            middle, reach = total * border // stages, max(total // (2 * stages), 1)
            near = range(max(middle - reach, 0), min(middle + reach, total))
            kept.update(crossing[min(near, key=lambda i: (width[i], abs(i - middle)))])
        return kept


def node_seconds(node: ir.Node, storages: Storages) -> float:
    """Return the expected time of a node, in seconds."""
    if all(storages.source(v) is not None for v in node.outputs):
        return 1e-6  # a view
    moved = sum(storages.bytes_of(v) for v in (*node.inputs, *node.outputs) if v is not None)
    flops = storages.number(flops_of(node))
    machine = current_machine()
    return moving_seconds(moved, machine) + expected_seconds("aten", flops, machine)
