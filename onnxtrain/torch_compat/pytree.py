"""Access PyTorch's pytrees, where users register their containers for torch.export and torch.compile."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from onnxtrain.torch_compat.internal import Internal, missing, required


def _function(name: str) -> Callable[..., Any]:
    return Internal[Callable[..., Any]](
        f"pytree.{name}",
        lambda: getattr(importlib.import_module("torch.utils._pytree"), name),
        why="only PyTorch's own pytrees know the containers that users registered with PyTorch",
        fallback=missing(f"pytree.{name}"),
        cost="every module runs in PyTorch",
        required=True,
        check=callable,
    ).get()


keystr = _function("keystr")
tree_flatten = _function("tree_flatten")
tree_flatten_with_path = _function("tree_flatten_with_path")
tree_leaves = _function("tree_leaves")
tree_map = _function("tree_map")
tree_map_only = _function("tree_map_only")
tree_unflatten = _function("tree_unflatten")
registered_containers: dict[type, Any] = required(
    "pytree.registered_containers",
    lambda: importlib.import_module("torch.utils._pytree").SUPPORTED_NODES,
    "the containers that users registered, with their flatten and unflatten functions",
    check=lambda part: {dict, list, tuple} <= part.keys(),
    fallback={},
)
