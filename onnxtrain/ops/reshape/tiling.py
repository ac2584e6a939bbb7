"""Tile, Pad and Roll: a tensor repeated, surrounded by a number, and turned around along its axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import OWN, TensorType, constant_of, dtype_of, normalize_axis, rank_of
from onnxtrain.ops.constructors import same_as
from onnxtrain.ops.definition import REQUIRED, Call, Method, NodeView
from onnxtrain.ops.reshape.dims import unsqueezed
from onnxtrain.ops.reshape.movement import axis_map, constant_ints, in_rank, movement, names, vector
from onnxtrain.ops.reshape.shape import reshaped
from onnxtrain.ops.reshape.slicing import repeated_rows, rolled
from onnxtrain.ops.symbolic import needed_sizes

# Tile(x, repeats): x laid out repeats[i] times along axis i.


def _repeats(n: NodeView) -> tuple[Size, ...]:
    repeats = needed_sizes(n.repeats, "the repeats of Tile")
    if len(repeats) != rank_of(n.x):
        raise GraphError("Tile repeats each axis", expected=f"{rank_of(n.x)} numbers", got=str(repeats))
    return repeats


def _tiled_type(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(dtype_of(n.x), tuple(map(sizes.multiply, sizes.of(n.x), _repeats(n)))),)


def _tile_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[ir.Value, None]:
    """Each tiled axis of dy is r times d: the sum over r."""
    parts: list[Size] = []
    summed: list[int] = []
    for size, repeat in zip(sizes.of(n.x), _repeats(n), strict=True):
        if repeat != 1:
            summed.append(len(parts))
            parts.append(repeat)
        parts.append(size)
    if not summed:
        return dy, None
    return op.ReduceSum(reshaped(op, dy, parts), vector(op, summed), keepdims=0), None


def _tile_axes(n: NodeView) -> str:
    left = names("a", rank_of(n.x))
    right = [word if repeat == 1 else f"y{i}" for i, (word, repeat) in enumerate(zip(left, _repeats(n), strict=True))]
    return axis_map([left, None], right)


def _capture_repeat(op: Builder, x: ir.Value, repeats: Sequence[Size]) -> ir.Value:
    """`repeat` and `tile`: the shorter of shape and repeats gets leading ones."""
    rank = rank_of(x)
    x = unsqueezed(op, x, *range(len(repeats) - rank)) if len(repeats) > rank else x
    repeats = [*[1] * (rank - len(repeats)), *repeats]
    result: ir.Value = x if all(r == 1 for r in repeats) else op.Tile(x, op.sizes(repeats))
    return result


def _capture_repeat_interleave(
    op: Builder, x: ir.Value, repeats: Size, dim: int | None = None, *, output_size: Any = None
) -> ir.Value:
    if dim is None:
        x = reshaped(op, x, (sizes.multiply(1, *sizes.of(x)),))
    axis = in_rank(dim or 0, rank_of(x), "the axis of repeat_interleave")
    return reshaped(op, repeated_rows(op, x, axis, repeats), op.out[0].shape)


TILE = movement(
    "Tile",
    ("x", "repeats"),
    _tiled_type,
    lambda n, x, repeats: Method("repeat", x, repeats),
    _tile_gradient,
    takes_ints=frozenset({1}),
    since=13,
    from_torch={
        "aten.repeat.default": _capture_repeat,
        "aten.tile.default": _capture_repeat,
        "aten.repeat_interleave.self_int": _capture_repeat_interleave,
    },
    axes=_tile_axes,
    stops=frozenset({"repeats"}),
)


# Pad(x, pads, value, axes): `value` (0 where absent) before and after each axis; a negative pad cuts off.
# pads are all the befores, then all the afters. Only the mode "constant": the others stay ATen nodes.


def _pads(n: NodeView) -> list[tuple[int, Size, Size]]:
    """(axis, before, after) of each padded axis."""
    if n.mode != "constant":
        raise GraphError("Pad knows the mode constant", got=n.mode, todo="keep the ATen op")
    rank = rank_of(n.x)
    axes = tuple(range(rank)) if n.axes is None else constant_ints(n.axes, "the axes of Pad")
    pads = needed_sizes(n.pads, "the pads of Pad")
    befores, afters = pads[: len(pads) // 2], pads[len(pads) // 2 :]
    return [(in_rank(a, rank, "an axis of Pad"), b, c) for a, b, c in zip(axes, befores, afters, strict=True)]


def _padded_type(n: NodeView) -> Sequence[TensorType]:
    shape = list(sizes.of(n.x))
    for axis, before, after in _pads(n):
        shape[axis] = sizes.add(shape[axis], before, after)
    return (TensorType(dtype_of(n.x), tuple(shape)),)


def _lower_pad(n: NodeView, x: Any, pads: Any, value: Any, axes: Any) -> Call:
    """Torch wants pairs, from the last axis to the first."""
    places = [axis for axis, _, _ in _pads(n)]
    pairs: dict[int, tuple[Any, Any]] = dict(zip(places, zip(pads, pads[len(places) :], strict=False), strict=True))
    wanted = [pairs.get(axis, (0, 0)) for axis in reversed(range(min(places, default=0), rank_of(n.x)))]
    return Call(torch.constant_pad_nd, x, [pad for pair in wanted for pad in pair], _filler(n))


def _filler(n: NodeView) -> Any:
    if n.value is None:
        return 0
    known = constant_of(n.value)
    if known is None:
        raise GraphError("the number that Pad pads with must be constant", got=f"{n.value.name}, which is computed")
    return n.value.meta.get("scalar", known.item())


def _pad_gradient(op: Builder, n: NodeView, dy: ir.Value) -> Sequence[ir.Value | None]:
    """Padding with the negative amounts cuts the padding off."""
    padded = _pads(n)
    amounts = [before for _, before, _ in padded] + [after for _, _, after in padded]
    axes = vector(op, [axis for axis, _, _ in padded])
    dx = op.Pad(dy, op.sizes([sizes.multiply(-1, a) for a in amounts]), op.scalar(0, like=dy), axes)
    return [dx, *[None] * (len(n.node.inputs) - 1)]


def _pad_axes(n: NodeView) -> str:
    padded = {axis for axis, before, after in _pads(n) if (before, after) != (0, 0)}
    words = names("a", rank_of(n.x))
    inputs = [words, *[None] * (len(n.node.inputs) - 1)]
    return axis_map(inputs, [f"y{i}" if i in padded else word for i, word in enumerate(words)])


def _capture_constant_pad(op: Builder, x: ir.Value, pad: Sequence[Size], value: complex = 0) -> ir.Value:
    rank, count = rank_of(x), len(pad) // 2
    pairs = [(rank - 1 - i, pad[2 * i], pad[2 * i + 1]) for i in range(count)]
    if all(before == 0 == after for _, before, after in pairs):
        return x
    amounts = [before for _, before, _ in pairs] + [after for _, _, after in pairs]
    axes = vector(op, [axis for axis, _, _ in pairs])
    inputs = (x, op.sizes(amounts), op.scalar(value, like=x), axes)
    return op.node("", "Pad", inputs, {}, types=[op.out[0]]).outputs[0]


def _capture_pad(
    op: Builder, x: ir.Value, pad: Sequence[Size], mode: str = "constant", value: float | None = None
) -> Any:
    if mode != "constant":
        return NotImplemented
    return _capture_constant_pad(op, x, pad, 0 if value is None else value)


PAD = movement(
    "Pad",
    ("x", "pads", "value?", "axes?"),
    _padded_type,
    _lower_pad,
    _pad_gradient,
    takes_ints=frozenset({1, 3}),
    attributes={"mode": "constant"},
    since=21,
    from_torch={
        "aten.constant_pad_nd.default": _capture_constant_pad,
        "aten.pad.default": _capture_pad,
    },
    axes=_pad_axes,
    stops=frozenset({"pads", "value", "axes"}),
)


# Roll(x, shifts, axes): the elements moved forward by shifts[i] along axes[i]; what leaves comes in at the front.


def _roll_body(op: Builder, n: NodeView) -> ir.Value:
    y: ir.Value = n.x
    for shift, axis in zip(n.shifts, n.along, strict=True):
        y = rolled(op, y, shift, normalize_axis(axis, rank_of(n.x)))
    return y


def _roll_axes(n: NodeView) -> str:
    turned = {normalize_axis(axis, rank_of(n.x)) for axis in n.along}
    words = names("a", rank_of(n.x))
    return axis_map([words], [f"y{i}" if i in turned else word for i, word in enumerate(words)])


def _capture_roll(op: Builder, x: ir.Value, shifts: Sequence[Size], dims: Sequence[int] = ()) -> Any:
    if any(isinstance(shift, str) for shift in shifts):
        return NotImplemented
    shape = sizes.of(x)
    if dims:
        result: ir.Value = op.own.Roll(x, shifts=list(shifts), along=list(dims))
        return result
    flat = reshaped(op, x, (sizes.multiply(1, *shape),))  # without axes PyTorch rolls all elements
    return reshaped(op, op.own.Roll(flat, shifts=list(shifts), along=[0]), shape)


ROLL = movement(
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
)
