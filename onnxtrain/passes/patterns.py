"""A small language for patterns of nodes, and what replaces them.

    x, number = Var("x"), Num("alpha")
    pattern = op("Mul", x, op("Sigmoid", op("Mul", x, number)))

    for found in match(pattern, value):
        found.values["x"], found.numbers["alpha"], found.nodes

A pattern is matched from a value backwards. Commutative ops match with their operands in either order; a name that
stands twice must find the same value twice. Several ops, `op("Rsqrt|Sqrt", ...)`, match any of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import dtype_of, is_float
from onnxtrain.ops import definition_of
from onnxtrain.ops.elementwise.arithmetic import number_of

_CLOSE = 1e-6  # how far a number may be from the one that a pattern names: half of float32's digits


@dataclass(frozen=True)
class Var:
    """Any value; the same one wherever the name stands."""

    name: str


@dataclass(frozen=True)
class Num:
    """A constant of one element: `near` this number, or any, which the match keeps under the name."""

    name: str = ""
    near: float | None = None


@dataclass(frozen=True)
class Op:
    """A node of one of these ops: its first output. Inputs beyond those named match anything."""

    kinds: tuple[str, ...]
    inputs: tuple[Pattern, ...]
    check: Callable[[ir.Node], bool] | None = None


@dataclass(frozen=True)
class Either:
    """The first of several patterns that matches."""

    of: tuple[Pattern, ...]


@dataclass(frozen=True)
class Cast:
    """A pattern, or what gives its elements on in its shape: casts between floating types, copies."""

    of: Pattern


Pattern = Var | Num | Op | Either | Cast


def op(kinds: str, *inputs: Pattern | float, check: Callable[[ir.Node], bool] | None = None) -> Op:
    """A node of one of the ops in `kinds`, separated by |; a plain number is a constant near it."""
    return Op(tuple(kinds.split("|")), tuple(_pattern(i) for i in inputs), check)


def either(*patterns: Pattern) -> Either:
    """Whichever of these matches."""
    return Either(patterns)


def _pattern(given: Pattern | float) -> Pattern:
    return Num(near=given) if isinstance(given, (int, float)) else given


@dataclass(frozen=True)
class Match:
    """What a pattern found.

    Attributes:
        values: by the names of Vars.
        numbers: by the names of Nums.
        nodes: all nodes that matched, the last of them first.
    """

    values: Mapping[str, ir.Value] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    nodes: tuple[ir.Node, ...] = ()


def match(pattern: Pattern, value: ir.Value | None, known: Match | None = None) -> Iterator[Match]:
    """All ways in which the pattern matches what gives `value`."""
    known = known or Match()
    if value is None:
        return
    match pattern:
        case Var(name):
            if known.values.get(name, value) is value:
                yield Match({**known.values, name: value}, known.numbers, known.nodes)
        case Num():
            yield from _match_number(pattern, value, known)
        case Either(patterns):
            for each in patterns:
                yield from match(each, value, known)
        case Cast(inner):
            yield from match(inner, value, known)
            yield from _match_cast(pattern, value, known)
        case Op():
            yield from _match_node(pattern, value, known)


def _match_number(pattern: Num, value: ir.Value, known: Match) -> Iterator[Match]:
    number, near, name = number_of(value), pattern.near, pattern.name
    if number is None or (near is not None and abs(number - near) > _CLOSE * max(abs(near), 1e-3)):
        return
    if not name or known.numbers.get(name, number) == number:
        yield Match(known.values, {**known.numbers, name: number}, known.nodes)


def _match_cast(pattern: Cast, value: ir.Value, known: Match) -> Iterator[Match]:
    node = value.producer()
    if node is None or not definition_of(node).same_elements or not is_float(dtype_of(value)):
        return
    source = node.inputs[0]
    if source is not None and is_float(dtype_of(source)) and sizes.dims_of(source) == sizes.dims_of(value):
        yield from match(pattern, source, Match(known.values, known.numbers, (*known.nodes, node)))


def _match_node(pattern: Op, value: ir.Value, known: Match) -> Iterator[Match]:
    node, inputs = value.producer(), pattern.inputs
    if node is None or node.op_type not in pattern.kinds or value is not node.outputs[0]:
        return
    if len(node.inputs) < len(inputs) or (pattern.check is not None and not pattern.check(node)):
        return
    here = Match(known.values, known.numbers, (*known.nodes, node))
    yield from _match_inputs(inputs, node.inputs, here)
    if len(inputs) == 2 and definition_of(node).commutative:
        yield from _match_inputs(inputs, tuple(reversed(node.inputs)), here)


def _match_inputs(patterns: Sequence[Pattern], values: Sequence[ir.Value | None], known: Match) -> Iterator[Match]:
    if not patterns:
        yield known
        return
    for found in match(patterns[0], values[0], known):
        yield from _match_inputs(patterns[1:], values[1:], found)


@dataclass(frozen=True)
class Rewrite:
    """One pattern and what takes its place.

    Attributes:
        name: what the result is called in reports.
        pattern: matched backwards from the value that is replaced.
        build: from a builder, the match and that value, the value that replaces it; None: it is not that after all.
    """

    name: str
    pattern: Op
    build: Callable[[Builder, Match, ir.Value], ir.Value | None]


def shared_inside(found: Match, result: ir.Value) -> ir.Value | None:
    """A value between the nodes of a match that is read elsewhere, or given out; None where there is none."""
    inside = set(found.nodes)
    for node in found.nodes:
        for value in node.outputs:
            if value is result:
                continue
            if value.is_graph_output() or any(use.node not in inside for use in value.uses()):
                return value
    return None
