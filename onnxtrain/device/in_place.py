"""Prove that outputs may be bound to the memory of inputs: `w.out` to `w`.

onnxruntime accepts any such binding, and orders nodes freely. If the node that writes `w.out` may run before one that
reads `w`, training silently continues with wrong values. A binding is safe if each node that reads `w` either must run
before the writer (which needs its result), or is the writer itself and reads each element before writing it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.errors import ArtifactError
from onnxtrain.graph import traversal
from onnxtrain.graph.values import ONNX
from onnxtrain.ops.registry import OPS


def verify_updates(model: ir.Model, updates: Mapping[str, str]) -> None:
    """Check all bindings of a model. Functions are inlined first, as onnxruntime does.

    Args:
        model: not modified.
        updates: the name of each output → the name of the input whose memory it is to be bound to.

    Raises:
        ArtifactError: an output or input does not exist, their types differ, or the binding is not safe.
    """
    plain = traversal.with_graph(model, traversal.clone(model.graph)[0])
    common.InlinePass()(plain)
    graph = plain.graph
    inputs = {v.name: v for v in graph.inputs}
    outputs = {v.name: v for v in graph.outputs}
    targets = list(updates.values())
    if len(set(targets)) != len(targets):
        raise ArtifactError("Two outputs cannot be bound to one input.", got=", ".join(targets))
    for output, name in updates.items():
        if output not in outputs or name not in inputs:
            raise ArtifactError("The graph lacks an output or input of an in-place binding.", got=(output, name))
        written, read = outputs[output], inputs[name]
        if (written.dtype, written.shape) != (read.dtype, read.shape):
            got = f"{written.dtype} {written.shape}"
            raise ArtifactError(
                f"{output} and {name} must have the same dtype and shape.",
                expected=f"{read.dtype} {read.shape}",
                got=got,
            )
        clash = _clash(written, [read], graph)
        if clash is not None:
            raise ArtifactError(
                f"{output} cannot be written to the memory of {name}: a node that reads it may run later.",
                where=traversal.describe(clash),
                expected=f"{output} to depend on every node that reads {name}",
                todo="read the value once, in the computation of its update",
            )


def _clash(written: ir.Value, memory: Sequence[ir.Value], graph: ir.Graph | Sequence[ir.Node]) -> ir.Node | None:
    """Return a node that may read `memory` after `written` has overwritten it; None if there is none."""
    writer = written.producer()
    if writer is None:
        return None  # an input is returned: nothing is written
    shared = _views(memory, graph)
    before = _ancestors(writer)
    for node in graph:
        if not any(value in shared for value in traversal.reads(node)):
            continue
        if node is writer:
            if not _writes_after_reading(node, written, shared):
                return node
        elif node not in before:
            return node
    return None


def _views(memory: Iterable[ir.Value], graph: Iterable[ir.Node]) -> set[ir.Value]:
    """Return the values that may share this memory. Possible views count, whether or not onnxruntime copies them."""
    shared = set(memory)
    for node in graph:
        definition = OPS.get((node.domain, node.op_type))
        views = definition is not None and (definition.preserves_elements or 0 in definition.aliases)
        if views and node.inputs[0] in shared:
            shared.update(v for v in node.outputs if not v.is_graph_output())
    return shared


def _ancestors(node: ir.Node) -> set[ir.Node]:
    ancestors: set[ir.Node] = set()
    pending = [node]
    while pending:
        for value in traversal.reads(pending.pop()):
            producer = value.producer()
            if producer is not None and producer not in ancestors:
                ancestors.add(producer)
                pending.append(producer)
    return ancestors


def _writes_after_reading(node: ir.Node, written: ir.Value, shared: set[ir.Value]) -> bool:
    """Return whether the node reads each element of `shared` before it writes that element of `written`."""
    if (node.domain, node.op_type) == (ONNX, "If"):
        if node.inputs[0] in shared:
            return False
        index = node.outputs.index(written)
        return all(_branch_is_safe(branch, index, shared) for branch in traversal.subgraphs(node))
    if (node.domain, node.op_type) == (ONNX, "Scan"):
        return _goes_by_slices(node, node.outputs.index(written), shared)
    return _is_elementwise(node) and all(v.shape == written.shape for v in node.inputs if v is not None and v in shared)


def _branch_is_safe(branch: ir.Graph, index: int, shared: set[ir.Value]) -> bool:
    return _clash(branch.outputs[index], list(shared), branch) is None


def _goes_by_slices(node: ir.Node, index: int, shared: set[ir.Value]) -> bool:
    """Return whether a Scan reads of `shared` only the slice that it writes next: forward, along the first axis."""
    attributes = node.attributes
    plain = not any(any(a.as_ints()) for name, a in attributes.items() if name.endswith(("_axes", "_directions")))
    body = attributes["body"].as_graph()
    states = len(node.inputs) - attributes.get_int("num_scan_inputs")
    slices = [inner for outer, inner in zip(node.inputs[states:], body.inputs[states:], strict=True) if outer in shared]
    elsewhere = {*node.inputs[:states], *traversal.captured_values(node)} & shared
    return plain and not elsewhere and index >= states and _clash(body.outputs[index], slices, body) is None


def _is_elementwise(node: ir.Node) -> bool:
    definition = OPS.get((node.domain, node.op_type))
    if definition is None:
        return False
    sides = definition.axes(definition.view(node)).split("->")
    return all(word in ("...", "-") for side in sides for word in _words(side))


def _words(side: str) -> Iterator[str]:
    return (word.strip() for word in side.split(","))
