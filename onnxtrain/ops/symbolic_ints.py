"""The integers that a value holds, as size expressions: evaluates the size arithmetic of a program symbolically.

Shape(x, start=0, end=1) ──> Mul(·, 12) ──> Concat(·, 64)      holds (12*s0, 64) if x is [s0, h]
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import as_sizes
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import rank_of
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.registry import definition_of


class SizeExpression:
    """A size with Python's arithmetic operators."""

    __slots__ = ("size",)

    def __init__(self, size: Size) -> None:
        self.size = size

    def __add__(self, other: Any) -> SizeExpression:
        return SizeExpression(sizes.add(self.size, _size(other)))

    def __sub__(self, other: Any) -> SizeExpression:
        return SizeExpression(sizes.subtract(self.size, _size(other)))

    def __mul__(self, other: Any) -> SizeExpression:
        return SizeExpression(sizes.multiply(self.size, _size(other)))

    def __floordiv__(self, other: Any) -> SizeExpression:
        return SizeExpression(sizes.floor_divide(self.size, _size(other)))

    def __mod__(self, other: Any) -> SizeExpression:
        return SizeExpression(sizes.from_sympy(sizes.parse(self.size) % sizes.parse(_size(other))))

    def __radd__(self, other: Any) -> SizeExpression:
        return SizeExpression(_size(other)) + self

    def __rsub__(self, other: Any) -> SizeExpression:
        return SizeExpression(_size(other)) - self

    def __rmul__(self, other: Any) -> SizeExpression:
        return SizeExpression(_size(other)) * self

    def __rfloordiv__(self, other: Any) -> SizeExpression:
        return SizeExpression(_size(other)) // self

    def __rmod__(self, other: Any) -> SizeExpression:
        return SizeExpression(_size(other)) % self

    def __neg__(self) -> SizeExpression:
        return self * -1

    def largest(self, other: Any) -> SizeExpression:
        """Return the maximum of both."""
        return SizeExpression(sizes.maximum(self.size, _size(other)))

    def smallest(self, other: Any) -> SizeExpression:
        """Return the minimum of both."""
        return SizeExpression(sizes.minimum(self.size, _size(other)))

    def scaled(self, factor: float) -> SizeExpression:
        """Return floor(self * factor), computed in doubles."""
        return SizeExpression(sizes.scale(self.size, factor))


class _ShapeOf:
    """A tensor of which only the sizes are read: an argument of `host_eval`."""

    def __init__(self, value: ir.Value) -> None:
        self._sizes = sizes.dims_of(value)

    def size(self, axis: int) -> SizeExpression:
        return SizeExpression(self._sizes[axis])


def _size(number: Any) -> Size:
    if isinstance(number, SizeExpression):
        return number.size
    return int(number)


def known_ints(value: ir.Value) -> Sizes | None:
    """Return the integers of an int64 scalar or vector, if they follow from constants and sizes; else None."""
    elements = as_sizes(value)
    if elements is not None:
        return elements
    computed = _computed(value)
    if computed is None:
        return None
    return tuple(map(_size, computed)) if isinstance(computed, tuple) else (_size(computed),)


def required_ints(value: ir.Value, use: str) -> Sizes:
    """Return `known_ints` of a value that an output type depends on.

    Args:
        value: an int64 scalar or vector.
        use: what it is, for the error.

    Raises:
        GraphError: its integers do not follow from constants and sizes.
    """
    integers = known_ints(value)
    if integers is None:
        raise GraphError(
            f"{use} must follow from constants and sizes of inputs", got=f"{value.name}, whose values are unknown"
        )
    return integers


def _computed(value: ir.Value) -> Any:
    if value.const_value is not None:
        array = value.const_value.numpy()
        return int(array) if array.ndim == 0 else tuple(int(v) for v in array)
    elements = as_sizes(value)
    if elements is not None and rank_of(value) == 1:
        return tuple(map(SizeExpression, elements))
    node = value.producer()
    if node is None:
        return None
    definition = definition_of(node)
    if definition.host_eval is None or len(node.outputs) != 1:
        return None
    arguments: list[Any] = []
    for index, operand in enumerate(node.inputs):
        if operand is None:
            arguments.append(None)
        elif definition.input_name(index) in definition.shape_only_inputs:
            arguments.append(_ShapeOf(operand))
        else:
            arguments.append(_computed(operand))
            if arguments[-1] is None:
                return None
    return definition.host_eval(NodeView(node, definition), *arguments)
