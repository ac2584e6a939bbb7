"""Gather and Embedding: rows of a tensor, picked along one axis by a tensor of row numbers; and their gradients.

    Gather(x[.., v, ..], rows[i..]) -> y[.., i.., ..]          y[.., i.., ..] = x[.., rows[i..], ..]
    GatherGrad(shape, rows, dy, added) -> dx                   dx[.., v, ..] = added[.., v, ..]
                                                                   + sum of dy[.., i.., ..] over rows[i..] = v

Row numbers below 0 count from the end. PyTorch's kernels raise on them: what is captured from PyTorch has none.
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
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.definition import Call, InPlaceCapableCall, Kernel, Method, NodeView, numel
from onnxtrain.ops.index.negative import from_size, from_the_end, never_negative, non_negative
from onnxtrain.ops.reshape.movement import axis_names, axis_of, checked_axis, define_movement, format_axis_map
from onnxtrain.ops.reshape.rows import scatter_rows, zeros
from onnxtrain.ops.reshape.shape import reshaped
from onnxtrain.ops.symbolic_ints import known_ints, required_ints
from onnxtrain.torch_compat import aten_kernels


def _gathered_type(n: NodeView) -> Sequence[TensorType]:
    axis, shape = axis_of(n, n.x), sizes.dims_of(n.x)
    return (TensorType(dtype_of(n.x), (*shape[:axis], *sizes.dims_of(n.rows), *shape[axis + 1 :])),)


def _gather_axes(n: NodeView) -> str:
    axis = axis_of(n, n.x)
    left, picked = axis_names("a", rank_of(n.x)), axis_names("i", rank_of(n.rows))
    return format_axis_map([left, picked], [*left[:axis], *picked, *left[axis + 1 :]])


def _is_index(value: ir.Value) -> bool:
    """Whether the value is one row number that a program has as a Python int."""
    return rank_of(value) == 0 and known_ints(value) is not None


def _gather(x: torch.Tensor, axis: int, rows: torch.Tensor) -> torch.Tensor:
    shape = x.shape
    return torch.index_select(x, axis, rows.reshape(-1)).view(*shape[:axis], *rows.shape, *shape[axis + 1 :])


def _lower_gather(n: NodeView, x: Any, rows: Any) -> Call:
    axis = axis_of(n, n.x)
    rows = rows if never_negative(n, n.rows) else Call(from_the_end, rows, x, axis)
    if rank_of(n.rows) == 1:
        return Call(torch.index_select, x, axis, rows)
    if axis == 0 and rank_of(n.x) == 2:
        return Call(torch.embedding, x, rows)
    return Call(_gather, x, axis, rows)


def _gather_on_host(n: NodeView, x: Any, rows: Any) -> Any:
    if isinstance(rows, tuple):
        return tuple(x[_known(row)] for row in rows)
    return x[_known(rows)]


def _known(row: Any) -> int:
    if not isinstance(row, int):
        raise GraphError("a size is picked from a shape by a number that changes", got=str(row))
    return row


def _capture_index_select(op: Builder, x: ir.Value, dim: int, index: ir.Value) -> ir.Value:
    if not rank_of(x):
        return x  # the one index there can be is 0
    axis = checked_axis(dim, rank_of(x), "the axis of index_select")
    rows = reshaped(op, index, (1,)) if not rank_of(index) else index  # PyTorch keeps the axis
    return non_negative(op.Gather(x, rows, axis=axis))


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
            "an embedding with sparse gradients", todo="set sparse=False, or leave the module to PyTorch"
        )
    if isinstance(padding_idx, str):
        return NotImplemented
    if padding_idx < 0 and not scale_grad_by_freq:
        return non_negative(op.Gather(weight, indices, axis=0))
    return op.own.Embedding(weight, indices, padding_idx=padding_idx, scale_grad_by_freq=int(scale_grad_by_freq))


GATHER = define_movement(
    "Gather",
    ("x", "rows"),
    _gathered_type,
    (
        Kernel(
            lower=lambda n, x, row: Method("clone", Call(torch.select, x, axis_of(n, n.x), row)),
            host_inputs=frozenset({1}),
            applies=lambda n, device: _is_index(n.rows),
        ),
        Kernel(lower=_lower_gather),
    ),
    lambda op, n, dy: (op.ms.GatherGrad(op.shape_of(n.x), n.rows, dy, axis=axis_of(n, n.x)), None),
    reads=("rows",),
    attributes={"axis": 0},
    since_version=13,
    from_torch={
        "aten.index_select.default": _capture_index_select,
        "aten.embedding.default": _capture_embedding,
    },
    axes=_gather_axes,
    host_eval=_gather_on_host,
    nondiff_inputs=frozenset({"rows"}),
)


# GatherGrad(shape, rows, dy, added) -> dx[shape]. A table of words that also gives their scores has two gradients: the
# rows that were picked are added to the other one, in place of zeros and a sum of two tensors of the table's size.


def _scattered_type(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(dtype_of(n.dy), required_ints(n.shape, f"the shape that {n.definition.name} gives")),)


def _gather_grad_axis(n: NodeView) -> int:
    return checked_axis(n.axis, len(sizes.dims_of(n.dx)), "the axis of GatherGrad")


def _select_grad(shape: tuple[int, ...], axis: int, row: int, dy: torch.Tensor) -> torch.Tensor:
    dx = dy.new_zeros(shape)
    dx.select(axis, row).copy_(dy)
    return dx


def _lower_add(n: NodeView, function: Any, shape: Any, rows: Any, dy: Any) -> Call:
    return Call(function, shape, _gather_grad_axis(n), _rows_of_grad(n, shape, rows), dy)


def _rows_of_grad(n: NodeView, shape: Any, rows: Any) -> Any:
    return rows if never_negative(n, n.rows) else Call(from_size, rows, shape[_gather_grad_axis(n)])


def _index_add(shape: tuple[int, ...], axis: int, rows: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    if rows.dim() != 1:
        dy = dy.reshape(*dy.shape[:axis], rows.numel(), *dy.shape[axis + rows.dim() :])
    return dy.new_zeros(shape).index_add_(axis, rows.reshape(-1), dy)


def _index_put(shape: tuple[int, ...], axis: int, rows: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """As `_index_add`, with a kernel that sorts the rows on a GPU and so adds in a fixed order."""
    places = [None] * axis + [rows]
    return aten_kernels.index_put(dy.new_zeros(shape), places, dy, True, True)


def row_sums(shape: tuple[int, int], rows: torch.Tensor, dy: torch.Tensor, padding: int) -> torch.Tensor:
    """For each of shape[0] rows of a table the sum of the dy that picked it; 0 for the row `padding` from 0 up.

    The numbers of aten::embedding_dense_backward, bit for bit in float32, and sooner: a table of [32, 8] that 4096 dy
    picked takes 0.05 ms, there 0.23 (2 threads of a virtual Xeon). Large pages are no gain: within MiniLM's steps 47 MB
    and 2048 rows take 5 ms there or 45, as the system has such pages at hand or not, and 10 without.
    """
    sums = _index_add(shape, 0, rows, dy)
    if padding >= 0:
        sums[padding].zero_()
    return sums


def plus_row_sums(added: torch.Tensor, rows: torch.Tensor, dy: torch.Tensor, padding: int) -> torch.Tensor:
    """Gives added + row_sums(added.shape, rows, dy, padding)."""
    return plus_row_sums_(added.clone(), rows, dy, padding)


def plus_row_sums_(added: torch.Tensor, rows: torch.Tensor, dy: torch.Tensor, padding: int) -> torch.Tensor:
    """The same, written over `added`: 0.15 ms for [8000, 256] and 512 rows, where zeros and a sum take 0.53.

    What picked the same row is summed first: a large number would swallow small ones that come one by one.
    """
    picked, places = torch.unique(rows, return_inverse=True)
    sums = row_sums((picked.numel(), added.size(1)), places, dy, -1)
    if padding >= 0:
        sums.masked_fill_((picked == padding)[:, None], 0)
    return added.index_add_(0, picked, sums)


def _lower_row_sums(n: NodeView, shape: Any, rows: Any, dy: Any, added: Any) -> Call:
    padding = getattr(n, "padding_idx", -1)
    rows = _rows_of_table(n, shape, rows)
    if added is None:
        return Call(row_sums, shape, rows, dy, padding)
    return InPlaceCapableCall(plus_row_sums, plus_row_sums_, added, rows, dy, padding)


def _lower_embedding_grad(n: NodeView, shape: Any, rows: Any, dy: Any, added: Any) -> Call:
    padding, by_frequency = getattr(n, "padding_idx", -1), bool(getattr(n, "scale_grad_by_freq", 0))
    rows = _rows_of_table(n, shape, rows)
    call = Call(torch.ops.aten.embedding_dense_backward.default, dy, rows, shape[0], padding, by_frequency)
    return _plus(added, call)


def _rows_of_table(n: NodeView, shape: Any, rows: Any) -> Any:
    return _rows_of_grad(n, shape, rows) if n.definition.name == "GatherGrad" else rows


def _plus(added: Any, call: Call) -> Call:
    return call if added is None else Call(torch.add, added, call)


def _bytes_of_sums(n: NodeView) -> Size:
    """What `plus_row_sums_` takes beside its result, at most."""
    return 0 if n.added is None else sizes.multiply(numel(n.dy), int(dtype_of(n.dy).itemsize))


_ADDED = 3  # the index of that input
_GATHER_GRAD_KERNELS = (
    Kernel(
        lower=lambda n, shape, row, dy, added: _plus(added, Call(_select_grad, shape, _gather_grad_axis(n), row, dy)),
        host_inputs=frozenset({0, 1}),
        applies=lambda n, device: _is_index(n.rows),
        in_place_input=_ADDED,
    ),
    Kernel(
        lower=_lower_row_sums,
        host_inputs=frozenset({0}),
        applies=lambda n, device: device == "cpu" and _is_table(n),
        workspace_bytes=_bytes_of_sums,
        in_place_input=_ADDED,
    ),
    Kernel(
        lower=_lower_embedding_grad,
        host_inputs=frozenset({0}),
        applies=lambda n, device: _is_table(n),
        in_place_input=_ADDED,
    ),
    Kernel(
        lower=lambda n, shape, rows, dy, added: _plus(added, _lower_add(n, _index_add, shape, rows, dy)),
        host_inputs=frozenset({0}),
        applies=lambda n, device: device == "cpu",
        in_place_input=_ADDED,
    ),
    Kernel(
        lower=lambda n, shape, rows, dy, added: _plus(added, _lower_add(n, _index_add, shape, rows, dy)),
        host_inputs=frozenset({0}),
        deterministic=False,  # atomic additions
        in_place_input=_ADDED,
    ),
    Kernel(
        lower=lambda n, shape, rows, dy, added: _plus(added, _lower_add(n, _index_put, shape, rows, dy)),
        host_inputs=frozenset({0}),
        in_place_input=_ADDED,
    ),
)


def _is_table(n: NodeView) -> bool:
    return _gather_grad_axis(n) == 0 and len(sizes.dims_of(n.dx)) == 2


def _gather_grad_body(op: Builder, n: NodeView) -> ir.Value:
    """Rows as one vector, then ScatterND with addition."""
    axis, shape, rank = _gather_grad_axis(n), sizes.dims_of(n.dy), rank_of(n.rows)
    count = sizes.multiply(1, *sizes.dims_of(n.rows))
    updates = reshaped(op, n.dy, (*shape[:axis], count, *shape[axis + rank :]))
    start = zeros(op, sizes.dims_of(n.dx), dtype_of(n.dy))
    return _sum(op, scatter_rows(op, start, reshaped(op, n.rows, (count,)), updates, axis, reduction="add"), n.added)


def _sum(op: Builder, dx: ir.Value, added: ir.Value | None) -> ir.Value:
    return dx if added is None else op.Add(dx, added)


def _gather_grad_axes(n: NodeView) -> str:
    axis = _gather_grad_axis(n)
    right = axis_names("a", len(sizes.dims_of(n.dx)))
    picked = [f"[i{k}]" for k in range(rank_of(n.rows))]
    outer = [*right[:axis], f"[a{axis}]", *right[axis + 1 :]]
    operands = [None, picked, [*right[:axis], *picked, *right[axis + 1 :]], outer]
    return format_axis_map(operands[: len(n.node.inputs)], outer)


GATHER_GRAD = define_movement(
    "GatherGrad",
    ("shape", "rows", "dy", "added?"),
    _scattered_type,
    _GATHER_GRAD_KERNELS,
    None,
    domain=MICROSOFT,
    outputs=("dx",),
    attributes={"axis": 0},
    body=_gather_grad_body,
    axes=_gather_grad_axes,
    nondiff_inputs=frozenset({"shape", "rows"}),
    output_addend="added",
)


# Embedding(weight[v, h], rows) -> y[.., h]: Gather, where the row `padding_idx` gets no gradient, or where a row's
# gradient is divided by how often it was picked.


def _embedding_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[ir.Value, None]:
    shape = op.shape_of(n.weight)
    options = {"padding_idx": n.padding_idx, "scale_grad_by_freq": n.scale_grad_by_freq}
    return op.own.EmbeddingGrad(shape, n.rows, dy, **options), None


def _embedding_axes(n: NodeView) -> str:
    picked = axis_names("i", rank_of(n.rows))
    if n.scale_grad_by_freq:  # its gradient counts all rows
        picked = [f"[{name}]" for name in picked]
    return format_axis_map([["v", "h"], picked], [*picked, "h"])


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
    """GatherGrad of dy, which is 0 for padding and divided by the count of its row, if asked."""
    rows, dy, dtype = cast(op, n.rows, ir.DataType.INT64), n.dy, dtype_of(n.dy)
    vocabulary = sizes.dims_of(n.dx)[0]
    flat = reshaped(op, rows, (sizes.multiply(1, *sizes.dims_of(rows)),))
    if n.padding_idx >= 0:
        padding = op.Equal(rows, op.scalar(n.padding_idx, like=rows))
        dy = op.Where(op.Unsqueeze(padding, op.constant([-1], ir.DataType.INT64)), op.scalar(0.0, like=dy), dy)
    if n.scale_grad_by_freq:
        one = op.Expand(op.scalar(1.0, dtype), op.shape_of(flat))
        counts = scatter_rows(op, zeros(op, (vocabulary,), dtype), flat, one, 0, reduction="add")
        dy = op.Div(dy, op.Unsqueeze(op.Gather(counts, rows, axis=0), op.constant([-1], ir.DataType.INT64)))
    result: ir.Value = op.ms.GatherGrad(n.shape, n.rows, dy, n.added, axis=0)
    return result


def _embedding_grad_axes(n: NodeView) -> str:
    picked = [f"[i{k}]" for k in range(rank_of(n.rows))]
    result = ["[v]", "h"]
    return format_axis_map([None, picked, [*picked, "h"], result][: len(n.node.inputs)], result)


EMBEDDING_GRAD = define_movement(
    "EmbeddingGrad",
    ("shape", "rows", "dy", "added?"),
    _scattered_type,
    (
        Kernel(
            lower=_lower_row_sums,
            host_inputs=frozenset({0}),
            applies=lambda n, device: device == "cpu" and not n.scale_grad_by_freq,
            workspace_bytes=_bytes_of_sums,
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
    output_addend="added",
)
