"""Host values: sizes that a program computes as Python ints instead of tensors.

Shape ──> Gather ──> Mul ──> Concat ──> Reshape(x, ·)      all but the Reshape run on Python ints
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.values import dtype_of, rank_of


class HostOp(Protocol):
    """The part of an op's definition that this analysis needs."""

    @property
    def host_eval(self) -> Callable[..., Any] | None: ...

    @property
    def shape_only_inputs(self) -> frozenset[str]: ...

    def input_name(self, index: int) -> str: ...


def is_integer_constant(value: ir.Value) -> bool:
    """Return whether the value is a constant int64 scalar or vector."""
    return value.const_value is not None and dtype_of(value) == ir.DataType.INT64 and rank_of(value) <= 1


def host_values(nodes: Iterable[ir.Node], definition_of: Callable[[ir.Node], HostOp]) -> set[ir.Value]:
    """Return the values that can be computed as Python ints (0-dimensional) or tuples of ints (vectors)."""
    on_host: set[ir.Value] = set()
    for node in nodes:
        definition = definition_of(node)
        if definition.host_eval is None or not all(
            _is_readable_on_host(node, i, definition, on_host) for i in range(len(node.inputs))
        ):
            continue
        if all(_has_static_length(v) for v in node.outputs):
            on_host.update(node.outputs)
    return on_host


def _has_static_length(value: ir.Value) -> bool:
    """Return whether the value fits a Python int or a tuple of ints whose length is known at compile time."""
    return dtype_of(value) == ir.DataType.INT64 and (
        rank_of(value) == 0 or (rank_of(value) == 1 and isinstance(sizes.dims_of(value)[0], int))
    )


def _is_readable_on_host(node: ir.Node, index: int, definition: HostOp, on_host: set[ir.Value]) -> bool:
    value = node.inputs[index]
    if value is None or definition.input_name(index) in definition.shape_only_inputs:
        return True
    return value in on_host or is_integer_constant(value)


def reads_shape(definition: HostOp) -> bool:
    """Return whether the op reads the shape of a tensor, as size arithmetic starts."""
    return bool(definition.shape_only_inputs)
