"""A part of a plan at static sizes, in standard ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.values import ONNX, dtype_of
from onnxtrain.ops import definition_of
from onnxtrain.ops.bodies import close, inline_bodies
from onnxtrain.ops.definition import OPSET
from onnxtrain.ops.symbolic_ints import known_ints
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.eliminate_common_subexpressions import eliminate_common_subexpressions
from onnxtrain.passes.eliminate_dead_code import eliminate_dead_code
from onnxtrain.passes.fold_constants import fold_constants
from onnxtrain.plan.cut import Part


@dataclass(frozen=True)
class StaticGraph:
    """A part at static sizes.

    Attributes:
        graph: in standard ops. Its inputs are those of the part, its outputs those of the part that are not None.
        passed_through: from the index of an output that is an input of the part to the index of that input.
        sizes_in, sizes_out: the part's.
    """

    graph: ir.Graph
    passed_through: Mapping[int, int]
    sizes_in: tuple[int, ...]
    sizes_out: tuple[int, ...]


def static_graph(part: Part, shapes: Sequence[Sequence[int]], sizes_in: Sequence[int]) -> StaticGraph:
    """Build the part as a graph of standard ops.

    Args:
        part: the part to run.
        shapes: those of its inputs.
        sizes_in: the values of its `sizes_in`.

    Raises:
        GraphError: a dimension does not follow from these, or an op has no body.
    """
    symbol_values = bind_sizes(part, shapes, sizes_in)
    values: dict[ir.Value, ir.Value] = {}
    try:
        graph = _with_static_sizes(part, sizes_in, symbol_values, values)
        outputs = [v for v in part.outputs if v is not None]
        close(graph, [values[v] for v in outputs], [f"result_{i}" for i in range(len(outputs))])
        sizes_out = tuple(
            sizes.evaluate(size, symbol_values) for v in part.sizes_out for size in known_ints(v) or (str(v.name),)
        )
    except NameError as error:
        raise GraphError("a dimension does not follow from the shapes of the inputs", got=error) from error
    graph = inline_bodies(graph).graph
    _sizes_to_constants(graph)
    for run in (fold_constants, eliminate_common_subexpressions, eliminate_dead_code):
        run(graph, Changes(run.__name__))
    inputs = {value: i for i, value in enumerate(part.inputs)}
    passed_through = {i: inputs[value] for i, value in enumerate(outputs) if value in inputs}
    return StaticGraph(graph, passed_through, tuple(sizes_in), sizes_out)


def bind_sizes(part: Part, shapes: Sequence[Sequence[int]], sizes_in: Sequence[int]) -> dict[str, int]:
    """Return the integer of each symbol of a part.

    Args:
        part: the part to run.
        shapes: those of its inputs.
        sizes_in: the values of its `sizes_in`.

    Raises:
        GraphError: an input's rank differs from the part's.
    """
    for value, shape in zip(part.inputs, shapes, strict=True):
        if len(sizes.dims_of(value)) != len(shape):
            raise GraphError(f"{value.name} has an unexpected rank", expected=sizes.dims_of(value), got=tuple(shape))
    pairs = [
        (size, integer)
        for value, shape in zip(part.inputs, shapes, strict=True)
        for size, integer in zip(sizes.dims_of(value), shape, strict=True)
    ]
    for value, integer in zip(part.sizes_in, sizes_in, strict=True):
        pairs += [(size, integer) for size in known_ints(value) or ()]
    return {size: integer for size, integer in pairs if isinstance(size, str) and size.isidentifier()}


def _with_static_sizes(
    part: Part, sizes_in: Sequence[int], symbol_values: dict[str, int], values: dict[ir.Value, ir.Value]
) -> ir.Graph:
    """Return the nodes of the part as a graph in which every size is static."""
    read = {v for node in part.nodes for v in node.inputs} | set(part.outputs)
    constants = {v for v in read if v is not None and v.const_value is not None}
    for value in (*part.inputs, *part.sizes_in, *constants):
        values[value] = traversal.clone_value(value)
        _substitute_sizes(values[value], symbol_values)
    graph = ir.Graph([values[v] for v in part.inputs], [], nodes=(), name="cpp program", opset_imports={ONNX: OPSET})
    for value in constants:
        graph.initializers[str(values[value].name)] = values[value]
    for value, integer in zip(part.sizes_in, sizes_in, strict=True):
        _make_constant(graph, values[value], (integer,))
    for node in part.nodes:
        copy = traversal.clone_node(node, values)
        for value in copy.outputs:
            _substitute_sizes(value, symbol_values)
        graph.append(copy)
    return graph


def _substitute_sizes(value: ir.Value, symbol_values: dict[str, int]) -> None:
    value.shape = sizes.shape(sizes.evaluate(size, symbol_values) for size in sizes.dims_of(value))
    elements = value.meta.get("sizes")
    if elements is not None:
        value.meta["sizes"] = tuple(sizes.evaluate(size, symbol_values) for size in elements)


def _make_constant(graph: ir.Graph, value: ir.Value, elements: Sequence[int | str]) -> None:
    """Make an integer or a vector of integers a constant of the graph."""
    array = np.array(elements if len(sizes.dims_of(value)) else elements[0], np.int64)
    value.const_value = ir.tensor(array, name=value.name)
    graph.initializers[str(value.name)] = value


def _sizes_to_constants(graph: ir.Graph) -> None:
    """Replace the results of size arithmetic by constants."""
    for node in list(graph):
        value = node.outputs[0]
        if definition_of(node).host_eval is None or len(node.outputs) != 1 or dtype_of(value) != ir.DataType.INT64:
            continue
        elements = known_ints(value) if len(sizes.dims_of(value)) <= 1 else None
        if elements is not None and all(isinstance(size, int) for size in elements) and not value.is_graph_output():
            constant = ir.Value(name=f"{value.name}_known", type=value.type, shape=value.shape)
            _make_constant(graph, constant, elements)
            traversal.replace(graph, value, constant)
            graph.remove(node, safe=True)
