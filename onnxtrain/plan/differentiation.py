"""Differentiate a forward graph for the cotangents of all its results, or of some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxtrain.autodiff import Joint, differentiate
from onnxtrain.graph import traversal
from onnxtrain.graph.traversal import clone, with_graph
from onnxtrain.passes import Pass, optimize
from onnxtrain.passes.user_graph_optimizers import GraphFunction, rewrite
from onnxtrain.plan.mutated_inputs import differentiate_with_copies

Flags = tuple[bool, ...]


@dataclass(frozen=True)
class Differentiation:
    """How a forward graph is differentiated.

    Attributes:
        forward: the graph; not modified. Its outputs are `results` results, then the new values of the mutated inputs.
        wrt: for each input of the graph, whether its gradient is wanted.
        results: how many outputs are results of the module.
        mutated: positions of the inputs that forward mutates, one per output after the results.
        passes: run on each joint graph.
    """

    forward: ir.Model
    wrt: Flags
    results: int
    mutated: Sequence[int]
    passes: Sequence[Pass]

    def joint(self, cotangents: Flags | None = None) -> Joint:
        """Return the joint graph for the cotangents of these results; None for all.

        They include results that may be views of an input: only the run shows whether they are. A view is recreated
        outside the autograd function, and autograd computes its gradient there; a copy gets its gradient here.
        """
        of_results = (True,) * self.results if cotangents is None else cotangents
        flags = (*of_results, *(False for _ in self.mutated))
        return differentiate_with_copies(
            self.forward, self.mutated, lambda model: differentiate(model, self.wrt, flags)
        )

    def optimized(self, cotangents: Flags | None = None) -> Joint:
        """Return the joint graph after the passes."""
        joint = self.joint(cotangents)
        optimize(joint.model, self.passes)
        return joint.rebind_gradients()

    def mutated_inputs(self, joint: Joint) -> list[ir.Value]:
        """Return the inputs of a joint graph that forward mutates before backward runs."""
        return [joint.model.graph.inputs[index] for index in self.mutated]


def unoptimized_joint(model: ir.Model, wrt: Flags, results: int) -> ir.Model:
    """Return the joint graph of a capture before any pass; the capture itself if no gradient is wanted."""
    if not any(wrt):
        return model
    cotangents = [i < results for i in range(len(model.graph.outputs))]
    return differentiate(with_graph(model, clone(model.graph)[0]), wrt, cotangents).model


def rewrite_joint(joint: Joint, functions: Sequence[GraphFunction]) -> Joint:
    """Rewrite a joint graph by users' functions."""
    graph = joint.model.graph
    rewritten = rewrite(graph, functions)
    # New nodes that compute results of forward run in forward.
    needed = set(graph.outputs[: joint.outputs])
    for node in reversed(graph):
        if any(v in needed for v in node.outputs):
            needed.update(traversal.reads(node))
    forward = {node for node in rewritten.added if any(v in needed for v in node.outputs)}
    return replace(
        joint,
        forward_nodes=joint.forward_nodes | forward,
        gradients=tuple(g if g is None else rewritten.replaced.get(g, g) for g in joint.gradients),
    )
