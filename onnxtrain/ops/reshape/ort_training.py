"""The com.microsoft variants of Concat, Split and Trilu that ONNX Runtime Training writes.

ConcatTraining(xs...) -> y, lengths[k]        Concat, and the length of each of its k inputs along the axis
SplitTraining(x, split) -> ys...              Split with its lengths as an input
Trilu(x, k)                                   as in ONNX
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import MICROSOFT, TensorType, dtype_of, rank_of, type_of
from onnxtrain.ops.constructors import define_by_body
from onnxtrain.ops.definition import REQUIRED, Call, NodeView
from onnxtrain.ops.reshape.join import concatenated, split, split_count
from onnxtrain.ops.reshape.movement import axis_names, axis_of, format_axis_map
from onnxtrain.ops.reshape.shape import sizes_on_device
from onnxtrain.ops.symbolic_ints import required_ints


def _lengths(n: NodeView) -> list[sizes.Size]:
    axis = axis_of(n, n.xs[0])
    return [sizes.dims_of(x)[axis] for x in n.xs]


def _concat_types(n: NodeView) -> Sequence[TensorType]:
    axis, shape = axis_of(n, n.xs[0]), sizes.dims_of(n.xs[0])
    concatenated_shape = (*shape[:axis], sizes.add(*_lengths(n)), *shape[axis + 1 :])
    types = TensorType(dtype_of(n.xs[0]), concatenated_shape), TensorType(ir.DataType.INT64, (len(n.xs),))
    return types[: len(n.node.outputs)]


def _concat_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    y = op.Identity(concatenated(op, n.xs, n.axis))
    return (y, op.Identity(op.sizes(_lengths(n))))[: len(n.node.outputs)]


def concat_with_lengths(xs: Sequence[torch.Tensor], axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat(list(xs), axis), sizes_on_device([x.size(axis) for x in xs], xs[0].device)


def _lower_concat(n: NodeView, xs: Any) -> Call:
    axis = axis_of(n, n.xs[0])
    return Call(concat_with_lengths, xs, axis) if len(n.node.outputs) > 1 else Call(torch.cat, xs, axis)


def _concat_axes(n: NodeView) -> str:
    axis = axis_of(n, n.xs[0])
    names = axis_names("a", rank_of(n.xs[0]))
    inputs = [[f"x{i}" if k == axis else name for k, name in enumerate(names)] for i in range(len(n.xs))]
    return format_axis_map(inputs, names, *[["[count]"]] * (len(n.node.outputs) - 1))


define_by_body(
    "ConcatTraining",
    ("xs...",),
    _concat_body,
    _lower_concat,
    domain=MICROSOFT,
    outputs=("y", "lengths?"),
    attributes={"axis": REQUIRED},
    shapes=_concat_types,
    axes=_concat_axes,
    flops=lambda n: 0,
)


def _split_types(n: NodeView) -> Sequence[TensorType]:
    axis, shape = axis_of(n, n.x), sizes.dims_of(n.x)
    lengths = required_ints(n.split, "the lengths of SplitTraining")
    return [TensorType(dtype_of(n.x), (*shape[:axis], length, *shape[axis + 1 :])) for length in lengths]


def _split_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    lengths = required_ints(n.split, "the lengths of SplitTraining")
    return [op.Identity(piece) for piece in split(op, n.x, lengths, axis_of(n, n.x))]


def _split_axes(n: NodeView) -> str:
    axis, names = axis_of(n, n.x), axis_names("a", rank_of(n.x))
    outputs = [[f"y{i}" if k == axis else name for k, name in enumerate(names)] for i in range(len(n.node.outputs))]
    return format_axis_map([names, None], *outputs)


define_by_body(
    "SplitTraining",
    ("x", "split"),
    _split_body,
    lambda n, x, split: Call(torch.split_with_sizes_copy, x, split, axis_of(n, n.x)),
    domain=MICROSOFT,
    outputs=("ys...",),
    attributes={"axis": 0},
    shapes=_split_types,
    axes=_split_axes,
    nondiff_inputs=frozenset({"split"}),
    flops=lambda n: 0,
    host_inputs=frozenset({1}),
    count_outputs=split_count,
)


def _trilu(x: torch.Tensor, k: torch.Tensor | None, upper: bool) -> torch.Tensor:
    offset = 0 if k is None else int(k)
    return x.triu(offset) if upper else x.tril(offset)


define_by_body(
    "Trilu",
    ("x", "k?"),
    lambda op, n: op.Trilu(n.x, n.k, upper=n.upper),
    lambda n, x, k: Call(_trilu, x, k, bool(n.upper)),
    domain=MICROSOFT,
    attributes={"upper": 1},
    shapes=lambda n: (type_of(n.x),),
    axes=lambda n: f"... [i] [j]{', -' * (len(n.node.inputs) - 1)} -> ... [i] [j]",
    nondiff_inputs=frozenset({"k"}),
    synchronizes=lambda n: n.k is not None,
    flops=lambda n: 0,
)
