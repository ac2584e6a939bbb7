"""Lets numbers that multiply tensors become part of what reads or gives these.

    before   Mul(Div(x, 8), 3)                                        after    Mul(x, 0.375)
    before   ScaledDotProductAttention(Reshape(Mul(q, 0.125)), k, v, scale=1)
    after    ScaledDotProductAttention(Reshape(q), k, v, scale=0.125)
    before   Div(MatMul(a, b), 0.07)                                  after    FusedMatMul(a, b, alpha=1/0.07)
    before   Mul(Linear(x[n, 8], w[768, 8]), 2)                       after    Linear(Mul(x, 2), w)

Attention and products of matrices multiply by a number at no cost; a Linear without bias lets it pass to its input
where that is smaller, as behind LoRA's low-rank branch. A product with 1 goes. Nothing is rounded more often than
before, and powers of two are exact. `Factor` of a definition says what an op lets through.

Refuses where the tensor before or behind the number is read elsewhere too; float16, whose range is so small that models
choose where to scale; numbers beyond 2**±20, for the same reason in float32; a graph that draws eager PyTorch's random
numbers (`rng="torch"`): who asks for these gets eager's order of operations. A result of the module does not become a
view of something larger.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import dtype_of, is_float
from onnxtrain.ops import builder, definition_of, view
from onnxtrain.ops.definition import Factor
from onnxtrain.ops.elementwise.arithmetic import DIV, MUL, number_of
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.rewriting import leaves, nodes_before, only_user, substitute

_LARGEST = 2.0**20


class _Scale(NamedTuple):
    """A node that multiplies one of its inputs, `of`, by `number`."""

    node: ir.Node
    of: int
    number: float

    @property
    def x(self) -> ir.Value:
        value = self.node.inputs[self.of]
        assert value is not None
        return value

    @property
    def y(self) -> ir.Value:
        return self.node.outputs[0]


class _Place(NamedTuple):
    """A node that a number may go to; `value` is what of it the number multiplies: an input or the first output."""

    node: ir.Node
    factor: Factor
    value: ir.Value


def fold_scalar_factors(graph: ir.Graph, changes: Changes) -> None:
    """Moves numbers of `graph` to where they cost nothing, or less."""
    op = builder(graph)
    draws_as_eager = any(node.metadata_props.get("draws") == "eager's" for node in graph)
    waiting = deque(graph)
    joined = moved = 0
    while waiting:
        node = waiting.popleft()
        scale = _scale(node) if node.graph is graph else None
        if scale is None:
            continue
        if draws_as_eager:
            changes.refuse(node, "its graph draws eager PyTorch's numbers, and so keeps its order of operations")
            return
        before = _joined(op, scale)
        if before is not None:
            waiting.append(before)
            joined += 1
        elif scale.number == 1 and not leaves(scale.y):
            _leave_out(graph, scale)
            moved += 1
        else:
            moved += _moved_away(op, scale, waiting, changes)
    if joined:
        changes.applied.append(f"joined {joined} pairs of numbers that multiply one after the other")
    if moved:
        changes.applied.append(
            f"moved {moved} numbers that multiply into products and attention, or to smaller tensors"
        )


def _moved_away(op: Builder, scale: _Scale, waiting: deque[ir.Node], changes: Changes) -> bool:
    """Moves a number before or behind other nodes, where that is better; a node that is new is `waiting` then."""
    for place in (_above(scale), _below(scale)):
        if place is None:
            continue
        kind = place.node.op_type
        if dtype_of(scale.x) == ir.DataType.FLOAT16:
            changes.refuse(scale.node, f"its number stays outside of {kind}: float16 has a small range")
        elif place.factor.scaled is None:
            product = _passed(op, scale, place)
            if product is not None:
                waiting.append(product)
                return True
        elif _absorbed(op, scale, place):
            return True
        else:
            changes.refuse(scale.node, f"its number is not exact as an attribute of {kind}")
    return False


def _scale(node: ir.Node) -> _Scale | None:
    """The node as a product with a number; None of any other."""
    n = view(node)
    if n.definition not in (MUL, DIV) or not is_float(dtype_of(node.outputs[0])):
        return None
    of, number = 0, number_of(n.b)
    if number is None and n.definition is MUL:
        of, number = 1, number_of(n.a)
    if number is None or not 1 / _LARGEST <= abs(number) <= _LARGEST:
        return None
    return _Scale(node, of, float(number) if n.definition is MUL else 1 / number)


def _joined(op: Builder, scale: _Scale) -> ir.Node | None:
    """Joins a product with the one right before it; returns what both are now."""
    before = scale.x.producer()
    first = _scale(before) if before is not None else None
    if first is None or only_user(scale.x) is not scale.node:
        return None
    with nodes_before(op, scale.node):
        y = op.Mul(first.x, op.scalar(first.number * scale.number, like=first.x))
    substitute(op.graph, scale.y, y, [scale.node, first.node])
    return _node(y)


def _node(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None
    return node


def _above(scale: _Scale) -> _Place | None:
    """What gives the tensor, but for movements, and lets a number of its result in."""
    value, reader = scale.x, scale.node
    while only_user(value) is reader:
        node = value.producer()
        if node is None:
            return None
        factor = _factor(node)
        if factor is not None:
            fits = factor.of_output and value.index() == 0 and (value is scale.x or not leaves(scale.y))
            return _Place(node, factor, value) if fits else None
        source = _moved(node)
        if source is None:
            return None
        value, reader = source, node
    return None


def _below(scale: _Scale) -> _Place | None:
    """What reads the product, but for movements, and lets a number of this input in."""
    value = scale.y
    while len(value.uses()) == 1 and not value.is_graph_output():
        node, index = next(iter(value.uses()))
        factor = _factor(node)
        if factor is not None:
            taken = factor.scaled is not None and definition_of(node).input_name(index) in factor.inputs
            return _Place(node, factor, value) if taken else None
        if _moved(node) is not value:
            return None
        value = node.outputs[0]
    return None


def _factor(node: ir.Node) -> Factor | None:
    build = definition_of(node).factor
    return None if build is None else build(view(node))


def _moved(node: ir.Node) -> ir.Value | None:
    """The one tensor whose elements a node moves to its one output; None of any other node."""
    definition = definition_of(node)
    if not definition.moves or len(node.outputs) != 1 or definition.inputs[-1].endswith("..."):
        return None
    return node.inputs[0] if definition.input_name(0) in definition.moves else None


def _absorbed(op: Builder, scale: _Scale, place: _Place) -> bool:
    """Lets the op at `place` multiply by the number itself; False where it cannot."""
    assert place.factor.scaled is not None
    with nodes_before(op, place.node):
        outputs = place.factor.scaled(op, view(place.node), scale.number)
    if outputs is None:
        return False
    _node(outputs[0]).metadata_props.update(place.node.metadata_props)  # how its dropout draws
    for old, new in zip(place.node.outputs, outputs, strict=True):
        substitute(op.graph, old, new, [])
    op.graph.remove(place.node, safe=True)
    _leave_out(op.graph, scale)
    return True


def _passed(op: Builder, scale: _Scale, place: _Place) -> ir.Node | None:
    """Multiplies the operand of the op at `place` where that is smaller than the result; returns the node that does."""
    operand = place.node.inputs[0]
    if operand is None or not _is_smaller(operand, place.value):
        return None
    with nodes_before(op, place.node):
        product = op.Mul(operand, op.scalar(scale.number, like=operand))
    place.node.replace_input_with(0, product)
    _leave_out(op.graph, scale)
    return _node(product)


def _is_smaller(a: ir.Value, b: ir.Value) -> bool:
    """Whether a has fewer elements than b, of which it differs in the last axis."""
    *leading, last = sizes.dims_of(a)
    *of_b, last_of_b = sizes.dims_of(b)
    return leading == of_b and isinstance(last, int) and isinstance(last_of_b, int) and last < last_of_b


def _leave_out(graph: ir.Graph, scale: _Scale) -> None:
    """Removes a product: its tensor takes its place."""
    traversal.replace(graph, scale.y, scale.x)
    graph.remove(scale.node, safe=True)
