"""Gather and Embedding: rows of a tensor, selected along one axis by an index tensor; and their gradients.

    Gather(x[.., v, ..], rows[i..]) -> y[.., i.., ..]          y[.., i.., ..] = x[.., rows[i..], ..]
    GatherGrad(shape, rows, dy, added) -> dx                   dx[.., v, ..] = added[.., v, ..]
                                                                   + sum of dy[.., i.., ..] over rows[i..] = v

Negative indices count from the end. PyTorch's kernels raise for them, so nodes captured from PyTorch have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError, UnsupportedOperatorError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import MICROSOFT, OWN, TensorType, dtype_of, rank_of
from onnxtrain.ops.body_parts import cast, reshaped
from onnxtrain.ops.constructors import with_addend
from onnxtrain.ops.definition import Call, InPlaceCapableCall, Kernel, Method, NodeView, numel
from onnxtrain.ops.index.negative_indices import (
    is_non_negative,
    mark_non_negative,
    wrap_negative,
    wrap_negative_in_axis,
)
from onnxtrain.ops.interfaces.addends import OUTPUT_ADDENDS
from onnxtrain.ops.interfaces.traced_calls import TRACED_CALLS
from onnxtrain.ops.reshape.movement import axis_names, axis_of, checked_axis, define_movement, format_axis_map
from onnxtrain.ops.reshape.rows import scatter_rows, zeros
from onnxtrain.ops.symbolic_ints import known_ints, required_ints
from onnxtrain.torch_compat import aten_kernels

_SMALL_TABLE = 1 << 15  # elements: a sum over all takes less time than finding the rows that are read


def gathered_types(n: NodeView) -> Sequence[TensorType]:
    """Return the type of x with its axis replaced by the axes of the row numbers."""
    axis, shape = axis_of(n, n.x), sizes.dims_of(n.x)
    return (TensorType(dtype_of(n.x), (*shape[:axis], *sizes.dims_of(n.rows), *shape[axis + 1 :])),)


def _gather_axes(n: NodeView) -> str:
    axis = axis_of(n, n.x)
    x_axes, index_axes = axis_names("a", rank_of(n.x)), axis_names("i", rank_of(n.rows))
    return format_axis_map([x_axes, index_axes], [*x_axes[:axis], *index_axes, *x_axes[axis + 1 :]])


def _is_host_index(value: ir.Value) -> bool:
    """Return whether the value is a single index that a program holds as a Python int."""
    return rank_of(value) == 0 and known_ints(value) is not None


def _gather(x: torch.Tensor, axis: int, rows: torch.Tensor) -> torch.Tensor:
    shape = x.shape
    return torch.index_select(x, axis, rows.reshape(-1)).view(*shape[:axis], *rows.shape, *shape[axis + 1 :])


def _lower_gather(n: NodeView, x: Any, rows: Any) -> Call:
    axis = axis_of(n, n.x)
    rows = rows if is_non_negative(n, n.rows) else Call(wrap_negative_in_axis, rows, x, axis)
    if rank_of(n.rows) == 1:
        return Call(torch.index_select, x, axis, rows)
    if axis == 0 and rank_of(n.x) == 2:
        return Call(torch.embedding, x, rows)
    return Call(_gather, x, axis, rows)


def _gather_on_host(n: NodeView, x: Any, rows: Any) -> Any:
    if isinstance(rows, tuple):
        return tuple(x[_checked_index(row)] for row in rows)
    return x[_checked_index(rows)]


def _checked_index(row: Any) -> int:
    if not isinstance(row, int):
        raise GraphError("the index of a dimension in a shape is not constant", expected="an integer", got=str(row))
    return row


def _capture_index_select(op: Builder, x: ir.Value, dim: int, index: ir.Value) -> ir.Value:
    if not rank_of(x):
        return x  # 0 is the only valid index
    axis = checked_axis(dim, rank_of(x), "the axis of index_select")
    rows = reshaped(op, index, (1,)) if not rank_of(index) else index  # PyTorch keeps the axis
    return mark_non_negative(op.Gather(x, rows, axis=axis))


def _capture_embedding(
    op: Builder,
    weight: ir.Value,
    indices: ir.Value,
    padding_idx: Size = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if sparse:
        raise UnsupportedOperatorError(
            "sparse gradients of embeddings are not supported",
            expected="sparse=False",
            got="sparse=True",
            todo="set sparse=False, or leave the module to PyTorch",
        )
    if isinstance(padding_idx, str):
        return NotImplemented
    if padding_idx < 0 and not scale_grad_by_freq:
        return mark_non_negative(op.Gather(weight, indices, axis=0))
    return op.own.Embedding(weight, indices, padding_idx=padding_idx, scale_grad_by_freq=int(scale_grad_by_freq))


GATHER = define_movement(
    "Gather",
    ("x", "rows"),
    gathered_types,
    (
        Kernel(
            lower=lambda n, x, row: Method("clone", Call(torch.select, x, axis_of(n, n.x), row)),
            host_inputs=frozenset({1}),
            applies=lambda n, device: _is_host_index(n.rows),
        ),
        Kernel(lower=_lower_gather),
    ),
    lambda op, n, dy: (op.ms.GatherGrad(op.shape_of(n.x), n.rows, dy, axis=axis_of(n, n.x)), None),
    reads=("rows",),
    attributes={"axis": 0},
    from_torch={
        "aten.index_select.default": _capture_index_select,
        "aten.embedding.default": _capture_embedding,
    },
    axes=_gather_axes,
    host_eval=_gather_on_host,
    nondiff_inputs=frozenset({"rows"}),
)


# GatherGrad(shape, rows, dy, added) -> dx[shape]. An embedding that is tied to the output layer has two gradients: the
# gathered rows are added to the other gradient, which saves zeros of the embedding's size and the sum of two such
# tensors.


def _gather_grad_types(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(dtype_of(n.dy), required_ints(n.shape, f"the shape of {n.definition.name}")),)


def _gather_grad_axis(n: NodeView) -> int:
    return checked_axis(n.axis, len(sizes.dims_of(n.dx)), "the axis of GatherGrad")


def _select_grad(shape: tuple[int, ...], axis: int, row: int, dy: torch.Tensor) -> torch.Tensor:
    dx = dy.new_zeros(shape)
    dx.select(axis, row).copy_(dy)
    return dx


def _scatter_call(n: NodeView, function: Any, shape: Any, rows: Any, dy: Any) -> Call:
    return Call(function, shape, _gather_grad_axis(n), _wrapped_rows(n, shape, rows), dy)


def _wrapped_rows(n: NodeView, shape: Any, rows: Any) -> Any:
    return rows if is_non_negative(n, n.rows) else Call(wrap_negative, rows, shape[_gather_grad_axis(n)])


def _index_add(shape: tuple[int, ...], axis: int, rows: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    if rows.dim() != 1:
        dy = dy.reshape(*dy.shape[:axis], rows.numel(), *dy.shape[axis + rows.dim() :])
    return dy.new_zeros(shape).index_add_(axis, rows.reshape(-1), dy)


def _index_put(shape: tuple[int, ...], axis: int, rows: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Compute `_index_add` by index_put, which sorts the rows on a GPU and so adds in a fixed order."""
    indices = [None] * axis + [rows]
    return aten_kernels.index_put(dy.new_zeros(shape), indices, dy, True, True)


def row_sums(shape: tuple[int, int], rows: torch.Tensor, dy: torch.Tensor, padding: int) -> torch.Tensor:
    """Return for each of shape[0] rows of an embedding the sum of the dy whose index it is.

    The sum of the row `padding` is 0; a negative `padding` is none. The result is bitwise equal to that of
    aten::embedding_dense_backward in float32, and faster: an embedding of [32, 8] with 4096 indices takes 0.05 ms
    instead of 0.23 (2 threads of a virtual Xeon). Huge pages do not pay: in MiniLM's steps, 47 MB and 2048 rows take 5
    or 45 ms with them, depending on whether the system has free ones, and 10 without.
    """
    sums = _index_add(shape, 0, rows, dy)
    if padding >= 0:
        sums[padding].zero_()
    return sums


def plus_row_sums(added: torch.Tensor, rows: torch.Tensor, dy: torch.Tensor, padding: int) -> torch.Tensor:
    """Return added + row_sums(added.shape, rows, dy, padding)."""
    return plus_row_sums_(added.clone(), rows, dy, padding)


def plus_row_sums_(added: torch.Tensor, rows: torch.Tensor, dy: torch.Tensor, padding: int) -> torch.Tensor:
    """Compute `plus_row_sums` in place: the result overwrites `added`.

    For [8000, 256] and 512 rows it takes 0.15 ms; zeros and a sum take 0.53. The dy of the same row are summed first,
    because adding them one by one to a large value would lose small ones to rounding. For [512, 64] and 128 rows zeros
    and a sum take 27 us, finding the unique rows 44.
    """
    if added.size(0) <= rows.numel() or added.numel() <= _SMALL_TABLE:
        return added.add_(row_sums((added.size(0), added.size(1)), rows, dy, padding))
    unique_rows, positions = torch.unique(rows, return_inverse=True)
    sums = row_sums((unique_rows.numel(), added.size(1)), positions, dy, -1)
    if padding >= 0:
        sums.masked_fill_((unique_rows == padding)[:, None], 0)
    return added.index_add_(0, unique_rows, sums)


def _traced_plus_row_sums(added: torch.Tensor, rows: torch.Tensor, dy: torch.Tensor, padding: int) -> torch.Tensor:
    """Compute `plus_row_sums` without sizes that depend on elements."""
    return added + row_sums((added.size(0), added.size(1)), rows, dy, padding)


TRACED_CALLS[plus_row_sums] = TRACED_CALLS[plus_row_sums_] = _traced_plus_row_sums


def _lower_row_sums(n: NodeView, shape: Any, rows: Any, dy: Any, added: Any) -> Call:
    padding = getattr(n, "padding_idx", -1)
    rows = _embedding_rows(n, shape, rows)
    if added is None:
        return Call(row_sums, shape, rows, dy, padding)
    return InPlaceCapableCall(plus_row_sums, plus_row_sums_, added, rows, dy, padding)


def _lower_embedding_grad(n: NodeView, shape: Any, rows: Any, dy: Any, added: Any) -> Call:
    padding, by_frequency = getattr(n, "padding_idx", -1), bool(getattr(n, "scale_grad_by_freq", 0))
    rows = _embedding_rows(n, shape, rows)
    call = Call(torch.ops.aten.embedding_dense_backward.default, dy, rows, shape[0], padding, by_frequency)
    return _plus(added, call)


def _embedding_rows(n: NodeView, shape: Any, rows: Any) -> Any:
    return _wrapped_rows(n, shape, rows) if n.definition.name == "GatherGrad" else rows


def _plus(added: Any, call: Call) -> Call:
    return call if added is None else Call(torch.add, added, call)


def _row_sum_bytes(n: NodeView) -> Size:
    """Return the maximum number of bytes that `plus_row_sums_` allocates besides its result."""
    if n.added is None:
        return 0
    count = sizes.maximum(numel(n.dy), sizes.minimum(numel(n.added), _SMALL_TABLE))
    return sizes.multiply(count, int(dtype_of(n.dy).itemsize))


_ADDED = 3  # the index of the input `added`
_GATHER_GRAD_KERNELS = (
    Kernel(
        lower=lambda n, shape, row, dy, added: _plus(added, Call(_select_grad, shape, _gather_grad_axis(n), row, dy)),
        host_inputs=frozenset({0, 1}),
        applies=lambda n, device: _is_host_index(n.rows),
        in_place_input=_ADDED,
    ),
    Kernel(
        lower=_lower_row_sums,
        host_inputs=frozenset({0}),
        applies=lambda n, device: device == "cpu" and _is_embedding(n),
        workspace_bytes=_row_sum_bytes,
        in_place_input=_ADDED,
    ),
    Kernel(
        lower=_lower_embedding_grad,
        host_inputs=frozenset({0}),
        applies=lambda n, device: _is_embedding(n),
        in_place_input=_ADDED,
    ),
    Kernel(
        lower=lambda n, shape, rows, dy, added: _plus(added, _scatter_call(n, _index_add, shape, rows, dy)),
        host_inputs=frozenset({0}),
        applies=lambda n, device: device == "cpu",
        in_place_input=_ADDED,
    ),
    Kernel(
        lower=lambda n, shape, rows, dy, added: _plus(added, _scatter_call(n, _index_add, shape, rows, dy)),
        host_inputs=frozenset({0}),
        deterministic=False,  # adds atomically
        in_place_input=_ADDED,
    ),
    Kernel(
        lower=lambda n, shape, rows, dy, added: _plus(added, _scatter_call(n, _index_put, shape, rows, dy)),
        host_inputs=frozenset({0}),
        in_place_input=_ADDED,
    ),
)


def _is_embedding(n: NodeView) -> bool:
    return _gather_grad_axis(n) == 0 and len(sizes.dims_of(n.dx)) == 2


def _gather_grad_body(op: Builder, n: NodeView) -> ir.Value:
    """Flatten the rows to a vector, and scatter-add."""
    axis, shape, rank = _gather_grad_axis(n), sizes.dims_of(n.dy), rank_of(n.rows)
    count = sizes.multiply(1, *sizes.dims_of(n.rows))
    updates = reshaped(op, n.dy, (*shape[:axis], count, *shape[axis + rank :]))
    dx = zeros(op, sizes.dims_of(n.dx), dtype_of(n.dy))
    dx = scatter_rows(op, dx, reshaped(op, n.rows, (count,)), updates, axis, reduction="add")
    return dx if n.added is None else op.Add(dx, n.added)


def _gather_grad_axes(n: NodeView) -> str:
    axis = _gather_grad_axis(n)
    right = axis_names("a", len(sizes.dims_of(n.dx)))
    index_axes = [f"[i{k}]" for k in range(rank_of(n.rows))]
    dx_axes = [*right[:axis], f"[a{axis}]", *right[axis + 1 :]]
    operands = [None, index_axes, [*right[:axis], *index_axes, *right[axis + 1 :]], dx_axes]
    return format_axis_map(operands[: len(n.node.inputs)], dx_axes)


GATHER_GRAD = define_movement(
    "GatherGrad",
    ("shape", "rows", "dy", "added?"),
    with_addend("added", _gather_grad_types),
    _GATHER_GRAD_KERNELS,
    None,
    domain=MICROSOFT,
    outputs=("dx",),
    attributes={"axis": 0},
    body=_gather_grad_body,
    axes=_gather_grad_axes,
    nondiff_inputs=frozenset({"shape", "rows"}),
)
OUTPUT_ADDENDS.register(GATHER_GRAD, "added")


# Embedding(weight[v, h], rows) -> y[.., h]: a Gather whose gradient is 0 for the row `padding_idx`, or divided by the
# number of times that a row is gathered (`scale_grad_by_freq`).


def _embedding_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[ir.Value, None]:
    shape = op.shape_of(n.weight)
    options = {"padding_idx": n.padding_idx, "scale_grad_by_freq": n.scale_grad_by_freq}
    return op.own.EmbeddingGrad(shape, n.rows, dy, **options), None


def _embedding_axes(n: NodeView) -> str:
    index_axes = axis_names("i", rank_of(n.rows))
    if n.scale_grad_by_freq:  # its gradient counts all rows
        index_axes = [f"[{name}]" for name in index_axes]
    return format_axis_map([["v", "h"], index_axes], [*index_axes, "h"])


EMBEDDING = define_movement(
    "Embedding",
    ("weight", "rows"),
    lambda n: (TensorType(dtype_of(n.weight), (*sizes.dims_of(n.rows), sizes.dims_of(n.weight)[1])),),
    lambda n, weight, rows: Call(torch.embedding, weight, rows),
    _embedding_gradient,
    reads=("rows",),
    domain=OWN,
    attributes={"padding_idx": -1, "scale_grad_by_freq": 0},
    body=lambda op, n: op.Gather(n.weight, n.rows, axis=0),
    axes=_embedding_axes,
    nondiff_inputs=frozenset({"rows"}),
)


def _embedding_grad_body(op: Builder, n: NodeView) -> ir.Value:
    """Set dy to 0 for `padding_idx` and divide it by the count of its row as requested; then build GatherGrad."""
    rows, dy, dtype = cast(op, n.rows, ir.DataType.INT64), n.dy, dtype_of(n.dy)
    row_count = sizes.dims_of(n.dx)[0]
    flat = reshaped(op, rows, (sizes.multiply(1, *sizes.dims_of(rows)),))
    if n.padding_idx >= 0:
        padding = op.Equal(rows, op.scalar(n.padding_idx, like=rows))
        dy = op.Where(op.Unsqueeze(padding, op.constant([-1], ir.DataType.INT64)), op.scalar(0.0, like=dy), dy)
    if n.scale_grad_by_freq:
        one = op.Expand(op.scalar(1.0, dtype), op.shape_of(flat))
        counts = scatter_rows(op, zeros(op, (row_count,), dtype), flat, one, 0, reduction="add")
        dy = op.Div(dy, op.Unsqueeze(op.Gather(counts, rows, axis=0), op.constant([-1], ir.DataType.INT64)))
    return op.ms.GatherGrad(n.shape, n.rows, dy, n.added, axis=0)


def _embedding_grad_axes(n: NodeView) -> str:
    index_axes = [f"[i{k}]" for k in range(rank_of(n.rows))]
    dx_axes = ["[v]", "h"]
    return format_axis_map([None, index_axes, [*index_axes, "h"], dx_axes][: len(n.node.inputs)], dx_axes)


EMBEDDING_GRAD = define_movement(
    "EmbeddingGrad",
    ("shape", "rows", "dy", "added?"),
    with_addend("added", _gather_grad_types),
    (
        Kernel(
            lower=_lower_row_sums,
            host_inputs=frozenset({0}),
            applies=lambda n, device: device == "cpu" and not n.scale_grad_by_freq,
            workspace_bytes=_row_sum_bytes,
            in_place_input=_ADDED,
        ),
        Kernel(lower=_lower_embedding_grad, host_inputs=frozenset({0}), in_place_input=_ADDED),
    ),
    None,
    domain=OWN,
    outputs=("dx",),
    attributes={"padding_idx": -1, "scale_grad_by_freq": 0},
    body=_embedding_grad_body,
    axes=_embedding_grad_axes,
    nondiff_inputs=frozenset({"shape", "rows"}),
)
OUTPUT_ADDENDS.register(EMBEDDING_GRAD, "added")
