"""Deterministic `index_put(accumulate=True)`, with one index tensor per indexed axis.

On a GPU `index_put(accumulate=True)` sorts the indices and adds in a fixed order. On a CPU its threads add atomically
in any order; there the indices become rows of a matrix, to which `index_add_` adds sequentially. On one thread of an
AMD EPYC, adding 1024 rows to [512, 64] takes 28 us this way and 56 us by `index_put`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from onnxtrain.torch_compat import aten_kernels

Index = Sequence[torch.Tensor]


def aten_indices(axes: Sequence[int], index: Index) -> list[torch.Tensor | None]:
    """Return the index tensors in ATen's form: one entry per axis, None for axes that are not indexed."""
    indices: list[torch.Tensor | None] = [None] * (max(axes) + 1)
    for axis, tensor in zip(axes, index, strict=True):
        indices[axis] = tensor
    return indices


def are_adjacent(axes: Sequence[int]) -> bool:
    """Return whether the indexed axes are adjacent: the index axes then replace them, otherwise they come first."""
    return list(axes) == list(range(axes[0], axes[0] + len(axes)))


def add_to_zeros(shape: Sequence[int], axes: Sequence[int], index: Index, updates: torch.Tensor) -> torch.Tensor:
    """Return zeros of `shape` with `updates`, which has the shape of x[index], added at the indices."""
    if updates.device.type != "cpu":
        return aten_kernels.index_put(updates.new_zeros(shape), aten_indices(axes, index), updates, True, True)
    order = _order(len(shape), axes)
    target = updates.new_zeros([shape[i] for i in order])
    return _add_rows(target, axes, index, updates).permute(_inverse(order))


def add_in_order(x: torch.Tensor, axes: Sequence[int], index: Index, updates: torch.Tensor) -> torch.Tensor:
    """Return a copy of x with `updates`, broadcast to the shape of x[index], added at the indices.

    Raises:
        IndexError: an index is out of range.
    """
    if x.device.type != "cpu":
        return torch.ops.aten.index_put.default(x, aten_indices(axes, index), updates, True)
    for axis, tensor in zip(axes, index, strict=True):
        size = x.size(axis)
        if tensor.numel() and not (-size <= int(tensor.min()) and int(tensor.max()) < size):
            raise IndexError(
                f"index out of range for axis {axis}: expected {-size} to {size - 1}, "
                f"got {int(tensor.min())} to {int(tensor.max())}"
            )
    order = _order(x.dim(), axes)
    target = x.permute(order).clone(memory_format=torch.contiguous_format)
    index_shape = list(torch.broadcast_shapes(*(i.shape for i in index)))
    rest = list(target.shape[len(axes) :])
    first = axes[0] if are_adjacent(axes) else 0
    updates = updates.expand([*rest[:first], *index_shape, *rest[first:]])
    return _add_rows(target, axes, index, updates).permute(_inverse(order))


def _order(rank: int, axes: Sequence[int]) -> list[int]:
    return [*axes, *(i for i in range(rank) if i not in axes)]


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(i) for i in range(len(order))]


def _add_rows(target: torch.Tensor, axes: Sequence[int], index: Index, updates: torch.Tensor) -> torch.Tensor:
    """Add to `target` in place; it is a new contiguous tensor whose first axes are the indexed ones."""
    count = len(axes)
    extents, rest = target.shape[:count], target.shape[count:]
    rows = torch.zeros((), dtype=torch.int64)
    for tensor, extent in zip(index, extents, strict=True):
        rows = rows * extent + torch.where(tensor < 0, tensor + extent, tensor)
    if are_adjacent(axes) and axes[0]:
        updates = updates.movedim(list(range(axes[0], axes[0] + rows.dim())), list(range(rows.dim())))
    flat = target.view(math.prod(extents), *rest)
    flat.index_add_(0, rows.reshape(-1), updates.reshape(rows.numel(), *rest))
    return target
