"""Dimension sizes: an int, or a symbolic expression over the dynamic dimensions of the graph's inputs.

An expression is a string in Python syntax (`s0`, `2*s0*s1`, `(s0 + 1)//2`, `max(1, s1)`), usable as an ONNX
`dim_param`, in generated source and in messages. Two sizes are provably equal if their strings are equal: every
function here returns sympy's canonical form.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType
from typing import Any

import onnx_ir as ir
import sympy
from sympy.printing.str import StrPrinter

Size = int | str
Sizes = tuple[Size, ...]


class _PythonPrinter(StrPrinter):  # type: ignore[misc]  # sympy is untyped
    """Print integer expressions in a form that Python evaluates to the same integer."""

    def _print_floor(self, expr: Any) -> str:
        numerator, denominator = sympy.fraction(sympy.together(expr.args[0]))
        return f"(({self._print(numerator)})//({self._print(denominator)}))"

    def _print_Float(self, expr: Any) -> str:  # noqa: N802  # sympy's dispatch by class name
        return repr(float(expr))  # the exact double: a scaled size is floor(scale * size) in double precision

    def _print_Mod(self, expr: Any) -> str:  # noqa: N802  # sympy's dispatch by class name
        left, right = expr.args
        return f"(({self._print(left)})%({self._print(right)}))"

    def _print_Max(self, expr: Any) -> str:  # noqa: N802
        return f"max({', '.join(sorted(self._print(a) for a in expr.args))})"

    def _print_Min(self, expr: Any) -> str:  # noqa: N802
        return f"min({', '.join(sorted(self._print(a) for a in expr.args))})"

    def _print_Abs(self, expr: Any) -> str:  # noqa: N802
        return f"abs({self._print(expr.args[0])})"


_PRINTER = _PythonPrinter({"order": "lex"})


@functools.lru_cache(maxsize=65536)
def symbol(name: str) -> sympy.Symbol:
    """Return the sympy symbol of a size: a non-negative integer."""
    return sympy.Symbol(name, integer=True, nonnegative=True)


@functools.lru_cache(maxsize=65536)
def parse(size: Size) -> sympy.Expr:
    """Return the sympy expression of a size."""
    if isinstance(size, int):
        return sympy.Integer(size)
    if size.isidentifier():
        return symbol(size)
    return _from_ast(ast.parse(size, mode="eval").body)


_OPERATORS: Mapping[type, Any] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: sympy.floor(a / b),
    ast.Div: lambda a, b: a / b,
    ast.Mod: sympy.Mod,
    ast.Pow: lambda a, b: a**b,
}
_FUNCTIONS: Mapping[str, Any] = {"max": sympy.Max, "min": sympy.Min, "abs": sympy.Abs}


def _from_ast(node: ast.expr) -> sympy.Expr:
    match node:
        case ast.Constant(value=int(number)):
            return sympy.Integer(number)
        case ast.Constant(value=float(number)):
            return sympy.Float(number)
        case ast.Name(id=name):
            return symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_from_ast(operand)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            return _OPERATORS[type(operator)](_from_ast(left), _from_ast(right))
        case ast.Call(func=ast.Name(id=name), args=args) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_from_ast, args))
    raise ValueError(f"not a size expression: {ast.unparse(node)}")


def from_sympy(expr: Any) -> Size:
    """Return the canonical size of a sympy expression."""
    if expr.is_Integer:
        return int(expr)
    return _print(expr)


@functools.lru_cache(maxsize=65536)
def _print(expr: Any) -> str:
    return str(_PRINTER.doprint(expr))


@functools.lru_cache(maxsize=65536)
def add(*sizes: Size) -> Size:
    return from_sympy(sympy.Add(*map(parse, sizes)))


@functools.lru_cache(maxsize=65536)
def subtract(a: Size, b: Size) -> Size:
    return from_sympy(parse(a) - parse(b))


@functools.lru_cache(maxsize=65536)
def multiply(*sizes: Size) -> Size:
    return from_sympy(sympy.Mul(*map(parse, sizes)))


@functools.lru_cache(maxsize=65536)
def floor_divide(a: Size, b: Size) -> Size:
    return from_sympy(sympy.floor(parse(a) / parse(b)))


@functools.lru_cache(maxsize=65536)
def scale(size: Size, factor: float) -> Size:
    """Return floor(size * factor), with the product rounded to a double."""
    return int(size * factor) if isinstance(size, int) else from_sympy(sympy.floor(sympy.Float(factor) * parse(size)))


def substitute(size: Size, names: Mapping[str, str]) -> Size:
    """Return a size whose symbols are renamed."""
    if isinstance(size, int):
        return size
    return from_sympy(parse(size).xreplace({symbol(old): symbol(new) for old, new in names.items()}))


@functools.lru_cache(maxsize=65536)
def maximum(*sizes: Size) -> Size:
    return from_sympy(sympy.Max(*map(parse, sizes)))


@functools.lru_cache(maxsize=65536)
def minimum(*sizes: Size) -> Size:
    return from_sympy(sympy.Min(*map(parse, sizes)))


def symbols(size: Size) -> frozenset[str]:
    """Return the symbols that a size depends on."""
    if isinstance(size, int):
        return frozenset()
    return frozenset(re.findall(r"[A-Za-z_]\w*", size)) - frozenset(_FUNCTIONS)


def evaluate(size: Size, symbol_values: Mapping[str, int]) -> int:
    """Return the integer value of a size, given those of its symbols."""
    if isinstance(size, int):
        return size
    if size in symbol_values:
        return int(symbol_values[size])
    return int(eval(_code(size), {"__builtins__": {}, "max": max, "min": min, "abs": abs}, dict(symbol_values)))


@functools.lru_cache(maxsize=65536)
def _code(size: str) -> CodeType:
    """Compile a size, our own canonical form: names, integers, arithmetic and three functions. It takes 5 us."""
    return compile(size, "<onnxtrain size>", "eval")


def dims_of(value: ir.Value) -> Sizes:
    """Return the sizes of a value's dimensions. Raises ValueError if the shape is unknown."""
    shape = value.shape
    if type(shape) is _SharedShape:
        return shape.sizes
    if shape is None:
        raise ValueError(f"the shape of {value.name} is unknown")
    return _sizes_in(shape)


def _sizes_in(shape: ir.Shape) -> Sizes:
    return tuple([dim if isinstance(dim, int) else str(dim.value) for dim in shape])


class _SharedShape(ir.Shape):
    """A frozen shape that keeps its sizes: of 48 layers, they are read 90,000 times in a first step."""

    __slots__ = ("sizes",)

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, frozen=True)
        self.sizes = _sizes_in(self)


def shape(sizes: Iterable[Size]) -> ir.Shape:
    """Return the ir.Shape of these sizes: one object for all values that have it, which therefore is frozen."""
    return _shared_shape(tuple(sizes))


@functools.lru_cache(maxsize=4096)
def _shared_shape(sizes: Sizes) -> ir.Shape:
    return _SharedShape(sizes)


def broadcast(*shapes: Sequence[Size]) -> Sizes:
    """Return NumPy's broadcast shape. Sizes that are not provably equal are assumed equal: the capture guards this."""
    rank = max((len(s) for s in shapes), default=0)
    result: list[Size] = []
    for position in range(rank):
        candidates = [s[position - rank + len(s)] for s in shapes if position - rank + len(s) >= 0]
        wide = [c for c in candidates if c != 1]
        fixed = [c for c in wide if isinstance(c, int)]
        result.append(fixed[0] if fixed else wide[0] if wide else 1)
    return tuple(result)
