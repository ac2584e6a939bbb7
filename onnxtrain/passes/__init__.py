"""Graph to graph. FORWARD and JOINT are the only statement of which passes run and in what order.

A pass is a function (graph, changes) that edits the graph in place and says in `changes` what it did and refused. It
lives in a file of its own; `docs/adding-a-pass.md` walks through one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.passes.changes import Changes
from onnxtrain.passes.dedupe import dedupe
from onnxtrain.passes.drop_unused import drop_unused
from onnxtrain.passes.fold_constants import fold_constants

Pass = Callable[[ir.Graph, Changes], None]

FORWARD: tuple[Pass, ...] = (
    fold_constants,  # first: later passes match constants
    dedupe,  # one value per expression, so that a match has one producer
    drop_unused,  # last: what the others left behind
)

JOINT: tuple[Pass, ...] = (
    fold_constants,  # gradient rules make constants too
    dedupe,  # several rules compute the same sizes and views
    drop_unused,  # gradients that nobody asked for
)


def optimize(model: ir.Model, passes: Sequence[Pass]) -> Changes:
    """Runs `passes` over `model` in order, in place; returns what they did."""
    total = Changes()
    for run in passes:
        changes = Changes(run.__name__)
        run(model.graph, changes)
        total.made += [f"{run.__name__}: {text}" for text in changes.made]
        total.refused += changes.refused
    return total
