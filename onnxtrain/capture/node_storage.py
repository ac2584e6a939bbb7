"""Which nodes of a trace share memory, and the layout of their tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from onnxtrain.torch_compat import pytree
from onnxtrain.torch_compat.symbols import unreplaced_expression
from onnxtrain.torch_compat.tensors import storage_id


def storages_of(node: Node) -> set[int]:
    """The memory of a node's tensors, as it was when forward was traced: views share it."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return {s for v in values if isinstance(v, torch.Tensor) and (s := _storage(v)) is not None}


def layout_of(tensor: torch.Tensor) -> tuple[tuple[Any, ...], ...]:
    """Shape, strides and offset, sizes as expressions: to compare sizes would make a condition of the comparison."""
    if tensor.layout != torch.strided:
        return (tuple(map(_expression, tensor.shape)),)
    return tuple(tuple(map(_expression, n)) for n in (tensor.shape, tensor.stride(), (tensor.storage_offset(),)))


def size_at_hand(size: int | torch.SymInt) -> int:
    """The size or stride in the call that is captured, without a guard; 0 where only the data tell."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def _expression(size: Any) -> Any:
    return unreplaced_expression(size) if isinstance(size, torch.SymInt) else size


def _storage(tensor: torch.Tensor) -> int | None:
    """The identity of a tensor's storage; None for a sparse tensor and inside a transform of torch.func."""
    if tensor.layout != torch.strided:
        return None
    try:
        return storage_id(tensor)
    except NotImplementedError:  # wrapped by vmap or jvp
        return None
