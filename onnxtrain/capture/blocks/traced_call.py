"""The trace of one call of a block, and a key that is equal for calls with the same trace.

The key names a node by its position in the trace, and a tensor from outside by its slot: the call's tensors come first,
then the block's parameters and buffers. Symbolic sizes are named by their expressions: they are the same in all blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from onnxtrain.capture.blocks.call_arguments import NotReusableError, argument_key, flatten, without_tensors
from onnxtrain.capture.export.checkpoint_regions import checkpoint_region_of, other_annotations
from onnxtrain.capture.functionalize.no_grad import is_grad_enabled, mutated_arguments
from onnxtrain.capture.node_storage import layout_of, storages_of
from onnxtrain.ops.python_function.node import TORCH_OP
from onnxtrain.torch_compat import pytree
from onnxtrain.torch_compat.operators import OpOverload
from onnxtrain.torch_compat.symbols import unreplaced_expression
from onnxtrain.torch_compat.tensors import storage_id


@dataclass(frozen=True)
class Slots:
    """The tensors that a block takes.

    Attributes:
        nodes: the nodes of the call's tensors, then the block's; the name of a hidden parameter; None for any other
            tensor that is not in the trace.
        storages: their storages.
        writable: whether each is a buffer of the block.
        keys: their types, and which of them are the same.
    """

    nodes: Sequence[Node | str | None]
    storages: Sequence[int]
    writable: Sequence[bool]
    keys: Hashable


@dataclass(frozen=True)
class TracedCall:
    """The trace of one call.

    Attributes:
        slots: the tensors that the block takes.
        nodes: the traced nodes in order, without those that compute sizes: they are the same for all blocks.
        result: what the block returned, without its tensors: a trace must not keep them alive.
        returned: for each tensor in `result`, the node that computes it, or the number of the slot that it is.
        requires_grad: for each tensor that a node computes, whether it requires a gradient.
        used_slots: the numbers of the slots that the nodes or the results use.
        outer_region: the checkpoint region around the call; "" if there is none.
        key: equal for calls with the same trace.
    """

    slots: Slots
    nodes: Sequence[Node]
    result: Any
    returned: Sequence[Node | int]
    requires_grad: Sequence[bool]
    used_slots: Sequence[int]
    outer_region: str
    key: Hashable


def traced_call(
    traced: Iterable[Node],
    slots: Slots,
    result: Any,
    node_of: Callable[[torch.Tensor], Node | None],
    outer_region: str,
) -> TracedCall:
    """Describe a call.

    Args:
        traced: the nodes that the call added to the trace.
        slots: the tensors that the block takes.
        result: what the block returned.
        node_of: finds the node of a tensor.
        outer_region: the checkpoint region around the call.

    Raises:
        NotReusableError: the call does something that a copy of its nodes would not repeat.
    """
    nodes: list[Node] = []
    for node in traced:
        if node.meta.get("unbacked_bindings"):  # the elements of a tensor decide on a size
            raise NotReusableError
        if not is_size(node):
            nodes.append(node)
    names = _Names(slots, nodes, outer_region)
    keys = tuple(map(names.key_of_call, nodes))
    tensors: list[torch.Tensor] = []
    structure = flatten(result, tensors)
    returned = [names.result(node_of(tensor)) for tensor in tensors]
    names.check_results(returned)
    results = [r if isinstance(r, int) else ("node", names.position_of[r]) for r in returned]
    requires_grad = [t.requires_grad for t, r in zip(tensors, returned, strict=True) if isinstance(r, Node)]
    key = (keys, structure, tuple(results), tuple(requires_grad))
    return TracedCall(
        slots, nodes, without_tensors(result), returned, requires_grad, sorted(names.used_slots), outer_region, key
    )


class _Names:
    """The names of nodes, storages and checkpoint regions that do not depend on the block."""

    def __init__(self, slots: Slots, nodes: Sequence[Node], outer_region: str) -> None:
        self.position_of = {node: position for position, node in enumerate(nodes)}
        self.slot_of: dict[Node, int] = {}
        self.used_slots: set[int] = set()
        self._storages: dict[int, Hashable] = {}
        self._read_only: set[int] = set()
        for index, node in enumerate(slots.nodes):
            if isinstance(node, Node):
                self.slot_of.setdefault(node, index)
                for storage in storages_of(node):
                    self._storages.setdefault(storage, ("slot", index))
                    if not slots.writable[index]:
                        self._read_only.add(storage)
        self._of_slots = frozenset(self._storages)
        self._regions: dict[str, int] = {outer_region: 0}

    def use_slot(self, node: Node) -> int:
        """Return the number of the slot with this node."""
        self.used_slots.add(self.slot_of[node])
        return self.slot_of[node]

    def result(self, node: Node | None) -> Node | int:
        """Return a result's node, or the number of its slot.

        Raises:
            NotReusableError: it is a tensor from elsewhere.
        """
        if node is None or not (node in self.slot_of or node in self.position_of):
            raise NotReusableError
        return self.use_slot(node) if node in self.slot_of else node

    def key_of_call(self, node: Node) -> Hashable:
        """Return a key of a node.

        Raises:
            NotReusableError: a copy of the node would not do the same.
        """
        target: Any = node.target
        if node.op != "call_function" or not (isinstance(target, OpOverload) or target is operator.getitem):
            raise NotReusableError
        if target is TORCH_OP:
            raise NotReusableError
        if isinstance(target, OpOverload) and torch.Tag.inplace_view in target.tags:
            raise NotReusableError
        if any(not self._read_only.isdisjoint(storages_of(written)) for written in mutated_arguments(node)):
            raise NotReusableError
        return (
            *(target, argument_key((node.args, node.kwargs), self._key_of_argument), is_grad_enabled(node)),
            *(self._key_of_value(node), node.stack_trace, self._key_of_region(checkpoint_region_of(node))),
            other_annotations(node.meta),
        )

    def _key_of_region(self, region: str) -> int:
        return self._regions.setdefault(region, len(self._regions))

    def _key_of_argument(self, node: Node) -> Hashable:
        if node in self.position_of:
            return "node", self.position_of[node]
        if node in self.slot_of:
            return "slot", self.use_slot(node)
        if is_size(node):
            return "size", str(node.meta["val"])
        raise NotReusableError  # a tensor from elsewhere

    def _key_of_value(self, node: Node) -> Hashable:
        return tuple(self._key_of_result(value) for value in pytree.tree_leaves(node.meta.get("val")))

    def _key_of_result(self, value: Any) -> Hashable:
        if isinstance(value, torch.SymInt):
            return "size", unreplaced_expression(value)
        if not isinstance(value, torch.Tensor):
            return repr(value)
        if value.layout is not torch.strided:
            raise NotReusableError
        storage = self._storages.setdefault(storage_id(value), len(self._storages))
        return value.dtype, value.device, layout_of(value), storage

    def check_results(self, returned: Sequence[Node | int]) -> None:
        """Check that every result is a slot itself, or has memory of its own.

        Raises:
            NotReusableError: two results, or a result and a slot, share memory, or a result is a part of a tensor.
        """
        used = set(self._of_slots)
        for node in (r for r in returned if not isinstance(r, int)):
            storages = storages_of(node)
            if len(storages) != 1 or not used.isdisjoint(storages) or layout_of(node.meta["val"])[-1] != (0,):
                raise NotReusableError
            used |= storages


def is_size(node: Node) -> bool:
    """Return whether a node computes an expression over the sizes of the inputs."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, torch.SymFloat))
