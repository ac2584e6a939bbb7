"""Split a part: Inductor computes the tensors that own memory, PyTorch makes the views of them that are results.

    inputs ──artifact──> roots          inputs, roots ──views──> outputs, sizes

So results share memory with inputs and with each other exactly as without Inductor, and none keeps more memory alive.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph.alias import AliasSets, view_source
from onnxtrain.ops import Effects, definition_of
from onnxtrain.ops.interfaces.in_place import MAY_KEEP_INPUTS
from onnxtrain.plan.cut import Part, nodes_computing

_REASONS = {
    Effects.PYTHON: "it runs the user's Python",
    Effects.HOST_SYNC: "its results determine sizes",
}


@dataclass(frozen=True)
class Split:
    """The two parts of a part.

    Attributes:
        computed: all nodes that compute tensors; its outputs own their memory.
        views: from some inputs of the part and the outputs of `computed`, the outputs and sizes of the part.
        inputs: the indices, among the inputs of the part, of the inputs that `views` reads.
    """

    computed: Part
    views: Part
    inputs: tuple[int, ...]


def split(part: Part) -> Split:
    """Split a part.

    Raises:
        GraphError: Inductor cannot run the part.
    """
    for node in part.nodes:
        reason = _obstacle(node)
        if reason:
            raise GraphError(f"{node.op_type} cannot be compiled", got=reason)
    sets = AliasSets(part.nodes, definition_of)
    outputs = [v for v in part.outputs if v is not None]
    roots = {root: None for root in map(sets.root, outputs) if root.producer() is not None and root in _own(part)}
    if not roots:
        raise GraphError("the program computes no tensor")
    nodes, _ = nodes_computing(part.nodes, list(roots), part.host, part.nodes, ~Effects.NONE)
    computed = Part(nodes, part.inputs, part.sizes_in, tuple(roots), (), part.host, 0)

    viewing = [n for n in part.nodes if roots.keys().isdisjoint(n.outputs)]
    goals = [v for v in (*outputs, *part.sizes_out) if v.const_value is None and v not in roots]
    nodes, read = nodes_computing(viewing, goals, part.host, part.nodes, Effects.NONE)
    for node in nodes:
        if not (part.host.issuperset(node.outputs) or view_source(node, 0, definition_of(node))):
            raise GraphError("a result is not a view of a tensor", got=node.op_type)
    needed = {*read, *outputs}
    inputs = tuple(i for i, v in enumerate(part.inputs) if v in needed)
    own_inputs = (*(part.inputs[i] for i in inputs), *roots)
    views = Part(nodes, own_inputs, part.sizes_in, part.outputs, part.sizes_out, part.host, part.num_user_outputs)
    return Split(computed, views, inputs)


def _own(part: Part) -> set[ir.Value]:
    return {v for node in part.nodes for v in node.outputs} - part.host


def _obstacle(node: ir.Node) -> str:
    """Return why Inductor cannot run a node; "" if it may."""
    reason = next((reason for effect, reason in _REASONS.items() if effect in definition_of(node).effects), "")
    return reason or ("it runs code that onnxtrain does not know" if node in MAY_KEEP_INPUTS else "")
