"""Which values of a graph are sizes: integers that a program computes in Python, not in tensors.

Shape ──> Gather ──> Mul ──> Concat ──> Reshape(x, ·)      all but the Reshape run on Python ints
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.values import dtype_of, rank_of


class HostOp(Protocol):
    """What this analysis asks of an op's definition."""

    @property
    def host(self) -> Callable[..., Any] | None: ...

    @property
    def shape_only(self) -> frozenset[str]: ...

    def input_name(self, index: int) -> str: ...


def is_integer_constant(value: ir.Value) -> bool:
    """Whether the value is a known integer or a known vector of integers."""
    return value.const_value is not None and dtype_of(value) == ir.DataType.INT64 and rank_of(value) <= 1


def host_values(nodes: Iterable[ir.Node], definition_of: Callable[[ir.Node], HostOp]) -> set[ir.Value]:
    """The values that can be computed as Python ints (0-dimensional) or tuples of ints (vectors)."""
    found: set[ir.Value] = set()
    for node in nodes:
        definition = definition_of(node)
        if definition.host is None or not all(
            _can_come_from_host(node, i, definition, found) for i in range(len(node.inputs))
        ):
            continue
        if all(_is_known_length(v) for v in node.outputs):
            found.update(node.outputs)
    return found


def _is_known_length(value: ir.Value) -> bool:
    """Whether the value can be a Python int or a tuple of ints: its length does not depend on sizes."""
    return dtype_of(value) == ir.DataType.INT64 and (
        rank_of(value) == 0 or (rank_of(value) == 1 and isinstance(sizes.dims_of(value)[0], int))
    )


def _can_come_from_host(node: ir.Node, index: int, definition: HostOp, found: set[ir.Value]) -> bool:
    value = node.inputs[index]
    if value is None or definition.input_name(index) in definition.shape_only:
        return True
    return value in found or is_integer_constant(value)


def is_root(node: ir.Node, definition: HostOp) -> bool:
    """Whether the node starts size arithmetic: it reads the shape of a tensor."""
    return bool(definition.shape_only)
