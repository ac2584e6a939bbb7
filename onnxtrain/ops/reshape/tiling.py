"""Tile and Roll."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import OWN, TensorType, dtype_of, normalize_axis, rank_of
from onnxtrain.ops.body_parts import int64_vector, reshaped
from onnxtrain.ops.constructors import same_as
from onnxtrain.ops.definition import REQUIRED, Call, Method, NodeView
from onnxtrain.ops.reshape.dims import unsqueezed
from onnxtrain.ops.reshape.movement import axis_names, checked_axis, define_movement, format_axis_map
from onnxtrain.ops.reshape.slicing import repeated_rows, rolled
from onnxtrain.ops.symbolic_ints import required_ints

# Tile(x, repeats): x repeated repeats[i] times along axis i.


def _repeats(n: NodeView) -> tuple[Size, ...]:
    repeats = required_ints(n.repeats, "the repeats of Tile")
    if len(repeats) != rank_of(n.x):
        raise GraphError("Tile: wrong number of repeats", expected=f"{rank_of(n.x)} repeats", got=str(repeats))
    return repeats


def _tiled_type(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(dtype_of(n.x), tuple(map(sizes.multiply, sizes.dims_of(n.x), _repeats(n)))),)


def _tile_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[ir.Value, None]:
    """Split each tiled axis of dy into [repeat, size] and sum over the repeats."""
    shape: list[Size] = []
    repeat_axes: list[int] = []
    for size, repeat in zip(sizes.dims_of(n.x), _repeats(n), strict=True):
        if repeat != 1:
            repeat_axes.append(len(shape))
            shape.append(repeat)
        shape.append(size)
    if not repeat_axes:
        return dy, None
    return op.ReduceSum(reshaped(op, dy, shape), int64_vector(op, repeat_axes), keepdims=0), None


def _tile_axes(n: NodeView) -> str:
    left = axis_names("a", rank_of(n.x))
    right = [name if repeat == 1 else f"y{i}" for i, (name, repeat) in enumerate(zip(left, _repeats(n), strict=True))]
    return format_axis_map([left, None], right)


def _capture_repeat(op: Builder, x: ir.Value, repeats: Sequence[Size]) -> ir.Value:
    """Capture `repeat` or `tile`: the shorter of shape and repeats gets leading ones."""
    rank = rank_of(x)
    x = unsqueezed(op, x, *range(len(repeats) - rank)) if len(repeats) > rank else x
    repeats = [*[1] * (rank - len(repeats)), *repeats]
    return x if all(r == 1 for r in repeats) else op.Tile(x, op.sizes(repeats))


def _capture_repeat_interleave(
    op: Builder, x: ir.Value, repeats: Size, dim: int | None = None, *, output_size: Any = None
) -> ir.Value:
    if dim is None:
        x = reshaped(op, x, (sizes.multiply(1, *sizes.dims_of(x)),))
    axis = checked_axis(dim or 0, rank_of(x), "the axis of repeat_interleave")
    return reshaped(op, repeated_rows(op, x, axis, repeats), op.out[0].shape)


TILE = define_movement(
    "Tile",
    ("x", "repeats"),
    _tiled_type,
    lambda n, x, repeats: Method("repeat", x, repeats),
    _tile_gradient,
    host_inputs=frozenset({1}),
    from_torch={
        "aten.repeat.default": _capture_repeat,
        "aten.tile.default": _capture_repeat,
        "aten.repeat_interleave.self_int": _capture_repeat_interleave,
    },
    axes=_tile_axes,
    nondiff_inputs=frozenset({"repeats"}),
)


# Roll(x, shifts, along): shifts the elements by shifts[i] along axis along[i]; those past the end wrap to the front.


def _roll_body(op: Builder, n: NodeView) -> ir.Value:
    y: ir.Value = n.x
    for shift, axis in zip(n.shifts, n.along, strict=True):
        y = rolled(op, y, shift, normalize_axis(axis, rank_of(n.x)))
    return y


def _roll_axes(n: NodeView) -> str:
    rolled_axes = {normalize_axis(axis, rank_of(n.x)) for axis in n.along}
    names = axis_names("a", rank_of(n.x))
    return format_axis_map([names], [f"y{i}" if i in rolled_axes else name for i, name in enumerate(names)])


def _capture_roll(op: Builder, x: ir.Value, shifts: Sequence[Size], dims: Sequence[int] = ()) -> Any:
    shape = sizes.dims_of(x)
    if not dims:  # PyTorch rolls the flattened tensor
        flat = reshaped(op, x, (sizes.multiply(1, *shape),))
        return reshaped(op, _capture_roll(op, flat, shifts, [0]), shape)
    if not any(isinstance(shift, str) for shift in shifts):
        return op.own.Roll(x, shifts=list(shifts), along=list(dims))
    for shift, axis in zip(shifts, dims, strict=True):  # by half a dynamic size, as fftshift does
        x = rolled(op, x, shift, normalize_axis(axis, rank_of(x)))
    return x


ROLL = define_movement(
    "Roll",
    ("x",),
    same_as("x"),
    lambda n, x: Call(torch.roll, x, n.shifts, n.along),
    lambda op, n, dy: op.own.Roll(dy, shifts=[-s for s in n.shifts], along=n.along),
    domain=OWN,
    attributes={"shifts": REQUIRED, "along": REQUIRED},
    from_torch={"aten.roll.default": _capture_roll},
    body=_roll_body,
    axes=_roll_axes,
    moved_inputs=frozenset({"x"}),
)
