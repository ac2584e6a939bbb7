"""ONNX ops that move elements and that PyTorch writes as several ops.

Flatten(x)                        [a, b, c, d] -> [a*b, c*d] at `axis`
DepthToSpace, SpaceToDepth(x)     [n, c*k*k, h, w] <-> [n, c, h*k, w*k]
ReverseSequence(x, lengths)       reverses the first lengths[i] elements of sequence i
CenterCropPad(x, shape)           crops, or pads with zeros, at both ends
Col2Im(x, image, block)           sums windows to an image: PyTorch's fold
Compress(x, condition)            the rows where the condition is true
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import TensorType, dtype_of, normalize_axis, rank_of
from onnxtrain.ops.body_parts import cast, int64_vector, reshaped
from onnxtrain.ops.constructors import define_by_body, no_axes
from onnxtrain.ops.definition import REQUIRED, Call, Effects, Method, NodeView
from onnxtrain.ops.interfaces.cpp import CPP, emit_reshape
from onnxtrain.ops.reshape.dims import expanded, transposed
from onnxtrain.ops.reshape.movement import axis_names, axis_of, checked_axis, constant_ints, format_axis_map
from onnxtrain.ops.reshape.rows import arange, vector_along
from onnxtrain.ops.symbolic_ints import required_ints


def _no_flops(n: NodeView) -> Size:
    return 0


# Flatten


def _flat_shape(n: NodeView) -> Sizes:
    shape = sizes.dims_of(n.x)
    axis = len(shape) if n.axis == len(shape) else normalize_axis(n.axis, len(shape))
    return sizes.multiply(1, *shape[:axis]), sizes.multiply(1, *shape[axis:])


def _flatten(x: torch.Tensor, axis: int) -> torch.Tensor:
    return x.reshape(x.shape[:axis].numel(), x.shape[axis:].numel())


FLATTEN = define_by_body(
    "Flatten",
    ("x",),
    lambda op, n: reshaped(op, n.x, _flat_shape(n)),
    lambda n, x: Call(_flatten, x, n.axis),
    attributes={"axis": 1},
    shapes=lambda n: (TensorType(dtype_of(n.x), _flat_shape(n)),),
    aliases={0: 0},
    axes=no_axes,
    flops=_no_flops,
)
CPP.register(FLATTEN, emit_reshape)


# DepthToSpace, SpaceToDepth


def _depth_to_space_shape(n: NodeView) -> Sizes:
    batch, channels, height, width = sizes.dims_of(n.x)
    block = n.blocksize
    return (
        batch,
        sizes.floor_divide(channels, block * block),
        sizes.multiply(height, block),
        sizes.multiply(width, block),
    )


def _depth_to_space_body(op: Builder, n: NodeView) -> ir.Value:
    """Move channels to pixels of a block: the outer channels (DCR), or the inner (CRD), as pixel_shuffle does."""
    batch, _, height, width = sizes.dims_of(n.x)
    shape, block = _depth_to_space_shape(n), n.blocksize
    inner = n.mode == "CRD"
    channels = (shape[1], block, block) if inner else (block, block, shape[1])
    order = [0, 1, 4, 2, 5, 3] if inner else [0, 3, 4, 1, 5, 2]
    parts = reshaped(op, n.x, (batch, *channels, height, width))
    return reshaped(op, transposed(op, parts, order), shape)


def depth_to_space(x: torch.Tensor, block: int) -> torch.Tensor:
    batch, channels, height, width = x.shape
    parts = x.reshape(batch, block, block, channels // block**2, height, width).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(batch, channels // block**2, height * block, width * block)


def space_to_depth(x: torch.Tensor, block: int) -> torch.Tensor:
    batch, channels, height, width = x.shape
    parts = x.reshape(batch, channels, height // block, block, width // block, block).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(batch, channels * block**2, height // block, width // block)


def _lower_depth_to_space(n: NodeView, x: Any) -> Call:
    return Call(torch.pixel_shuffle if n.mode == "CRD" else depth_to_space, x, n.blocksize)


def _space_to_depth_shape(n: NodeView) -> Sizes:
    batch, channels, height, width = sizes.dims_of(n.x)
    block = n.blocksize
    return (
        batch,
        sizes.multiply(channels, block * block),
        sizes.floor_divide(height, block),
        sizes.floor_divide(width, block),
    )


def _space_to_depth_body(op: Builder, n: NodeView) -> ir.Value:
    batch, channels, _, _ = sizes.dims_of(n.x)
    shape, block = _space_to_depth_shape(n), n.blocksize
    parts = reshaped(op, n.x, (batch, channels, shape[2], block, shape[3], block))
    return reshaped(op, transposed(op, parts, [0, 3, 5, 1, 2, 4]), shape)


def _batch_axis_only(n: NodeView) -> str:
    return "n [c] [h] [w] -> n [d] [i] [j]"


define_by_body(
    "DepthToSpace",
    ("x",),
    _depth_to_space_body,
    _lower_depth_to_space,
    attributes={"blocksize": REQUIRED, "mode": "DCR"},
    shapes=lambda n: (TensorType(dtype_of(n.x), _depth_to_space_shape(n)),),
    aliases={0: 0},
    axes=_batch_axis_only,
    flops=_no_flops,
)
define_by_body(
    "SpaceToDepth",
    ("x",),
    _space_to_depth_body,
    lambda n, x: Call(space_to_depth, x, n.blocksize),
    attributes={"blocksize": REQUIRED},
    shapes=lambda n: (TensorType(dtype_of(n.x), _space_to_depth_shape(n)),),
    aliases={0: 0},
    axes=_batch_axis_only,
    flops=_no_flops,
)


# ReverseSequence


def _reverse_body(op: Builder, n: NodeView) -> ir.Value:
    """Read element t of sequence i from lengths[i] - 1 - t if that is not negative, else from t."""
    rank = rank_of(n.x)
    times = vector_along(op, arange(op, sizes.dims_of(n.x)[n.time_axis]), n.time_axis, rank)
    lengths = vector_along(op, cast(op, n.lengths, ir.DataType.INT64), n.batch_axis, rank)
    mirrored = op.Sub(op.Sub(lengths, op.scalar(1, ir.DataType.INT64)), times)
    sources = op.Where(op.Less(times, lengths), mirrored, times)
    return op.GatherElements(n.x, expanded(op, sources, sizes.dims_of(n.x)), axis=n.time_axis)


def reverse_sequence(x: torch.Tensor, lengths: torch.Tensor, time_axis: int, batch_axis: int) -> torch.Tensor:
    steps = torch.arange(x.shape[time_axis], device=x.device)
    sources = torch.where(steps[:, None] < lengths, lengths - 1 - steps[:, None], steps[:, None])
    sources = sources if (time_axis, batch_axis) == (0, 1) else sources.T
    return x.gather(time_axis, sources.reshape(*sources.shape, *[1] * (x.ndim - 2)).expand(x.shape))


def _reverse_axes(n: NodeView) -> str:
    names = axis_names("a", rank_of(n.x))
    names[n.time_axis] = f"[a{n.time_axis}]"
    return format_axis_map([names, [names[n.batch_axis]]], names)


define_by_body(
    "ReverseSequence",
    ("x", "lengths"),
    _reverse_body,
    lambda n, x, lengths: Call(reverse_sequence, x, lengths, n.time_axis, n.batch_axis),
    attributes={"batch_axis": 1, "time_axis": 0},
    axes=_reverse_axes,
    nondiff_inputs=frozenset({"lengths"}),
    flops=_no_flops,
)


# CenterCropPad


def _target_sizes(n: NodeView) -> list[tuple[int, Size]]:
    """Return (axis, target size) of each axis to crop or pad."""
    rank = rank_of(n.x)
    axes = range(rank) if n.axes is None else [checked_axis(a, rank, "an axis of CenterCropPad") for a in n.axes]
    return list(zip(axes, required_ints(n.shape, "the shape of CenterCropPad"), strict=True))


def _crop_type(n: NodeView) -> Sequence[TensorType]:
    shape = list(sizes.dims_of(n.x))
    for axis, target in _target_sizes(n):
        shape[axis] = target
    return (TensorType(dtype_of(n.x), tuple(shape)),)


def _crop_body(op: Builder, n: NodeView) -> ir.Value:
    x, shape = n.x, list(sizes.dims_of(n.x))
    for axis, target in _target_sizes(n):
        axes = int64_vector(op, [axis])
        surplus = sizes.maximum(0, sizes.subtract(shape[axis], target))
        lacking = sizes.maximum(0, sizes.subtract(target, shape[axis]))
        kept = sizes.minimum(shape[axis], target)
        start, before = sizes.floor_divide(surplus, 2), sizes.floor_divide(lacking, 2)
        shape[axis] = kept
        slice_inputs = (x, op.sizes([start]), op.sizes([sizes.add(start, kept)]), axes)
        x = op.node("", "Slice", slice_inputs, {}, types=[TensorType(dtype_of(x), tuple(shape))]).outputs[0]
        shape[axis] = target
        pads = op.sizes([before, sizes.subtract(lacking, before)])
        pad_inputs = (x, pads, op.scalar(0, like=x), axes)
        x = op.node("", "Pad", pad_inputs, {}, types=[TensorType(dtype_of(x), tuple(shape))]).outputs[0]
    return x


def center_crop_pad(x: torch.Tensor, targets: Sequence[int], axes: Sequence[int]) -> torch.Tensor:
    for axis, target in zip(axes, targets, strict=True):
        surplus, lacking = max(0, x.shape[axis] - target), max(0, target - x.shape[axis])
        x = x.narrow(axis, surplus // 2, min(x.shape[axis], target))
        pads = [0] * (2 * (x.ndim - 1 - axis)) + [lacking // 2, lacking - lacking // 2]
        x = torch.constant_pad_nd(x, pads)
    return x


define_by_body(
    "CenterCropPad",
    ("x", "shape"),
    _crop_body,
    lambda n, x, shape: Call(center_crop_pad, x, shape, [axis for axis, _ in _target_sizes(n)]),
    attributes={"axes": None},
    shapes=_crop_type,
    axes=no_axes,
    nondiff_inputs=frozenset({"shape"}),
    flops=_no_flops,
    host_inputs=frozenset({1}),
)


# Col2Im


def _fold_type(n: NodeView) -> Sequence[TensorType]:
    block = constant_ints(n.block, "the block of Col2Im")
    image = required_ints(n.image, "the image of Col2Im")
    if len(block) != 2:
        raise GraphError(
            "Col2Im: only images of two axes are supported", expected="a block of 2 sizes", got=f"{len(block)}: {block}"
        )
    batch, channels, _ = sizes.dims_of(n.x)
    return (TensorType(dtype_of(n.x), (batch, sizes.floor_divide(channels, block[0] * block[1]), *image)),)


def _fold_window(n: NodeView) -> dict[str, tuple[int, ...]]:
    pads = n.pads or (0, 0, 0, 0)
    if pads[:2] != pads[2:]:
        raise GraphError(
            "Col2Im: asymmetric padding is not supported",
            expected="the same padding at both ends of each axis",
            got=str(pads),
        )
    return {
        "kernel_shape": constant_ints(n.block, "the block of Col2Im"),
        "strides": n.strides or (1, 1),
        "pads": pads,
        "dilations": n.dilations or (1, 1),
    }


def _lower_fold(n: NodeView, x: Any, image: Any, block: Any) -> Call:
    window = _fold_window(n)
    kernel_size, dilations, strides = (window[name] for name in ("kernel_shape", "dilations", "strides"))
    return Call(torch.nn.functional.fold, x, image, kernel_size, dilations, window["pads"][:2], strides)


define_by_body(
    "Col2Im",
    ("x", "image", "block"),
    lambda op, n: op.own.Col2Im(n.x, n.image, **_fold_window(n)),
    _lower_fold,
    attributes={"dilations": None, "pads": None, "strides": None},
    shapes=_fold_type,
    axes=no_axes,
    nondiff_inputs=frozenset({"image", "block"}),
    host_inputs=frozenset({1, 2}),
)


# Compress


def _compressed_type(n: NodeView) -> Sequence[TensorType]:
    name = "".join(c if c.isalnum() else "_" for c in n.condition.name or "value")
    count = f"count_{name}"  # the symbol that NonZero uses
    if n.axis is None:
        return (TensorType(dtype_of(n.x), (count,)),)
    axis, shape = axis_of(n, n.x), sizes.dims_of(n.x)
    return (TensorType(dtype_of(n.x), (*shape[:axis], count, *shape[axis + 1 :])),)


def _compress_body(op: Builder, n: NodeView) -> ir.Value:
    x, axis = n.x, n.axis
    if axis is None:
        x, axis = reshaped(op, x, (sizes.multiply(1, *sizes.dims_of(x)),)), 0
    rows = op.Squeeze(op.NonZero(n.condition), int64_vector(op, [0]))
    return op.Gather(x, rows, axis=axis)


def _lower_compress(n: NodeView, x: Any, condition: Any) -> Call:
    rows = Method("flatten", Call(torch.nonzero, condition))
    if n.axis is None:
        return Call(torch.index_select, Method("flatten", x), 0, rows)
    return Call(torch.index_select, x, axis_of(n, n.x), rows)


define_by_body(
    "Compress",
    ("x", "condition"),
    _compress_body,
    _lower_compress,
    attributes={"axis": None},
    shapes=_compressed_type,
    axes=no_axes,
    nondiff_inputs=frozenset({"condition"}),
    flops=_no_flops,
    effects=Effects.HOST_SYNC,
)
