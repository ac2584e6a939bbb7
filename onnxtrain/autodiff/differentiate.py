"""Differentiate a forward graph into the joint graph of forward and backward.

    forward  (inputs)            -> (outputs)
    joint    (inputs, cotangents) -> (outputs, gradients)

Nodes are visited from last to first. For a node with a cotangent on any output, the gradient rule of its definition
computes the cotangents of its inputs. Three things happen only here: a gradient is summed to its input's shape if the
input was broadcast, the contributions of several readers are added, and dtypes are checked (no integer value has a
gradient).
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
from onnxtrain.ops.aten_node import aten_sum
from onnxtrain.ops.bodies import inline_bodies
from onnxtrain.ops.definition import ZEROS, Zeros
from onnxtrain.system.time_limit import check_time


@dataclass(frozen=True)
class Joint:
    """A joint graph and the roles of its inputs and outputs.

    Attributes:
        model: inputs are the forward graph's, then the cotangents; outputs are the forward graph's, then gradients.
        forward_nodes: the nodes of the forward graph.
        outputs: how many of the model's outputs are the forward graph's.
        active: for each forward output, whether it depends differentiably on an input in `wrt`.
        cotangents: for each forward output, its cotangent; None if it gets none.
        gradients: for each forward input, its gradient; None if it has none.
        is_rewritten: whether functions of the user have changed the graph since.
    """

    model: ir.Model
    forward_nodes: frozenset[ir.Node]
    outputs: int
    active: tuple[bool, ...]
    cotangents: tuple[ir.Value | None, ...]
    gradients: tuple[ir.Value | None, ...]
    is_rewritten: bool = False

    def copy(self) -> Joint:
        """Copy the joint graph; names stay the same."""
        graph, values = clone(self.model.graph)
        nodes = dict(zip(self.model.graph, graph, strict=True))
        return Joint(
            with_graph(self.model, graph),
            frozenset(nodes[node] for node in self.forward_nodes if node in nodes),  # passes may have removed some
            self.outputs,
            self.active,
            tuple(None if c is None else values[c] for c in self.cotangents),
            tuple(None if g is None else values[g] for g in self.gradients),
            self.is_rewritten,
        )

    def rebind_gradients(self) -> Joint:
        """Update `gradients` after passes have replaced outputs of the graph."""
        outputs = iter(self.model.graph.outputs[self.outputs :])
        return replace(self, gradients=tuple(None if g is None else next(outputs) for g in self.gradients))


def differentiate(model: ir.Model, wrt: Sequence[bool], has_cotangents: Sequence[bool]) -> Joint:
    """Extend `model` to the joint graph, in place.

    Args:
        model: the forward graph.
        wrt: for each graph input, whether its gradient is wanted.
        has_cotangents: for each graph output, whether it gets a cotangent; ignored for dtypes without gradients.

    Raises:
        GradientError: a gradient rule returns a wrong dtype, shape or number of gradients; or an op has no definition.
    """
    model = _inline_for_gradients(model, wrt)
    graph = model.graph
    forward = tuple(graph)
    active = _active(forward, _wrt_inputs(graph, wrt))
    op = builder(graph)
    walk = _Walk(op, active)
    cotangents: list[ir.Value | None] = []
    for index, (output, has_cotangent) in enumerate(zip(graph.outputs, has_cotangents, strict=True)):
        cotangent = None
        if has_cotangent and output in active:
            cotangent = ir.Value(name=f"grad_{output.name or index}_{index}")
            set_type(cotangent, type_of(output))
            walk.add(output, cotangent)
        cotangents.append(cotangent)
    graph.inputs.extend(c for c in cotangents if c is not None)
    walk.used_names.update(c.name for c in cotangents if c is not None)

    for node in reversed(forward):
        walk.visit(node)

    gradients = tuple(walk.total(v) if is_wanted else None for v, is_wanted in zip(graph.inputs, wrt, strict=False))
    flags = tuple(v in active for v in graph.outputs)
    graph.outputs.extend(g for g in gradients if g is not None)
    return Joint(model, frozenset(forward), len(flags), flags, tuple(cotangents), gradients)


def _wrt_inputs(graph: ir.Graph, wrt: Sequence[bool]) -> list[ir.Value]:
    return [v for v, is_wanted in zip(graph.inputs, wrt, strict=True) if is_wanted]


def _inline_for_gradients(model: ir.Model, wrt: Sequence[bool]) -> ir.Model:
    """Inline the bodies of nodes that are differentiated through their body."""
    active = _active(tuple(model.graph), _wrt_inputs(model.graph, wrt))
    passive = {n.name for n in model.graph if not _active_inputs(n, definition_of(n), active)}

    def keep(node: ir.Node) -> bool:
        return definition_of(node).gradient is not BY_BODY or node.name in passive

    return model if all(map(keep, model.graph)) else inline_bodies(model, keep=keep)


def _active(nodes: Sequence[ir.Node], wrt_inputs: Sequence[ir.Value]) -> set[ir.Value]:
    """Return the values that gradients flow through: floating-point, and computed from an input in `wrt`."""
    active = {v for v in wrt_inputs if is_differentiable_type(dtype_of(v))}
    for node in nodes:
        definition = definition_of(node)
        if _active_inputs(node, definition, active):
            active.update(
                v
                for i, v in enumerate(node.outputs)
                if is_differentiable_type(dtype_of(v)) and definition.output_name(i) not in definition.nondiff_outputs
            )
    return active


def _active_inputs(node: ir.Node, definition: OpDef, active: set[ir.Value]) -> set[str]:
    if definition.gradient is NOT_DIFFERENTIABLE:
        return set()
    indices = [i for i, v in enumerate(node.inputs) if v is not None and v in active]
    names = {definition.input_name(i) for i in indices} - definition.nondiff_inputs
    if names and definition.inputs[-1].endswith("..."):
        first = len(definition.inputs) - 1
        names.update(f"{definition.input_name(i)}[{i - first}]" for i in indices if i >= first)
    return names


class _Walk:
    """The reverse walk over the nodes, with the cotangents summed so far."""

    def __init__(self, op: Builder, active: set[ir.Value]) -> None:
        self._op = op
        self._active = active
        self._sums: dict[ir.Value, ir.Value] = {}
        self._zeros: set[ir.Value] = set()  # whose cotangent is zeros, unless it is in `_sums`
        self.used_names: set[str | None] = set()  # names of the cotangent inputs

    def add(self, value: ir.Value, cotangent: ir.Value) -> None:
        """Add a contribution immediately, in eager's order: one sum per parameter is live, however many read it."""
        sum_ = self._sums.get(value)
        if sum_ is not None:
            add = self._op.Add if is_float(dtype_of(sum_)) else partial(aten_sum, self._op)
            cotangent = add(sum_, cotangent)
        self._sums[value] = cotangent

    def total(self, value: ir.Value) -> ir.Value | None:
        """Return the sum of all contributions; None if there is none."""
        if value in self._zeros and value not in self._sums:
            self._sums[value] = self._op.Expand(self._op.scalar(0.0, like=value), self._op.shape_of(value))
        result = self._sums.get(value)
        if result is None:
            return None
        name = f"grad_{value.name}"
        unnamed = (result.name or "").startswith("val_") and name not in self.used_names
        if unnamed and result.producer() is not None and not result.is_graph_output():
            result.name = name  # readable in dumps; a shared gradient keeps its first name
        return result

    def visit(self, node: ir.Node) -> None:
        check_time()
        definition = definition_of(node)
        active = _active_inputs(node, definition, self._active)
        has_zeros = any(v in self._zeros for v in node.outputs)
        has_sums = any(v in self._sums for v in node.outputs)
        if not active or not (has_zeros or has_sums):
            return
        if active <= definition.moved_inputs and not has_sums:
            names = map(definition.input_name, range(len(node.inputs)))
            self._zeros.update(
                v for v, name in zip(node.inputs, names, strict=True) if v is not None and name in active
            )
            return
        with self._op.at({**node.metadata_props, "gradient_of": node.name or node.op_type}):
            cotangents = [self.total(v) for v in node.outputs]
            assert isinstance(definition.gradient, tuple)
            rule = definition.gradient[0]
            result = rule.build(self._op, definition.view(node, active), *cotangents)
            gradients = (result,) if result is None or isinstance(result, ir.Value | Zeros) else tuple(result)
            if len(gradients) != len(node.inputs):
                raise GradientError(
                    f"the gradient rule of {definition.name} returned the wrong number of gradients",
                    expected=len(node.inputs),
                    got=len(gradients),
                    where=node.metadata_props.get("line"),
                    todo="return one gradient or None per input of the node",
                )
            for index, (value, gradient) in enumerate(zip(node.inputs, gradients, strict=True)):
                if value is None or gradient is None or value not in self._active:
                    continue
                if definition.input_name(index) not in active:
                    continue
                if gradient is ZEROS:
                    self._zeros.add(value)
                else:
                    self.add(value, self._fit(gradient, value, node))

    def _fit(self, gradient: ir.Value, value: ir.Value, node: ir.Node) -> ir.Value:
        """Sum `gradient` to the shape of `value`, if the node broadcast it."""
        if dtype_of(gradient) != dtype_of(value):
            raise GradientError(
                f"the gradient of {value.name} through {node.op_type} has the wrong dtype",
                where=node.metadata_props.get("line"),
                expected=dtype_of(value).name,
                got=dtype_of(gradient).name,
                todo="cast in the gradient rule",
            )
        got, expected = sizes.dims_of(gradient), sizes.dims_of(value)
        if got == expected:
            return gradient
        extra = len(got) - len(expected)
        pairs = list(zip(got[max(extra, 0) :], expected, strict=extra >= 0))
        # A dynamic size may be 1 by a guard that only the gradient's shape shows; SumTo raises if it is not.
        if extra < 0 or any(g == 1 and isinstance(e, int) and e != 1 for g, e in pairs):
            raise GradientError(
                f"the gradient of {value.name} through {node.op_type} does not broadcast from the value's shape",
                where=node.metadata_props.get("line"),
                expected=str(expected),
                got=str(got),
                todo="return a gradient of the value's shape, or of a shape that the value broadcasts to",
            )
        if extra:
            gradient = self._sum(gradient, range(extra), keepdims=0)
        got = got[extra:]
        broadcast = [i for i, (g, e) in enumerate(zip(got, expected, strict=True)) if e == 1 and g != 1]
        if broadcast:
            gradient = self._sum(gradient, broadcast, keepdims=1)
        if sizes.dims_of(gradient) != expected:
            # The dimensions are not provably equal: only the run shows whether the input was broadcast.
            gradient = self._op.own.SumTo(gradient, self._op.shape_of(value))
            set_type(gradient, type_of(value))
        return gradient

    def _sum(self, value: ir.Value, axes: Sequence[int], keepdims: int) -> ir.Value:
        over = self._op.constant(list(axes), ir.DataType.INT64)
        return self._op.ReduceSum(value, over, keepdims=keepdims)
