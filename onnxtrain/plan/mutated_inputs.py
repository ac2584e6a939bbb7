"""Copy the inputs that forward mutates, if backward reads their old values: buffers and arguments.

    y = x * seen;  seen = seen + 1        backward reads the old `seen`: a copy is kept

Eager PyTorch keeps the old tensor if forward assigns a new one. If forward writes in place, eager's backward raises.
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
    model: ir.Model, mutated: Sequence[int], differentiate: Callable[[ir.Model], Joint]
) -> Joint:
    """Differentiate a copy of `model` whose backward reads the old values of the `mutated` inputs.

    Args:
        model: without gradients.
        mutated: positions of inputs.
        differentiate: makes the joint graph of a model, which it may modify.
    """
    joint = differentiate(with_graph(model, clone(model.graph)[0]))
    read = _read_by_backward(joint, mutated)
    if not read:
        return joint
    with_copies = with_graph(model, clone(model.graph)[0])
    for index in read:
        _read_through_copy(with_copies.graph, with_copies.graph.inputs[index])
    return differentiate(with_copies)


def check_backward_reads(joint: Joint, mutated: Sequence[int]) -> None:
    """Raise CaptureError if backward reads an input that forward mutates, as a faulty pass could cause."""
    read = _read_by_backward(joint, mutated)
    if read:
        raise CaptureError(
            "backward reads a buffer or an input after forward has mutated it",
            got=", ".join(str(joint.model.graph.inputs[index].name) for index in read),
            todo="this is a bug in onnxtrain: please report it with the module, which runs in PyTorch meanwhile",
        )


def _read_by_backward(joint: Joint, mutated: Sequence[int]) -> list[int]:
    """Return the mutated inputs whose memory holds a value that is kept for backward."""
    if not mutated:
        return []
    sets = AliasSets(tuple(joint.model.graph), definition_of)
    kept = {sets.root(value) for value in cut(joint).kept}
    return [index for index in mutated if sets.root(joint.model.graph.inputs[index]) in kept]


def _read_through_copy(graph: ir.Graph, value: ir.Value) -> None:
    """Make all nodes read a copy of an input."""
    uses, op = list(value.uses()), builder(graph)
    with nodes_before(op, graph[0]):
        copied = op.own.Clone(value)
    for node, index in uses:
        node.replace_input_with(index, copied)
    for index, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[index] = copied
