"""Order the collectives of sharded parameters, so that they overlap with computation.

    before   gather 1, wait 1, compute 1, gather 2, wait 2, compute 2, …    gradient 2, reduce 2, wait, gradient 1, …
    after    gather 1, gather 2, wait 1, compute 1, gather 3, wait 2, …     gradient 2, reduce 2, gradient 1, …, wait

Parameters are gathered before what comes before their readers, as many bytes of them as `in_flight_bytes` allows. The
reduction of a gradient starts when the gradient is complete. It is awaited at the end, or before a later one that would
exceed `in_flight_bytes`: until then the whole gradient is held. Gathers keep their order, and so do reductions.

The order of all depends on the graph and on options alone, never on the sizes of a rank's batches. A cut puts its nodes
in this order, so that predictions of memory see it. It is the order of the host, on every device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.values import TensorType, dtype_of, type_of
from onnxtrain.ops import Effects, definition_of, view
from onnxtrain.ops.collective.parameters import GATHER_PARAMETERS, REDUCE_GRADIENTS
from onnxtrain.ops.collective.transfers import WAIT

Exchange = tuple[str, dict[str, Any], tuple[TensorType, ...]]

_BEYOND_ANY_LIMIT = 2**62
_SHARE_OF_BUDGET = 8  # of a memory budget in bytes, an eighth for what is in flight


def limit_in_flight(graph: ir.Graph, budget: int | float | str | None) -> None:
    """Limit the bytes in flight to a share of a memory budget that is given in bytes, and so the same on all ranks."""
    if not isinstance(budget, int):
        return
    for node in graph:
        if definition_of(node) is GATHER_PARAMETERS:
            limit = min(view(node).in_flight_bytes, budget // _SHARE_OF_BUDGET)
            node.attributes["in_flight_bytes"] = ir.AttrInt64("in_flight_bytes", limit)


def is_ordered_here(node: ir.Node) -> bool:
    """Return whether a node is a collective of parameters, or waits for one."""
    if definition_of(node) is WAIT:
        source = node.inputs[0].producer() if node.inputs[0] is not None else None
        return source is not None and is_ordered_here(source)
    return definition_of(node) in (GATHER_PARAMETERS, REDUCE_GRADIENTS)


def overlapped(nodes: Sequence[ir.Node], results: Iterable[ir.Value | None]) -> tuple[ir.Node, ...]:
    """Return the nodes of a part in the order that overlaps collectives of parameters with computation.

    Args:
        nodes: in execution order.
        results: the values that leave the part.
    """
    if not any(map(is_ordered_here, nodes)):
        return tuple(nodes)
    return tuple(_awaited_late(_awaited_at_once(_gathered_early(_reduced_early(nodes))), set(results)))


def waits_for(node: ir.Node, among: Collection[ir.Node]) -> list[ir.Node]:
    """Return the nodes that wait for the collective of a node: PyTorch keeps its results until all are waited for."""
    if Effects.COLLECTIVE not in definition_of(node).effects:
        return []
    users = (user for value in node.outputs for user, index in value.uses() if index == 0)
    return [user for user in users if definition_of(user) is WAIT and user in among]


def exchanges(nodes: Iterable[ir.Node]) -> list[Exchange]:
    """Return what nodes exchange with other ranks: the op, attributes and result types of each collective, in order."""
    return [
        (node.op_type, {a.name: getattr(view(node), a.name) for a in node.attributes.values()}, _types(node))
        for node in nodes
        if Effects.COLLECTIVE in definition_of(node).effects
    ]


def _types(node: ir.Node) -> tuple[TensorType, ...]:
    return tuple(map(type_of, node.outputs))


def whole_bytes(node: ir.Node) -> int:
    """Return the bytes of the whole parameters, or of their gradients, that a node communicates.

    Tensors of symbolic sizes, which are no parameters, have more than any limit: such a node stays where it is.
    """
    wholes = node.outputs if definition_of(node) is GATHER_PARAMETERS else node.inputs
    return sum(map(_bytes, wholes))


def _bytes(value: ir.Value | None) -> int:
    if value is None:
        return 0
    elements = sizes.multiply(*sizes.dims_of(value))
    return elements * int(dtype_of(value).itemsize) if isinstance(elements, int) else _BEYOND_ANY_LIMIT


def _reduced_early(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Move each reduction after the node that completes its gradients, or after the reduction before."""
    positions = {node: position for position, node in enumerate(nodes)}
    order: dict[int, list[ir.Node]] = {}
    latest = 0
    for node in nodes:
        if definition_of(node) is REDUCE_GRADIENTS:
            producers = [p for value in node.inputs if value is not None and (p := value.producer()) in positions]
            latest = max([latest, *(positions[p] for p in producers if p is not None)])
            order.setdefault(latest, []).append(node)
    moved = {node for reductions in order.values() for node in reductions}
    return [each for i, n in enumerate(nodes) for each in (*([] if n in moved else [n]), *order.get(i, ()))]


def _gathered_early(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    gathers = [node for node in nodes if definition_of(node) is GATHER_PARAMETERS]
    early: dict[ir.Node, list[ir.Node]] = {}  # what is gathered where a node was
    pending, ahead = deque(gathers), 0
    for gather in gathers:
        started = early[gather] = []
        if pending and pending[0] is gather:
            started.append(pending.popleft())
        else:
            ahead -= whole_bytes(gather)
        while pending and ahead + whole_bytes(pending[0]) <= view(pending[0]).in_flight_bytes:
            ahead += whole_bytes(pending[0])
            started.append(pending.popleft())
    order: dict[ir.Node, None] = {}
    own = set(nodes)
    for node in nodes:
        for each in early.get(node, [node]):
            _append(each, own, order)
    return list(order)


def _append(node: ir.Node, own: set[ir.Node], order: dict[ir.Node, None]) -> None:
    """Append a node after what it reads, such as the padding of shards."""
    if node in order:
        return
    for value in node.inputs:
        producer = None if value is None else value.producer()
        if producer is not None and producer in own:
            _append(producer, own, order)
    order[node] = None


def _awaited_at_once(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Move the waits for reductions that may not be in flight right after them."""
    own = set(nodes)
    waits = {
        node: waits_for(node, own)
        for node in nodes
        if definition_of(node) is REDUCE_GRADIENTS and whole_bytes(node) > view(node).in_flight_bytes
    }
    moved = {wait for each in waits.values() for wait in each}
    return [each for node in nodes if node not in moved for each in (node, *waits.get(node, ()))]


def _awaited_late(nodes: Sequence[ir.Node], results: set[ir.Value | None]) -> list[ir.Node]:
    order: list[ir.Node] = []
    in_flight: dict[ir.Node, list[ir.Node]] = {}  # reductions: what waits for each, and depends on that
    delayed: dict[ir.Node, ir.Node] = {}  # the reduction that a node is delayed for
    own = set(nodes)

    def finish(reduction: ir.Node) -> None:
        order.extend(in_flight.pop(reduction))

    for node in nodes:
        producers = [value.producer() for value in node.inputs if value is not None]
        if definition_of(node) is WAIT and producers[0] in in_flight and _is_read(node, own, results):
            assert producers[0] is not None
            delayed[node] = producers[0]
        elif sources := [delayed[p] for p in producers if p in delayed and delayed[p] in in_flight]:
            if definition_of(node).effects is Effects.NONE:
                delayed[node] = max(sources, key=list(in_flight).index)
            else:
                for reduction in list(in_flight):
                    finish(reduction)
        if node in delayed:
            in_flight[delayed[node]].append(node)
            continue
        if definition_of(node) is REDUCE_GRADIENTS:
            size, limit = whole_bytes(node), view(node).in_flight_bytes
            while in_flight and sum(map(whole_bytes, in_flight)) + size > limit:
                finish(next(iter(in_flight)))
            if size <= limit:
                in_flight[node] = []
        order.append(node)
    for reduction in list(in_flight):
        finish(reduction)
    return order


def _is_read(node: ir.Node, own: set[ir.Node], results: set[ir.Value | None]) -> bool:
    return any(v in results or any(user in own for user, _ in v.uses()) for v in node.outputs)
