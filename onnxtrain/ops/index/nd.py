"""GatherND and ScatterND: parts of a tensor at places given by vectors of coordinates; their gradients.

    GatherND(x, places[.., k]) -> y[.., rest]           y[i] = x[places[i, 0], .., places[i, k-1]]
    ScatterND(x, places[.., k], updates[.., rest])      y = x, then y[places[i]] = updates[i]

With batch_dims = b the first b axes of x and places go together. Coordinates below 0 count from the end.
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
from onnxtrain.ops.index.negative import from_size
from onnxtrain.ops.index.scatter import Places, scatter_gradient
from onnxtrain.ops.reshape.movement import axis_names, define_movement, format_axis_map
from onnxtrain.ops.reshape.rows import arange, vector_along, zeros
from onnxtrain.ops.symbolic_ints import required_ints


def _depth(places: ir.Value) -> int:
    depth = sizes.dims_of(places)[-1]
    if not isinstance(depth, int):
        raise GraphError("the number of coordinates must be known", got=f"{places.name} with {depth} coordinates")
    return depth


def _gathered_type(n: NodeView) -> Sequence[TensorType]:
    rest = sizes.dims_of(n.x)[n.batch_dims + _depth(n.places) :]
    return (TensorType(dtype_of(n.x), (*sizes.dims_of(n.places)[:-1], *rest)),)


def _coordinates(shape: Sequence[int], places: torch.Tensor, batch_dims: int) -> tuple[torch.Tensor, ...]:
    """One index tensor per indexed axis; batch axes are indexed by their own positions."""
    outer = places.dim() - 1
    batch = [
        torch.arange(shape[i], device=places.device).view([-1 if k == i else 1 for k in range(outer)])
        for i in range(batch_dims)
    ]
    return (*batch, *places.unbind(-1))


def _gather_nd(x: torch.Tensor, places: torch.Tensor, batch_dims: int) -> torch.Tensor:
    index = _coordinates(x.shape, places, batch_dims)
    return x.expand(places.shape[:-1] + x.shape) if not index else torch.ops.aten.index.Tensor(x, index)


def _gather_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[ir.Value, None]:
    return op.ms.GatherNDGrad(op.shape_of(n.x), n.places, dy, batch_dims=n.batch_dims), None


def _names(n: NodeView, whole: int) -> tuple[list[str], list[str], list[str]]:
    """Axis names of the tensor, of the places and of the updates."""
    batch, outer = n.batch_dims, rank_of(n.places) - 1
    picked = axis_names("i", outer)
    rest = axis_names("r", whole - batch - _depth(n.places))
    indexed = [f"[x{k}]" for k in range(_depth(n.places))]
    return [*picked[:batch], *indexed, *rest], [*picked, "[k]"], [*picked, *rest]


def _gather_axes(n: NodeView) -> str:
    left, places, right = _names(n, rank_of(n.x))
    batch = n.batch_dims
    # A batch axis that is broadcast does not pass.
    left[:batch] = [
        word if have == want else f"[b{k}]"
        for k, (word, have, want) in enumerate(
            zip(left[:batch], sizes.dims_of(n.x), sizes.dims_of(n.places), strict=False)
        )
    ]
    return format_axis_map([left, places], right)


GATHER_ND = define_movement(
    "GatherND",
    ("x", "places"),
    _gathered_type,
    lambda n, x, places: Call(_gather_nd, x, places, n.batch_dims),
    _gather_gradient,
    reads=("places",),
    attributes={"batch_dims": 0},
    since_version=13,
    axes=_gather_axes,
    nondiff_inputs=frozenset({"places"}),
)


# GatherNDGrad(shape, places, dy, batch_dims) -> dx[shape]


def _gather_nd_grad(shape: tuple[int, ...], places: torch.Tensor, dy: torch.Tensor, batch_dims: int) -> torch.Tensor:
    index = _coordinates(shape, places, batch_dims)
    return add_to_zeros(shape, range(len(index)), index, dy) if index else dy.sum_to_size(shape)


def _gather_nd_grad_body(op: Builder, n: NodeView) -> ir.Value:
    places = cast(op, n.places, ir.DataType.INT64)
    batch, outer = sizes.dims_of(places)[: n.batch_dims], sizes.dims_of(places)[:-1]
    if n.batch_dims:
        columns = [
            op.Expand(vector_along(op, arange(op, size), i, len(outer) + 1), op.sizes((*outer, 1)))
            for i, size in enumerate(batch)
        ]
        places = op.Concat(*columns, places, axis=len(outer))
    result: ir.Value = op.ScatterND(zeros(op, sizes.dims_of(n.dx), dtype_of(n.dy)), places, n.dy, reduction="add")
    return result


def _gather_nd_grad_axes(n: NodeView) -> str:
    left, places, right = _names(n, len(sizes.dims_of(n.dx)))
    summed = {word: f"[{word}]" for word in places[:-1] if word not in left}
    return format_axis_map(
        [None, [summed.get(w, w) for w in places], [summed.get(w, w) for w in right]],
        [w if w.startswith(("r", "[")) else f"[{w}]" for w in left],
    )


def _lower_gather_nd_grad(n: NodeView, shape: Any, places: Any, dy: Any) -> Call:
    return Call(_gather_nd_grad, shape, places, dy, n.batch_dims)


GATHER_ND_GRAD = define_movement(
    "GatherNDGrad",
    ("shape", "places", "dy"),
    lambda n: (TensorType(dtype_of(n.dy), required_ints(n.shape, "the shape that GatherNDGrad gives")),),
    _lower_gather_nd_grad,
    None,
    takes_ints=frozenset({0}),
    domain=MICROSOFT,
    outputs=("dx",),
    attributes={"batch_dims": 0},
    body=_gather_nd_grad_body,
    axes=_gather_nd_grad_axes,
    nondiff_inputs=frozenset({"shape", "places"}),
)


# ScatterND: an update replaces what is there, or is reduced with it.

_REDUCE = {"mul": "prod", "max": "amax", "min": "amin"}


def _scatter_nd(x: torch.Tensor, places: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    return torch.index_put(x, places.unbind(-1), updates)


def _scatter_nd_add(x: torch.Tensor, places: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    return add_in_order(x, range(places.size(-1)), places.unbind(-1), updates)


def _scatter_nd_reduce(x: torch.Tensor, places: torch.Tensor, updates: torch.Tensor, how: str) -> torch.Tensor:
    """The indexed axes as one, whose places count through all of them."""
    depth = places.size(-1)
    indexed, rest = x.shape[:depth], x.shape[depth:]
    flat = torch.zeros(places.shape[:-1], dtype=torch.int64, device=x.device)
    for size, place in zip(indexed, places.unbind(-1), strict=True):
        flat = flat * size + from_size(place, size)
    rows = flat.reshape(-1, 1).expand(-1, rest.numel())
    result = x.reshape(indexed.numel(), rest.numel()).scatter_reduce(0, rows, updates.reshape(rows.shape), how)
    return result.view(x.shape)


def _lower_scatter_nd(n: NodeView, x: Any, places: Any, updates: Any) -> Call:
    if n.reduction in _REDUCE:
        return Call(_scatter_nd_reduce, x, places, updates, _REDUCE[n.reduction])
    if n.reduction not in ("none", "add") or _depth(n.places) == 0:
        raise GraphError("ScatterND does not know the reduction", "none, add, mul, max, min", n.reduction)
    return Call(_scatter_nd if n.reduction == "none" else _scatter_nd_add, x, places, updates)


def _scatter_nd_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[ir.Value | None, None, ir.Value | None]:
    places = Places(
        lambda x: op.GatherND(x, n.places),
        lambda x, updates, reduction: op.ScatterND(x, n.places, updates, reduction=reduction),
    )
    return scatter_gradient(op, n, dy, places)


def _scatter_nd_axes(n: NodeView) -> str:
    depth, outer = _depth(n.places), rank_of(n.places) - 1
    picked = [f"[i{k}]" for k in range(outer)]
    rest = axis_names("r", rank_of(n.x) - depth)
    whole = [f"[x{k}]" for k in range(depth)] + rest
    return format_axis_map([whole, [*picked, "[k]"], [*picked, *rest]], whole)


SCATTER_ND = define_movement(
    "ScatterND",
    ("x", "places", "updates"),
    same_as("x"),
    (
        Kernel(lower=_lower_scatter_nd, applies=lambda n, device: device == "cpu" or n.reduction != "none"),
        Kernel(lower=_lower_scatter_nd, deterministic=False),  # the last of several updates of one place wins by chance
    ),
    _scatter_nd_gradient,
    reads=("x", "places", "updates", "y"),
    attributes={"reduction": "none"},
    since_version=18,
    axes=_scatter_nd_axes,
    nondiff_inputs=frozenset({"places"}),
)
