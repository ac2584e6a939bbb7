"""GatherND and ScatterND: slices of a tensor at vectors of coordinates; and their gradients.

    GatherND(x, indices[.., k]) -> y[.., rest]           y[i] = x[indices[i, 0], .., indices[i, k-1]]
    ScatterND(x, indices[.., k], updates[.., rest])      y = x, then y[indices[i]] = updates[i]

With batch_dims = b, the first b axes of x and indices are batch axes. Negative coordinates count from the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import MICROSOFT, TensorType, dtype_of, rank_of
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.constructors import same_as
from onnxtrain.ops.definition import Call, Kernel, NodeView
from onnxtrain.ops.index.accumulate import add_in_order, add_to_zeros
from onnxtrain.ops.index.negative_indices import wrap_negative
from onnxtrain.ops.index.scatter_gradient import TORCH_REDUCTIONS, IndexedAccess, scatter_gradient
from onnxtrain.ops.reshape.movement import axis_names, define_movement, format_axis_map
from onnxtrain.ops.reshape.rows import arange, vector_along, zeros
from onnxtrain.ops.symbolic_ints import required_ints


def _depth(indices: ir.Value) -> int:
    depth = sizes.dims_of(indices)[-1]
    if not isinstance(depth, int):
        raise GraphError(
            f"the number of coordinates in {indices.name} is unknown", expected="a constant last dimension", got=depth
        )
    return depth


def _gathered_types(n: NodeView) -> Sequence[TensorType]:
    rest = sizes.dims_of(n.x)[n.batch_dims + _depth(n.indices) :]
    return (TensorType(dtype_of(n.x), (*sizes.dims_of(n.indices)[:-1], *rest)),)


def _coordinates(shape: Sequence[int], indices: torch.Tensor, batch_dims: int) -> tuple[torch.Tensor, ...]:
    """Return one index tensor per indexed axis; those of batch axes are ranges."""
    outer = indices.dim() - 1
    batch = [
        torch.arange(shape[i], device=indices.device).view([-1 if k == i else 1 for k in range(outer)])
        for i in range(batch_dims)
    ]
    return (*batch, *indices.unbind(-1))


def _gather_nd(x: torch.Tensor, indices: torch.Tensor, batch_dims: int) -> torch.Tensor:
    index = _coordinates(x.shape, indices, batch_dims)
    return x.expand(indices.shape[:-1] + x.shape) if not index else torch.ops.aten.index.Tensor(x, index)


def _gather_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[ir.Value, None]:
    return op.ms.GatherNDGrad(op.shape_of(n.x), n.indices, dy, batch_dims=n.batch_dims), None


def _axis_names(n: NodeView, rank: int) -> tuple[list[str], list[str], list[str]]:
    """Return the axis names of x, which has this rank, of the indices, and of the updates."""
    batch, outer = n.batch_dims, rank_of(n.indices) - 1
    index_axes = axis_names("i", outer)
    rest = axis_names("r", rank - batch - _depth(n.indices))
    indexed = [f"[x{k}]" for k in range(_depth(n.indices))]
    return [*index_axes[:batch], *indexed, *rest], [*index_axes, "[k]"], [*index_axes, *rest]


def _gather_axes(n: NodeView) -> str:
    left, indices, right = _axis_names(n, rank_of(n.x))
    batch = n.batch_dims
    # A broadcast batch axis does not pass through.
    left[:batch] = [
        name if x_size == index_size else f"[b{k}]"
        for k, (name, x_size, index_size) in enumerate(
            zip(left[:batch], sizes.dims_of(n.x), sizes.dims_of(n.indices), strict=False)
        )
    ]
    return format_axis_map([left, indices], right)


GATHER_ND = define_movement(
    "GatherND",
    ("x", "indices"),
    _gathered_types,
    lambda n, x, indices: Call(_gather_nd, x, indices, n.batch_dims),
    _gather_gradient,
    reads=("indices",),
    attributes={"batch_dims": 0},
    axes=_gather_axes,
    nondiff_inputs=frozenset({"indices"}),
)


# GatherNDGrad(shape, indices, dy, batch_dims) -> dx[shape]


def _gather_nd_grad(shape: tuple[int, ...], indices: torch.Tensor, dy: torch.Tensor, batch_dims: int) -> torch.Tensor:
    index = _coordinates(shape, indices, batch_dims)
    return add_to_zeros(shape, range(len(index)), index, dy) if index else dy.sum_to_size(shape)


def _gather_nd_grad_body(op: Builder, n: NodeView) -> ir.Value:
    indices = cast(op, n.indices, ir.DataType.INT64)
    batch, outer = sizes.dims_of(indices)[: n.batch_dims], sizes.dims_of(indices)[:-1]
    if n.batch_dims:
        columns = [
            op.Expand(vector_along(op, arange(op, size), i, len(outer) + 1), op.sizes((*outer, 1)))
            for i, size in enumerate(batch)
        ]
        indices = op.Concat(*columns, indices, axis=len(outer))
    return op.ScatterND(zeros(op, sizes.dims_of(n.dx), dtype_of(n.dy)), indices, n.dy, reduction="add")


def _gather_nd_grad_axes(n: NodeView) -> str:
    left, indices, right = _axis_names(n, len(sizes.dims_of(n.dx)))
    summed = {name: f"[{name}]" for name in indices[:-1] if name not in left}
    return format_axis_map(
        [None, [summed.get(name, name) for name in indices], [summed.get(name, name) for name in right]],
        [name if name.startswith(("r", "[")) else f"[{name}]" for name in left],
    )


def _lower_gather_nd_grad(n: NodeView, shape: Any, indices: Any, dy: Any) -> Call:
    return Call(_gather_nd_grad, shape, indices, dy, n.batch_dims)


GATHER_ND_GRAD = define_movement(
    "GatherNDGrad",
    ("shape", "indices", "dy"),
    lambda n: (TensorType(dtype_of(n.dy), required_ints(n.shape, "the shape of GatherNDGrad")),),
    _lower_gather_nd_grad,
    None,
    host_inputs=frozenset({0}),
    domain=MICROSOFT,
    outputs=("dx",),
    attributes={"batch_dims": 0},
    body=_gather_nd_grad_body,
    axes=_gather_nd_grad_axes,
    nondiff_inputs=frozenset({"shape", "indices"}),
)


# ScatterND: an update replaces an element, or is reduced with it.


def _scatter_nd(x: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    return torch.index_put(x, indices.unbind(-1), updates)


def _scatter_nd_add(x: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    return add_in_order(x, range(indices.size(-1)), indices.unbind(-1), updates)


def _scatter_nd_reduce(x: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, reduction: str) -> torch.Tensor:
    """Flatten the indexed axes to one, and run scatter_reduce on it."""
    depth = indices.size(-1)
    indexed, rest = x.shape[:depth], x.shape[depth:]
    flat = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=x.device)
    for size, coordinate in zip(indexed, indices.unbind(-1), strict=True):
        flat = flat * size + wrap_negative(coordinate, size)
    rows = flat.reshape(-1, 1).expand(-1, rest.numel())
    result = x.reshape(indexed.numel(), rest.numel()).scatter_reduce(0, rows, updates.reshape(rows.shape), reduction)
    return result.view(x.shape)


def _lower_scatter_nd(n: NodeView, x: Any, indices: Any, updates: Any) -> Call:
    if n.reduction in TORCH_REDUCTIONS:
        return Call(_scatter_nd_reduce, x, indices, updates, TORCH_REDUCTIONS[n.reduction])
    if n.reduction not in ("none", "add") or _depth(n.indices) == 0:
        raise GraphError(
            "ScatterND has an unsupported reduction or no coordinates",
            expected="none, add, mul, max or min, and at least one coordinate",
            got=f"{n.reduction} and {_depth(n.indices)} coordinates",
        )
    return Call(_scatter_nd if n.reduction == "none" else _scatter_nd_add, x, indices, updates)


def _scatter_nd_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[ir.Value | None, None, ir.Value | None]:
    access = IndexedAccess(
        lambda x: op.GatherND(x, n.indices),
        lambda x, updates, reduction: op.ScatterND(x, n.indices, updates, reduction=reduction),
    )
    return scatter_gradient(op, n, dy, access)


def _scatter_nd_axes(n: NodeView) -> str:
    depth, outer = _depth(n.indices), rank_of(n.indices) - 1
    index_axes = [f"[i{k}]" for k in range(outer)]
    rest = axis_names("r", rank_of(n.x) - depth)
    x_axes = [f"[x{k}]" for k in range(depth)] + rest
    return format_axis_map([x_axes, [*index_axes, "[k]"], [*index_axes, *rest]], x_axes)


SCATTER_ND = define_movement(
    "ScatterND",
    ("x", "indices", "updates"),
    same_as("x"),
    (
        Kernel(lower=_lower_scatter_nd, applies=lambda n, device: device == "cpu" or n.reduction != "none"),
        Kernel(lower=_lower_scatter_nd, deterministic=False),  # of several updates of an element any may win
    ),
    _scatter_nd_gradient,
    reads=("x", "indices", "updates", "y"),
    attributes={"reduction": "none"},
    axes=_scatter_nd_axes,
    nondiff_inputs=frozenset({"indices"}),
)
