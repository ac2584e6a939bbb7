"""What an op needs of its inputs where only some rows of its output are wanted: asked of its axis map.

    rows along axis 1 of LayerNormalization(x[b, s, h])      need the same rows along axis 1 of x
    rows of Reshape(x[b, s, h]) -> [b*s, h]                  need the same rows of the axes (0, 1) of x together

`Axes` says along what rows are counted: one axis, or two that are counted together, row = i * (size of the second) + j,
wherever the two stand. Selected rows take the place of the one axis; of two, the first becomes 1 and the second as long
as there are rows. So the rank stays, and attributes that name axes stay right.
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
    """Which rows of an input are needed.

    Attributes:
        axes: along what they are counted; below 0 an axis that the input lacks, before its first.
        spread: None, or where the input broadcasts along some of these axes, the sizes to broadcast it to first.
    """

    axes: Axes
    spread: Sizes | None = None


class NotRowwise(Exception):  # noqa: N818  # not an error: says where a selection of rows stops
    """Some rows of the op's output need more than the same rows of its inputs."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def needed_rows(node: ir.Node, wanted: dict[ir.Value, Axes]) -> list[Rows | None]:
    """For each input the rows of it that are needed; None where it is needed as it is.

    Args:
        node: all of its outputs that are read, and have these rows, are in `wanted`.
        wanted: the axes of values of which only selected rows are read.

    Raises:
        NotRowwise: the op mixes rows, or has effects that forbid it to run on some of them.
    """
    _check_effects(node)
    axis_map = definition_of(node).axis_map(node)
    if axis_map is None:
        raise NotRowwise(f"{node.op_type} gives no rows that can be computed by themselves")
    places = dict(zip(node.outputs, axis_map.outputs, strict=False))
    if any(is_used(v) and (v not in wanted or places.get(v) is None) for v in node.outputs):
        raise NotRowwise(f"another result of {node.op_type} is read whole")
    found = {_names(operand, rank_of(v), wanted[v]) for v, operand in places.items() if v in wanted and operand}
    if len(found) != 1:
        raise NotRowwise(f"the results of {node.op_type} are read along different axes")
    (names,) = found
    if any(
        name in operand.unsliceable for operand in (*axis_map.inputs, *axis_map.outputs) if operand for name in names
    ):
        raise NotRowwise(f"{node.op_type} reads all rows together")
    output = next(v for v in node.outputs if v in wanted)
    result = [
        None if value is None or operand is None else _place(node, value, operand, names, output, wanted[output])
        for value, operand in zip(node.inputs, axis_map.inputs, strict=True)
    ]
    if all(place is None for place in result) and shape_input(node) is None:
        raise NotRowwise(f"{node.op_type} makes its rows itself")
    return result


def _check_effects(node: ir.Node) -> None:
    effects = definition_of(node).effects
    if effects & ~Effects.RANDOM:
        raise NotRowwise(f"{node.op_type} has effects beside its result")
    if effects and node.metadata_props.get("draws") != "any":
        raise NotRowwise(f'{node.op_type} draws the random numbers that eager PyTorch draws (rng="torch")')


def _names(operand: Operand, rank: int, axes: Axes) -> tuple[str, ...]:
    """The axis names under these axes; a reshape has several under one axis."""
    factors = operand.axis_factors(rank)
    return tuple(name for axis in axes for name in factors[axis])


def _place(
    node: ir.Node, value: ir.Value, operand: Operand, names: tuple[str, ...], output: ir.Value, along: Axes
) -> Rows | None:
    """Where the rows called `names`, `along` of `output`, lie in an input; None where it has none, or one for all."""
    factors = operand.axis_factors(rank_of(value))
    if names in factors:
        axes: Axes = (factors.index(names),)
    else:
        present = {name: factors.index((name,)) for name in names if (name,) in factors}
        if not present and any(name in factor for factor in factors for name in names):
            raise NotRowwise(f"{node.op_type} has rows of several axes in one")
        if not present:
            return None
        if len(names) > 2:
            raise NotRowwise(f"{node.op_type} makes rows of more than two axes")
        axes = tuple(present.get(name, -1) for name in names)
        if len(present) < len(names):
            axes = _with_leading(node, value, names, present, along)
    have = tuple(1 if axis < 0 else sizes.dims_of(value)[axis] for axis in axes)
    want = tuple(sizes.dims_of(output)[axis] for axis in along)
    if len(have) != len(want) or have == want:  # a reshape is proven: two axes are one axis of the other
        return Rows(axes)
    return None if all(size == 1 for size in have) else Rows(axes, want)


def _with_leading(node: ir.Node, value: ir.Value, names: tuple[str, ...], present: dict[str, int], along: Axes) -> Axes:
    """The axes of an operand that broadcasts and lacks one of them: it is counted from its first, below 0."""
    if len(along) != len(names) or not all(name.startswith("...") for name in names):
        raise NotRowwise(f"{node.op_type} reads {value.name} for many rows at once")
    ((name, axis),) = present.items()
    shift = axis - along[names.index(name)]
    return tuple(place + shift for place in along)


def _holds_shape(node: ir.Node, index: int) -> bool:
    """Whether this input holds the sizes of the result, as Reshape's and Expand's `shape` does."""
    return node.inputs[index] is not None and definition_of(node).input_name(index) == "shape"


def with_rows(shape: Sizes, axes: Axes, count: Size) -> Sizes:
    """The shape of `count` selected rows."""
    return tuple(count if axis == axes[-1] else 1 if axis in axes else size for axis, size in enumerate(shape))


def shape_input(node: ir.Node) -> int | None:
    """The index of the input that holds the sizes of the result; None where there is none."""
    return next((i for i in range(len(node.inputs)) if _holds_shape(node, i)), None)


def output_axes(node: ir.Node, wanted: dict[ir.Value, Axes]) -> dict[ir.Value, Axes]:
    """The axes of the rows in each output that has them, also where nobody reads it."""
    axis_map = definition_of(node).axis_map(node)
    assert axis_map is not None
    known = next(i for i, v in enumerate(node.outputs) if v in wanted)
    first = axis_map.outputs[known]
    assert first is not None
    names = _names(first, rank_of(node.outputs[known]), wanted[node.outputs[known]])
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
