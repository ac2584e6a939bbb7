"""Alias analysis: which values may share memory.

    x ──Reshape──> y ──Transpose──> z        x, y and z are one alias set, with root x

Torch kernels return views where PyTorch does, and an op's definition says which output may be a view of which input. A
value is freed, overwritten in place or returned to the caller only if its whole alias set allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import onnx_ir as ir


class AliasOp(Protocol):
    """The part of an op's definition that alias analysis needs."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Output names; the last may be variadic."""

    @property
    def aliases(self) -> Mapping[int, int]:
        """Output index -> index of the input that it may be a view of."""


class AliasSets:
    """The alias sets of a graph at construction time; later changes of the graph are not tracked.

    Args:
        graph: the nodes in topological order; a part of a graph will do.
        definition_of: returns a node's definition.
    """

    def __init__(self, graph: Iterable[ir.Node], definition_of: Callable[[ir.Node], AliasOp]) -> None:
        self._roots: dict[ir.Value, ir.Value] = {}
        self._members: dict[ir.Value, list[ir.Value]] = {}
        for node in graph:
            definition = definition_of(node)
            for index, output in enumerate(node.outputs):
                source = view_source(node, index, definition)
                if source is not None:
                    self._join(output, source)

    def root(self, value: ir.Value) -> ir.Value:
        """Return the first value of the alias set: the one that owns the memory; itself if it is not a view."""
        return self._roots.get(value, value)

    def aliases_of(self, value: ir.Value) -> tuple[ir.Value, ...]:
        """Return all values that may share memory with this one, including itself, in graph order."""
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
    """Return the input that output number `output` may be a view of, or None. Variadic outputs share one entry."""
    index = definition.aliases.get(min(output, len(definition.outputs) - 1))
    return None if index is None or index >= len(node.inputs) else node.inputs[index]
