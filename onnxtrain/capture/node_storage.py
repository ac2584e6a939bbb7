"""Which nodes of a trace share memory, and the layout of their tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree


def storages_of(node: Node) -> set[int]:
    """The memory of a node's tensors, as it was when forward was traced: views share it."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return {s for v in values if isinstance(v, torch.Tensor) and (s := _storage(v)) is not None}


def layout_of(tensor: torch.Tensor) -> tuple[tuple[Any, ...], ...]:
    """Shape, strides and offset, sizes as expressions: to compare sizes would make a condition of the comparison."""
    if tensor.layout != torch.strided:
        return (tuple(map(_expression, tensor.shape)),)
    return tuple(tuple(map(_expression, n)) for n in (tensor.shape, tensor.stride(), (tensor.storage_offset(),)))


def _expression(size: Any) -> Any:
    return size.node._expr if isinstance(size, torch.SymInt) else size


def _storage(tensor: torch.Tensor) -> int | None:
    """The identity of a tensor's storage; None for a sparse tensor and inside a transform of torch.func."""
    if tensor.layout != torch.strided:
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # wrapped by vmap or jvp
        return None
