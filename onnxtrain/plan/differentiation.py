"""Differentiate a forward graph for the cotangents of all its results, or of some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxtrain.autodiff import Joint, differentiate
from onnxtrain.graph import traversal
from onnxtrain.graph.traversal import clone, with_graph
from onnxtrain.graph.values import type_of
from onnxtrain.ops import definition_of
from onnxtrain.ops.elementwise.arithmetic import ADD
from onnxtrain.passes import Pass, optimize
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.fuse_sums import fuse_gradient_sums
from onnxtrain.passes.rewriting import only_user, substitute
from onnxtrain.passes.user_graph_optimizers import GraphFunction, rewrite
from onnxtrain.plan.mutated_inputs import differentiate_with_copies
from onnxtrain.plan.parameter_buckets import join_collectives

Flags = tuple[bool, ...]


@dataclass(frozen=True)
class Differentiation:
    """A forward graph with the arguments of its differentiation.

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
        return self.optimize(self.joint(cotangents))[0]

    def optimize(self, joint: Joint) -> tuple[Joint, Changes]:
        """Run the passes over a joint graph, and return it with what they did."""
        changes = optimize(joint.model, self.passes)
        return join_collectives(joint.rebind_gradients()), changes

    def without_cotangents(self, joint: Joint, cotangents: Flags) -> Joint | None:
        """Remove the cotangents that are not in `cotangents` from a joint graph after the passes, in place.

        The result is the graph that differentiation makes without them.

        Returns:
            None, and leave the graph as it is, if a cotangent is read by anything but an addition of a gradient, or if
            the user's functions have rewritten the graph.
        """
        pairs = zip(joint.cotangents, (*cotangents, *(False for _ in self.mutated)), strict=True)
        absent = [c for c, is_passed in pairs if c is not None and not is_passed]
        sums = [_only_sum(c, joint) for c in absent]
        if joint.is_rewritten or None in sums or len({*sums}) < len(sums):
            return None
        graph = joint.model.graph
        for cotangent, node in zip(absent, sums, strict=True):
            assert node is not None
            other = node.inputs[1 - node.inputs.index(cotangent)]
            assert other is not None
            substitute(graph, node.outputs[0], other, [node])
            graph.inputs.remove(cotangent)
        optimize(joint.model, [run for run in self.passes if run is fuse_gradient_sums])
        left = (None if c in absent else c for c in joint.cotangents)
        return replace(joint, cotangents=tuple(left)).rebind_gradients()

    def mutated_inputs(self, joint: Joint) -> list[ir.Value]:
        """Return the inputs of a joint graph that forward mutates before backward runs."""
        return [joint.model.graph.inputs[index] for index in self.mutated]


def _only_sum(cotangent: ir.Value, joint: Joint) -> ir.Node | None:
    """Return the node that adds a cotangent to a gradient of the same type, if nothing else reads the cotangent."""
    node = only_user(cotangent)
    if node is None or node.graph is not joint.model.graph or definition_of(node) is not ADD:
        return None
    if node.outputs[0].is_graph_output():
        return None
    other = node.inputs[1 - node.inputs.index(cotangent)]
    if other is None or other in joint.cotangents or other.producer() is None:
        return None
    return node if type_of(other) == type_of(node.outputs[0]) else None


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
        is_rewritten=True,
        forward_nodes=joint.forward_nodes | forward,
        gradients=tuple(g if g is None else rewritten.replaced.get(g, g) for g in joint.gradients),
    )
