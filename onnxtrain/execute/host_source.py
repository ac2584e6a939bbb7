"""Size arithmetic as Python source: an integer that is known only when the program runs, as an expression."""

from __future__ import annotations

from typing import Union

Int = Union[int, "HostInt"]


class HostInt:
    """A Python int of the generated program. Arithmetic on it gives the source of the arithmetic."""

    __slots__ = ("source",)

    def __init__(self, source: str) -> None:
        self.source = source

    def _binary(self, symbol: str, other: Int, swapped: bool = False) -> HostInt:
        left, right = (_text(other), self.source) if swapped else (self.source, _text(other))
        return HostInt(f"({left} {symbol} {right})")

    def __add__(self, other: Int) -> HostInt:
        return self._binary("+", other)

    def __radd__(self, other: Int) -> HostInt:
        return self._binary("+", other, swapped=True)

    def __sub__(self, other: Int) -> HostInt:
        return self._binary("-", other)

    def __rsub__(self, other: Int) -> HostInt:
        return self._binary("-", other, swapped=True)

    def __mul__(self, other: Int) -> HostInt:
        return self._binary("*", other)

    def __rmul__(self, other: Int) -> HostInt:
        return self._binary("*", other, swapped=True)

    def __floordiv__(self, other: Int) -> HostInt:
        return self._binary("//", other)

    def __rfloordiv__(self, other: Int) -> HostInt:
        return self._binary("//", other, swapped=True)

    def __mod__(self, other: Int) -> HostInt:
        return self._binary("%", other)

    def __rmod__(self, other: Int) -> HostInt:
        return self._binary("%", other, swapped=True)

    def __neg__(self) -> HostInt:
        return HostInt(f"(-{self.source})")

    def largest(self, other: Int) -> HostInt:
        return HostInt(f"max({self.source}, {_text(other)})")

    def smallest(self, other: Int) -> HostInt:
        return HostInt(f"min({self.source}, {_text(other)})")

    def scaled(self, factor: float) -> HostInt:
        """floor(self * factor) in doubles; no size is negative."""
        return HostInt(f"int({self.source} * {factor!r})")

    def __repr__(self) -> str:
        return self.source


class ShapeSource:
    """A tensor of which only the shape is read."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def size(self, axis: int) -> HostInt:
        return HostInt(f"{self.name}.size({axis})")


def _text(value: Int) -> str:
    return value.source if isinstance(value, HostInt) else repr(value)
