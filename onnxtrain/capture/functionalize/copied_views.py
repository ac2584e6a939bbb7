"""Decide by sizes whether an operator that copies some tensors, and returns a view of others, copies.

    y = x.transpose(0, 1).reshape(-1);  x.fill_(0)        y is a view if x has one row, and zero too; else a copy

A trace with symbolic sizes copies. That is the same computation unless the memory is written: then the capture serves
only calls without a size of 1 there.
"""

from __future__ import annotations

import torch
from torch.export.exported_program import ExportedProgram
from torch.fx import GraphModule

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
    modules = [module for module in program.graph_module.modules() if isinstance(module, GraphModule)]
    nodes = [node for module in modules for node in module.graph.nodes if node.op == "call_function"]
    written = {storage for node in nodes for argument in mutated_arguments(node) for storage in storages_of(argument)}
    for node in nodes if written else ():
        if node.target not in _COPIES_OR_VIEWS:
            continue
        source = node.args[0]
        own, copied = storages_of(source), storages_of(node)
        if own.isdisjoint(copied) and not written.isdisjoint(own | copied):
            for size in source.meta["val"].shape:
                if isinstance(size, torch.SymInt):
                    decisions.record_not_one(size, source_location.of_node(node) or "")
