"""Triangles (Trilu), diagonals (Diagonal, DiagonalEmbed) and sliding windows (Unfold) of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import OWN, TensorType, dtype_of, rank_of
from onnxtrain.ops.body_parts import reshaped
from onnxtrain.ops.constructors import same_as
from onnxtrain.ops.definition import REQUIRED, Call, Method, NodeView
from onnxtrain.ops.reshape.dims import inverse, moved, transposed
from onnxtrain.ops.reshape.movement import axis_names, checked_axis, define_movement, format_axis_map
from onnxtrain.ops.reshape.rows import arange, scatter_rows, vector_along, zeros
from onnxtrain.ops.symbolic_ints import required_ints

# Trilu(x, k, upper): sets elements below (upper) or above the k-th diagonal of the last two axes to 0.


def _lower_trilu(n: NodeView, x: Any, k: Any) -> Call:
    diagonal = 0 if k is None else k[0] if isinstance(k, tuple) else k
    return Call(torch.triu if n.upper else torch.tril, x, diagonal)


def _trilu_gradient(op: Builder, n: NodeView, dy: ir.Value) -> Sequence[ir.Value | None]:
    dx: ir.Value = op.Trilu(dy, *n.node.inputs[1:], upper=n.upper)
    return [dx, *[None] * (len(n.node.inputs) - 1)]


def _trilu_axes(n: NodeView) -> str:
    words = axis_names("a", rank_of(n.x))
    words = [*words[:-2], *(f"[{word}]" for word in words[-2:])]
    return format_axis_map([words, *[None] * (len(n.node.inputs) - 1)], words)


def _capture_trilu(upper: int) -> Any:
    def capture(op: Builder, x: ir.Value, diagonal: Size = 0) -> ir.Value:
        return op.Trilu(x, op.size(diagonal), upper=upper)

    return capture


TRILU = define_movement(
    "Trilu",
    ("x", "k?"),
    same_as("x"),
    _lower_trilu,
    _trilu_gradient,
    host_inputs=frozenset({1}),
    attributes={"upper": 1},
    from_torch={"aten.tril.default": _capture_trilu(0), "aten.triu.default": _capture_trilu(1)},
    axes=_trilu_axes,
    nondiff_inputs=frozenset({"k"}),
)


# Diagonal(x, offset, row_axis, column_axis): x[.., i, .., i + offset, ..] as the last axis, after the other axes.
# DiagonalEmbed(d, shape, ...): zeros of `shape` with d on this diagonal. Each is the other's gradient.


def diagonal_length(rows: Size, columns: Size, offset: int) -> Size:
    """Return the number of elements of a diagonal."""
    rows_left = sizes.add(rows, min(offset, 0))
    columns_left = sizes.subtract(columns, max(offset, 0))
    return sizes.maximum(0, sizes.minimum(rows_left, columns_left))


def _matrix_axes(n: NodeView, rank: int) -> tuple[int, int]:
    name = n.definition.name
    return (
        checked_axis(n.row_axis, rank, f"row_axis of {name}"),
        checked_axis(n.column_axis, rank, f"column_axis of {name}"),
    )


def _diagonal_type(n: NodeView) -> Sequence[TensorType]:
    shape = sizes.dims_of(n.x)
    rows, columns = _matrix_axes(n, len(shape))
    others = [s for i, s in enumerate(shape) if i not in (rows, columns)]
    return (TensorType(dtype_of(n.x), (*others, diagonal_length(shape[rows], shape[columns], n.offset))),)


def _diagonal_indices(op: Builder, length: Size, columns: Size, offset: int) -> ir.Value:
    """Return the indices of the diagonal in a matrix that is flattened row by row."""
    first = -offset if offset < 0 else 0
    start = sizes.add(sizes.multiply(first, columns), max(offset, 0))
    step = op.size(sizes.add(columns, 1))
    return op.Add(op.Mul(arange(op, length), step), op.size(start))


def _diagonal_body(op: Builder, n: NodeView) -> ir.Value:
    """Flatten the matrices and gather the diagonal."""
    shape = sizes.dims_of(n.x)
    rows, columns = _matrix_axes(n, len(shape))
    x = transposed(op, n.x, moved(len(shape), [rows, columns], [-2, -1]))
    *outer, height, width = sizes.dims_of(x)
    flat = reshaped(op, x, (*outer, sizes.multiply(height, width)))
    indices = _diagonal_indices(op, sizes.dims_of(n.y)[-1], width, n.offset)
    return op.Gather(flat, indices, axis=len(outer))


def _diagonal_attributes(n: NodeView) -> dict[str, int]:
    return {"offset": n.offset, "row_axis": n.row_axis, "column_axis": n.column_axis}


def _capture_diagonal(op: Builder, x: ir.Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ir.Value:
    attributes = {"offset": offset, "row_axis": dim1, "column_axis": dim2}
    return op.node(OWN, "Diagonal", (x,), attributes, types=[op.out[0]]).outputs[0]


def _capture_diagonal_embed(op: Builder, x: ir.Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> ir.Value:
    shape = op.sizes(op.out[0].shape)
    return op.own.DiagonalEmbed(x, shape, offset=offset, row_axis=dim1, column_axis=dim2)


def _capture_diag(op: Builder, x: ir.Value, diagonal: int = 0) -> ir.Value:
    return _capture_diagonal_embed(op, x, diagonal) if rank_of(x) == 1 else _capture_diagonal(op, x, diagonal)


_DIAGONAL_ATTRIBUTES = {"offset": 0, "row_axis": 0, "column_axis": 1}


def _diagonal_names(n: NodeView, rank: int) -> tuple[list[str], list[str]]:
    """Return the axis names of the matrices and of their diagonals."""
    matrix_axes = _matrix_axes(n, rank)
    matrices = [f"[m{i}]" if i in matrix_axes else f"a{i}" for i in range(rank)]
    return matrices, [name for i, name in enumerate(matrices) if i not in matrix_axes] + ["[d]"]


def _diagonal_axes(n: NodeView) -> str:
    matrices, diagonal = _diagonal_names(n, rank_of(n.x))
    return format_axis_map([matrices], diagonal)


def _diagonal_embed_axes(n: NodeView) -> str:
    matrices, diagonal = _diagonal_names(n, rank_of(n.y))
    return format_axis_map([diagonal, None], matrices)


DIAGONAL = define_movement(
    "Diagonal",
    ("x",),
    _diagonal_type,
    lambda n, x: Call(torch.diagonal, x, n.offset, n.row_axis, n.column_axis),
    lambda op, n, dy: op.own.DiagonalEmbed(dy, op.shape_of(n.x), **_diagonal_attributes(n)),
    domain=OWN,
    attributes=_DIAGONAL_ATTRIBUTES,
    from_torch={
        "aten.diagonal.default": _capture_diagonal,
        "aten.diagonal_copy.default": _capture_diagonal,
        "aten.linalg_diagonal.default": lambda op, x, *, offset=0, dim1=-2, dim2=-1: _capture_diagonal(
            op, x, offset, dim1, dim2
        ),
        "aten.diag.default": _capture_diag,
    },
    body=_diagonal_body,
    axes=_diagonal_axes,
    view=True,
    moved_inputs=frozenset({"x"}),
)


def _diagonal_embed(x: torch.Tensor, shape: Any, offset: int, row_axis: int, column_axis: int) -> torch.Tensor:
    y = x.new_zeros(shape)
    torch.diagonal(y, offset, row_axis, column_axis).copy_(x)
    return y


def _diagonal_embed_body(op: Builder, n: NodeView) -> ir.Value:
    shape = sizes.dims_of(n.y)
    rows, columns = _matrix_axes(n, len(shape))
    order = moved(len(shape), [rows, columns], [-2, -1])
    *outer, height, width = (shape[i] for i in order)
    flat = zeros(op, (*outer, sizes.multiply(height, width)), dtype_of(n.x))
    indices = _diagonal_indices(op, sizes.dims_of(n.x)[-1], width, n.offset)
    scattered = scatter_rows(op, flat, indices, n.x, len(outer))
    return transposed(op, reshaped(op, scattered, (*outer, height, width)), inverse(order))


DIAGONAL_EMBED = define_movement(
    "DiagonalEmbed",
    ("x", "shape"),
    lambda n: (TensorType(dtype_of(n.x), required_ints(n.shape, "the output shape of DiagonalEmbed")),),
    lambda n, x, shape: Call(_diagonal_embed, x, shape, n.offset, n.row_axis, n.column_axis),
    lambda op, n, dy: (op.own.Diagonal(dy, **_diagonal_attributes(n)), None),
    host_inputs=frozenset({1}),
    domain=OWN,
    attributes=_DIAGONAL_ATTRIBUTES,
    from_torch={"aten.diag_embed.default": _capture_diagonal_embed},
    body=_diagonal_embed_body,
    axes=_diagonal_embed_axes,
    nondiff_inputs=frozenset({"shape"}),
)


# Unfold(x, axis, size, step) -> y: windows of `size` elements, `step` apart, along `axis`, in a new last axis.
# UnfoldGrad(dy, shape, ...) -> dx: the sum over the windows that hold each element.


def _window_count(total: Size, size: int, step: int) -> Size:
    return sizes.add(sizes.floor_divide(sizes.subtract(total, size), step), 1)


def _unfolded_type(n: NodeView) -> Sequence[TensorType]:
    shape = sizes.dims_of(n.x)
    axis = checked_axis(n.axis, len(shape), "the axis of Unfold")
    count = _window_count(shape[axis], n.size, n.step)
    return (TensorType(dtype_of(n.x), (*shape[:axis], count, *shape[axis + 1 :], n.size)),)


def _window_indices(op: Builder, count: Size, size: int, step: int) -> ir.Value:
    """Return the indices of the elements of each window, [count, size]."""
    starts = op.Mul(arange(op, count), op.size(step))
    return op.Add(vector_along(op, starts, 0, 2), vector_along(op, arange(op, size), 1, 2))


def _unfold_body(op: Builder, n: NodeView) -> ir.Value:
    rank = rank_of(n.x)
    axis = checked_axis(n.axis, rank, "the axis of Unfold")
    windows = op.Gather(n.x, _window_indices(op, sizes.dims_of(n.y)[axis], n.size, n.step), axis=axis)
    return transposed(op, windows, moved(rank + 1, [axis + 1], [-1]))


def _unfold_names(n: NodeView, rank: int) -> tuple[list[str], list[str]]:
    axis = checked_axis(n.axis, rank, "the axis of Unfold")
    words = [f"[w{i}]" if i == axis else f"a{i}" for i in range(rank)]
    return words, [f"[c{i}]" if i == axis else word for i, word in enumerate(words)] + ["[k]"]


def _unfold_axes(n: NodeView) -> str:
    words, unfolded = _unfold_names(n, rank_of(n.x))
    return format_axis_map([words], unfolded)


def _capture_unfold(op: Builder, x: ir.Value, dimension: int, size: int, step: int) -> ir.Value:
    if not rank_of(x):
        return reshaped(op, x, op.out[0].shape)
    attributes = {"axis": dimension, "size": size, "step": step}
    return op.node(OWN, "Unfold", (x,), attributes, types=[op.out[0]]).outputs[0]


_UNFOLD_ATTRIBUTES = {"axis": REQUIRED, "size": REQUIRED, "step": REQUIRED}

UNFOLD = define_movement(
    "Unfold",
    ("x",),
    _unfolded_type,
    lambda n, x: Method("unfold", x, n.axis, n.size, n.step),
    lambda op, n, dy: op.own.UnfoldGrad(dy, op.shape_of(n.x), axis=n.axis, size=n.size, step=n.step),
    domain=OWN,
    attributes=_UNFOLD_ATTRIBUTES,
    from_torch={"aten.unfold.default": _capture_unfold, "aten.unfold_copy.default": _capture_unfold},
    body=_unfold_body,
    axes=_unfold_axes,
    view=True,
)


def _unfold_grad_body(op: Builder, n: NodeView) -> ir.Value:
    """Merge the windows into one axis, then add its rows to those that Unfold read."""
    shape = sizes.dims_of(n.dx)
    axis = checked_axis(n.axis, len(shape), "the axis of UnfoldGrad")
    dy = transposed(op, n.dy, moved(len(shape) + 1, [-1], [axis + 1]))
    count = sizes.dims_of(n.dy)[axis]
    total = sizes.multiply(count, n.size)
    flat = reshaped(op, dy, (*shape[:axis], total, *shape[axis + 1 :]))
    rows = reshaped(op, _window_indices(op, count, n.size, n.step), (total,))
    return scatter_rows(op, zeros(op, shape, dtype_of(n.dy)), rows, flat, axis, reduction="add")


def _unfold_grad_axes(n: NodeView) -> str:
    words, unfolded = _unfold_names(n, rank_of(n.dx))
    return format_axis_map([unfolded, None], words)


UNFOLD_GRAD = define_movement(
    "UnfoldGrad",
    ("dy", "shape"),
    lambda n: (TensorType(dtype_of(n.dy), required_ints(n.shape, "the output shape of UnfoldGrad")),),
    lambda n, dy, shape: Call(torch.ops.aten.unfold_backward.default, dy, shape, n.axis, n.size, n.step),
    None,
    host_inputs=frozenset({1}),
    domain=OWN,
    outputs=("dx",),
    attributes=_UNFOLD_ATTRIBUTES,
    body=_unfold_grad_body,
    axes=_unfold_grad_axes,
    nondiff_inputs=frozenset({"shape"}),
)
