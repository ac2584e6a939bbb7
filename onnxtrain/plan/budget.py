"""Chooses what backward computes again, so that a step fits into a number of bytes in the least time.

For a price per kept byte, the cheapest choice is a minimum cut of forward's dataflow:

    source ──seconds──> node ──> value in ──price · bytes──> value out ──> node that reads it ──> … ──> sink
            computed again                  kept                                        read by backward

What stands on the sink's side is computed again. The higher the price, the less is kept. The peak of each choice is
predicted (`lifetimes`): where kept is too little, what is computed again is held for long and the peak rises, so the
search also tries choices that keep all that crosses some places of forward, as a checkpoint per layer does.

Where none of them fits, gradients are handed over while backward goes on (`split`), and do not pile up.
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
from onnxtrain.machine import current_machine
from onnxtrain.ops import definition_of
from onnxtrain.ops.cost_model import expected_seconds, moving_seconds
from onnxtrain.plan.backward_stages import group_gradients
from onnxtrain.plan.cut import Cut
from onnxtrain.plan.lifetimes import timeline
from onnxtrain.plan.recompute import RecomputeChoice, predict_cut, recomputable_nodes, recompute_inputs, replay_inputs
from onnxtrain.plan.storage import Storages

_PRICES = (1e-10, 3e-10, 1e-9, 3e-9, 1e-8)  # seconds a byte
_DEEP = 1e-8  # at which all that is no border of a stage is computed again
_STAGES = (2, 3, 4, 6, 8, 12, 16, 24)
_HALVINGS = 5  # of an interval of prices or places
_TRIED = 3  # numbers of stages, of those that fit
_SHARE_OF_FREE = 0.9
_UNIT = 1e-15  # seconds: capacities are whole numbers, for networkx may never end with sums that are rounded
_TILT = 0.1  # what is kept from the beginning is kept longest: its price is so much higher


def bytes_allowed(budget: int | float | str, inputs: Sequence[torch.Tensor]) -> int | float:
    """A budget as the option gives it, in bytes, or as a share: "auto" is what is free now.

    Gradients that are not there yet will take as much as their parameters.
    """
    if budget != "auto":
        assert not isinstance(budget, str)
        return budget
    device = next((t.device for t in inputs if t.device.type == "cuda"), None)
    free = torch.cuda.mem_get_info(device)[0] if device is not None else _free_on_host()
    coming = sum(t.nbytes for t in inputs if t.requires_grad and t.is_leaf and t.grad is None)
    return max(int(_SHARE_OF_FREE * free) - coming, 1)


def _free_on_host() -> int:
    """The bytes that the system can give without swapping; where it does not say, its free pages."""
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
    changed: Collection[ir.Value] = (),
    early: bool | None = False,
) -> RecomputeChoice:
    """The choice that is expected to take the least time of those found whose peak is within the budget.

    Args:
        parts: the cut in which everything is kept.
        storages: the sizes for which it is to hold.
        budget: bytes, or a share of the peak without a budget.
        changed: inputs of the graph whose contents are others when backward runs.
        early: whether gradients are handed over while backward goes on; None: where nothing else fits.

    Raises:
        MemoryBudgetError: none fits; it names the smallest budget that can be met.
    """
    search = _Search(parts, storages, changed, bool(early))
    if isinstance(budget, float):
        budget = int(budget * search.nothing.peak)
    found = search.within(budget)
    if found is None and early is None:
        search = _Search(parts, storages, changed, early=True)
        found = search.within(budget)
    if found is None:
        raise MemoryBudgetError(
            "memory_budget_bytes cannot be met, whatever is computed again",
            expected=f"{search.least} bytes or more for these sizes",
            got=budget,
            todo="give that much, or smaller batches",
        )
    return found


class _Prices(NamedTuple):
    """What it costs to keep a byte, in seconds.

    Attributes:
        first: in the first part of forward, to `share` of its nodes.
        then: in the rest.
        share: from 0 to 1.
        kept: values that are kept in any case.
    """

    first: float
    then: float = 0.0
    share: float = 1.0
    kept: Collection[ir.Value] = frozenset()

    def at(self, place: float) -> float:
        return (self.first if place < self.share else self.then) * (1 + _TILT * (1 - place))


class _Search:
    """The choices tried so far.

    Attributes:
        nothing: the choice to keep everything.
        least: the smallest peak of all choices.
    """

    def __init__(self, parts: Cut, storages: Storages, changed: Collection[ir.Value], early: bool) -> None:
        self._parts, self._storages, self._early = parts, storages, early
        self._nodes = [n for n in parts.forward.nodes if not storages.host.issuperset(n.outputs)]
        self._seconds = {n: node_seconds(n, storages) for n in self._nodes}
        self._again = recomputable_nodes(self._nodes, changed)
        results = {v for v in parts.forward.outputs[: parts.forward.num_user_outputs] if v is not None}
        self._bytes = {v: self._to_keep(v, results) for n in self._nodes for v in n.outputs}
        self.nothing = RecomputeChoice(frozenset(), 0.0, self._peak(parts), early)
        self.least = self.nothing.peak

    def _peak(self, parts: Cut) -> int:
        return timeline(parts, self._storages, group_gradients(parts) if self._early else ()).peak

    def _to_keep(self, value: ir.Value, results: set[ir.Value]) -> int:
        """What it takes to keep a value: the memory that it is a view of; nothing where that is there anyway."""
        root = self._storages.root(value)
        return 0 if root.producer() is None or root in results else self._storages.bytes_of(root)

    def within(self, budget: int) -> RecomputeChoice | None:
        """The choice of the least time of those found whose peak is within the budget."""
        if self.nothing.peak <= budget:
            return self.nothing
        fitting = (choice for choice in self._choices(budget) if choice.peak <= budget)
        return min(fitting, key=lambda choice: choice.seconds, default=None)

    def _choices(self, budget: int) -> Iterator[RecomputeChoice]:
        """Choices among which is the best that is found for this budget."""
        plain = [self._at(_Prices(price)) for price in _PRICES]
        yield from plain
        best = min(range(len(plain)), key=lambda i: plain[i].peak)
        if plain[best].peak <= budget:
            first = next(i for i, choice in enumerate(plain) if choice.peak <= budget)
            low = _PRICES[first - 1] if first else _PRICES[0] / 10
            # The same price for all, or the higher one for the first part of forward only.
            yield from self._halved(budget, lambda share: _Prices(low * (_PRICES[first] / low) ** share))
            yield from self._halved(budget, lambda share: _Prices(_PRICES[first], low, share))
            return
        crossing = self._crossing()
        borders = [self._at_borders(crossing, stages) for stages in _STAGES if stages <= len(self._nodes)]
        deep = [(self._at(_Prices(_DEEP, kept=kept)), kept) for kept in borders]
        yield from (choice for choice, _ in deep)
        fitting = sorted((d for d in deep if d[0].peak <= budget), key=lambda d: d[0].seconds)
        for _, kept in fitting[:_TRIED]:
            yield from self._halved(budget, partial(_Prices, _DEEP, _PRICES[best], kept=kept))

    def _halved(self, budget: int, prices: Callable[[float], _Prices]) -> Iterator[RecomputeChoice]:
        """Choices around the least share with which the budget is met."""
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            choice = self._at(prices(middle))
            yield choice
            low, high = (low, middle) if choice.peak <= budget else (middle, high)

    def _at(self, prices: _Prices) -> RecomputeChoice:
        """The choice at these prices."""
        again = self._cut(prices)
        values = {v for n in again for v in n.outputs if v not in replay_inputs(n) and v not in prices.kept}
        peak = self._peak(predict_cut(self._parts, values))
        self.least = min(self.least, peak)
        return RecomputeChoice(
            frozenset(str(v.name) for v in values), sum(self._seconds[n] for n in again), peak, self._early
        )

    # The minimum cut

    def _cut(self, prices: _Prices) -> set[ir.Node]:
        """The nodes to be computed again."""
        import networkx  # noqa: PLC0415  # takes a tenth of a second, and few ask for a budget

        graph = networkx.DiGraph()
        source, sink = "source", "sink"
        count = max(len(self._nodes), 1)
        graph.add_nodes_from((source, sink))
        for position, node in enumerate(self._nodes):
            if node in self._again:
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
        return {n for n in self._again if n in far}

    # Places

    def _crossing(self) -> list[list[ir.Value]]:
        """For the place before each node, the values that are made before it and read by forward from it on."""
        place = {n: i for i, n in enumerate(self._nodes)}
        last = {v: max((place[use.node] for use in v.uses() if use.node in place), default=-1) for v in self._bytes}
        found, live = [], dict[ir.Value, None]()
        for position, node in enumerate(self._nodes):
            live = {v: None for v in live if last[v] >= position}
            found.append(list(live))
            live.update(dict.fromkeys(node.outputs))
        return found

    def _at_borders(self, crossing: Sequence[Sequence[ir.Value]], stages: int) -> set[ir.Value]:
        """What crosses the narrowest place near the end of each stage but the last."""
        total, kept = len(crossing), set[ir.Value]()
        width = [sum(self._bytes[v] for v in values) for values in crossing]
        for border in range(1, stages):
            middle, reach = total * border // stages, max(total // (2 * stages), 1)
            near = range(max(middle - reach, 0), min(middle + reach, total))
            kept.update(crossing[min(near, key=lambda i: (width[i], abs(i - middle)))])
        return kept


def node_seconds(node: ir.Node, storages: Storages) -> float:
    """What a node is expected to take."""
    if all(storages.source(v) is not None for v in node.outputs):
        return 1e-6  # a view
    moved = sum(storages.bytes_of(v) for v in (*node.inputs, *node.outputs) if v is not None)
    flops = storages.number(definition_of(node).flops(definition_of(node).view(node)))
    machine = current_machine()
    return moving_seconds(moved, machine) + expected_seconds("aten", flops, machine)
