"""Python's x[.., i, .., j, ..] with index tensors, as PyTorch means it: Index, its gradient, IndexPut; NonZero.

    Index(x, indices..., at)            indices[k] stands at axis at[k] of x; all are broadcast together
    IndexGrad(shape, dy, indices...)    zeros of `shape` with dy added where Index read
    IndexPut(x, values, indices...)     x with `values`, broadcast to the sizes of x[..], written or added there

The picked axes stand where the indexed axes were if those are neighbours, else in front. Indices below 0 count from the
end. A mask is the indices of its true elements, whose number only the run can tell.
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
from onnxtrain.ops.index.accumulate import add_in_order, add_to_zeros, is_together, places
from onnxtrain.ops.reshape.dims import expanded, inverse, moved, transposed, unsqueezed
from onnxtrain.ops.reshape.movement import axis_names, define_movement, format_axis_map
from onnxtrain.ops.reshape.rows import zeros
from onnxtrain.ops.symbolic_ints import required_ints

Argument = ir.Value | None


def _picked(indices: Sequence[ir.Value]) -> Sizes:
    return sizes.broadcast(*map(sizes.dims_of, indices))


def _first(at: Sequence[int]) -> int:
    """Where the picked axes stand."""
    return at[0] if is_together(at) else 0


def _indexed_type(n: NodeView) -> Sequence[TensorType]:
    rest = [s for i, s in enumerate(sizes.dims_of(n.x)) if i not in n.at]
    first = _first(n.at)
    return (TensorType(dtype_of(n.x), (*rest[:first], *_picked(n.indices), *rest[first:])),)


def _lower_index(n: NodeView, x: Any, indices: Any) -> Call:
    if any(rank_of(i) == 0 for i in n.indices):  # Python's subscript reads a 0-dimensional index as a number
        return Call(torch.ops.aten.index.Tensor, x, places(n.at, indices))
    subscript = tuple(slice(None) if place is None else place for place in places(n.at, indices))
    return Call(operator.getitem, x, subscript)


def _index_gradient(op: Builder, n: NodeView, dy: ir.Value) -> Sequence[ir.Value | None]:
    return [op.own.IndexGrad(op.shape_of(n.x), dy, *n.indices, at=n.at), *[None] * len(n.indices)]


def _stacked(op: Builder, indices: Sequence[ir.Value]) -> ir.Value:
    """The indices broadcast together and side by side: the coordinates that GatherND takes."""
    picked = _picked(indices)
    columns = [unsqueezed(op, expanded(op, cast(op, i, ir.DataType.INT64), picked), -1) for i in indices]
    result: ir.Value = op.Concat(*columns, axis=len(picked)) if len(columns) > 1 else columns[0]
    return result


def _index_body(op: Builder, n: NodeView) -> ir.Value:
    """Indexed axes in front, GatherND, picked axes back to their place."""
    rank, count = rank_of(n.x), len(n.at)
    gathered = op.GatherND(transposed(op, n.x, moved(rank, n.at, range(count))), _stacked(op, n.indices))
    return transposed(op, gathered, _from_front(n.at, len(_picked(n.indices)), rank_of(n.y)))


def _from_front(at: Sequence[int], picked: int, rank: int) -> list[int]:
    """The permutation that puts the `picked` axes, which are in front, in their place."""
    first = _first(at)
    return moved(rank, range(picked), range(first, first + picked))


def _names(n: NodeView, whole: int) -> tuple[list[str], list[list[str]], list[str]]:
    """Axis names of x, of each index and of what is picked."""
    picked = _picked(n.indices)
    words = axis_names("i", len(picked))
    indices = []
    for index in n.indices:
        shape = sizes.dims_of(index)
        skipped = len(picked) - len(shape)
        indices.append([
            "1" if size == 1 else words[k + skipped] if size == picked[k + skipped] else f"[u{k}]"
            for k, size in enumerate(shape)
        ])  # fmt: skip
    outer = [f"[x{i}]" if i in n.at else f"a{i}" for i in range(whole)]
    rest = [word for i, word in enumerate(outer) if i not in n.at]
    first = _first(n.at)
    return outer, indices, [*rest[:first], *words, *rest[first:]]


def _index_axes(n: NodeView) -> str:
    outer, indices, right = _names(n, rank_of(n.x))
    return format_axis_map([outer, *indices], right)


def _resolved(
    op: Builder, x: ir.Value, indices: Sequence[Argument], count: Size | None
) -> tuple[list[int], list[ir.Value]]:
    """The axes that are indexed and their index tensors; a mask becomes the indices of its true elements.

    `count` is the number of true elements, where PyTorch has a name for it.
    """
    at: list[int] = []
    found: list[ir.Value] = []
    axis = 0
    for index in indices:
        if index is None:
            axis += 1
        elif dtype_of(index) in (ir.DataType.BOOL, ir.DataType.UINT8):
            columns = true_places(op, index, count)
            at.extend(range(axis, axis + len(columns)))
            found.extend(columns)
            axis += len(columns)
        else:
            at.append(axis)
            found.append(index)
            axis += 1
    return at, found


def _is_mask(index: Argument) -> bool:
    return index is not None and dtype_of(index) in (ir.DataType.BOOL, ir.DataType.UINT8)


def _capture_index(op: Builder, x: ir.Value, indices: Sequence[Argument]) -> Any:
    given = [i for i in indices if i is not None]
    if not given:
        return x
    masks = [i for i in given if _is_mask(i)]
    if masks and len(masks) < len(given):
        return NotImplemented
    if any(not rank_of(mask) for mask in masks):
        return NotImplemented
    count = None
    if masks:
        before = next(k for k, i in enumerate(indices) if i is not None)
        together = all(i is not None for i in indices[before : before + len(given)])
        count = op.out[0].shape[before if together else 0]
    at, found = _resolved(op, x, indices, count)
    return op.node(OWN, "Index", (x, *found), {"at": at}, types=[op.out[0]]).outputs[0]


def _capture_masked_select(op: Builder, x: ir.Value, mask: ir.Value) -> Any:
    shape = sizes.broadcast(sizes.dims_of(x), sizes.dims_of(mask))
    x, mask = expanded(op, x, shape), expanded(op, mask, shape)
    if not shape:
        x, mask = unsqueezed(op, x, 0), unsqueezed(op, mask, 0)
    return _capture_index(op, x, [mask])


INDEX = define_movement(
    "Index",
    ("x", "indices..."),
    _indexed_type,
    _lower_index,
    _index_gradient,
    reads=("indices",),
    domain=OWN,
    attributes={"at": REQUIRED},
    from_torch={
        "aten.index.Tensor": _capture_index,
        "aten._unsafe_index.Tensor": _capture_index,
        "aten.masked_select.default": _capture_masked_select,
    },
    body=_index_body,
    axes=_index_axes,
    nondiff_inputs=frozenset({"indices"}),
)


# IndexGrad and IndexPut


def _written(op: Builder, n: NodeView, base: ir.Value, values: ir.Value, add: bool) -> ir.Value:
    """Indexed axes in front, ScatterND, axes back in their order."""
    rank, picked = rank_of(base), len(_picked(n.indices))
    order = moved(rank, n.at, range(len(n.at)))
    back = inverse(_from_front(n.at, picked, rank - len(n.at) + picked))
    written = op.ScatterND(
        transposed(op, base, order),
        _stacked(op, n.indices),
        transposed(op, values, back),
        reduction="add" if add else "none",
    )
    return transposed(op, written, inverse(order))


def _summed_axes(n: NodeView, whole: int) -> tuple[list[str], list[list[str]], list[str]]:
    """As `_names`, where the picked axes are read whole."""
    outer, indices, right = _names(n, whole)
    closed = {word: f"[{word}]" for word in axis_names("i", len(_picked(n.indices)))}
    return outer, [[closed.get(w, w) for w in index] for index in indices], [closed.get(w, w) for w in right]


def _index_grad_axes(n: NodeView) -> str:
    outer, indices, right = _summed_axes(n, len(sizes.dims_of(n.dx)))
    return format_axis_map([None, right, *indices], outer)


INDEX_GRAD = define_movement(
    "IndexGrad",
    ("shape", "dy", "indices..."),
    lambda n: (TensorType(dtype_of(n.dy), required_ints(n.shape, "the shape that IndexGrad gives")),),
    lambda n, shape, dy, indices: Call(add_to_zeros, shape, n.at, indices, dy),
    None,
    takes_ints=frozenset({0}),
    domain=OWN,
    outputs=("dx",),
    attributes={"at": REQUIRED},
    body=lambda op, n: _written(op, n, zeros(op, sizes.dims_of(n.dx), dtype_of(n.dy)), n.dy, add=True),
    axes=_index_grad_axes,
    nondiff_inputs=frozenset({"shape", "indices"}),
)


def _put_sizes(n: NodeView) -> Sizes:
    """The sizes of x[..]."""
    rest = [s for i, s in enumerate(sizes.dims_of(n.x)) if i not in n.at]
    first = _first(n.at)
    return (*rest[:first], *_picked(n.indices), *rest[first:])


def _lower_index_put(n: NodeView, x: Any, values: Any, indices: Any) -> Call:
    where = places(n.at, indices)
    if None not in where:
        return Call(torch.index_put, x, indices, values, bool(n.accumulate))
    return Call(torch.ops.aten.index_put.default, x, where, values, bool(n.accumulate))


def _index_put_gradient(op: Builder, n: NodeView, dy: ir.Value) -> Sequence[ir.Value | None]:
    dx: ir.Value | None = dy
    if not n.accumulate and n.wants("x"):
        dx = op.own.IndexPut(dy, op.scalar(0, like=dy), *n.indices, at=n.at)
    dvalues = op.own.Index(dy, *n.indices, at=n.at) if n.wants("values") else None
    return [dx, dvalues, *[None] * len(n.indices)]


def _index_put_body(op: Builder, n: NodeView) -> ir.Value:
    return _written(op, n, n.x, expanded(op, n.values, _put_sizes(n)), bool(n.accumulate))


def _index_put_axes(n: NodeView) -> str:
    """Axes of x pass; along the picked axes all of `values` is needed."""
    outer, indices, right = _summed_axes(n, rank_of(n.x))
    target, shape = _put_sizes(n), sizes.dims_of(n.values)
    skipped = len(target) - len(shape)
    values = [
        "1" if size == 1 else right[k + skipped] if size == target[k + skipped] else f"[v{k}]"
        for k, size in enumerate(shape)
    ]
    return format_axis_map([outer, values, *indices], outer)


def _capture_index_put(
    op: Builder, x: ir.Value, indices: Sequence[Argument], values: ir.Value, accumulate: bool = False
) -> Any:
    values = cast(op, values, dtype_of(x))
    given = [i for i in indices if i is not None]
    if len(given) == 1 and _is_mask(given[0]) and not accumulate and not rank_of(values):
        return _filled_where(op, x, given[0], indices.index(given[0]), values)
    if any(map(_is_mask, given)) and not all(map(_is_mask, given)):
        return NotImplemented
    at, found = _resolved(op, x, indices, None)
    if not found:
        return NotImplemented
    result: ir.Value = op.own.IndexPut(x, values, *found, at=at, accumulate=int(accumulate))
    return result


def _filled_where(op: Builder, x: ir.Value, mask: ir.Value, axis: int, value: ir.Value) -> ir.Value:
    """x[.., mask, ..] = number needs no places."""
    mask = cast(op, mask, ir.DataType.BOOL)
    after = rank_of(x) - axis - rank_of(mask)
    mask = unsqueezed(op, mask, *range(rank_of(mask), rank_of(mask) + after))
    result: ir.Value = op.Where(mask, value, x)
    return result


INDEX_PUT = define_movement(
    "IndexPut",
    ("x", "values", "indices..."),
    lambda n: (TensorType(dtype_of(n.x), sizes.dims_of(n.x)),),
    (
        Kernel(lower=_lower_index_put, applies=lambda n, device: device == "cpu" and not n.accumulate),
        Kernel(
            lower=lambda n, x, values, indices: Call(add_in_order, x, n.at, indices, values),
            applies=lambda n, device: bool(n.accumulate),
        ),
        Kernel(lower=_lower_index_put, deterministic=False),  # the last of several values of one place wins by chance
    ),
    _index_put_gradient,
    reads=("indices",),
    domain=OWN,
    attributes={"at": REQUIRED, "accumulate": 0},
    from_torch={
        "aten.index_put.default": _capture_index_put,
        "aten._unsafe_index_put.default": _capture_index_put,
    },
    body=_index_put_body,
    axes=_index_put_axes,
    nondiff_inputs=frozenset({"indices"}),
)


# NonZero(x) -> the coordinates of the elements that are not 0, [rank, count]. How many there are only the run can tell.


def true_places(op: Builder, mask: ir.Value, count: Size | None) -> list[ir.Value]:
    """For each axis of `mask`, the positions of its true elements; `count` is the name of their number."""
    rank = rank_of(mask)
    types = None if count is None else [TensorType(ir.DataType.INT64, (rank, count))]
    coordinates = op.node("", "NonZero", (mask,), {}, types=types).outputs[0]
    if rank == 1:
        return [op.Squeeze(coordinates, int64_vector(op, [0]))]
    column = TensorType(ir.DataType.INT64, (1, sizes.dims_of(coordinates)[1]))
    rows = op.node("", "Split", (coordinates, op.sizes([1] * rank)), {"axis": 0}, types=[column] * rank).outputs
    return [op.Squeeze(row, int64_vector(op, [0])) for row in rows]


def _nonzero_type(n: NodeView) -> Sequence[TensorType]:
    # One value has one count: its name tells counts apart.
    name = "".join(c if c.isalnum() else "_" for c in n.x.name or "value")
    return (TensorType(ir.DataType.INT64, (rank_of(n.x), f"count_{name}")),)


def _nonzero(x: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(x).t()


def _capture_nonzero(op: Builder, x: ir.Value) -> Any:
    count, rank = op.out[0].shape
    if not rank:
        return NotImplemented
    coordinates = op.node("", "NonZero", (x,), {}, types=[TensorType(ir.DataType.INT64, (rank, count))]).outputs[0]
    return transposed(op, coordinates, [1, 0])


def _capture_nonzero_numpy(op: Builder, x: ir.Value) -> tuple[ir.Value, ...]:
    if not rank_of(x):
        x = unsqueezed(op, x, 0)
    return tuple(true_places(op, x, op.out[0].shape[0]))


NON_ZERO = define_movement(
    "NonZero",
    ("x",),
    _nonzero_type,
    lambda n, x: Call(_nonzero, x),
    None,
    since_version=13,
    from_torch={
        "aten.nonzero.default": _capture_nonzero,
        "aten.nonzero_numpy.default": _capture_nonzero_numpy,
    },
    effects=Effects.HOST_SYNC,
)
