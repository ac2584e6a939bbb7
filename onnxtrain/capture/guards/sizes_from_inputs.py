"""Compute the sizes in the graph of a decision from the sizes of inputs, and not from those of hidden tensors.

    image_features.numel() == mask.sum() * width     the features are computed from parameters, their number is not

A data-dependent size is read from the node that introduces it, as `nonzero(mask)`; that of a slice or of `x[mask]` is
computed without x.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from onnxtrain.capture.guards.traced_graph import part_of
from onnxtrain.torch_compat.symbols import functions

_SIZE = torch.ops.aten.sym_size.int
_READS = (_SIZE, torch.ops.aten.sym_numel.default, torch.ops.aten.sym_stride.int)
_SLICE = torch.ops.aten.slice.Tensor
_OPERATORS: dict[Any, Callable[..., Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    **{
        getattr(functions, name): function
        for name, function in (
            ("FloorDiv", operator.floordiv),
            ("CleanDiv", operator.floordiv),
            ("Mod", operator.mod),
            ("PythonMod", operator.mod),
        )
        if hasattr(functions, name)
    },
}


def slice_length(size: int, start: int | None, end: int | None, step: int) -> int:
    """Return the number of elements of `x[start:end:step]` of a dimension."""
    return len(range(*slice(start, end, step).indices(size)))


def read_sizes_from_inputs(graph: Graph, inputs: Sequence[Node]) -> None:
    """Replace reads of sizes of hidden tensors, where that is possible.

    Args:
        graph: of ATen operators; the values of its nodes are in their meta.
        inputs: the placeholders whose sizes may be read.
    """
    sizes = _Sizes(graph, inputs)
    for node in list(graph.nodes):
        is_read = node.op == "call_function" and node.target in _READS and node.args[0] not in inputs
        if is_read:
            with graph.inserting_before(node):
                size = sizes.of(node.meta["val"])
            if size is not None and size is not node:
                node.replace_all_uses_with(size)


class _Sizes:
    """The sizes of a graph as nodes."""

    def __init__(self, graph: Graph, inputs: Sequence[Node]) -> None:
        self._graph = graph
        self._introduced = {
            s: (n, path) for n in graph.nodes for s, path in n.meta.get("unbacked_bindings", {}).items()
        }
        self._of_inputs: dict[Any, tuple[Node, int]] = {}
        for node in inputs:
            value = node.meta.get("val")
            sizes: list[Any] = list(value.shape) if isinstance(value, torch.Tensor) else []
            for d, size in enumerate(sizes):
                if isinstance(size, torch.SymInt):
                    self._of_inputs.setdefault(size.node.expr, (node, d))

    def of(self, size: Any) -> Any:
        """Return a size as `node` does."""
        return self.node(size.node.expr) if isinstance(size, torch.SymInt) else size

    def node(self, expr: Any) -> Any:
        """Insert the nodes that compute an expression; return its int or node, None if there are none for it."""
        if expr.is_Integer:
            return int(expr)
        if expr in self._of_inputs:
            return self._graph.call_function(_SIZE, self._of_inputs[expr])
        if expr in self._introduced:
            return self._where_introduced(*self._introduced[expr])
        if expr.func not in _OPERATORS:
            return None
        parts = [self.node(part) for part in expr.args]
        if any(part is None for part in parts):
            return None
        result = parts[0]
        for part in parts[1:]:
            result = self._graph.call_function(_OPERATORS[expr.func], (result, part))
        return result

    def _where_introduced(self, node: Node, path: Sequence[Any]) -> Any:
        """Return the number at a path of a node's result."""
        if node.target is _SLICE and not node.kwargs:
            arguments: tuple[Any, ...] = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
            x, dim, start, end, step = arguments
            before = self.of(x.meta["val"].shape[dim])
            return None if before is None else self._graph.call_function(slice_length, (before, start, end, step))
        mask = _only_mask(node)
        if mask is not None:
            selected = self._graph.call_function(torch.ops.aten.nonzero.default, (mask,))
            return self._graph.call_function(_SIZE, (selected, 0))
        return part_of(self._graph, node, path)


def _only_mask(node: Node) -> Node | None:
    """Return the mask of `x[mask]` or `x[:, mask]`, whose only data-dependent size is the number of true elements."""
    if node.target is not torch.ops.aten.index.Tensor:
        return None
    given: list[Any] = [index for index in node.args[1] if index is not None]  # type: ignore[union-attr]
    return given[0] if len(given) == 1 and given[0].meta["val"].dtype == torch.bool else None
