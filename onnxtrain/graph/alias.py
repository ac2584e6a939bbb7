"""Which values may lie in the same memory: the one alias analysis.

    x ──Reshape──> y ──Transpose──> z        x, y and z are one alias set, with root x

Torch kernels return views where PyTorch does, and a definition says which output may be a view of which input. A value
is freed, overwritten in place or handed to the caller as its own only where its whole alias set allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

import onnx_ir as ir


class AliasOp(Protocol):
    """What this analysis asks of an op's definition."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names; the last may be variadic."""

    @property
    def aliases(self) -> Mapping[int, int]:
        """Output index to the index of the input that it may be a view of."""


class AliasSets:
    """The alias sets of a graph as it is now: a later change of the graph is not seen.

    Args:
        graph: its nodes in order, or any stretch of nodes.
        definition_of: finds a node's definition.
        together: groups of inputs that the caller may pass in the same memory.
    """

    def __init__(
        self,
        graph: Iterable[ir.Node],
        definition_of: Callable[[ir.Node], AliasOp],
        together: Iterable[Collection[ir.Value]] = (),
    ) -> None:
        self._roots: dict[ir.Value, ir.Value] = {}
        self._members: dict[ir.Value, list[ir.Value]] = {}
        for first, *others in map(list, together):
            for other in others:
                self._join(other, first)
        for node in graph:
            definition = definition_of(node)
            for index, output in enumerate(node.outputs):
                source = view_source(node, index, definition)
                if source is not None:
                    self._join(output, source)

    def root(self, value: ir.Value) -> ir.Value:
        """The value whose memory this one may be a view of: the first of its set; itself where it is no view."""
        return self._roots.get(value, value)

    def may_alias(self, a: ir.Value, b: ir.Value) -> bool:
        """Whether the two values may share memory."""
        return self.root(a) is self.root(b)

    def aliases_of(self, value: ir.Value) -> tuple[ir.Value, ...]:
        """All values that may share memory with this one, itself among them, in the order of the graph."""
        return tuple(self._members.get(self.root(value), [value]))

    def _join(self, value: ir.Value, source: ir.Value) -> None:
        root, old = self.root(source), self.root(value)
        if root is old:
            return
        members = self._members.setdefault(root, [root])
        for member in self._members.pop(old, [old]):
            members.append(member)
            self._roots[member] = root


def view_source(node: ir.Node, output: int, definition: AliasOp) -> ir.Value | None:
    """The input of which output number `output` may be a view. What holds for a variadic output holds for all of it."""
    index = definition.aliases.get(min(output, len(definition.outputs) - 1))
    return None if index is None or index >= len(node.inputs) else node.inputs[index]
