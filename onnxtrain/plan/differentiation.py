"""The joint graphs of one forward graph: for all cotangents that its results can have, or for some of them."""

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
        forward: the graph, which stays as it is. Its outputs are `results` results, then the mutations' new values.
        wrt: for each input of the graph, whether its gradient is wanted.
        results: how many outputs are results of the module.
        mutated: positions of the inputs that forward mutates, one for each further output.
        passes: run over each joint graph.
    """

    forward: ir.Model
    wrt: Flags
    results: int
    mutated: Sequence[int]
    passes: Sequence[Pass]

    def joint(self, cotangents: Flags | None = None) -> Joint:
        """The joint graph for the cotangents of these results; None: of all.

        A result that may be a view of an input is among them, for only the run shows whether it is one. One that is
        gets recreated outside the autograd function and its gradient takes another way; one that was copied gets it
        here.
        """
        given = (True,) * self.results if cotangents is None else cotangents
        of = (*given, *(False for _ in self.mutated))
        return differentiate_with_copies(self.forward, self.mutated, lambda model: differentiate(model, self.wrt, of))

    def optimized(self, cotangents: Flags | None = None) -> Joint:
        """The same, optimized."""
        joint = self.joint(cotangents)
        optimize(joint.model, self.passes)
        return joint.rebind_gradients()

    def mutated_inputs(self, joint: Joint) -> list[ir.Value]:
        """The inputs of a joint graph whose contents are others when backward runs."""
        return [joint.model.graph.inputs[index] for index in self.mutated]


def unoptimized_joint(model: ir.Model, wrt: Flags, results: int) -> ir.Model:
    """The joint graph of a capture without any pass; the capture itself where no gradient is wanted."""
    if not any(wrt):
        return model
    of = [i < results for i in range(len(model.graph.outputs))]
    return differentiate(with_graph(model, clone(model.graph)[0]), wrt, of).model


def rewrite_joint(joint: Joint, functions: Sequence[GraphFunction]) -> Joint:
    """A joint graph after users' functions have rewritten it."""
    graph = joint.model.graph
    done = rewrite(graph, functions)
    # A new node that forward's results need runs in forward.
    needed = set(graph.outputs[: joint.outputs])
    for node in reversed(graph):
        if any(v in needed for v in node.outputs):
            needed.update(traversal.reads(node))
    forward = {node for node in done.added if any(v in needed for v in node.outputs)}
    return replace(
        joint,
        forward_nodes=joint.forward_nodes | forward,
        gradients=tuple(g if g is None else done.replaced.get(g, g) for g in joint.gradients),
    )
