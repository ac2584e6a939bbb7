"""Find the results of forward that may be views."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.alias import AliasSets, view_source
from onnxtrain.ops import NOT_DIFFERENTIABLE, definition_of


def input_views(model: ir.Model, results: int) -> tuple[str, ...]:
    """Return "view" for each result that may be a view of an input, "detached" if it has no gradient, else ""."""
    sets = AliasSets(model.graph, definition_of)
    inputs = set(model.graph.inputs)
    return tuple(
        ("detached" if _is_detached(v) else "view") if sets.root(v) in inputs else ""
        for v in model.graph.outputs[:results]
    )


def unshared_results(model: ir.Model, results: int) -> list[int]:
    """Return the results that share memory with no input and no other result."""
    sets, outputs, inputs = AliasSets(model.graph, definition_of), model.graph.outputs, set(model.graph.inputs)
    roots = [sets.root(v) for v in outputs]
    return [i for i, root in enumerate(roots[:results]) if root not in inputs and roots.count(root) == 1]


def _is_detached(value: ir.Value) -> bool:
    """Return whether an op without gradient is between the value and the input that it is a view of."""
    node = value.producer()
    while node is not None:
        definition = definition_of(node)
        if definition.gradient is NOT_DIFFERENTIABLE:
            return True
        source = view_source(node, value.index() or 0, definition)
        if source is None:
            return False
        value, node = source, source.producer()
    return False
