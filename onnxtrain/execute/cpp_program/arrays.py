"""Arrays of the generated C++, and loops over them. All sizes are static."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

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
        """A view of the same memory."""
        return Array(self.name, self.dtype, tuple(shape), tuple(strides))

    def broadcast(self, shape: Shape) -> Array:
        """A view of this shape, with stride 0 along broadcast dimensions."""
        missing = len(shape) - len(self.shape)
        strides = [0 if size == 1 else stride for size, stride in zip(self.shape, self.strides, strict=True)]
        return self.with_dims(shape, [0] * missing + strides)


def strides_of(shape: Sequence[int]) -> Shape:
    """Strides of a contiguous array."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def loops(arrays: Sequence[Array], body: Callable[[list[str]], str], *, independent: bool = True) -> list[str]:
    """The lines of loops over arrays of one shape.

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
