"""Refuse writes to views whose elements overlap in memory, which a functional graph cannot express; and to `unfold`.

x.expand(2, 3).fill_(1)                     functionalization would add up the overlapping elements
torch.select_scatter(x.unfold(0, 2, 1), …)  PyTorch's result overlaps, too: a write to one element changes others
x.unfold(0, 2, 3).fill_(1)                  functionalization sets the elements of x between the windows to 0
"""

from __future__ import annotations

import torch
from torch.export.exported_program import ExportedProgram
from torch.fx import GraphModule, Node

from onnxtrain.capture import source_location
from onnxtrain.capture.functionalize.no_grad import mutated_arguments
from onnxtrain.capture.node_storage import example_size
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat.operators import OpOverload, schema_of

_aten = torch.ops.aten
_SCATTERS = {_aten.select_scatter, _aten.slice_scatter, _aten.diagonal_scatter, _aten.as_strided_scatter}


def refuse_overlapping_writes(program: ExportedProgram) -> None:
    """Refuse a forward that writes to a view whose elements overlap, or to a view made by `unfold`.

    Raises:
        CaptureError: forward writes to such a view.
    """
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            for written in _written_values(node):
                if _overlaps(written.meta.get("val")):
                    raise _error("forward writes to a view whose elements overlap in memory", node)
                if _is_unfolded(written):
                    raise _error("forward writes to a view made by unfold", node)


def _error(problem: str, node: Node) -> CaptureError:
    todo = "the module runs in PyTorch; clone() the view first"
    return CaptureError(problem, where=source_location.of_node(node), got=str(node.target), todo=todo)


def _is_unfolded(value: object) -> bool:
    """Return whether a tensor is a view, of a view, … of a tensor that `unfold` returned."""
    while isinstance(value, Node) and value.args:
        if getattr(value.target, "overloadpacket", None) is _aten.unfold:
            return True
        if isinstance(value.target, OpOverload) and not any(r.alias_info for r in schema_of(value.target).returns):
            return False
        value = value.args[0]
    return False


def _written_values(node: Node) -> list[Node]:
    if getattr(node.target, "overloadpacket", None) in _SCATTERS:
        return [argument for argument in node.args[:1] if isinstance(argument, Node)]
    if isinstance(node.target, OpOverload) and torch.Tag.inplace_view in node.target.tags:
        return []  # x.t_() changes the strides and no element
    return mutated_arguments(node)


def _overlaps(value: object) -> bool:
    """Return whether a dimension's stride is below the span of the dimensions inside it, at the example's sizes."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    sizes, strides = ([example_size(n) for n in dims] for dims in (value.shape, value.stride()))
    if 0 in sizes:
        return False
    span = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1):
        if stride < span:
            return True
        span = stride * (size - 1) + span
    return False
