"""Split backward into stages at the points where gradients are ready, to release them while backward still runs.

    kept, cotangents ──[stage]──> gradients of the last layers ──> .grad, hooks
              carried ──[stage]──> gradients of the layers before ──> .grad, hooks
                                   ...

A gradient is ready when it is computed and no later node of backward reads its memory or its parameter: a hook may then
change both, as an optimizer that runs in backward does.
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
from onnxtrain.ops.collective.transfers import WAIT
from onnxtrain.ops.interfaces.recompute import OBJECT_OUTPUTS
from onnxtrain.plan.cut import Cut, Part, nodes_computing
from onnxtrain.torch_compat.autograd import why_no_stages

_MAX_STAGES = 32  # of equal bytes: at most this share of all gradients waits for its stage to end
Groups = tuple[tuple[int, ...], ...]


def group_gradients(parts: Cut) -> Groups:
    """Group the gradients that are released together, in the order in which they are ready."""
    ready = _ready(parts)
    bytes_of = {index: _fixed_bytes(parts.forward.inputs[index]) for index in ready}
    group_bytes = sum(bytes_of.values()) / _MAX_STAGES
    groups: list[tuple[int, ...]] = []
    group: list[int] = []
    for index in sorted(ready, key=lambda index: ready[index]):
        if group and sum(bytes_of[i] for i in group) >= group_bytes and ready[index] > ready[group[-1]]:
            groups.append(tuple(group))
            group = []
        group.append(index)
    return (*groups, tuple(group)) if group else ()


def group_inputs(parts: Cut, inputs: Iterable[int]) -> Groups:
    """Group the gradients of these inputs, and then those of the others; () if the former cannot be released before.

    That is so if a node that computes only the latter reads their memory.
    """
    wanted = set(inputs)
    present = [index for index, gradient in enumerate(parts.backward.outputs) if gradient is not None]
    first = tuple(index for index in present if index in wanted)
    second = tuple(index for index in present if index not in wanted)
    if not first or not second:
        return ()
    ordered, end = inputs_first(parts, first)
    aliases = AliasSets((*ordered.forward.nodes, *ordered.backward.nodes), definition_of)
    released = {aliases.root(v) for index in first if (v := ordered.backward.outputs[index]) is not None}
    used = (v for node in ordered.backward.nodes[end:] for v in (*node.inputs, *node.outputs) if v is not None)
    return () if any(aliases.root(value) in released for value in used) else (first, second)


def inputs_first(parts: Cut, inputs: Iterable[int]) -> tuple[Cut, int]:
    """Return the cut with the nodes that compute the gradients of these inputs first, and the number of them."""
    part = parts.backward
    goals = [gradient for index in inputs if (gradient := part.outputs[index]) is not None]
    first, _ = nodes_computing(part.nodes, goals, part.host, part.nodes, Effects.PYTHON)
    chosen = set(first)
    nodes = (*first, *(node for node in part.nodes if node not in chosen))
    return replace(parts, backward=replace(part, nodes=nodes)), len(first)


def is_object(value: ir.Value) -> bool:
    """Return whether a value of a running program is a Python object rather than a tensor."""
    producer = value.producer()
    objects = None if producer is None else OBJECT_OUTPUTS.entry(producer)
    return producer is not None and definition_of(producer).output_name(value.index() or 0) in (objects or ())


def why_not_staged(parts: Cut, views: Sequence[str]) -> str | None:
    """Return why backward cannot run in stages; None if it can. For `views` see `output_views.input_views`."""
    if why := why_no_stages():
        return why
    if any(map(is_object, parts.kept)):
        return "a custom autograd function runs in it"
    return "an output may be a view of an input" if any(views) else None


def stage_ends(parts: Cut, groups: Groups) -> list[int]:
    """Return, for each group, the number of backward's nodes that have run when it is released."""
    ready, ends = _ready(parts), [0]
    for group in groups[:-1]:
        ends.append(max([ends[-1], *(ready[index] for index in group if index in ready)]))
    return [*ends[1:], len(parts.backward.nodes)]


def split_backward(parts: Cut, groups: Groups, inputs_are_first: bool = False) -> tuple[Part, ...]:
    """Split the backward part into one part per group, whose outputs are its gradients and the values later parts read.

    Args:
        parts: the cut that the groups were made for, or one for fewer cotangents or gradients.
        groups: see `group_gradients`; each gradient is in exactly one.
        inputs_are_first: whether they are those of `group_inputs`.
    """
    if inputs_are_first:
        parts, end = inputs_first(parts, groups[0])
        ends = [end, len(parts.backward.nodes)]
    else:
        ends = stage_ends(parts, groups)
    part = parts.backward
    stages: list[Part] = []
    later: dict[ir.Value, None] = {}  # the values that later stages read
    for group, (start, end) in reversed(list(zip(groups, itertools.pairwise([0, *ends]), strict=True))):
        own = part.nodes[start:end]
        gradients = tuple(part.outputs[index] for index in group)
        carried = [v for node in own for v in node.outputs if v in later]
        waited = [node.outputs[0] for node in own if definition_of(node) is WAIT]
        goals = [*(g for g in gradients if g is not None), *carried, *waited]
        nodes, reads = nodes_computing(own, goals, part.host, part.nodes, Effects.PYTHON)
        reads = [v for v in reads if v.const_value is None]
        tensors_in, sizes_in = _tensors_and_sizes(reads, part)
        tensors_out, sizes_out = _tensors_and_sizes(carried, part)
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
        later = {v: None for v in (*later, *reads) if v not in set(carried)}
    return tuple(reversed(stages))


def _ready(parts: Cut) -> dict[int, int]:
    """Return, for each gradient by its input's position, how many of backward's nodes run before it may be released."""
    aliases = AliasSets((*parts.forward.nodes, *parts.backward.nodes), definition_of)
    last_use: dict[ir.Value, int] = {}
    for count, node in enumerate(parts.backward.nodes, 1):
        for value in (*node.inputs, *node.outputs):
            if value is not None:
                last_use[aliases.root(value)] = count
    return {
        index: max(last_use.get(aliases.root(value), 0) for value in (gradient, parts.forward.inputs[index]))
        for index, gradient in enumerate(parts.backward.outputs)
        if gradient is not None
    }


def _fixed_bytes(value: ir.Value) -> int:
    """Return the bytes of a value of static shape, such as a parameter; 0 for a dynamic shape."""
    static = [dim for dim in sizes.dims_of(value) if isinstance(dim, int)]
    return int(math.prod(static) * dtype_of(value).itemsize) if len(static) == len(sizes.dims_of(value)) else 0


def _tensors_and_sizes(values: Iterable[ir.Value], part: Part) -> tuple[tuple[ir.Value, ...], tuple[ir.Value, ...]]:
    ordered = list(values)
    return tuple(v for v in ordered if v not in part.host), tuple(v for v in ordered if v in part.host)
