"""Order the nodes of a part for a device whose work runs behind the host, on several streams.

    host        launches ……… waits for the number of rows, launches the rest
    compute     mask, count ─event─▶ copy ……… layers ……… rows, loss
    collectives                              AllReduce(x) ─event─▶ compute, where the first node reads the sum

A number that the host reads crosses from the device to the host: its copy is launched as soon as its input is computed,
which is first of all if only integers and sizes are needed for it. The host then waits for an event at the start of the
step, while the device still has the layers to compute.

A collective runs on a stream of the process group, which begins after its input. It is started before the nodes that it
does not need, and the compute stream waits for it before the first node that reads the result. In between are nodes
that are independent of it, such as the gradient of a weight beside the sum of the gradients of its input.

Nothing is reordered on a CPU, nor are nodes with effects. Collectives of parameters stay where `parameter_order` puts
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

import onnx_ir as ir
import torch

from onnxtrain.graph.values import dtype_of
from onnxtrain.ops import Effects, definition_of, view
from onnxtrain.ops.collective.transfers import WAIT
from onnxtrain.ops.interfaces.cost import MATMUL_FLOPS, flops_per_element
from onnxtrain.ops.interfaces.host_reads import HOST_READS
from onnxtrain.plan.cut import Part, nodes_computing
from onnxtrain.plan.parameter_order import is_ordered_here

DEVICES = frozenset({"cuda"})  # whose work runs behind the host
Fill = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
REACH = 48  # nodes before a collective, and after the first reader of its result: those of about a layer's gradient


class Phase(Enum):
    """The action of the host for a node."""

    RUN = auto()  # launches it; a wait for a collective makes the compute stream wait
    START_READ = auto()  # launches the copy of the number that it reads
    FINISH_READ = auto()  # waits for the copy, and launches it


class Step(NamedTuple):
    """One action of the host, in order."""

    node: ir.Node
    phase: Phase


def scheduled(part: Part, device_type: str) -> Part:
    """Return the part with its nodes in the order in which they are launched, and with its early reads."""
    if device_type not in DEVICES:
        return part
    nodes = _masks_first(part)
    reads = frozenset(node for node in nodes if HOST_READS.entry(node) is not None)
    return replace(part, nodes=tuple(_awaited_late(_started_early(nodes))), early_reads=reads)


def steps(part: Part) -> Iterator[Step]:
    """Return what the host does to run a part."""
    waiting: dict[ir.Value, list[ir.Node]] = {}
    for node in part.nodes:
        if node in part.early_reads:
            waiting.setdefault(number_source(node), []).append(node)
    for value in part.inputs:
        yield from (Step(node, Phase.START_READ) for node in waiting.pop(value, ()))
    for node in part.nodes:
        yield Step(node, Phase.FINISH_READ if node in part.early_reads else Phase.RUN)
        for value in node.outputs:
            yield from (Step(other, Phase.START_READ) for other in waiting.pop(value, ()))


def number_source(node: ir.Node) -> ir.Value:
    """Return the input of an early read that its number depends on."""
    read = HOST_READS.entry(node)
    assert read is not None
    value: ir.Value = getattr(view(node), read.reads)
    return value


def number_part(part: Part, node: ir.Node) -> Part | None:
    """Return what computes `number_source` of an early read; None if that is more than integers of the part's inputs.

    The host can run it on a batch whose integers it knows.
    """
    source = number_source(node)
    nodes, outside = nodes_computing(part.nodes, [source], part.host, part.nodes, Effects.NONE)
    is_integer = all(_is_free(other) and not any(map(_is_floating, other.outputs)) for other in nodes)
    inputs = tuple(value for value in outside if value.const_value is None)
    if not is_integer or not set(inputs) <= set(part.inputs):
        return None
    return Part(nodes, inputs, (), (source,), (), part.host, 1)


class SplitAtReads(NamedTuple):
    """A part, cut after its early reads.

    Attributes:
        reads: what computes the early reads, from integers of the part's inputs; its outputs are what `rest` takes
            after the inputs of the part, then `number_source` of each read.
        rest: the other nodes.
        filled: for each read, the indices of its input and of its output among the outputs of `reads`, and its `fill`.
    """

    reads: Part
    rest: Part
    filled: tuple[tuple[int, int, Fill], ...]


def split_at_reads(part: Part) -> SplitAtReads | None:
    """Cut a part after its early reads, so that no size of the rest depends on data.

    None: it has no early reads, or one that does not depend on integers of its inputs alone, or without a `fill`.
    """
    fills = {node: read.fill for node in part.early_reads if (read := HOST_READS.entry(node)) is not None}
    if not fills or part.sizes_in or None in fills.values() or None in [number_part(part, node) for node in fills]:
        return None
    sources = [number_source(node) for node in fills]
    first = {n for n in _needed(sources, set(part.nodes)) if not part.host.issuperset(n.outputs)} | set(fills)
    goals = [v for v in (*part.outputs, *part.sizes_out) if v is not None and v.const_value is None]
    others = [node for node in part.nodes if node not in first]
    rest, outside = nodes_computing(others, goals, part.host, part.nodes, ~Effects.NONE)
    crossing = [value for value in outside if value.producer() in first]
    nodes, inputs = nodes_computing(part.nodes, [*crossing, *sources], part.host, part.nodes, Effects.NONE)
    tensors = tuple(value for value in inputs if value.const_value is None)
    reads = Part(nodes, tensors, (), (*crossing, *sources), (), part.host, 0, part.early_reads & set(nodes))
    filled = [
        (len(crossing) + index, crossing.index(node.outputs[0]), fill)
        for index, (node, fill) in enumerate(fills.items())
        if node.outputs[0] in crossing and fill is not None
    ]
    return SplitAtReads(
        reads, replace(part, nodes=rest, inputs=(*part.inputs, *crossing), early_reads=frozenset()), tuple(filled)
    )


def _masks_first(part: Part) -> list[ir.Node]:
    """Move what early reads depend on to the front, if that is only integers, booleans and sizes."""
    own = set(part.nodes)
    first: set[ir.Node] = set()
    for node in part.nodes:
        if HOST_READS.entry(node) is not None:
            needed = _needed([number_source(node)], own)
            if all(_is_free(other) and not any(map(_is_floating, other.outputs)) for other in needed):
                first |= needed
    return [n for n in part.nodes if n in first] + [n for n in part.nodes if n not in first]


def _started_early(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Move collectives before nodes that take time and that they do not need."""
    order = list(nodes)
    for collective in [node for node in nodes if _is_started(node) and not is_ordered_here(node)]:
        position = order.index(collective)
        first = position
        while first > max(0, position - REACH) and _is_free(order[first - 1]):
            first -= 1
        before = order[first:position]
        needed = _needed(collective.inputs, set(before))
        if any(node not in needed and _takes_time(node) for node in before):
            others = [node for node in before if node not in needed]
            order[first : position + 1] = [*(node for node in before if node in needed), collective, *others]
    return order


def _is_started(node: ir.Node) -> bool:
    """Return whether a node starts a collective, which another one waits for."""
    return any(definition_of(user) is WAIT and index == 0 for v in node.outputs for user, index in v.uses())


def _awaited_late(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Move waits for collectives to the first readers of their results, and independent work before the waits."""
    order = list(nodes)
    for wait in [node for node in nodes if definition_of(node) is WAIT and not is_ordered_here(node)]:
        start = order.index(wait)
        del order[start]
        reader = next((i for i in range(start, len(order)) if _reads(order[i], wait)), len(order))
        ready = _independent(order, reader, wait)
        late = [node for node in order[reader : reader + REACH] if node not in ready]
        early = [node for node in order[reader : reader + REACH] if node in ready]
        order[reader : reader + REACH] = [*early, wait, *late]
    return order


def _independent(order: Sequence[ir.Node], reader: int, wait: ir.Node) -> set[ir.Node]:
    """Return the nodes from a reader on that take time, do not depend on a wait, and what they need."""
    after = order[reader : reader + REACH]
    dependent = {wait}
    for node in after:
        if not _is_free(node) or any(v is not None and v.producer() in dependent for v in node.inputs):
            dependent.add(node)
    return set().union(
        *(_needed(node.outputs, set(after)) for node in after if node not in dependent and _takes_time(node))
    )


def _takes_time(node: ir.Node) -> bool:
    return flops_per_element(node) >= MATMUL_FLOPS


def _needed(values: Iterable[ir.Value | None], among: set[ir.Node]) -> set[ir.Node]:
    """Return the nodes that compute values."""
    needed: set[ir.Node] = set()
    pending = list(values)
    while pending:
        value = pending.pop()
        node = None if value is None else value.producer()
        if node is not None and node in among and node not in needed:
            needed.add(node)
            pending += node.inputs
    return needed


def _reads(node: ir.Node, wait: ir.Node) -> bool:
    return any(value in node.inputs for value in wait.outputs)


def _is_free(node: ir.Node) -> bool:
    return definition_of(node).effects is Effects.NONE


def _is_floating(value: ir.Value) -> bool:
    return dtype_of(value).is_floating_point()
