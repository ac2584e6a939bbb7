"""Fold scalar factors into adjacent ops.

    before   Mul(Div(x, 8), 3)                                        after    Mul(x, 0.375)
    before   ScaledDotProductAttention(Reshape(Mul(q, 0.125)), k, v, scale=1)
    after    ScaledDotProductAttention(Reshape(q), k, v, scale=0.125)
    before   Div(MatMul(a, b), 0.07)                                  after    FusedMatMul(a, b, alpha=1/0.07)
    before   Mul(Linear(x[n, 8], w[768, 8]), 2)                       after    Linear(Mul(x, 2), w)

Attention and matmuls apply a scalar factor at no cost. A factor after a Linear without bias moves to its input if that
is smaller, as after LoRA's low-rank branch. Factors of 1 are removed. No value is rounded more often than before, and
powers of two are exact. `SCALAR_FACTORS` says which factors an op can absorb or commute with.

Refused: tensors next to the factor with other users; float16, whose range is so small that models choose where to
scale; factors beyond 2**±20, for the same reason in float32; graphs that reproduce eager PyTorch's random numbers
(`rng="torch"`), which keep eager's order of operations. A module output never becomes a view of a larger tensor.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import dtype_of, is_float
from onnxtrain.ops import builder, definition_of, view
from onnxtrain.ops.elementwise.arithmetic import DIV, MUL, number_of
from onnxtrain.ops.interfaces.scalar_factors import SCALAR_FACTORS, ScalarFactor
from onnxtrain.passes.changes import Changes, counted
from onnxtrain.passes.rewriting import nodes_before, only_user, reaches_output, substitute

_MAX_FACTOR = 2.0**20


class _Scaling(NamedTuple):
    """A node that multiplies its input at index `scaled_input` by the constant `factor`."""

    node: ir.Node
    scaled_input: int
    factor: float

    @property
    def x(self) -> ir.Value:
        value = self.node.inputs[self.scaled_input]
        assert value is not None
        return value

    @property
    def y(self) -> ir.Value:
        return self.node.outputs[0]


class _Target(NamedTuple):
    """A node that a factor may move to; `value` is the input or first output of the node that the factor scales."""

    node: ir.Node
    factor: ScalarFactor
    value: ir.Value


def fold_scalar_factors(graph: ir.Graph, changes: Changes) -> None:
    """Move the scalar factors of `graph` to ops where they cost nothing, or less."""
    op = builder(graph)
    samples_as_eager = any(node.metadata_props.get("samples") == "eager's" for node in graph)
    worklist = deque(graph)
    combined = moved = 0
    while worklist:
        node = worklist.popleft()
        scaling = _scaling(node) if node.graph is graph else None
        if scaling is None:
            continue
        if samples_as_eager:
            changes.refuse(
                node, 'its graph reproduces eager\'s random numbers (rng="torch") and its order of operations'
            )
            return
        new_node = _combine(op, scaling)
        if new_node is not None:
            worklist.append(new_node)
            combined += 1
        elif scaling.factor == 1 and not reaches_output(scaling.y):
            _remove(graph, scaling)
            moved += 1
        else:
            moved += _move(op, scaling, worklist, changes)
    if combined:
        changes.applied.append(f"combined {counted(combined, 'pair')} of scalar factors")
    if moved:
        changes.applied.append(f"folded {counted(moved, 'scalar factor')} into matmuls, attention or smaller tensors")


def _move(op: Builder, scaling: _Scaling, worklist: deque[ir.Node], changes: Changes) -> bool:
    """Move a factor into an earlier or later node if that is cheaper; append a new scaling to `worklist`."""
    for target in (_target_before(scaling), _target_after(scaling)):
        if target is None:
            continue
        kind = target.node.op_type
        if dtype_of(scaling.x) == ir.DataType.FLOAT16:
            changes.refuse(scaling.node, f"its factor is not folded into {kind}: float16 might overflow or underflow")
        elif target.factor.absorb is None:
            scaled = _scale_operand(op, scaling, target)
            if scaled is not None:
                worklist.append(scaled)
                return True
        elif _absorb(op, scaling, target):
            return True
        else:
            changes.refuse(scaling.node, f"an attribute of {kind} cannot hold its factor exactly")
    return False


def _scaling(node: ir.Node) -> _Scaling | None:
    """Return the node as a multiplication by a constant scalar; None if it is not one."""
    n = view(node)
    if n.definition not in (MUL, DIV) or not is_float(dtype_of(node.outputs[0])):
        return None
    scaled_input, number = 0, number_of(n.b)
    if number is None and n.definition is MUL:
        scaled_input, number = 1, number_of(n.a)
    if number is None or not 1 / _MAX_FACTOR <= abs(number) <= _MAX_FACTOR:
        return None
    return _Scaling(node, scaled_input, float(number) if n.definition is MUL else 1 / number)


def _combine(op: Builder, scaling: _Scaling) -> ir.Node | None:
    """Combine a scaling with the one directly before it into one node, and return that."""
    before = scaling.x.producer()
    first = _scaling(before) if before is not None else None
    if first is None or only_user(scaling.x) is not scaling.node:
        return None
    with nodes_before(op, scaling.node):
        y = op.Mul(first.x, op.scalar(first.factor * scaling.factor, like=first.x))
    substitute(op.graph, scaling.y, y, [scaling.node, first.node])
    return _producer(y)


def _producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None
    return node


def _target_before(scaling: _Scaling) -> _Target | None:
    """Return the producer of the scaled tensor, seen through data movement, if it can scale its output."""
    value, user = scaling.x, scaling.node
    while only_user(value) is user:
        node = value.producer()
        if node is None:
            return None
        factor = _factor(node)
        if factor is not None:
            fits = factor.scales_output and value.index() == 0 and (value is scaling.x or not reaches_output(scaling.y))
            return _Target(node, factor, value) if fits else None
        source = _moved_input(node)
        if source is None:
            return None
        value, user = source, node
    return None


def _target_after(scaling: _Scaling) -> _Target | None:
    """Return the user of the product, seen through data movement, if it can scale that input."""
    value = scaling.y
    while len(value.uses()) == 1 and not value.is_graph_output():
        node, index = next(iter(value.uses()))
        factor = _factor(node)
        if factor is not None:
            absorbed = factor.absorb is not None and definition_of(node).input_name(index) in factor.inputs
            return _Target(node, factor, value) if absorbed else None
        if _moved_input(node) is not value:
            return None
        value = node.outputs[0]
    return None


def _factor(node: ir.Node) -> ScalarFactor | None:
    build = SCALAR_FACTORS.entry(node)
    return None if build is None else build(view(node))


def _moved_input(node: ir.Node) -> ir.Value | None:
    """Return the input whose elements the node only moves to its single output; None for any other node."""
    definition = definition_of(node)
    if not definition.moved_inputs or len(node.outputs) != 1 or definition.inputs[-1].endswith("..."):
        return None
    return node.inputs[0] if definition.input_name(0) in definition.moved_inputs else None


def _absorb(op: Builder, scaling: _Scaling, target: _Target) -> bool:
    """Fold the factor into an attribute of the target; return whether that is possible."""
    assert target.factor.absorb is not None
    with nodes_before(op, target.node):
        outputs = target.factor.absorb(op, view(target.node), scaling.factor)
    if outputs is None:
        return False
    _producer(outputs[0]).metadata_props.update(target.node.metadata_props)  # the RNG mode of its dropout
    for old, new in zip(target.node.outputs, outputs, strict=True):
        substitute(op.graph, old, new, [])
    op.graph.remove(target.node, safe=True)
    _remove(op.graph, scaling)
    return True


def _scale_operand(op: Builder, scaling: _Scaling, target: _Target) -> ir.Node | None:
    """Scale the target's operand instead, if it is smaller than the result, and return the new node."""
    operand = target.node.inputs[0]
    if operand is None or not _is_smaller(operand, target.value):
        return None
    with nodes_before(op, target.node):
        scaled = op.Mul(operand, op.scalar(scaling.factor, like=operand))
    target.node.replace_input_with(0, scaled)
    _remove(op.graph, scaling)
    return _producer(scaled)


def _is_smaller(a: ir.Value, b: ir.Value) -> bool:
    """Return whether a has fewer elements than b; they may differ in the last dimension only."""
    *leading_a, last_a = sizes.dims_of(a)
    *leading_b, last_b = sizes.dims_of(b)
    return leading_a == leading_b and isinstance(last_a, int) and isinstance(last_b, int) and last_a < last_b


def _remove(graph: ir.Graph, scaling: _Scaling) -> None:
    """Replace the product by the unscaled tensor."""
    traversal.replace(graph, scaling.y, scaling.x)
    graph.remove(scaling.node, safe=True)
