"""Give the same number for an item that forward reads again, as layers that split by the lengths of images do.

    lengths = ends[1:] - ends[:-1]          in each layer
    torch.split(x, lengths.tolist())        the same data-dependent numbers, and so the same decisions on them

PyTorch makes a new symbol for each call of `item()`. Two items are the same if the same operators compute them from the
same tensors of integers, and no tensor of integers was changed in place between them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.fx import Node

from onnxtrain.torch_compat.operators import OpOverload, schema_of
from onnxtrain.torch_compat.tracing import traced_node

_MAX_DEPTH = 12  # of operators between an item and the tensors that it is compared by


class RepeatedItems:
    """The numbers that forward has read so far in one trace."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, Any] = {}
        self._last: Node | None = None
        self._changes = 0  # in-place changes of tensors of integers, up to the node `_last`

    def number(self, tensor: torch.Tensor, read: Callable[[torch.Tensor], Any]) -> Any:
        """Return the item of a traced tensor: `read(tensor)`, or what that returned for the same item before."""
        node = traced_node(tensor)
        if node is None or tensor.is_floating_point() or tensor.is_complex():
            return read(tensor)
        self._count_changes(node.graph)
        key = self._changes, id(node.graph), _key(node, _MAX_DEPTH)
        if key not in self._numbers:
            self._numbers[key] = read(tensor)
        return self._numbers[key]

    def _count_changes(self, graph: torch.fx.Graph) -> None:
        nodes = iter(reversed(graph.nodes))
        latest = first = next(nodes)
        while latest is not self._last:
            self._changes += _changes_integers(latest)
            following = next(nodes, None)
            if following is None:
                break
            latest = following
        self._last = first


def _changes_integers(node: Node) -> bool:
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
        return False
    return any(_is_of_integers(part) for part in node.all_input_nodes)


def _is_of_integers(node: Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(v, torch.Tensor) and not v.is_floating_point() and not v.is_complex() for v in values)


def _key(argument: Any, depth: int) -> Hashable:
    """Return a key that is equal for arguments that are computed in the same way."""
    if isinstance(argument, list | tuple):
        return tuple(_key(part, depth) for part in argument)
    if not isinstance(argument, Node):
        return type(argument), argument
    value = argument.meta.get("val")
    if isinstance(value, torch.SymInt):
        return "size", value.node.expr
    is_pure = argument.target is operator.getitem or (
        isinstance(argument.target, OpOverload)
        and not schema_of(argument.target).is_mutable
        and torch.Tag.nondeterministic_seeded not in argument.target.tags
    )
    if depth == 0 or argument.op != "call_function" or not is_pure or not _is_of_integers(argument):
        return argument
    parts = tuple(_key(part, depth - 1) for part in argument.args)
    return argument.target, parts, tuple((name, _key(part, depth - 1)) for name, part in argument.kwargs.items())
