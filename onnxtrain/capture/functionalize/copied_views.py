"""Decide by sizes whether an operator that copies some tensors, and returns a view of others, copies.

    y = x.transpose(0, 1).reshape(-1);  x.fill_(0)        y is a view if x has one row, and zero too; else a copy

A trace with symbolic sizes copies. The computation is the same unless the memory is written; the capture then serves
only calls without a size of 1 there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export.exported_program import ExportedProgram
from torch.fx import GraphModule, Node

from onnxtrain.capture import source_location
from onnxtrain.capture.functionalize.no_grad import mutated_arguments
from onnxtrain.capture.guards.size_decisions import SizeDecisions
from onnxtrain.capture.node_storage import storages_of

_aten = torch.ops.aten
_COPIES_OR_VIEWS = (
    _aten.contiguous.default,
    _aten.flatten.using_ints,
    _aten.ravel.default,
    _aten.reshape.default,
    _aten.reshape_as.default,
)


def decide_copies(program: ExportedProgram, decisions: SizeDecisions) -> None:
    """Record that the sizes on which a copy of written memory depends are not 1.

    Raises:
        CaptureError: the call has such a size.
    """
    _decide_in(program.graph_module, decisions, set())


def _decide_in(module: GraphModule, decisions: SizeDecisions, written_later: set[int]) -> None:
    """Decide in a graph and its regions; add the storages that they write to those that are written later."""
    for node in reversed(module.graph.nodes):
        for operand in node.all_input_nodes:
            region = getattr(module, str(operand.target), None) if operand.op == "get_attr" else None
            if isinstance(region, GraphModule):
                _decide_in(region, decisions, written_later)
        for argument in mutated_arguments(node):
            written_later |= storages_of(argument)
        if node.target in _COPIES_OR_VIEWS:
            _decide(node, decisions, written_later)


def _decide(node: Node, decisions: SizeDecisions, written_later: set[int]) -> None:
    source: Any = node.args[0]
    own, copied = storages_of(source), storages_of(node)
    if not own.isdisjoint(copied) or written_later.isdisjoint(own | copied):
        return
    for size in source.meta["val"].shape:
        if isinstance(size, torch.SymInt):
            decisions.record_not_one(size, source_location.of_node(node) or "")
