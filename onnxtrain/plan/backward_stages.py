"""Splits a backward part where gradients are ready, so that they can be handed over while backward goes on.

    kept, cotangents ──[stage]──> gradients of the last layers ──> .grad, hooks
              carried ──[stage]──> gradients of the layers before ──> .grad, hooks
                                   ...

A gradient is ready when it is computed and nothing in backward reads its memory or its parameter any more: a hook may
then change both, as an optimizer that runs in backward does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.alias import AliasSets
from onnxtrain.graph.values import dtype_of
from onnxtrain.ops import Effects, definition_of
from onnxtrain.plan.cut import Cut, Part, nodes_computing
from onnxtrain.torch_compat.autograd import why_no_stages

_MOST_STAGES = 32  # of equal bytes: what is held back is at most that share of all gradients
Groups = tuple[tuple[int, ...], ...]


def group_gradients(parts: Cut) -> Groups:
    """The gradients that are handed over together, in the order in which they are ready."""
    ready = _ready(parts)
    bytes_of = {index: _fixed_bytes(parts.forward.inputs[index]) for index in ready}
    enough = sum(bytes_of.values()) / _MOST_STAGES
    groups: list[tuple[int, ...]] = []
    group: list[int] = []
    for index in sorted(ready, key=lambda index: ready[index]):
        if group and sum(bytes_of[i] for i in group) >= enough and ready[index] > ready[group[-1]]:
            groups.append(tuple(group))
            group = []
        group.append(index)
    return (*groups, tuple(group)) if group else ()


def is_object(value: ir.Value) -> bool:
    """Whether a value is a Python object in a running program, and no tensor."""
    producer = value.producer()
    if producer is None:
        return False
    definition = definition_of(producer)
    return definition.output_name(value.index() or 0) in definition.objects


def why_not_staged(parts: Cut, views: Sequence[str]) -> str | None:
    """Why backward cannot run in stages; None where it can. For `views` see `output_views.input_views`."""
    if why := why_no_stages():
        return why
    if any(map(is_object, parts.kept)):
        return "a custom autograd function runs in it"
    return "an output may be a view of an input" if any(views) else None


def stage_ends(parts: Cut, groups: Groups) -> list[int]:
    """For each group, how many of backward's nodes have run when it is handed over."""
    ready, found = _ready(parts), [0]
    for group in groups[:-1]:
        found.append(max([found[-1], *(ready[index] for index in group if index in ready)]))
    return [*found[1:], len(parts.backward.nodes)]


def split_backward(parts: Cut, groups: Groups) -> tuple[Part, ...]:
    """The backward part as one part per group: its outputs are the group's gradients, then what later parts read of it.

    Args:
        parts: those that the groups are of, or those for fewer cotangents or gradients.
        groups: see `group_gradients`; each gradient is in one.
    """
    part = parts.backward
    stages: list[Part] = []
    later: dict[ir.Value, None] = {}  # what the stages behind read
    for group, (start, end) in reversed(
        list(zip(groups, itertools.pairwise([0, *stage_ends(parts, groups)]), strict=True))
    ):
        own = part.nodes[start:end]
        gradients = tuple(part.outputs[index] for index in group)
        made = [v for node in own for v in node.outputs if v in later]
        goals = [*(g for g in gradients if g is not None), *made]
        nodes, reads = nodes_computing(own, goals, part.host, part.nodes, Effects.PYTHON | Effects.COLLECTIVE)
        reads = [v for v in reads if v.const_value is None]
        tensors_in, sizes_in = _tensors_and_sizes(reads, part)
        tensors_out, sizes_out = _tensors_and_sizes(made, part)
        stages.append(
            replace(
                part,
                nodes=nodes,
                inputs=tensors_in,
                sizes_in=sizes_in,
                outputs=(*gradients, *tensors_out),
                sizes_out=sizes_out,
                num_user_outputs=len(group),
            )
        )
        later = {v: None for v in (*later, *reads) if v not in set(made)}
    return tuple(reversed(stages))


def _ready(parts: Cut) -> dict[int, int]:
    """For each gradient, by the number of its input, how many of backward's nodes run before it is handed over."""
    aliases = AliasSets((*parts.forward.nodes, *parts.backward.nodes), definition_of)
    touched: dict[ir.Value, int] = {}
    for count, node in enumerate(parts.backward.nodes, 1):
        for value in (*node.inputs, *node.outputs):
            if value is not None:
                touched[aliases.root(value)] = count
    return {
        index: max(touched.get(aliases.root(value), 0) for value in (gradient, parts.forward.inputs[index]))
        for index, gradient in enumerate(parts.backward.outputs)
        if gradient is not None
    }


def _fixed_bytes(value: ir.Value) -> int:
    """A value's bytes where its sizes are fixed, as a parameter's are; else 0."""
    known = [size for size in sizes.dims_of(value) if isinstance(size, int)]
    return int(math.prod(known) * dtype_of(value).itemsize) if len(known) == len(sizes.dims_of(value)) else 0


def _tensors_and_sizes(values: Iterable[ir.Value], part: Part) -> tuple[tuple[ir.Value, ...], tuple[ir.Value, ...]]:
    found = list(values)
    return tuple(v for v in found if v not in part.host), tuple(v for v in found if v in part.host)
