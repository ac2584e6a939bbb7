"""The order in which the dimensions of a traced tensor are stored in memory, and views that restore it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from onnxtrain.capture.node_storage import example_size


def memory_order(value: torch.Tensor) -> list[int]:
    """Return the dimensions by descending stride, which is the same order at all sizes.

    A dimension of size 1, whose stride is arbitrary, keeps its position.
    """
    strides = [example_size(stride) for stride in value.stride()]
    sorted_dims = [dim for dim in range(value.dim()) if example_size(value.shape[dim]) != 1]
    by_stride = iter(sorted(sorted_dims, key=lambda dim: -strides[dim]))
    return [next(by_stride) if dim in sorted_dims else dim for dim in range(value.dim())]


def add_view(node: Node, target: Any, argument: Node, option: Any) -> Node:
    """Add a view of `argument`, with the source location of `node`."""
    view = node.graph.call_function(target, (argument, option))
    view.meta = {**node.meta, "val": target(argument.meta["val"], option)}
    return view
