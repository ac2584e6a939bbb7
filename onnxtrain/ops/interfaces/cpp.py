"""How an op is emitted as C++, for `execute/cpp_program/`, which compiles small programs into one call.

An emitter takes the source, the node and its inputs, and returns the node's outputs: new arrays, or views of inputs. It
raises `UnsupportedError` for a node that it cannot emit. All sizes are static.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from onnxtrain.graph.values import is_float
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.interfaces import OpInterface

C_TYPES = {
    ir.DataType.FLOAT: "float",
    ir.DataType.DOUBLE: "double",
    ir.DataType.INT64: "int64_t",
    ir.DataType.INT32: "int32_t",
    ir.DataType.BOOL: "bool",
}
Shape = tuple[int, ...]


class UnsupportedError(Exception):
    """The graph cannot be emitted as C++: its program runs as before."""


@dataclass(frozen=True)
class Array:
    """Elements in memory.

    Attributes:
        name: a pointer, in C++.
        dtype: of the elements.
        shape, strides: in elements.
    """

    name: str
    dtype: ir.DataType
    shape: Shape
    strides: Shape

    @property
    def c_type(self) -> str:
        if self.dtype not in C_TYPES:
            raise UnsupportedError(f"elements of type {self.dtype.name}")
        return C_TYPES[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        expected = strides_of(self.shape)
        return all(size == 1 or a == b for size, a, b in zip(self.shape, self.strides, expected, strict=True))

    def with_dims(self, shape: Sequence[int], strides: Sequence[int]) -> Array:
        """Return a view of the same memory."""
        return Array(self.name, self.dtype, tuple(shape), tuple(strides))

    def broadcast(self, shape: Shape) -> Array:
        """Return a view of this shape, with stride 0 along broadcast dimensions."""
        missing = len(shape) - len(self.shape)
        strides = [0 if size == 1 else stride for size, stride in zip(self.shape, self.strides, strict=True)]
        return self.with_dims(shape, [0] * missing + strides)


def strides_of(shape: Sequence[int]) -> Shape:
    """Return the strides of a contiguous array."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def loops(arrays: Sequence[Array], body: Callable[[list[str]], str], *, independent: bool = True) -> list[str]:
    """Return the lines of loops over arrays of one shape.

    Args:
        arrays: what the body reads and writes.
        body: a statement, from an expression for the element of each array.
        independent: whether no iteration writes an element that another reads or writes.
    """
    shape, strides = _merge_dims(arrays[0].shape, [array.strides for array in arrays])
    lines = []
    for depth, size in enumerate(shape):
        if independent and depth == len(shape) - 1:
            lines.append("  " * depth + "#pragma GCC ivdep")
        lines.append("  " * depth + f"for (int64_t i{depth} = 0; i{depth} < {size}; ++i{depth})")
    elements = [f"{array.name}[{_offset(own)}]" for array, own in zip(arrays, strides, strict=True)]
    return [*lines, "  " * len(shape) + body(elements)]


def _offset(strides: Sequence[int]) -> str:
    terms = [f"i{i}" if stride == 1 else f"i{i} * {stride}" for i, stride in enumerate(strides) if stride]
    return " + ".join(terms) or "0"


def _merge_dims(shape: Shape, strides: Sequence[Shape]) -> tuple[list[int], list[list[int]]]:
    """Merge adjacent dimensions as far as the order of the elements stays the same in each array."""
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(own[-1] == stride[axis] * size for own, stride in zip(merged, strides, strict=True)):
            sizes[-1] *= size
            for own, stride in zip(merged, strides, strict=True):
                own[-1] = stride[axis]
            continue
        sizes.append(size)
        for own, stride in zip(merged, strides, strict=True):
            own.append(stride[axis])
    return sizes, merged


class Source(Protocol):
    """The function that is being emitted, as emitters see it."""

    def lines(self, lines: Sequence[str]) -> None: ...

    def new(self, dtype: ir.DataType, shape: Shape, value: ir.Value | None = None) -> Array: ...

    def work(self, count: int) -> None: ...


Emitter = Callable[[Source, NodeView, list[Array]], list[Array]]
CPP = OpInterface[Emitter]("C++")


def shape_of(value: ir.Value) -> Shape:
    assert value.shape is not None
    return tuple(int(str(size)) for size in value.shape)


@dataclass(frozen=True)
class Elementwise:
    """An emitter by the C++ of an element, from those of the inputs `{0}`, `{1}`; NaN propagates as in PyTorch."""

    expression: str

    def __call__(self, source: Source, n: NodeView, inputs: Sequence[Array]) -> list[Array]:
        if "/" in self.expression and not is_float(inputs[0].dtype):
            raise UnsupportedError(f"{n.definition.name} of integers")  # division by 0 ends the process
        if len(inputs) != 1 + ("{1}" in self.expression) + ("{2}" in self.expression):
            raise UnsupportedError(f"{n.definition.name} of {len(inputs)} inputs")
        (value,) = n.node.outputs
        assert value.dtype is not None
        shape = shape_of(value)
        result = source.new(value.dtype, shape, value)
        operands = [array.broadcast(shape) for array in inputs]
        source.lines(loops([result, *operands], lambda e: f"{e[0]} = {self.expression.format(*e[1:])};"))
        return [result]


def emit_reshape(source: Source, n: NodeView, inputs: list[Array]) -> list[Array]:
    """Return a view of the first input in the output's shape; of a copy if that is not contiguous."""
    shape, array = shape_of(n.node.outputs[0]), inputs[0]
    if not array.is_contiguous:
        copy = source.new(array.dtype, array.shape)
        source.lines(loops([copy, array], lambda e: f"{e[0]} = {e[1]};"))
        array = copy
    return [array.with_dims(shape, strides_of(shape))]
