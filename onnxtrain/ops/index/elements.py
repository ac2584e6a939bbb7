"""GatherElements and ScatterElements: one place along an axis for each element; their gradients.

    GatherElements(x, places) -> y                  y[i, j, k] = x[places[i, j, k], j, k]                     for axis 0
    ScatterElements(x, places, updates) -> y        y = x, then y[places[i, j, k], j, k] = updates[i, j, k]

`reduction` says how an update meets what is there: none (it replaces it), add, mul, max, min. Places below 0 count from
the end. PyTorch's kernels raise on them: what is captured from PyTorch has none.
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
from onnxtrain.ops.body_parts import as_value, cast, int64_vector
from onnxtrain.ops.constructors import same_as
from onnxtrain.ops.definition import Call, Kernel, Method, NodeView
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.index.negative import from_size, from_the_end, never_negative, non_negative
from onnxtrain.ops.index.scatter import Places, scatter_gradient
from onnxtrain.ops.reshape.dims import expanded
from onnxtrain.ops.reshape.movement import axis_names, axis_of, checked_axis, define_movement, format_axis_map
from onnxtrain.ops.reshape.rows import zeros
from onnxtrain.ops.reshape.shape import reshaped
from onnxtrain.ops.symbolic_ints import required_ints


def _shared_names(axis: int, whole: Sizes, part: Sizes) -> tuple[list[str], list[str]]:
    """Axis names of a tensor and of the places in it. An axis passes where both are proven of one size."""
    left, right = axis_names("a", len(whole)), axis_names("a", len(part))
    for k, (have, want) in enumerate(zip(whole, part, strict=True)):
        if k == axis:
            left[k], right[k] = f"[x{k}]", f"p{k}"
        elif have != want:
            left[k], right[k] = f"[x{k}]", f"[p{k}]"
    return left, right


def _gather_axes(n: NodeView) -> str:
    left, right = _shared_names(axis_of(n, n.x), sizes.dims_of(n.x), sizes.dims_of(n.places))
    return format_axis_map([left, right], right)


def _scalars_as_vectors(op: Builder, *values: ir.Value) -> tuple[ir.Value, ...]:
    """PyTorch takes 0-dimensional tensors for vectors of one element; ONNX has no axis in them."""
    return tuple(reshaped(op, v, (1,)) if rank_of(v) == 0 else v for v in values)


def _capture_gather(op: Builder, x: ir.Value, dim: int, index: ir.Value, *, sparse_grad: bool = False) -> ir.Value:
    if sparse_grad:
        raise UnsupportedOperatorError("gather with sparse gradients", todo="set sparse_grad=False")
    x, index = _scalars_as_vectors(op, x, index)
    axis = checked_axis(dim, rank_of(x), "the axis of gather")
    return reshaped(op, non_negative(op.GatherElements(x, index, axis=axis)), op.out[0].shape)


def _capture_take_along(op: Builder, x: ir.Value, indices: ir.Value, dim: int | None = None) -> ir.Value:
    """Gather, where x and the indices are broadcast along the other axes."""
    if dim is None:
        x, indices = (reshaped(op, v, (sizes.multiply(1, *sizes.dims_of(v)),)) for v in (x, indices))
    axis = checked_axis(dim or 0, rank_of(x), "the axis of take_along_dim")
    source, wanted = list(sizes.dims_of(x)), list(sizes.dims_of(indices))
    shared = sizes.broadcast([*source[:axis], 1, *source[axis + 1 :]], [*wanted[:axis], 1, *wanted[axis + 1 :]])
    x = expanded(op, x, (*shared[:axis], source[axis], *shared[axis + 1 :]))
    indices = expanded(op, indices, (*shared[:axis], wanted[axis], *shared[axis + 1 :]))
    result: ir.Value = op.GatherElements(x, indices, axis=axis)
    return result


def _places(n: NodeView, places: Any, x: Any) -> Any:
    """As PyTorch wants them: int64, and not negative."""
    if dtype_of(n.places) != ir.DataType.INT64:
        places = Method("long", places)
    return places if never_negative(n, n.places) else Call(from_the_end, places, x, axis_of(n, n.node.outputs[0]))


GATHER_ELEMENTS = define_movement(
    "GatherElements",
    ("x", "places"),
    lambda n: (TensorType(dtype_of(n.x), sizes.dims_of(n.places)),),
    lambda n, x, places: Call(torch.gather, x, axis_of(n, n.x), _places(n, places, x)),
    lambda op, n, dy: (op.ms.GatherElementsGrad(dy, op.shape_of(n.x), n.places, axis=axis_of(n, n.x)), None),
    reads=("places",),
    attributes={"axis": 0},
    since_version=13,
    from_torch={"aten.gather.default": _capture_gather, "aten.take_along_dim.default": _capture_take_along},
    axes=_gather_axes,
    nondiff_inputs=frozenset({"places"}),
)


# GatherElementsGrad(dy, shape, places, axis) -> dx[shape]: dy added up where it was gathered from.


def _scatter_add(dy: torch.Tensor, shape: tuple[int, ...], axis: int, places: torch.Tensor) -> torch.Tensor:
    return dy.new_zeros(shape).scatter_add_(axis, places, dy)


def _lower_gather_grad(n: NodeView, dy: Any, shape: Any, places: Any) -> Call:
    axis = axis_of(n, n.dy)
    if dtype_of(n.places) != ir.DataType.INT64:
        places = Method("long", places)
    places = places if never_negative(n, n.places) else Call(from_size, places, shape[axis])
    return Call(_scatter_add, dy, shape, axis, places)


def _gather_grad_body(op: Builder, n: NodeView) -> ir.Value:
    places = cast(op, n.places, ir.DataType.INT64)
    start = zeros(op, sizes.dims_of(n.dx), dtype_of(n.dy))
    result: ir.Value = op.ScatterElements(start, places, n.dy, axis=axis_of(n, n.dy), reduction="add")
    return result


def _gather_grad_axes(n: NodeView) -> str:
    left, right = _shared_names(axis_of(n, n.dy), sizes.dims_of(n.dx), sizes.dims_of(n.places))
    shared = [word if word in left else f"[{word}]" for word in right]
    return format_axis_map([shared, None, shared], left)


GATHER_ELEMENTS_GRAD = define_movement(
    "GatherElementsGrad",
    ("dy", "shape", "places"),
    lambda n: (TensorType(dtype_of(n.dy), required_ints(n.shape, "the shape that GatherElementsGrad gives")),),
    (
        Kernel(lower=_lower_gather_grad, host_inputs=frozenset({1}), applies=lambda n, device: device == "cpu"),
        Kernel(lower=_lower_gather_grad, host_inputs=frozenset({1}), deterministic=False),  # atomic additions
    ),
    None,
    domain=MICROSOFT,
    outputs=("dx",),
    attributes={"axis": 0},
    body=_gather_grad_body,
    axes=_gather_grad_axes,
    nondiff_inputs=frozenset({"shape", "places"}),
)


# ScatterElements: the reductions under ATen's names

_REDUCE = {"mul": "prod", "max": "amax", "min": "amin"}
_ONNX_REDUCTIONS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}


def _lower_scatter(n: NodeView, x: Any, places: Any, updates: Any) -> Call:
    axis = axis_of(n, n.x)
    places = _places(n, places, x)
    if n.reduction == "none":
        return Call(torch.scatter, x, axis, places, updates)
    if n.reduction == "add":
        return Call(torch.scatter_add, x, axis, places, updates)
    return Call(torch.scatter_reduce, x, axis, places, updates, _REDUCE[n.reduction], include_self=True)


def _scatter_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[ir.Value | None, None, ir.Value | None]:
    axis = axis_of(n, n.x)
    places = Places(
        lambda x: op.GatherElements(x, n.places, axis=axis),
        lambda x, updates, reduction: op.ScatterElements(x, n.places, updates, axis=axis, reduction=reduction),
    )
    return scatter_gradient(op, n, dy, places)


def _scatter_axes(n: NodeView) -> str:
    left, right = _shared_names(axis_of(n, n.x), sizes.dims_of(n.x), sizes.dims_of(n.places))
    shared = [word if word in left else f"[{word}]" for word in right]
    return format_axis_map([left, shared, shared], left)


def _scattered(op: Builder, x: ir.Value, dim: int, index: ir.Value, source: Any, reduction: str = "none") -> ir.Value:
    """PyTorch reads only as much of `source` as there are places."""
    shape = sizes.dims_of(x)
    x, index = _scalars_as_vectors(op, x, index)
    if isinstance(source, ir.Value) and rank_of(source):
        updates = _first(op, source, sizes.dims_of(index))
    else:
        updates = expanded(op, as_value(op, source, dtype_of(x)), sizes.dims_of(index))
    axis = checked_axis(dim, rank_of(x), "the axis of scatter")
    return reshaped(op, non_negative(op.ScatterElements(x, index, updates, axis=axis, reduction=reduction)), shape)


def _first(op: Builder, source: ir.Value, wanted: Sizes) -> ir.Value:
    """The first `wanted` elements of each axis."""
    larger = [i for i, (have, want) in enumerate(zip(sizes.dims_of(source), wanted, strict=True)) if have != want]
    if not larger:
        return source
    starts, ends = int64_vector(op, [0] * len(larger)), op.sizes([wanted[i] for i in larger])
    result: ir.Value = op.Slice(source, starts, ends, int64_vector(op, larger))
    return reshaped(op, result, wanted)  # PyTorch has checked that there are as many


def _capture_scatter(op: Builder, x: ir.Value, dim: int, index: ir.Value, source: Any) -> ir.Value:
    return _scattered(op, x, dim, index, source)


def _capture_scatter_add(op: Builder, x: ir.Value, dim: int, index: ir.Value, source: ir.Value) -> ir.Value:
    return _scattered(op, x, dim, index, source, "add")


def _neutral(reduction: str, dtype: ir.DataType) -> Any:
    """What leaves the other operand of a reduction as it is."""
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
        x = _scattered(op, x, dim, index, _neutral(reduce, dtype_of(x)))
    return _scattered(op, x, dim, index, source, _ONNX_REDUCTIONS[reduce])


def _scattered_mean(op: Builder, x: ir.Value, dim: int, index: ir.Value, source: ir.Value, include_self: bool) -> Any:
    """The sum by the count; where nothing came, what was there."""
    if not is_float(dtype_of(x)):
        return NotImplemented
    one = op.scalar(1, like=x)
    start = x if include_self else _scattered(op, x, dim, index, 0)
    summed = _scattered(op, start, dim, index, source, "add")
    ones = op.Expand(one, op.shape_of(x))
    count = _scattered(op, ones if include_self else _scattered(op, ones, dim, index, 0), dim, index, 1, "add")
    return op.Div(summed, count)


def _capture_scatter_named(op: Builder, x: ir.Value, dim: int, index: ir.Value, source: Any, *, reduce: str) -> Any:
    return _scattered(op, x, dim, index, source, {"add": "add", "multiply": "mul"}[reduce])


SCATTER_ELEMENTS = define_movement(
    "ScatterElements",
    ("x", "places", "updates"),
    same_as("x"),
    (
        Kernel(lower=_lower_scatter, applies=lambda n, device: device == "cpu" or n.reduction in ("max", "min")),
        # On a GPU the last of several updates of one place, and the order of additions, are left to chance.
        Kernel(lower=_lower_scatter, deterministic=False),
    ),
    _scatter_gradient,
    reads=("x", "places", "updates", "y"),
    attributes={"axis": 0, "reduction": "none"},
    since_version=18,
    from_torch={
        "aten.scatter.src": _capture_scatter,
        "aten.scatter.value": _capture_scatter,
        "aten.scatter.reduce": _capture_scatter_named,
        "aten.scatter.value_reduce": _capture_scatter_named,
        "aten.scatter_add.default": _capture_scatter_add,
        "aten.scatter_reduce.two": _capture_scatter_reduce,
    },
    axes=_scatter_axes,
    nondiff_inputs=frozenset({"places"}),
)
