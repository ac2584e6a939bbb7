"""Replace operators that return views without declaring it, which functionalization would miss.

v.t_()                                  ──>  v = v.t()          later reads of `v` read the view
y = dropout(v, 0.1, False);  y.mul_(2)  ──>  y = alias(v);  …   dropout returns v itself, its schema says a new tensor
y, z = broadcast_tensors(v, w)          decomposed: its schema does not declare the views
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
_DECLARING_VIEWS: dict[OpOverload, OpOverload] = {
    aten.unsafe_chunk.default: aten.chunk.default,
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}


def declare_views(program: ExportedProgram) -> None:
    """Replace operators that return a view by operators whose schema declares it."""
    calls = list(_calls(program))
    for node, operator in calls:
        if torch.Tag.inplace_view in operator.tags:
            node.target = _out_of_place(operator)
    if any(schema_of(operator).is_mutable for _, operator in calls):
        for node, operator in calls:
            node.target = _DECLARING_VIEWS.get(operator, node.target)
            if (argument := _returned_argument(node)) is not None:
                node.target, node.args, node.kwargs = _ALIAS, (argument,), {}


def _calls(program: ExportedProgram) -> Iterator[tuple[Node, OpOverload]]:
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if isinstance(node.target, OpOverload):
                yield node, node.target


def is_undeclared_view(node: Node) -> bool:
    """Return whether a composite operator returns views that its schema does not declare.

    If it were kept as one node, a write to the view would not reach the argument.
    """
    target = node.target
    if not isinstance(target, OpOverload) or schema_of(target).is_mutable:
        return False
    if any(result.alias_info for result in schema_of(target).returns) or not is_composite(target):
        return False
    return any(not storages_of(node).isdisjoint(storages_of(argument)) for argument in node.all_input_nodes)


def _returned_argument(node: Node) -> Node | None:
    """Return the argument that an operator returns, though its schema declares a new tensor; None if it does not."""
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor) or not is_undeclared_view(node):
        return None
    for argument in node.all_input_nodes:
        value = argument.meta.get("val")
        if isinstance(value, torch.Tensor) and layout_of(value) == layout_of(result):
            return argument if not storages_of(node).isdisjoint(storages_of(argument)) else None
    return None


def _out_of_place(operator: OpOverload) -> OpOverload:
    """Return the view operator with the same arguments as an in-place one (`t` for `t_`), or `operator` itself."""
    packet = getattr(aten, schema_of(operator).name.removeprefix("aten::").removesuffix("_"), None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    signature = _signature(operator)
    return next((o for o in overloads if o.is_view and _signature(o) == signature), operator)


def _signature(operator: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema_of(operator).arguments]
