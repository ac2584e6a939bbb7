"""The storages and memory layouts of the tensors in a trace, and the nodes that copied ones repeat."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.fx import Node

from onnxtrain.torch_compat import pytree
from onnxtrain.torch_compat.symbols import unreplaced_expression
from onnxtrain.torch_compat.tensors import storage_id

COPY_OF = "copy of"  # the key in a copied node's metadata: the node of the block that was traced
_COPIED = "storages of the copy"  # the key in a node's metadata


class StoragesOfCopy(dict[int, int]):
    """The storages of the tensors of a copied block, by those of the block it is a copy of.

    A storage is new if it is not given. Copies share their fake tensors with the block.
    """

    def __missing__(self, storage: int) -> int:
        self[storage] = new = -next(_NEW_STORAGES)  # no address is negative
        return new


_NEW_STORAGES = itertools.count(1)


def set_storages(meta: dict[str, Any], storages: StoragesOfCopy) -> None:
    """Give a copied node, which has this metadata, its own storages."""
    meta[_COPIED] = storages


def storages_of(node: Node, *, can_have_gradient: bool = False) -> set[int]:
    """Return the ids of the storages that a node's tensors had during the trace: a view shares its base's.

    Args:
        node: the node.
        can_have_gradient: leave out tensors of integers and booleans.
    """
    values = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    if can_have_gradient:
        values = [v for v in values if v.is_floating_point() or v.is_complex()]
    storages = {s for v in values if (s := _storage(v)) is not None}
    copied: StoragesOfCopy | None = node.meta.get(_COPIED)
    return storages if copied is None else {copied[storage] for storage in storages}


def layout_of(tensor: torch.Tensor) -> tuple[tuple[Any, ...], ...]:
    """Return shape, strides and offset, with symbolic sizes as expressions.

    To compare two symbolic sizes would add a guard; to compare their expressions does not.
    """
    if tensor.layout != torch.strided:
        return (tuple(map(_expression, tensor.shape)),)
    return tuple(
        tuple(map(_expression, sizes)) for sizes in (tensor.shape, tensor.stride(), (tensor.storage_offset(),))
    )


def example_size(size: int | torch.SymInt) -> int:
    """Return a size or stride in the captured call without adding a guard; 0 if it depends on tensor values."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def _expression(size: Any) -> Any:
    return unreplaced_expression(size) if isinstance(size, torch.SymInt) else size


def _storage(tensor: torch.Tensor) -> int | None:
    """Return the id of a tensor's storage; None for a sparse tensor and inside a torch.func transform."""
    if tensor.layout != torch.strided:
        return None
    try:
        return storage_id(tensor)
    except NotImplementedError:  # wrapped by vmap or jvp
        return None
