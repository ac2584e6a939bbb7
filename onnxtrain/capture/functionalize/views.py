"""Views in a trace that functionalization would miss.

v.t_()                                  ──>  v = v.t()          what reads `v` later reads the view
y = dropout(v, 0.1, False);  y.mul_(2)  ──>  y = alias(v);  …   dropout gives v itself, its schema a new tensor
y, z = broadcast_tensors(v, w)          taken apart: its schema does not mark the views
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.export.exported_program import ExportedProgram
from torch.fx import GraphModule, Node

from onnxtrain.capture.node_storage import layout_of, storages_of
from onnxtrain.ops.aten_node import is_composite
from onnxtrain.torch_compat.operators import OpOverload, schema_of

aten = torch.ops.aten

_ALIAS = aten.alias.default
_MARKED: dict[OpOverload, OpOverload] = {
    aten.unsafe_chunk.default: aten.chunk.default,
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}


def mark_views(program: ExportedProgram) -> None:
    """Let operators that give a view be ones whose schema says so."""
    calls = list(_calls(program))
    for node, operator in calls:
        if torch.Tag.inplace_view in operator.tags:
            node.target = _view(operator)
    if any(schema_of(operator).is_mutable for _, operator in calls):
        for node, operator in calls:
            node.target = _MARKED.get(operator, node.target)
            if (same := _argument_itself(node)) is not None:
                node.target, node.args, node.kwargs = _ALIAS, (same,), {}


def _calls(program: ExportedProgram) -> Iterator[tuple[Node, OpOverload]]:
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if isinstance(node.target, OpOverload):
                yield node, node.target


def is_unmarked_view(node: Node) -> bool:
    """Whether a composite operator gives views that its schema does not mark.

    Kept as one node, what forward writes to the view would not be written to its argument.
    """
    target = node.target
    if not isinstance(target, OpOverload) or schema_of(target).is_mutable:
        return False
    if any(result.alias_info for result in schema_of(target).returns) or not is_composite(target):
        return False
    return any(not storages_of(node).isdisjoint(storages_of(argument)) for argument in node.all_input_nodes)


def _argument_itself(node: Node) -> Node | None:
    """The argument that an operator gives back, though its schema says that it makes a tensor."""
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor) or not is_unmarked_view(node):
        return None
    for argument in node.all_input_nodes:
        value = argument.meta.get("val")
        if isinstance(value, torch.Tensor) and layout_of(value) == layout_of(result):
            return argument if not storages_of(node).isdisjoint(storages_of(argument)) else None
    return None


def _view(operator: OpOverload) -> OpOverload:
    """The operator that gives as a view what an in-place one makes of its tensor; itself where there is none."""
    packet = getattr(aten, schema_of(operator).name.removeprefix("aten::").removesuffix("_"), None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    takes = [(a.name, str(a.type)) for a in schema_of(operator).arguments]
    same = (o for o in overloads if o.is_view and [(a.name, str(a.type)) for a in schema_of(o).arguments] == takes)
    return next(same, operator)
