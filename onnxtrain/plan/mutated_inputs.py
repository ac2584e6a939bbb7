"""Inputs whose contents are others when backward runs: buffers and arguments that forward changes.

    y = x * seen;  seen = seen + 1        backward reads `seen` as it was: a copy is kept, where it does

Eager PyTorch keeps the old tensor where forward assigns a new one; where it writes to the tensor, backward raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.autodiff import Joint
from onnxtrain.errors import CaptureError
from onnxtrain.graph.alias import AliasSets
from onnxtrain.graph.traversal import clone, with_graph
from onnxtrain.ops import builder, definition_of
from onnxtrain.passes.rewriting import nodes_before
from onnxtrain.plan.cut import cut


def differentiate_with_copies(
    model: ir.Model, changed: Sequence[int], differentiate: Callable[[ir.Model], Joint]
) -> Joint:
    """The joint graph of a copy of `model`, whose backward reads the `changed` inputs as forward found them.

    Args:
        model: without gradients.
        changed: positions of inputs.
        differentiate: makes a joint graph of a model, which it may write to.
    """
    joint = differentiate(with_graph(model, clone(model.graph)[0]))
    read = _read_by_backward(joint, changed)
    if not read:
        return joint
    apart = with_graph(model, clone(model.graph)[0])
    for index in read:
        _copy_first(apart.graph, apart.graph.inputs[index])
    return differentiate(apart)


def check_backward_reads(joint: Joint, changed: Sequence[int]) -> None:
    """Raises CaptureError where backward would read what forward has changed, as a pass may have made it."""
    read = _read_by_backward(joint, changed)
    if read:
        raise CaptureError(
            "backward reads a buffer or an input that forward changes",
            got=", ".join(str(joint.model.graph.inputs[index].name) for index in read),
            todo="the module runs in PyTorch; this is a fault of onnxtrain: please report it with the module",
        )


def _read_by_backward(joint: Joint, changed: Sequence[int]) -> list[int]:
    """Those of the inputs in whose memory something lies that is kept for backward."""
    if not changed:
        return []
    sets = AliasSets(tuple(joint.model.graph), definition_of)
    kept = {sets.root(value) for value in cut(joint).kept}
    return [index for index in changed if sets.root(joint.model.graph.inputs[index]) in kept]


def _copy_first(graph: ir.Graph, value: ir.Value) -> None:
    """Lets all nodes read a copy of an input."""
    uses, op = list(value.uses()), builder(graph)
    with nodes_before(op, graph[0]):
        copied = op.own.Clone(value)
    for node, index in uses:
        node.replace_input_with(index, copied)
    for index, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[index] = copied
