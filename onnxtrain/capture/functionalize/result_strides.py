"""Give results the strides that eager PyTorch's kernels give them, where those of the graph's nodes give others.

    pixel_shuffle(x)            ──>    pixel_shuffle(x).permute(0, 2, 3, 1).clone(contiguous).permute(0, 3, 1, 2)
    rms_norm(x.mT)              ──>    rms_norm(x.mT.clone(contiguous))

A graph's values have no strides: those of a program's tensors follow from the kernels that it calls. Most nodes call
the kernel that eager PyTorch calls, but the operators here are captured as others, pixel_shuffle as two reshapes. Users
see strides in results, and in the elements that a later dropout drops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export.exported_program import ExportedProgram
from torch.fx import GraphModule, Node

from onnxtrain.capture.functionalize.memory_order import add_view, memory_order
from onnxtrain.capture.node_storage import example_size

_aten = torch.ops.aten


def restore_result_strides(program: ExportedProgram) -> None:
    """Copy results, or arguments, into the memory order in which eager PyTorch has the result."""
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            for node in list(module.graph.nodes):
                restore = _OPERATORS.get(getattr(node.target, "overloadpacket", None))
                if restore is not None and node.users:
                    restore(node)


def _contiguous_as_traced(node: Node) -> None:
    """The nodes' result has the order of the first argument, where that of the trace may be contiguous."""
    x = node.args[0]
    assert isinstance(x, Node)
    if _is_ordered(node) and not _is_ordered(x):
        with node.graph.inserting_before(node):
            copy = _add_copy(node, x)
        copy.meta["val"] = torch.empty_like(x.meta["val"], memory_format=torch.contiguous_format)
        node.replace_input_with(x, copy)


def _masked_fill(node: Node) -> None:
    """The node's result has the order of either argument; that of the trace is contiguous."""
    if _is_ordered(node) and not all(map(_is_ordered, node.all_input_nodes)):
        with node.graph.inserting_before(node.next):
            copy = _add_copy(node, node)
        node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


def _as_traced(node: Node) -> None:
    """The nodes' result is contiguous, that of the trace may not be."""
    order = memory_order(node.meta["val"])
    if order == sorted(order):
        return
    result = node.meta["val"]
    users = list(node.users)
    node.meta["val"] = torch.empty_like(result, memory_format=torch.contiguous_format)
    with node.graph.inserting_before(node.next):
        copy = _add_copy(node, add_view(node, _aten.permute.default, node, order))
        copy.meta["val"] = result.permute(order)  # the memory of the traced result, of which other nodes are views
        restored = add_view(node, _aten.permute.default, copy, [order.index(dim) for dim in range(len(order))])
    node.replace_all_uses_with(restored, delete_user_cb=lambda user: user in users)


def _add_copy(node: Node, x: Node) -> Node:
    copy = node.graph.call_function(_aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
    copy.meta = dict(node.meta)
    return copy


def _is_ordered(node: Node) -> bool:
    """Return whether the dimensions are stored in their order; an expanded one, of stride 0, may have any position."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return True
    order = [dim for dim in memory_order(value) if example_size(value.stride(dim)) != 0]
    return order == sorted(order)


_OPERATORS: Mapping[Any, Callable[[Node], None]] = {
    **dict.fromkeys((_aten.addbmm, _aten.addmm, _aten.baddbmm, _aten.rms_norm), _contiguous_as_traced),
    _aten.masked_fill: _masked_fill,
    **dict.fromkeys((_aten.channel_shuffle, _aten.pixel_shuffle, _aten.pixel_unshuffle, _aten.stack), _as_traced),
}
