"""Facts about ops that one consumer asks, registered beside the definitions.

    IMAGES = OpInterface[Images]("images", names=lambda images: images.values)  # a module of this folder

    IMAGES.register(CONV, Images(frozenset({"x", "y"})))  # in the op's file, after its definition

    images = IMAGES.entry(node)  # in the consumer, such as a pass; None: its op has no entry

A definition holds the meaning of an op. A pass that needs to know more brings an interface: a module here with the type
of an entry, beside which each op that takes part registers its own. Ops and consumers import the interface, so that ops
know no pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.ops.definition import OpDef
from onnxtrain.ops.registry import OPS

T = TypeVar("T")


class OpInterface(Generic[T]):
    """At most one entry per op, of type T.

    Attributes:
        entries: by domain and name of the op.
    """

    def __init__(self, label: str, names: Callable[[T], Iterable[str]] = lambda entry: ()) -> None:
        """Create an interface without entries.

        Args:
            label: for errors.
            names: the inputs and outputs that an entry names.
        """
        self._label = label
        self._names = names
        self._entries: dict[tuple[str, str], T] = {}
        self._definitions: dict[tuple[str, str], OpDef] = {}  # of the entries: a new definition needs a new entry

    def register(self, op: OpDef, entry: T) -> None:
        """Register the entry of an op.

        Raises:
            GraphError: the op is not defined or has an entry, or it has no such input or output.
        """
        key = (op.domain, op.name)
        op_name = f"{op.domain or 'ai.onnx'}::{op.name}"
        if OPS.get(key) is not op:
            raise GraphError(
                f"{op_name} has an entry for {self._label} but is not defined", todo="define(...) it before the entry"
            )
        if self._definitions.get(key) is op:
            raise GraphError(f"{op_name} has two entries for {self._label}", todo="merge them into one")
        unknown = sorted(set(self._names(entry)) - op.slots.keys())
        if unknown:
            raise GraphError(
                f"the entry of {op_name} for {self._label} must name inputs or outputs of the op",
                expected=", ".join(op.slots),
                got=", ".join(unknown),
            )
        self._entries[key] = entry
        self._definitions[key] = op

    def implements(self, *ops: OpDef) -> Callable[[T], T]:
        """Register the decorated function as the entry of each of these ops."""

        def register(entry: T) -> T:
            for op in ops:
                self.register(op, entry)
            return entry

        return register

    def entry(self, node: ir.Node) -> T | None:
        """Return the entry of a node's op, or None."""
        return self._entries.get((node.domain, node.op_type))

    @property
    def entries(self) -> Mapping[tuple[str, str], T]:
        return self._entries


class OpSet(OpInterface[bool]):
    """The ops for which a statement holds that needs no entry: `node in FUSIBLE`."""

    def add(self, *ops: OpDef) -> None:
        """Add defined ops. Raises GraphError as `register` does."""
        for op in ops:
            self.register(op, True)

    def __contains__(self, node: ir.Node) -> bool:
        return self.entry(node) is not None
