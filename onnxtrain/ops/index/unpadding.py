"""Ops that remove padding from a batch of sequences, and restore it.

    ShrunkenGather(x, rows) -> y                        Gather of a subset of rows
    FlattenAndUnpad(x[b, s, ..], rows[n]) -> y[n, ..], dims[2]       rows of x as [b*s, ..]; dims is (b, s)
    PadAndUnflatten(x[n, ..], rows[n], dims[2]) -> y[b, s, ..]       each row at its index, zeros elsewhere

The last two are each other's gradient. Rows are distinct indices in [0, b*s).
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.traversal import is_used
from onnxtrain.graph.values import MICROSOFT, TensorType, dtype_of, rank_of, type_of
from onnxtrain.graph.verify import format_type
from onnxtrain.ops.body_parts import reshaped
from onnxtrain.ops.constructors import define_by_body
from onnxtrain.ops.definition import Call, NodeView
from onnxtrain.ops.index.gather import gathered_types
from onnxtrain.ops.reshape.movement import axis_names, axis_of, define_movement, format_axis_map
from onnxtrain.ops.reshape.rows import scatter_rows, zeros
from onnxtrain.ops.reshape.shape import sizes_on_device
from onnxtrain.ops.symbolic_ints import required_ints

# ShrunkenGather


def _gathered_axes(n: NodeView) -> str:
    axis = axis_of(n, n.x)
    x_axes = axis_names("a", rank_of(n.x))
    return format_axis_map([x_axes, ["i"]], [*x_axes[:axis], "i", *x_axes[axis + 1 :]])


SHRUNKEN_GATHER = define_by_body(
    "ShrunkenGather",
    ("x", "rows"),
    lambda op, n: op.Gather(n.x, n.rows, axis=n.axis),
    lambda n, x, rows: Call(torch.index_select, x, axis_of(n, n.x), rows),
    domain=MICROSOFT,
    attributes={"axis": 0},
    shapes=gathered_types,
    axes=_gathered_axes,
    nondiff_inputs=frozenset({"rows"}),
    flops=lambda n: 0,
)


# FlattenAndUnpad


def _batch_steps_and_rest(x: ir.Value) -> tuple[Size, Size, tuple[Size, ...]]:
    if rank_of(x) < 2:
        raise GraphError(
            "FlattenAndUnpad has an input without batch and sequence axes",
            expected="at least 2 dimensions",
            got=format_type(type_of(x)),
        )
    batch, steps, *rest = sizes.dims_of(x)
    return batch, steps, tuple(rest)


def _unpadded_types(n: NodeView) -> Sequence[TensorType]:
    rest = _batch_steps_and_rest(n.x)[2]
    return TensorType(dtype_of(n.x), (*sizes.dims_of(n.rows), *rest)), TensorType(ir.DataType.INT64, (2,))


def _unpad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    batch, steps, rest = _batch_steps_and_rest(n.x)
    flat = reshaped(op, n.x, (sizes.multiply(batch, steps), *rest))
    # Identity, because the sizes may be a constant, which cannot be a graph output.
    return op.Gather(flat, n.rows, axis=0), op.Identity(op.sizes([batch, steps]))


def flatten_and_unpad(x: torch.Tensor, rows: torch.Tensor, with_dims: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    y = x.reshape(x.shape[:2].numel(), *x.shape[2:]).index_select(0, rows)
    return y, sizes_on_device(x.shape[:2], x.device) if with_dims else None


def _dims_are_used(n: NodeView) -> bool:
    return n.dims is not None and is_used(n.dims)


def _unpad_gradient(op: Builder, n: NodeView, dy: ir.Value | None, _: None) -> tuple[ir.Value | None, None]:
    batch, steps = _batch_steps_and_rest(n.x)[:2]
    return (None if dy is None else op.ms.PadAndUnflatten(dy, n.rows, op.sizes([batch, steps]))), None


def _unpad_axes(n: NodeView) -> str:
    rest = axis_names("a", rank_of(n.x) - 2)
    return format_axis_map([["[b]", "[s]", *rest], ["i"]], ["i", *rest], ["[two]"])


FLATTEN_AND_UNPAD = define_movement(
    "FlattenAndUnpad",
    ("x", "rows"),
    _unpadded_types,
    lambda n, x, rows: Call(flatten_and_unpad, x, rows, _dims_are_used(n)),
    _unpad_gradient,
    reads=("rows",),
    domain=MICROSOFT,
    outputs=("y", "dims"),
    body=_unpad_body,
    axes=_unpad_axes,
    nondiff_inputs=frozenset({"rows"}),
)


# PadAndUnflatten


def _padded_types(n: NodeView) -> Sequence[TensorType]:
    dims = required_ints(n.dims, "the dims of PadAndUnflatten")
    return (TensorType(dtype_of(n.x), (*dims, *sizes.dims_of(n.x)[1:])),)


def _pad_body(op: Builder, n: NodeView) -> ir.Value:
    ((dtype, (batch, steps, *rest)),) = _padded_types(n)
    padded = zeros(op, (sizes.multiply(batch, steps), *rest), dtype)
    return reshaped(op, scatter_rows(op, padded, n.rows, n.x, 0), (batch, steps, *rest))


def pad_and_unflatten(x: torch.Tensor, rows: torch.Tensor, dims: tuple[int, int]) -> torch.Tensor:
    flat = x.new_zeros(dims[0] * dims[1], *x.shape[1:])
    return flat.index_copy_(0, rows.long(), x).view(*dims, *x.shape[1:])


def _pad_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[ir.Value, None, None]:
    return op.ms.FlattenAndUnpad(dy, n.rows)[0], None, None


def _pad_axes(n: NodeView) -> str:
    rest = axis_names("a", rank_of(n.x) - 1)
    return format_axis_map([["[i]", *rest], ["[i]"], None], ["[b]", "[s]", *rest])


PAD_AND_UNFLATTEN = define_movement(
    "PadAndUnflatten",
    ("x", "rows", "dims"),
    _padded_types,
    lambda n, x, rows, dims: Call(pad_and_unflatten, x, rows, dims),
    _pad_gradient,
    reads=("rows",),
    host_inputs=frozenset({2}),
    domain=MICROSOFT,
    body=_pad_body,
    axes=_pad_axes,
    nondiff_inputs=frozenset({"rows", "dims"}),
)
