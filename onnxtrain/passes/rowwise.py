"""Determine which input rows an op needs for selected rows of its output, from its axis map.

    rows along axis 1 of LayerNormalization(x[b, s, h])      need the same rows along axis 1 of x
    rows of Reshape(x[b, s, h]) -> [b*s, h]                  need the same rows of x along the axes (0, 1) combined

`Axes` are the axes along which rows are numbered: one axis, or two combined, row = i * (size of the second) + j,
wherever the two are. Selected rows replace the one axis; of two axes, the first gets size 1 and the second the number
of rows. This keeps the rank, so that attributes that name axes remain valid.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.axes import Operand
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.traversal import is_used
from onnxtrain.graph.values import rank_of
from onnxtrain.ops import definition_of
from onnxtrain.ops.definition import Effects

Axes = tuple[int, ...]


class Rows(NamedTuple):
    """The rows of an input that are needed.

    Attributes:
        axes: the axes along which they are numbered; a negative one is a leading axis that the input lacks.
        broadcast_to: the sizes to expand these axes to first, if the input broadcasts along some of them; else None.
    """

    axes: Axes
    broadcast_to: Sizes | None = None


class NotRowwise(Exception):  # noqa: N818  # control flow: why a selection of rows stops here
    """Selected rows of the op's output need more than the same rows of its inputs."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def needed_rows(node: ir.Node, row_axes: dict[ir.Value, Axes]) -> list[Rows | None]:
    """Return, for each input, the rows that are needed; None for an input that is needed unchanged.

    Args:
        node: the op.
        row_axes: values of which only selected rows are used, with the axes of these rows; they include all used
            outputs of `node`.

    Raises:
        NotRowwise: the op mixes rows, or has side effects that forbid running it on some rows only.
    """
    _check_effects(node)
    axis_map = definition_of(node).axis_map(node)
    if axis_map is None:
        raise NotRowwise(f"{node.op_type} does not compute its rows independently")
    operands = dict(zip(node.outputs, axis_map.outputs, strict=False))
    if any(is_used(v) and (v not in row_axes or operands.get(v) is None) for v in node.outputs):
        raise NotRowwise(f"all rows of another output of {node.op_type} are used")
    row_names = {
        _names(operand, rank_of(v), row_axes[v]) for v, operand in operands.items() if v in row_axes and operand
    }
    if len(row_names) != 1:
        raise NotRowwise(f"rows of the outputs of {node.op_type} are selected along different axes")
    (names,) = row_names
    if any(
        name in operand.unsliceable for operand in (*axis_map.inputs, *axis_map.outputs) if operand for name in names
    ):
        raise NotRowwise(f"{node.op_type} needs all rows at once")
    output = next(v for v in node.outputs if v in row_axes)
    needed = [
        None if value is None or operand is None else _input_rows(node, value, operand, names, output, row_axes[output])
        for value, operand in zip(node.inputs, axis_map.inputs, strict=True)
    ]
    if all(rows is None for rows in needed) and shape_input(node) is None:
        raise NotRowwise(f"no input of {node.op_type} has the rows of its output")
    return needed


def _check_effects(node: ir.Node) -> None:
    effects = definition_of(node).effects
    if effects & ~Effects.RANDOM:
        raise NotRowwise(f"{node.op_type} has side effects")
    if effects and node.metadata_props.get("samples") != "any":
        raise NotRowwise(f'{node.op_type} reproduces eager\'s random numbers (rng="torch")')


def _names(operand: Operand, rank: int, axes: Axes) -> tuple[str, ...]:
    """Return the names of these axes in the axis map; a reshape has several factors per axis."""
    factors = operand.axis_factors(rank)
    return tuple(name for axis in axes for name in factors[axis])


def _input_rows(
    node: ir.Node, value: ir.Value, operand: Operand, names: tuple[str, ...], output: ir.Value, along: Axes
) -> Rows | None:
    """Return where an input has the rows `names`, which `output` has `along` these axes; None if it broadcasts them."""
    factors = operand.axis_factors(rank_of(value))
    if names in factors:
        axes: Axes = (factors.index(names),)
    else:
        present = {name: factors.index((name,)) for name in names if (name,) in factors}
        if not present and any(name in factor for factor in factors for name in names):
            raise NotRowwise(f"{node.op_type} merges the rows with another axis")
        if not present:
            return None
        if len(names) > 2:
            raise NotRowwise(f"{node.op_type} merges more than two axes into rows")
        axes = tuple(present.get(name, -1) for name in names)
        if len(present) < len(names):
            axes = _with_leading(node, value, names, present, along)
    have = tuple(1 if axis < 0 else sizes.dims_of(value)[axis] for axis in axes)
    want = tuple(sizes.dims_of(output)[axis] for axis in along)
    if len(have) != len(want) or have == want:  # of different lengths only for a reshape, which merges or splits them
        return Rows(axes)
    return None if all(size == 1 for size in have) else Rows(axes, want)


def _with_leading(node: ir.Node, value: ir.Value, names: tuple[str, ...], present: dict[str, int], along: Axes) -> Axes:
    """Return the axes in a broadcast operand that lacks one of them, as a negative leading axis."""
    if len(along) != len(names) or not all(name.startswith("...") for name in names):
        raise NotRowwise(f"{node.op_type} reads an element of {value.name} for several rows")
    ((name, axis),) = present.items()
    shift = axis - along[names.index(name)]
    return tuple(other + shift for other in along)


def _is_shape(node: ir.Node, index: int) -> bool:
    """Return whether this input holds the shape of the result, as `shape` of Reshape and Expand does."""
    return node.inputs[index] is not None and definition_of(node).input_name(index) == "shape"


def with_rows(shape: Sizes, axes: Axes, count: Size) -> Sizes:
    """Return the shape with `count` selected rows."""
    return tuple(count if axis == axes[-1] else 1 if axis in axes else size for axis, size in enumerate(shape))


def shape_input(node: ir.Node) -> int | None:
    """Return the index of the input that holds the shape of the result, or None."""
    return next((i for i in range(len(node.inputs)) if _is_shape(node, i)), None)


def output_axes(node: ir.Node, row_axes: dict[ir.Value, Axes]) -> dict[ir.Value, Axes]:
    """Return the axes of the rows in each output that has them, including unused outputs."""
    axis_map = definition_of(node).axis_map(node)
    assert axis_map is not None
    selected = next(i for i, v in enumerate(node.outputs) if v in row_axes)
    first = axis_map.outputs[selected]
    assert first is not None
    names = _names(first, rank_of(node.outputs[selected]), row_axes[node.outputs[selected]])
    result: dict[ir.Value, Axes] = {}
    for value, operand in zip(node.outputs, axis_map.outputs, strict=True):
        if operand is None:
            continue
        factors = operand.axis_factors(rank_of(value))
        if names in factors:
            result[value] = (factors.index(names),)
        elif all((name,) in factors for name in names):
            result[value] = tuple(factors.index((name,)) for name in names)
    return result
