"""GatherElements and ScatterElements: one index along an axis for each element; and their gradients.

    GatherElements(x, indices) -> y                  y[i, j, k] = x[indices[i, j, k], j, k]              for axis 0
    ScatterElements(x, indices, updates) -> y        y = x, then y[indices[i, j, k], j, k] = updates[i, j, k]

`reduction` combines an update with the element: none (replaces it), add, mul, max or min. Negative indices count from
the end. PyTorch's kernels raise for them, so nodes captured from PyTorch have none.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import UnsupportedOperatorError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Sizes
from onnxtrain.graph.values import MICROSOFT, TensorType, dtype_of, is_float, rank_of
from onnxtrain.ops.body_parts import as_value, cast, int64_vector, reshaped
from onnxtrain.ops.constructors import same_as
from onnxtrain.ops.definition import Call, Kernel, Method, NodeView
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.index.negative_indices import (
    is_non_negative,
    mark_non_negative,
    wrap_negative,
    wrap_negative_in_axis,
)
from onnxtrain.ops.index.scatter_gradient import TORCH_REDUCTIONS, IndexedAccess, scatter_gradient
from onnxtrain.ops.reshape.dims import expanded
from onnxtrain.ops.reshape.movement import axis_names, axis_of, checked_axis, define_movement, format_axis_map
from onnxtrain.ops.reshape.rows import zeros
from onnxtrain.ops.symbolic_ints import required_ints


def _axis_names(axis: int, x_shape: Sizes, index_shape: Sizes) -> tuple[list[str], list[str]]:
    """Return the axis names of x and of the indices. An axis passes through if both are known to have the same size."""
    left, right = axis_names("a", len(x_shape)), axis_names("a", len(index_shape))
    for k, (x_size, index_size) in enumerate(zip(x_shape, index_shape, strict=True)):
        if k == axis:
            left[k], right[k] = f"[x{k}]", f"p{k}"
        elif x_size != index_size:
            left[k], right[k] = f"[x{k}]", f"[p{k}]"
    return left, right


def _gather_axes(n: NodeView) -> str:
    left, right = _axis_names(axis_of(n, n.x), sizes.dims_of(n.x), sizes.dims_of(n.indices))
    return format_axis_map([left, right], right)


def _scalars_as_vectors(op: Builder, *values: ir.Value) -> tuple[ir.Value, ...]:
    """Reshape 0-dimensional values to vectors of one element, as which PyTorch treats them."""
    return tuple(reshaped(op, v, (1,)) if rank_of(v) == 0 else v for v in values)


def _capture_gather(op: Builder, x: ir.Value, dim: int, index: ir.Value, *, sparse_grad: bool = False) -> ir.Value:
    if sparse_grad:
        raise UnsupportedOperatorError("sparse gradients of gather are not supported", todo="set sparse_grad=False")
    x, index = _scalars_as_vectors(op, x, index)
    axis = checked_axis(dim, rank_of(x), "the axis of gather")
    return reshaped(op, mark_non_negative(op.GatherElements(x, index, axis=axis)), op.out[0].shape)


def _capture_take_along(op: Builder, x: ir.Value, indices: ir.Value, dim: int | None = None) -> ir.Value:
    """Capture `take_along_dim`: gather with x and the indices broadcast along the other axes."""
    if dim is None:
        x, indices = (reshaped(op, v, (sizes.multiply(1, *sizes.dims_of(v)),)) for v in (x, indices))
    axis = checked_axis(dim or 0, rank_of(x), "the axis of take_along_dim")
    x_shape, index_shape = list(sizes.dims_of(x)), list(sizes.dims_of(indices))
    shared = sizes.broadcast(
        [*x_shape[:axis], 1, *x_shape[axis + 1 :]], [*index_shape[:axis], 1, *index_shape[axis + 1 :]]
    )
    x = expanded(op, x, (*shared[:axis], x_shape[axis], *shared[axis + 1 :]))
    indices = expanded(op, indices, (*shared[:axis], index_shape[axis], *shared[axis + 1 :]))
    return op.GatherElements(x, indices, axis=axis)


def _torch_indices(n: NodeView, indices: Any, x: Any) -> Any:
    """Return the indices as PyTorch requires them: int64 and not negative."""
    if dtype_of(n.indices) != ir.DataType.INT64:
        indices = Method("long", indices)
    return (
        indices
        if is_non_negative(n, n.indices)
        else Call(wrap_negative_in_axis, indices, x, axis_of(n, n.node.outputs[0]))
    )


GATHER_ELEMENTS = define_movement(
    "GatherElements",
    ("x", "indices"),
    lambda n: (TensorType(dtype_of(n.x), sizes.dims_of(n.indices)),),
    lambda n, x, indices: Call(torch.gather, x, axis_of(n, n.x), _torch_indices(n, indices, x)),
    lambda op, n, dy: (op.ms.GatherElementsGrad(dy, op.shape_of(n.x), n.indices, axis=axis_of(n, n.x)), None),
    reads=("indices",),
    attributes={"axis": 0},
    from_torch={"aten.gather.default": _capture_gather, "aten.take_along_dim.default": _capture_take_along},
    axes=_gather_axes,
    nondiff_inputs=frozenset({"indices"}),
)


# GatherElementsGrad(dy, shape, indices, axis) -> dx[shape]: dy scatter-added to zeros


def _scatter_add(dy: torch.Tensor, shape: tuple[int, ...], axis: int, indices: torch.Tensor) -> torch.Tensor:
    return dy.new_zeros(shape).scatter_add_(axis, indices, dy)


def _lower_gather_grad(n: NodeView, dy: Any, shape: Any, indices: Any) -> Call:
    axis = axis_of(n, n.dy)
    if dtype_of(n.indices) != ir.DataType.INT64:
        indices = Method("long", indices)
    indices = indices if is_non_negative(n, n.indices) else Call(wrap_negative, indices, shape[axis])
    return Call(_scatter_add, dy, shape, axis, indices)


def _gather_grad_body(op: Builder, n: NodeView) -> ir.Value:
    indices = cast(op, n.indices, ir.DataType.INT64)
    dx = zeros(op, sizes.dims_of(n.dx), dtype_of(n.dy))
    return op.ScatterElements(dx, indices, n.dy, axis=axis_of(n, n.dy), reduction="add")


def _gather_grad_axes(n: NodeView) -> str:
    left, right = _axis_names(axis_of(n, n.dy), sizes.dims_of(n.dx), sizes.dims_of(n.indices))
    shared = [name if name in left else f"[{name}]" for name in right]
    return format_axis_map([shared, None, shared], left)


GATHER_ELEMENTS_GRAD = define_movement(
    "GatherElementsGrad",
    ("dy", "shape", "indices"),
    lambda n: (TensorType(dtype_of(n.dy), required_ints(n.shape, "the shape of GatherElementsGrad")),),
    (
        Kernel(lower=_lower_gather_grad, host_inputs=frozenset({1}), applies=lambda n, device: device == "cpu"),
        Kernel(lower=_lower_gather_grad, host_inputs=frozenset({1}), deterministic=False),  # adds atomically
    ),
    None,
    domain=MICROSOFT,
    outputs=("dx",),
    attributes={"axis": 0},
    body=_gather_grad_body,
    axes=_gather_grad_axes,
    nondiff_inputs=frozenset({"shape", "indices"}),
)


# ScatterElements

_ONNX_REDUCTIONS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}


def _lower_scatter(n: NodeView, x: Any, indices: Any, updates: Any) -> Call:
    axis = axis_of(n, n.x)
    indices = _torch_indices(n, indices, x)
    if n.reduction == "none":
        return Call(torch.scatter, x, axis, indices, updates)
    if n.reduction == "add":
        return Call(torch.scatter_add, x, axis, indices, updates)
    return Call(torch.scatter_reduce, x, axis, indices, updates, TORCH_REDUCTIONS[n.reduction], include_self=True)


def _scatter_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[ir.Value | None, None, ir.Value | None]:
    axis = axis_of(n, n.x)
    access = IndexedAccess(
        lambda x: op.GatherElements(x, n.indices, axis=axis),
        lambda x, updates, reduction: op.ScatterElements(x, n.indices, updates, axis=axis, reduction=reduction),
    )
    return scatter_gradient(op, n, dy, access)


def _scatter_axes(n: NodeView) -> str:
    left, right = _axis_names(axis_of(n, n.x), sizes.dims_of(n.x), sizes.dims_of(n.indices))
    shared = [name if name in left else f"[{name}]" for name in right]
    return format_axis_map([left, shared, shared], left)


def _scattered(op: Builder, x: ir.Value, dim: int, index: ir.Value, source: Any, reduction: str = "none") -> ir.Value:
    """Build a scatter; PyTorch reads only as much of `source` as the indices cover."""
    shape = sizes.dims_of(x)
    x, index = _scalars_as_vectors(op, x, index)
    if isinstance(source, ir.Value) and rank_of(source):
        updates = _sliced_to(op, source, sizes.dims_of(index))
    else:
        updates = expanded(op, as_value(op, source, dtype_of(x)), sizes.dims_of(index))
    axis = checked_axis(dim, rank_of(x), "the axis of scatter")
    return reshaped(op, mark_non_negative(op.ScatterElements(x, index, updates, axis=axis, reduction=reduction)), shape)


def _sliced_to(op: Builder, source: ir.Value, shape: Sizes) -> ir.Value:
    """Slice each axis of `source` from 0 to the size in `shape`."""
    axes = [i for i, (size, end) in enumerate(zip(sizes.dims_of(source), shape, strict=True)) if size != end]
    if not axes:
        return source
    starts, ends = int64_vector(op, [0] * len(axes)), op.sizes([shape[i] for i in axes])
    result: ir.Value = op.Slice(source, starts, ends, int64_vector(op, axes))
    return reshaped(op, result, shape)  # PyTorch has checked that `source` is large enough


def _capture_scatter(op: Builder, x: ir.Value, dim: int, index: ir.Value, source: Any) -> ir.Value:
    return _scattered(op, x, dim, index, source)


def _capture_scatter_add(op: Builder, x: ir.Value, dim: int, index: ir.Value, source: ir.Value) -> ir.Value:
    return _scattered(op, x, dim, index, source, "add")


def _identity_element(reduction: str, dtype: ir.DataType) -> Any:
    """Return the value that a reduction with any other value ignores."""
    if reduction in ("sum", "mean", "prod"):
        return 1 if reduction == "prod" else 0
    limits = torch.finfo(TORCH_DTYPES[dtype]) if is_float(dtype) else torch.iinfo(TORCH_DTYPES[dtype])
    lowest, highest = (-math.inf, math.inf) if is_float(dtype) else (limits.min, limits.max)
    return lowest if reduction == "amax" else highest


def _capture_scatter_reduce(
    op: Builder, x: ir.Value, dim: int, index: ir.Value, source: ir.Value, reduce: str, *, include_self: bool = True
) -> Any:
    if reduce == "mean":
        return _scattered_mean(op, x, dim, index, source, include_self)
    if not include_self:
        x = _scattered(op, x, dim, index, _identity_element(reduce, dtype_of(x)))
    return _scattered(op, x, dim, index, source, _ONNX_REDUCTIONS[reduce])


def _scattered_mean(op: Builder, x: ir.Value, dim: int, index: ir.Value, source: ir.Value, include_self: bool) -> Any:
    """Divide the sum of the updates by their count; elements without an update remain."""
    if not is_float(dtype_of(x)):
        return NotImplemented
    ones = op.Expand(op.scalar(1, like=x), op.shape_of(x))
    initial_sum, initial_count = (v if include_self else _scattered(op, v, dim, index, 0) for v in (x, ones))
    total = _scattered(op, initial_sum, dim, index, source, "add")
    count = _scattered(op, initial_count, dim, index, 1, "add")
    return op.Div(total, count)


def _capture_scatter_with_reduction(
    op: Builder, x: ir.Value, dim: int, index: ir.Value, source: Any, *, reduce: str
) -> Any:
    return _scattered(op, x, dim, index, source, {"add": "add", "multiply": "mul"}[reduce])


SCATTER_ELEMENTS = define_movement(
    "ScatterElements",
    ("x", "indices", "updates"),
    same_as("x"),
    (
        Kernel(lower=_lower_scatter, applies=lambda n, device: device == "cpu" or n.reduction in ("max", "min")),
        # On a GPU, of several updates of an element any may win, and the order of additions varies.
        Kernel(lower=_lower_scatter, deterministic=False),
    ),
    _scatter_gradient,
    reads=("x", "indices", "updates", "y"),
    attributes={"axis": 0, "reduction": "none"},
    from_torch={
        "aten.scatter.src": _capture_scatter,
        "aten.scatter.value": _capture_scatter,
        "aten.scatter.reduce": _capture_scatter_with_reduction,
        "aten.scatter.value_reduce": _capture_scatter_with_reduction,
        "aten.scatter_add.default": _capture_scatter_add,
        "aten.scatter_reduce.two": _capture_scatter_reduce,
    },
    axes=_scatter_axes,
    nondiff_inputs=frozenset({"indices"}),
)
