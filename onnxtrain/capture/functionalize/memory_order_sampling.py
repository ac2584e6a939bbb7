"""Sample random elements of a non-contiguous tensor in the order in which eager PyTorch samples them.

    x.mT.bernoulli_(p)            ──>    x.mT.permute(1, 0).bernoulli_(p)
    alpha_dropout(x.mT)           ──>    alpha_dropout(x.mT.permute(1, 0)).permute(1, 0)

PyTorch samples in memory order. A graph samples in logical order, because its values have no strides. Permuting the
dimensions makes both orders equal. `normal_` is refused on a tensor that is not contiguous, for which PyTorch uses
another algorithm (`normal_kernel` in aten/src/ATen/native/cpu/DistributionTemplates.h).
"""

from __future__ import annotations

import torch
from torch.export.exported_program import ExportedProgram
from torch.fx import GraphModule, Node

from onnxtrain.capture import source_location
from onnxtrain.capture.functionalize.memory_order import add_view, memory_order
from onnxtrain.capture.node_storage import example_size
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat.tensors import is_contiguous_or_false

_aten = torch.ops.aten
# These sample one random number per element of their first argument, in its memory order.
_FILLS = {
    _aten.bernoulli_,
    _aten.dropout_,
    _aten.uniform_,
    _aten.random_,
    _aten.exponential_,
    _aten.geometric_,
    _aten.log_normal_,
    _aten.cauchy_,
    _aten.alpha_dropout_,
}
_FUNCTIONAL = {_aten.alpha_dropout}


def sample_in_memory_order(program: ExportedProgram) -> None:
    """Permute the tensors that random operators fill, so that their logical order is their memory order.

    Raises:
        CaptureError: `normal_` fills a tensor that is not contiguous, for which PyTorch uses another algorithm.
    """
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            for node in list(module.graph.nodes):
                packet = getattr(node.target, "overloadpacket", None)
                if packet in _FILLS or packet in _FUNCTIONAL:
                    _permute(node, is_fill=packet in _FILLS)
                elif packet is _aten.normal_:
                    _refuse_strided(node)


def _refuse_strided(node: Node) -> None:
    filled = node.args[0]
    assert isinstance(filled, Node)
    tensor = filled.meta["val"]
    if not is_contiguous_or_false(tensor):
        shape, strides = (tuple(map(example_size, dims)) for dims in (tensor.shape, tensor.stride()))
        raise CaptureError(
            "forward fills a tensor that is not contiguous with normal_",
            where=source_location.of_node(node),
            expected="a contiguous tensor",
            got=f"shape {shape} with strides {strides}",
            todo="the module runs in PyTorch; fill a contiguous tensor: torch.randn(sizes)",
        )


def _permute(node: Node, *, is_fill: bool) -> None:
    filled = node.args[0]
    assert isinstance(filled, Node)
    # alpha_dropout samples into an empty_like of its argument: contiguous, if the argument is expanded.
    perm = memory_order(filled.meta["val"] if is_fill else torch.empty_like(filled.meta["val"]))
    if perm == sorted(perm):
        return
    result = node.meta["val"]
    with node.graph.inserting_before(node):
        node.args = tuple(_permuted(a, perm, node) if isinstance(a, Node) else a for a in node.args)
    node.meta["val"] = result.permute(perm)
    if is_fill:
        node.replace_all_uses_with(filled)
    else:
        with node.graph.inserting_after(node):
            restored = add_view(node, _aten.permute.default, node, [perm.index(dim) for dim in range(len(perm))])
        node.replace_all_uses_with(restored, delete_user_cb=lambda user: user is not restored)


def _permuted(argument: Node, perm: list[int], node: Node) -> Node:
    """Permute a tensor argument in the same way as the tensor that it is broadcast to."""
    while argument.meta["val"].dim() < len(perm):
        argument = add_view(node, _aten.unsqueeze.default, argument, 0)
    return add_view(node, _aten.permute.default, argument, perm)
