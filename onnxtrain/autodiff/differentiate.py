"""The reverse walk: from a forward graph to the joint graph of forward and backward.

    forward  (inputs)            -> (outputs)
    joint    (inputs, cotangents) -> (outputs, gradients)

Walks the nodes from last to first; a node with a cotangent on some output asks its definition's gradient rule for the
cotangents of its inputs. Three things are done here and nowhere else: a gradient is summed to its input's shape where
the input was broadcast, contributions of several readers are added, and types are checked, so that no integer edge
ever carries a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir

from onnxtrain.errors import GradientError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.traversal import clone, with_graph
from onnxtrain.graph.values import dtype_of, is_differentiable_type, is_float, set_type, type_of
from onnxtrain.ops import BY_BODY, NOT_DIFFERENTIABLE, OpDef, builder, definition_of
from onnxtrain.ops.aten import aten_sum
from onnxtrain.ops.bodies import inline_bodies


@dataclass(frozen=True)
class Joint:
    """A joint graph and what its inputs and outputs are.

    Attributes:
        model: inputs are the forward graph's, then the cotangents; outputs are the forward graph's, then gradients.
        forward_nodes: the nodes that stood in the forward graph.
        outputs: how many of the model's outputs are the forward graph's.
        active: for each forward output, whether a gradient could flow into it.
        cotangents: for each forward output, its cotangent, or None where none is expected.
        gradients: for each forward input, its gradient, or None where it has none.
    """

    model: ir.Model
    forward_nodes: frozenset[ir.Node]
    outputs: int
    active: tuple[bool, ...]
    cotangents: tuple[ir.Value | None, ...]
    gradients: tuple[ir.Value | None, ...]

    def copy(self) -> Joint:
        """A joint graph of its own, with the same names."""
        graph, values = clone(self.model.graph)
        nodes = dict(zip(self.model.graph, graph, strict=True))
        return Joint(
            with_graph(self.model, graph),
            frozenset(nodes[node] for node in self.forward_nodes if node in nodes),  # passes may have removed some
            self.outputs,
            self.active,
            tuple(None if c is None else values[c] for c in self.cotangents),
            tuple(None if g is None else values[g] for g in self.gradients),
        )

    def rebind_gradients(self) -> Joint:
        """This, after passes that put other values in the place of gradients."""
        given = iter(self.model.graph.outputs[self.outputs :])
        return replace(self, gradients=tuple(None if g is None else next(given) for g in self.gradients))


def differentiate(model: ir.Model, wrt: Sequence[bool], of: Sequence[bool]) -> Joint:
    """Extends `model` to the joint graph.

    Args:
        model: the forward graph, which becomes part of the joint one.
        wrt: for each graph input, whether its gradient is asked for.
        of: for each graph output, whether a cotangent will be given; one of a type that cannot have a gradient is
            taken as False.

    Raises:
        GradientError: a gradient of the wrong type or shape, or an op without a definition.
    """
    model = _through_bodies(model, wrt)
    graph = model.graph
    forward = tuple(graph)
    active = _active(forward, _asked(graph, wrt))
    op = builder(graph)
    walk = _Walk(op, active)
    cotangents: list[ir.Value | None] = []
    for index, (output, given) in enumerate(zip(graph.outputs, of, strict=True)):
        cotangent = None
        if given and output in active:
            cotangent = ir.Value(name=f"grad_{output.name or index}_{index}")
            set_type(cotangent, type_of(output))
            walk.add(output, cotangent)
        cotangents.append(cotangent)
    graph.inputs.extend(c for c in cotangents if c is not None)
    walk.taken.update(c.name for c in cotangents if c is not None)

    for node in reversed(forward):
        walk.visit(node)

    gradients = tuple(walk.total(v) if wanted else None for v, wanted in zip(graph.inputs, wrt, strict=False))
    flags = tuple(v in active for v in graph.outputs)
    graph.outputs.extend(g for g in gradients if g is not None)
    return Joint(model, frozenset(forward), len(flags), flags, tuple(cotangents), gradients)


def _asked(graph: ir.Graph, wrt: Sequence[bool]) -> list[ir.Value]:
    return [v for v, wanted in zip(graph.inputs, wrt, strict=True) if wanted]


def _through_bodies(model: ir.Model, wrt: Sequence[bool]) -> ir.Model:
    """The model with bodies in the place of those nodes that a gradient can only flow through by their body."""
    active = _active(tuple(model.graph), _asked(model.graph, wrt))
    passive = {n.name for n in model.graph if not _active_inputs(n, definition_of(n), active)}

    def stays(node: ir.Node) -> bool:
        return definition_of(node).gradient is not BY_BODY or node.name in passive

    return model if all(map(stays, model.graph)) else inline_bodies(model, keep=stays)


def _active(nodes: Sequence[ir.Node], asked: Sequence[ir.Value]) -> set[ir.Value]:
    """The values that a gradient can flow through: floating, and computed from an asked input."""
    active = {v for v in asked if is_differentiable_type(dtype_of(v))}
    for node in nodes:
        definition = definition_of(node)
        if _active_inputs(node, definition, active):
            active.update(
                v
                for i, v in enumerate(node.outputs)
                if is_differentiable_type(dtype_of(v)) and definition.output_name(i) not in definition.detached
            )
    return active


def _active_inputs(node: ir.Node, definition: OpDef, active: set[ir.Value]) -> set[str]:
    if definition.gradient is NOT_DIFFERENTIABLE:
        return set()
    found = [i for i, v in enumerate(node.inputs) if v is not None and v in active]
    names = {definition.input_name(i) for i in found} - definition.stops
    if names and definition.inputs[-1].endswith("..."):
        first = len(definition.inputs) - 1
        names.update(f"{definition.input_name(i)}[{i - first}]" for i in found if i >= first)
    return names


class _Walk:
    """The cotangents summed so far."""

    def __init__(self, op: Builder, active: set[ir.Value]) -> None:
        self._op = op
        self._active = active
        self._sums: dict[ir.Value, ir.Value] = {}
        self.taken: set[str | None] = set()  # names of cotangents: that of output 1, `relu`, is `grad_relu_1` as well

    def add(self, value: ir.Value, cotangent: ir.Value) -> None:
        """Adds a contribution at once, in eager's order: a parameter with many readers keeps one sum alive, not all."""
        sum_ = self._sums.get(value)
        if sum_ is not None:
            add = self._op.Add if is_float(dtype_of(sum_)) else partial(aten_sum, self._op)
            cotangent = add(sum_, cotangent)
        self._sums[value] = cotangent

    def total(self, value: ir.Value) -> ir.Value | None:
        """The sum of all contributions."""
        result = self._sums.get(value)
        if result is None:
            return None
        name = f"grad_{value.name}"
        unnamed = (result.name or "").startswith("val_") and name not in self.taken
        if unnamed and result.producer() is not None and not result.is_graph_output():
            result.name = name  # a file or program reads better so; a shared gradient keeps its first
        return result

    def visit(self, node: ir.Node) -> None:
        definition = definition_of(node)
        wanted = _active_inputs(node, definition, self._active)
        if not wanted or not any(v in self._sums for v in node.outputs):
            return
        with self._op.at({**node.metadata_props, "gradient_of": node.name or node.op_type}):
            cotangents = [self.total(v) for v in node.outputs]
            assert isinstance(definition.gradient, tuple)
            rule = definition.gradient[0]
            result = rule.build(self._op, definition.view(node, wanted), *cotangents)
            gradients = (result,) if result is None or isinstance(result, ir.Value) else tuple(result)
            if len(gradients) != len(node.inputs):
                raise GradientError(
                    f"the gradient rule of {definition.name} gave the wrong number of gradients",
                    expected=len(node.inputs),
                    got=len(gradients),
                    where=node.metadata_props.get("line"),
                    todo="return one gradient or None per input of the node",
                )
            for index, (value, gradient) in enumerate(zip(node.inputs, gradients, strict=True)):
                if value is None or gradient is None or value not in self._active:
                    continue
                if definition.input_name(index) in wanted:
                    self.add(value, self._fit(gradient, value, node))

    def _fit(self, gradient: ir.Value, value: ir.Value, node: ir.Node) -> ir.Value:
        """`gradient` with the shape of `value`, which a broadcast may have enlarged."""
        if dtype_of(gradient) != dtype_of(value):
            raise GradientError(
                f"the gradient of {value.name} through {node.op_type} has the wrong element type",
                where=node.metadata_props.get("line"),
                expected=dtype_of(value).name,
                got=dtype_of(gradient).name,
                todo="cast in the gradient rule",
            )
        have, want = sizes.dims_of(gradient), sizes.dims_of(value)
        if have == want:
            return gradient
        extra = len(have) - len(want)
        if extra < 0 or any(h == 1 and w != 1 for h, w in zip(have[extra:], want, strict=True)):
            raise GradientError(
                f"the gradient of {value.name} through {node.op_type} is smaller than the value",
                where=node.metadata_props.get("line"),
                expected=str(want),
                got=str(have),
                todo="return a gradient that has the value's shape or broadcasts from it",
            )
        if extra:
            gradient = self._sum(gradient, range(extra), keepdims=0)
        have = have[extra:]
        widened = [i for i, (h, w) in enumerate(zip(have, want, strict=True)) if w == 1 and h != 1]
        if widened:
            gradient = self._sum(gradient, widened, keepdims=1)
        if sizes.dims_of(gradient) != want:
            # Sizes that are not proven equal: whether the input was broadcast shows at run time.
            gradient = self._op.own.SumTo(gradient, self._op.shape_of(value))
            set_type(gradient, type_of(value))
        return gradient

    def _sum(self, value: ir.Value, axes: Sequence[int], keepdims: int) -> ir.Value:
        over = self._op.constant(list(axes), ir.DataType.INT64)
        result: ir.Value = self._op.ReduceSum(value, over, keepdims=keepdims)
        return result
