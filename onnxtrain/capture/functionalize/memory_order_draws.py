"""Random fills of tensors that are not contiguous, under the generator of eager PyTorch.

    x.mT.bernoulli_(p)            ──>    x.mT.permute(1, 0).bernoulli_(p)
    alpha_dropout(x.mT)           ──>    alpha_dropout(x.mT.permute(1, 0)).permute(1, 0)

PyTorch draws in the order of memory; values of a graph have no strides, so a graph draws in logical order. In between
the dimensions are permuted so that both orders are the same. `normal_` draws other numbers, by another algorithm, if
the tensor is not contiguous (`normal_kernel` in aten/src/ATen/native/cpu/DistributionTemplates.h): that is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export.exported_program import ExportedProgram
from torch.fx import GraphModule, Node

from onnxtrain.capture import source_location
from onnxtrain.capture.node_storage import example_size
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat.tensors import is_contiguous_or_false

_aten = torch.ops.aten
# Draw one number per element of their first argument, in the order of its memory.
_FILLS = {
    _aten.bernoulli_,
    _aten.uniform_,
    _aten.random_,
    _aten.exponential_,
    _aten.geometric_,
    _aten.log_normal_,
    _aten.cauchy_,
    _aten.alpha_dropout_,
}
_DRAWS = {_aten.alpha_dropout}


def draw_in_memory_order(program: ExportedProgram) -> None:
    """Permute what random operators fill, so that its logical order is the order of its memory.

    Raises:
        CaptureError: the operator draws other numbers in a tensor that is not contiguous.
    """
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            for node in list(module.graph.nodes):
                packet = getattr(node.target, "overloadpacket", None)
                if packet in _FILLS or packet in _DRAWS:
                    _permute(node, is_fill=packet in _FILLS)
                elif packet is _aten.normal_:
                    _refuse_strided(node)


def _refuse_strided(node: Node) -> None:
    filled = node.args[0]
    assert isinstance(filled, Node)
    if not is_contiguous_or_false(filled.meta["val"]):
        raise CaptureError(
            "forward fills a tensor that is not contiguous with normal_",
            where=source_location.of_node(node),
            todo="the module runs in PyTorch; fill a contiguous tensor: torch.randn(sizes)",
        )


def _permute(node: Node, *, is_fill: bool) -> None:
    filled = node.args[0]
    assert isinstance(filled, Node)
    order = _memory_order(filled.meta["val"])
    if order == sorted(order):
        return
    result = node.meta["val"]
    with node.graph.inserting_before(node):
        node.args = tuple(_permuted(a, order, node) if isinstance(a, Node) else a for a in node.args)
    node.meta["val"] = result.permute(order)
    if is_fill:
        node.replace_all_uses_with(filled)
    else:
        with node.graph.inserting_after(node):
            back = _call(node, _aten.permute.default, node, [order.index(dim) for dim in range(len(order))])
        node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)


def _memory_order(value: torch.Tensor) -> list[int]:
    """The dimensions by descending stride, which is the same order at all sizes.

    A dimension of size 1 stays where it is: its stride means nothing.
    """
    strides = [example_size(stride) for stride in value.stride()]
    moved = [dim for dim in range(value.dim()) if example_size(value.shape[dim]) != 1]
    by_stride = iter(sorted(moved, key=lambda dim: -strides[dim]))
    return [next(by_stride) if dim in moved else dim for dim in range(value.dim())]


def _permuted(argument: Node, order: list[int], node: Node) -> Node:
    """A tensor argument, permuted like what it is broadcast to."""
    while argument.meta["val"].dim() < len(order):
        argument = _call(node, _aten.unsqueeze.default, argument, 0)
    return _call(node, _aten.permute.default, argument, order)


def _call(node: Node, target: Any, argument: Node, option: Any) -> Node:
    """A view of `argument`, at the line of `node`."""
    made = node.graph.call_function(target, (argument, option))
    made.meta = {**node.meta, "val": target(argument.meta["val"], option)}
    return made
