"""A small pattern-matching language for subgraphs and their replacements.

    x, number = Var("x"), Num("alpha")
    pattern = op("Mul", x, op("Sigmoid", op("Mul", x, number)))

    for found in match(pattern, value):
        found.values["x"], found.numbers["alpha"], found.nodes

A pattern is matched backwards from a value. Commutative ops match with their operands in either order; a name that
occurs twice must match the same value. `op("Tanh|onnxtrain::Rsqrt", ...)` matches any of these ops: a name without a
domain is an op of ai.onnx.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import dtype_of, is_float
from onnxtrain.ops import OpDef, definition_of, lookup
from onnxtrain.ops.elementwise.arithmetic import number_of
from onnxtrain.ops.interfaces.commutative import COMMUTATIVE

_RELATIVE_TOLERANCE = 1e-6  # between a constant and the number in a pattern: about float32's precision


@dataclass(frozen=True)
class Var:
    """Any value; the same one wherever the name occurs."""

    name: str


@dataclass(frozen=True)
class Num:
    """A constant of one element, close to `near` if given; the match stores it under the name."""

    name: str = ""
    near: float | None = None


@dataclass(frozen=True)
class Op:
    """The first output of a node of one of these ops. Inputs beyond those given match anything."""

    kinds: frozenset[OpDef]
    inputs: tuple[Pattern, ...]
    check: Callable[[ir.Node], bool] | None = None


@dataclass(frozen=True)
class Either:
    """Any of several patterns, tried in order."""

    alternatives: tuple[Pattern, ...]


@dataclass(frozen=True)
class Cast:
    """A pattern, or a chain of transparent ops of its shape after it: casts between floating-point types, copies."""

    pattern: Pattern


Pattern = Var | Num | Op | Either | Cast


def op(kinds: str, *inputs: Pattern | float, check: Callable[[ir.Node], bool] | None = None) -> Op:
    """Match a node of one of the ops in `kinds`, separated by |; a number matches a constant close to it.

    Raises:
        GraphError: there is no such op.
    """
    return Op(frozenset(map(_definition, kinds.split("|"))), tuple(_pattern(i) for i in inputs), check)


def _definition(kind: str) -> OpDef:
    domain, _, name = kind.rpartition("::")
    return lookup(domain, name)


def either(*patterns: Pattern) -> Either:
    """Match any of these patterns."""
    return Either(patterns)


def _pattern(operand: Pattern | float) -> Pattern:
    return Num(near=operand) if isinstance(operand, (int, float)) else operand


@dataclass(frozen=True)
class Match:
    """A match of a pattern.

    Attributes:
        values: by the names of Vars.
        numbers: by the names of Nums.
        nodes: all matched nodes, users before producers.
    """

    values: Mapping[str, ir.Value] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    nodes: tuple[ir.Node, ...] = ()


def match(pattern: Pattern, value: ir.Value | None, partial: Match | None = None) -> Iterator[Match]:
    """Yield all matches of the pattern at `value` that extend the match `partial`."""
    partial = partial or Match()
    if value is None:
        return
    match pattern:
        case Var(name):
            if partial.values.get(name, value) is value:
                yield Match({**partial.values, name: value}, partial.numbers, partial.nodes)
        case Num():
            yield from _match_number(pattern, value, partial)
        case Either(patterns):
            for each in patterns:
                yield from match(each, value, partial)
        case Cast(inner):
            yield from match(inner, value, partial)
            yield from _match_cast(pattern, value, partial)
        case Op():
            yield from _match_node(pattern, value, partial)


def _match_number(pattern: Num, value: ir.Value, partial: Match) -> Iterator[Match]:
    number, near, name = number_of(value), pattern.near, pattern.name
    if number is None or (near is not None and abs(number - near) > _RELATIVE_TOLERANCE * max(abs(near), 1e-3)):
        return
    if not name or partial.numbers.get(name, number) == number:
        yield Match(partial.values, {**partial.numbers, name: number}, partial.nodes)


def _match_cast(pattern: Cast, value: ir.Value, partial: Match) -> Iterator[Match]:
    node = value.producer()
    if node is None or not definition_of(node).is_transparent or not is_float(dtype_of(value)):
        return
    source = node.inputs[0]
    if source is not None and is_float(dtype_of(source)) and sizes.dims_of(source) == sizes.dims_of(value):
        yield from match(pattern, source, Match(partial.values, partial.numbers, (*partial.nodes, node)))


def _match_node(pattern: Op, value: ir.Value, partial: Match) -> Iterator[Match]:
    node, inputs = value.producer(), pattern.inputs
    if node is None or definition_of(node) not in pattern.kinds or value is not node.outputs[0]:
        return
    if len(node.inputs) < len(inputs) or (pattern.check is not None and not pattern.check(node)):
        return
    extended = Match(partial.values, partial.numbers, (*partial.nodes, node))
    yield from _match_inputs(inputs, node.inputs, extended)
    if len(inputs) == 2 and node in COMMUTATIVE:
        yield from _match_inputs(inputs, tuple(reversed(node.inputs)), extended)


def _match_inputs(patterns: Sequence[Pattern], values: Sequence[ir.Value | None], partial: Match) -> Iterator[Match]:
    if not patterns:
        yield partial
        return
    for matched in match(patterns[0], values[0], partial):
        yield from _match_inputs(patterns[1:], values[1:], matched)


@dataclass(frozen=True)
class Rewrite:
    """A pattern and its replacement.

    Attributes:
        name: the replacement, for reports.
        pattern: matched backwards from the value to replace.
        build: (builder, match, old value) -> the new value, or None if the match does not qualify.
    """

    name: str
    pattern: Op
    build: Callable[[Builder, Match, ir.Value], ir.Value | None]


def shared_value(matched: Match, result: ir.Value) -> ir.Value | None:
    """Return a value between the nodes of a match that has users outside it or is a graph output, if any."""
    inside = set(matched.nodes)
    for node in matched.nodes:
        for value in node.outputs:
            if value is result:
                continue
            if value.is_graph_output() or any(use.node not in inside for use in value.uses()):
                return value
    return None
