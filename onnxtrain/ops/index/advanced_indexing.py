"""Advanced indexing x[.., i, .., j, ..] with index tensors, as in PyTorch: Index, IndexGrad, IndexPut; and NonZero.

    Index(x, indices..., axes)          indices[k] indexes axis axes[k] of x; the indices broadcast together
    IndexGrad(shape, dy, indices...)    zeros of `shape` with dy added at the indices
    IndexPut(x, values, indices...)     x with `values`, broadcast to the shape of x[..], written or added there

The index axes replace the indexed axes if those are adjacent, otherwise they come first. Negative indices count from
the end. A bool mask becomes the indices of its true elements, whose number is known at run time only.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import OWN, TensorType, dtype_of, rank_of
from onnxtrain.ops.body_parts import cast, int64_vector
from onnxtrain.ops.definition import REQUIRED, Call, Effects, Kernel, NodeView
from onnxtrain.ops.index.accumulate import add_in_order, add_to_zeros, are_adjacent, aten_indices
from onnxtrain.ops.interfaces.element_formulas import ELEMENT_FORMULAS, Affine, Formula, FormulaOf, affine, broadcast
from onnxtrain.ops.interfaces.host_reads import HOST_READS, HostRead, PendingInt
from onnxtrain.ops.reshape.dims import expanded, inverse, moved, transposed, unsqueezed
from onnxtrain.ops.reshape.movement import axis_names, define_movement, format_axis_map
from onnxtrain.ops.reshape.rows import zeros
from onnxtrain.ops.symbolic_ints import required_ints

Argument = ir.Value | None


def _index_shape(indices: Sequence[ir.Value]) -> Sizes:
    return sizes.broadcast(*map(sizes.dims_of, indices))


def _first_index_axis(axes: Sequence[int]) -> int:
    """Return the position of the index axes in x[..]."""
    return axes[0] if are_adjacent(axes) else 0


def _indexed_shape(n: NodeView) -> Sizes:
    """Return the shape of x[..]."""
    rest = [s for i, s in enumerate(sizes.dims_of(n.x)) if i not in n.axes]
    first = _first_index_axis(n.axes)
    return (*rest[:first], *_index_shape(n.indices), *rest[first:])


def _lower_index(n: NodeView, x: Any, indices: Any) -> Call:
    per_axis = aten_indices(n.axes, indices)
    if any(rank_of(i) == 0 for i in n.indices):  # Python's x[..] treats a 0-dimensional index as a number
        return Call(torch.ops.aten.index.Tensor, x, per_axis)
    return Call(operator.getitem, x, tuple(slice(None) if index is None else index for index in per_axis))


def _index_gradient(op: Builder, n: NodeView, dy: ir.Value) -> Sequence[ir.Value | None]:
    return [op.own.IndexGrad(op.shape_of(n.x), dy, *n.indices, axes=n.axes), *[None] * len(n.indices)]


def _coordinates(op: Builder, indices: Sequence[ir.Value]) -> ir.Value:
    """Broadcast the indices together and stack them along a new last axis, as GatherND requires."""
    shape = _index_shape(indices)
    columns = [unsqueezed(op, expanded(op, cast(op, i, ir.DataType.INT64), shape), -1) for i in indices]
    return op.Concat(*columns, axis=len(shape)) if len(columns) > 1 else columns[0]


def _index_body(op: Builder, n: NodeView) -> ir.Value:
    """Transpose the indexed axes to the front, build GatherND, and transpose the index axes to their position."""
    rank, count = rank_of(n.x), len(n.axes)
    gathered = op.GatherND(transposed(op, n.x, moved(rank, n.axes, range(count))), _coordinates(op, n.indices))
    return transposed(op, gathered, _perm_from_front(n.axes, len(_index_shape(n.indices)), rank_of(n.y)))


def _perm_from_front(axes: Sequence[int], index_rank: int, rank: int) -> list[int]:
    """Return the permutation that moves the index axes from the front to their position in x[..]."""
    first = _first_index_axis(axes)
    return moved(rank, range(index_rank), range(first, first + index_rank))


def _axis_names(n: NodeView, rank: int) -> tuple[list[str], list[list[str]], list[str]]:
    """Return the axis names of x, which has this rank, of each index, and of x[..]."""
    index_shape = _index_shape(n.indices)
    index_axes = axis_names("i", len(index_shape))
    indices = []
    for index in n.indices:
        shape = sizes.dims_of(index)
        skipped = len(index_shape) - len(shape)
        indices.append([
            "1" if size == 1 else index_axes[k + skipped] if size == index_shape[k + skipped] else f"[u{k}]"
            for k, size in enumerate(shape)
        ])  # fmt: skip
    x_axes = [f"[x{i}]" if i in n.axes else f"a{i}" for i in range(rank)]
    rest = [name for i, name in enumerate(x_axes) if i not in n.axes]
    first = _first_index_axis(n.axes)
    return x_axes, indices, [*rest[:first], *index_axes, *rest[first:]]


def _index_axes(n: NodeView) -> str:
    x_axes, indices, right = _axis_names(n, rank_of(n.x))
    return format_axis_map([x_axes, *indices], right)


def _axes_and_indices(
    op: Builder, x: ir.Value, indices: Sequence[Argument], count: Size | None
) -> tuple[list[int], list[ir.Value]]:
    """Return the indexed axes and their index tensors; a mask becomes the indices of its true elements.

    `count` is PyTorch's symbol for the number of true elements; None without one.
    """
    axes: list[int] = []
    tensors: list[ir.Value] = []
    axis = 0
    for index in indices:
        if index is None:
            axis += 1
        elif _is_mask(index):
            columns = nonzero_indices(op, index, count)
            axes.extend(range(axis, axis + len(columns)))
            tensors.extend(columns)
            axis += len(columns)
        else:
            axes.append(axis)
            tensors.append(index)
            axis += 1
    return axes, tensors


def _is_mask(index: Argument) -> bool:
    return index is not None and dtype_of(index) in (ir.DataType.BOOL, ir.DataType.UINT8)


def _capture_index(op: Builder, x: ir.Value, indices: Sequence[Argument]) -> Any:
    present = [i for i in indices if i is not None]
    if not present:
        return x
    masks = [i for i in present if _is_mask(i)]
    if masks and len(masks) < len(present):
        return NotImplemented
    if any(not rank_of(mask) for mask in masks):
        return NotImplemented
    count = None
    if masks:
        first = next(k for k, i in enumerate(indices) if i is not None)
        is_adjacent = all(i is not None for i in indices[first : first + len(present)])
        count = op.out[0].shape[first if is_adjacent else 0]
    axes, tensors = _axes_and_indices(op, x, indices, count)
    return op.node(OWN, "Index", (x, *tensors), {"axes": axes}, types=[op.out[0]]).outputs[0]


def _capture_masked_select(op: Builder, x: ir.Value, mask: ir.Value) -> Any:
    shape = sizes.broadcast(sizes.dims_of(x), sizes.dims_of(mask))
    x, mask = expanded(op, x, shape), expanded(op, mask, shape)
    if not shape:
        x, mask = unsqueezed(op, x, 0), unsqueezed(op, mask, 0)
    return _capture_index(op, x, [mask])


INDEX = define_movement(
    "Index",
    ("x", "indices..."),
    lambda n: (TensorType(dtype_of(n.x), _indexed_shape(n)),),
    _lower_index,
    _index_gradient,
    reads=("indices",),
    domain=OWN,
    attributes={"axes": REQUIRED},
    from_torch={
        "aten.index.Tensor": _capture_index,
        "aten._unsafe_index.Tensor": _capture_index,
        "aten.masked_select.default": _capture_masked_select,
    },
    body=_index_body,
    axes=_index_axes,
    nondiff_inputs=frozenset({"indices"}),
)


@ELEMENT_FORMULAS.implements(INDEX)
def _index_formula(n: NodeView, formula_of: FormulaOf) -> Formula | None:
    formula = affine(formula_of, n.x)
    if formula is None or tuple(n.axes) != tuple(range(rank_of(n.x))):
        return None
    result = Affine(formula.constant, (0,) * rank_of(n.y))
    for coefficient, index in zip(formula.coefficients, n.indices, strict=True):
        positions = broadcast(affine(formula_of, index), index, n.y)
        if coefficient and (positions is None or not positions.is_never_negative):
            return None
        if coefficient:
            result += Affine(coefficient * positions.constant, tuple(coefficient * c for c in positions.coefficients))
    return result


# IndexGrad and IndexPut


def _scattered(op: Builder, n: NodeView, base: ir.Value, values: ir.Value, add: bool) -> ir.Value:
    """Transpose the indexed axes to the front, build ScatterND, and transpose the axes back."""
    rank, index_rank = rank_of(base), len(_index_shape(n.indices))
    order = moved(rank, n.axes, range(len(n.axes)))
    to_front = inverse(_perm_from_front(n.axes, index_rank, rank - len(n.axes) + index_rank))
    scattered = op.ScatterND(
        transposed(op, base, order),
        _coordinates(op, n.indices),
        transposed(op, values, to_front),
        reduction="add" if add else "none",
    )
    return transposed(op, scattered, inverse(order))


def _axis_names_of_scatter(n: NodeView, rank: int) -> tuple[list[str], list[list[str]], list[str]]:
    """Return `_axis_names` for an op that does not pass the index axes through."""
    x_axes, indices, right = _axis_names(n, rank)
    closed = {name: f"[{name}]" for name in axis_names("i", len(_index_shape(n.indices)))}
    closed_indices = [[closed.get(name, name) for name in index] for index in indices]
    return x_axes, closed_indices, [closed.get(name, name) for name in right]


def _index_grad_axes(n: NodeView) -> str:
    x_axes, indices, right = _axis_names_of_scatter(n, len(sizes.dims_of(n.dx)))
    return format_axis_map([None, right, *indices], x_axes)


INDEX_GRAD = define_movement(
    "IndexGrad",
    ("shape", "dy", "indices..."),
    lambda n: (TensorType(dtype_of(n.dy), required_ints(n.shape, "the shape of IndexGrad")),),
    lambda n, shape, dy, indices: Call(add_to_zeros, shape, n.axes, indices, dy),
    None,
    host_inputs=frozenset({0}),
    domain=OWN,
    outputs=("dx",),
    attributes={"axes": REQUIRED},
    body=lambda op, n: _scattered(op, n, zeros(op, sizes.dims_of(n.dx), dtype_of(n.dy)), n.dy, add=True),
    axes=_index_grad_axes,
    nondiff_inputs=frozenset({"shape", "indices"}),
)


def _lower_index_put(n: NodeView, x: Any, values: Any, indices: Any) -> Call:
    per_axis = aten_indices(n.axes, indices)
    if None not in per_axis:
        return Call(torch.index_put, x, indices, values, bool(n.accumulate))
    return Call(torch.ops.aten.index_put.default, x, per_axis, values, bool(n.accumulate))


def _index_put_gradient(op: Builder, n: NodeView, dy: ir.Value) -> Sequence[ir.Value | None]:
    dx: ir.Value | None = dy
    if not n.accumulate and n.wants("x"):
        dx = op.own.IndexPut(dy, op.scalar(0, like=dy), *n.indices, axes=n.axes)
    dvalues = op.own.Index(dy, *n.indices, axes=n.axes) if n.wants("values") else None
    return [dx, dvalues, *[None] * len(n.indices)]


def _index_put_body(op: Builder, n: NodeView) -> ir.Value:
    return _scattered(op, n, n.x, expanded(op, n.values, _indexed_shape(n)), bool(n.accumulate))


def _index_put_axes(n: NodeView) -> str:
    """Return the axis map: axes of x that are not indexed pass through."""
    x_axes, indices, right = _axis_names_of_scatter(n, rank_of(n.x))
    indexed_shape, shape = _indexed_shape(n), sizes.dims_of(n.values)
    skipped = len(indexed_shape) - len(shape)
    values = [
        "1" if size == 1 else right[k + skipped] if size == indexed_shape[k + skipped] else f"[v{k}]"
        for k, size in enumerate(shape)
    ]
    return format_axis_map([x_axes, values, *indices], x_axes)


def _capture_index_put(
    op: Builder, x: ir.Value, indices: Sequence[Argument], values: ir.Value, accumulate: bool = False
) -> Any:
    values = cast(op, values, dtype_of(x))
    present = [i for i in indices if i is not None]
    if len(present) == 1 and _is_mask(present[0]) and not accumulate and not rank_of(values):
        return _masked_fill(op, x, present[0], indices.index(present[0]), values)
    if any(map(_is_mask, present)) and not all(map(_is_mask, present)):
        return NotImplemented
    axes, tensors = _axes_and_indices(op, x, indices, None)
    if not tensors:
        return NotImplemented
    return op.own.IndexPut(x, values, *tensors, axes=axes, accumulate=int(accumulate))


def _masked_fill(op: Builder, x: ir.Value, mask: ir.Value, axis: int, value: ir.Value) -> ir.Value:
    """Build x[.., mask, ..] = value as a Where, which needs no indices."""
    mask = cast(op, mask, ir.DataType.BOOL)
    trailing = rank_of(x) - axis - rank_of(mask)
    mask = unsqueezed(op, mask, *range(rank_of(mask), rank_of(mask) + trailing))
    return op.Where(mask, value, x)


INDEX_PUT = define_movement(
    "IndexPut",
    ("x", "values", "indices..."),
    lambda n: (TensorType(dtype_of(n.x), sizes.dims_of(n.x)),),
    (
        Kernel(lower=_lower_index_put, applies=lambda n, device: device == "cpu" and not n.accumulate),
        Kernel(
            lower=lambda n, x, values, indices: Call(add_in_order, x, n.axes, indices, values),
            applies=lambda n, device: bool(n.accumulate),
        ),
        Kernel(lower=_lower_index_put, deterministic=False),  # of several values for an element any may win
    ),
    _index_put_gradient,
    reads=("indices",),
    domain=OWN,
    attributes={"axes": REQUIRED, "accumulate": 0},
    from_torch={
        "aten.index_put.default": _capture_index_put,
        "aten._unsafe_index_put.default": _capture_index_put,
    },
    body=_index_put_body,
    axes=_index_put_axes,
    nondiff_inputs=frozenset({"indices"}),
)


# NonZero(x) -> the coordinates of the elements that are not 0, [rank, count]; the count is known at run time only


def nonzero_indices(op: Builder, mask: ir.Value, count: Size | None) -> list[ir.Value]:
    """Return for each axis of `mask` the indices of its true elements; `count` is the symbol of their number."""
    rank = rank_of(mask)
    types = None if count is None else [TensorType(ir.DataType.INT64, (rank, count))]
    coordinates = op.node("", "NonZero", (mask,), {}, types=types).outputs[0]
    if rank == 1:
        return [op.Squeeze(coordinates, int64_vector(op, [0]))]
    column = TensorType(ir.DataType.INT64, (1, sizes.dims_of(coordinates)[1]))
    rows = op.node("", "Split", (coordinates, op.sizes([1] * rank)), {"axis": 0}, types=[column] * rank).outputs
    return [op.Squeeze(row, int64_vector(op, [0])) for row in rows]


def _nonzero_types(n: NodeView) -> Sequence[TensorType]:
    # The symbol contains the value's name: nodes that read the same value have the same count.
    name = "".join(c if c.isalnum() else "_" for c in n.x.name or "value")
    return (TensorType(ir.DataType.INT64, (rank_of(n.x), f"count_{name}")),)


def _nonzero(x: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(x).t()


def _counted(x: torch.Tensor, count: PendingInt) -> torch.Tensor:
    return torch.nonzero_static(x, size=count.result()).t()


def _capture_nonzero(op: Builder, x: ir.Value) -> Any:
    count, rank = op.out[0].shape
    if not rank:
        return NotImplemented
    coordinates = op.node("", "NonZero", (x,), {}, types=[TensorType(ir.DataType.INT64, (rank, count))]).outputs[0]
    return transposed(op, coordinates, [1, 0])


def _capture_nonzero_numpy(op: Builder, x: ir.Value) -> tuple[ir.Value, ...]:
    if not rank_of(x):
        x = unsqueezed(op, x, 0)
    return tuple(nonzero_indices(op, x, op.out[0].shape[0]))


NON_ZERO = define_movement(
    "NonZero",
    ("x",),
    _nonzero_types,
    lambda n, x: Call(_nonzero, x),
    None,
    from_torch={
        "aten.nonzero.default": _capture_nonzero,
        "aten.nonzero_numpy.default": _capture_nonzero_numpy,
    },
    effects=Effects.HOST_SYNC,
)
HOST_READS.register(NON_ZERO, HostRead("x", lambda x: PendingInt(torch.count_nonzero(x)), _counted))
