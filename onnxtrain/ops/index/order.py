"""TopK and Sort: elements by size along an axis, with their places; OneHot: places as rows of zeros and a one.

    TopK(x, k) -> values, places         the k largest (or smallest); of equal ones either may come first
    Sort(x) -> values, places            all of them; with stable=1 equal ones keep their order, else they come in the
                                         order that PyTorch's kernel gives them; NaN is larger than every number
    KthValue(x, k) -> value, place       the k-th smallest, counted from 1; which of equal ones is left open

The gradient goes back to the places the values came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import MICROSOFT, OWN, TensorType, constant_of, dtype_of, is_float, rank_of
from onnxtrain.ops.body_parts import cast, int64_vector
from onnxtrain.ops.definition import Call, NodeView
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.index.negative import from_size, never_negative, non_negative
from onnxtrain.ops.reshape.movement import axis_names, axis_of, checked_axis, define_movement, format_axis_map
from onnxtrain.ops.reshape.shape import reshaped
from onnxtrain.ops.symbolic_ints import required_ints


def _ordered_gradient(op: Builder, n: NodeView, dvalues: ir.Value | None, dplaces: None) -> Sequence[ir.Value | None]:
    if dvalues is None:
        return [None] * len(n.node.inputs)
    dx = op.op(MICROSOFT, "GatherElementsGrad")(dvalues, op.shape_of(n.x), n.node.outputs[1], axis=axis_of(n, n.x))
    return [dx, *[None] * (len(n.node.inputs) - 1)]


def _ordered_axes(n: NodeView) -> str:
    axis = axis_of(n, n.x)
    left = [f"[{w}]" if i == axis else w for i, w in enumerate(axis_names("a", rank_of(n.x)))]
    right = ["[k]" if i == axis else word for i, word in enumerate(left)]
    return format_axis_map([left, *[None] * (len(n.node.inputs) - 1)], right, right)


def _top_types(n: NodeView) -> Sequence[TensorType]:
    axis = axis_of(n, n.x)
    (k,) = required_ints(n.k, "the k of TopK")
    shape = sizes.dims_of(n.x)
    kept = (*shape[:axis], k, *shape[axis + 1 :])
    return TensorType(dtype_of(n.x), kept), TensorType(ir.DataType.INT64, kept)


def _lower_top(n: NodeView, x: Any, k: Any) -> Call:
    return Call(torch.topk, x, k[0], axis_of(n, n.x), bool(n.largest), bool(n.sorted))


def _capture_topk(
    op: Builder, x: ir.Value, k: Size, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[ir.Value, ir.Value]:
    if not rank_of(x):
        values, order = _capture_topk(op, reshaped(op, x, (1,)), k, 0, largest, sorted)
        return reshaped(op, values, ()), reshaped(op, order, ())
    axis = checked_axis(dim, rank_of(x), "the axis of topk")
    wanted = dtype_of(x)
    if wanted == ir.DataType.BFLOAT16:  # which ONNX's TopK does not take
        x = cast(op, x, ir.DataType.FLOAT)
    values, order = op.TopK(x, op.sizes([k]), axis=axis, largest=int(largest), sorted=int(sorted))
    return cast(op, values, wanted), order


TOP_K = define_movement(
    "TopK",
    ("x", "k"),
    _top_types,
    _lower_top,
    _ordered_gradient,
    reads=("places",),
    takes_ints=frozenset({1}),
    outputs=("values", "places"),
    attributes={"axis": -1, "largest": 1, "sorted": 1},
    since_version=11,
    from_torch={"aten.topk.default": _capture_topk},
    axes=_ordered_axes,
    nondiff_inputs=frozenset({"k"}),
)


# Sort, along one axis


def _sort_body(op: Builder, n: NodeView) -> tuple[ir.Value, ir.Value]:
    """TopK of all elements: of equal ones the first comes first.

    ONNX does not say where NaN goes. NaN is sorted as infinity, then told apart from it by a second sort, which keeps
    the order of the first.
    """
    axis, x = axis_of(n, n.x), n.x
    how = {"axis": axis, "largest": n.descending, "sorted": 1}
    everything = op.sizes([sizes.dims_of(x)[axis]])
    if dtype_of(x) == ir.DataType.BOOL:
        numbers = op.Cast(x, to=ir.DataType.INT64)
        order = op.TopK(numbers, everything, **how)[1]
    elif is_float(dtype_of(x)):
        nan = op.IsNaN(x)
        first = op.TopK(op.Where(nan, op.scalar(float("inf"), like=x), x), everything, **how)[1]
        flags = op.GatherElements(op.Cast(nan, to=ir.DataType.INT64), first, axis=axis)
        order = op.GatherElements(first, op.TopK(flags, everything, **how)[1], axis=axis)
    else:
        order = op.TopK(x, everything, **how)[1]
    return op.GatherElements(x, order, axis=axis), order


def _capture_sort(
    op: Builder, x: ir.Value, *position: Any, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[ir.Value, ir.Value]:
    """`sort(x, dim, descending)` and `sort.stable(x, *, stable, dim, descending)`."""
    dim = position[0] if position else dim
    descending = position[1] if len(position) > 1 else descending
    how = {"descending": int(descending), "stable": int(bool(stable))}
    if not rank_of(x):
        values, order = op.own.Sort(reshaped(op, x, (1,)), axis=0, **how)
        return reshaped(op, values, ()), reshaped(op, order, ())
    found: tuple[ir.Value, ir.Value] = op.own.Sort(x, axis=checked_axis(dim, rank_of(x), "the axis of sort"), **how)
    return found


def _capture_argsort(op: Builder, x: ir.Value, *position: Any, **options: Any) -> ir.Value:
    return _capture_sort(op, x, *position, **options)[1]


def _capture_msort(op: Builder, x: ir.Value) -> ir.Value:
    return _capture_sort(op, x, 0)[0]


SORT = define_movement(
    "Sort",
    ("x",),
    lambda n: (TensorType(dtype_of(n.x), sizes.dims_of(n.x)), TensorType(ir.DataType.INT64, sizes.dims_of(n.x))),
    lambda n, x: Call(torch.sort, x, dim=axis_of(n, n.x), descending=bool(n.descending), stable=bool(n.stable)),
    _ordered_gradient,
    reads=("places",),
    domain=OWN,
    outputs=("values", "places"),
    attributes={"axis": -1, "descending": 0, "stable": 1},
    from_torch={
        "aten.sort.default": _capture_sort,
        "aten.sort.stable": _capture_sort,
        "aten.argsort.default": _capture_argsort,
        "aten.argsort.stable": _capture_argsort,
        "aten.msort.default": _capture_msort,
    },
    body=_sort_body,
    axes=_ordered_axes,
)


# KthValue, which keeps its axis with size 1


def _kth_types(n: NodeView) -> Sequence[TensorType]:
    kept = list(sizes.dims_of(n.x))
    kept[axis_of(n, n.x)] = 1
    return TensorType(dtype_of(n.x), tuple(kept)), TensorType(ir.DataType.INT64, tuple(kept))


def _kth_body(op: Builder, n: NodeView) -> tuple[ir.Value, ...]:
    """Of all that are sorted."""
    place = op.Sub(n.k, int64_vector(op, [1]))
    return tuple(op.Gather(v, place, axis=axis_of(n, n.x)) for v in op.own.Sort(n.x, axis=axis_of(n, n.x)))


def _capture_kth(op: Builder, x: ir.Value, k: Size, dim: int = -1, keepdim: bool = False) -> tuple[ir.Value, ...]:
    wide = x if rank_of(x) else reshaped(op, x, (1,))
    found = op.own.KthValue(wide, op.sizes([k]), axis=checked_axis(dim, rank_of(wide), "the axis of kthvalue"))
    return tuple(reshaped(op, v, t.shape) for v, t in zip(found, op.out, strict=True))


KTH_VALUE = define_movement(
    "KthValue",
    ("x", "k"),
    _kth_types,
    lambda n, x, k: Call(torch.kthvalue, x, k[0], axis_of(n, n.x), True),
    _ordered_gradient,
    reads=("place",),
    takes_ints=frozenset({1}),
    domain=OWN,
    outputs=("value", "place"),
    attributes={"axis": -1},
    from_torch={"aten.kthvalue.default": _capture_kth},
    body=_kth_body,
    axes=_ordered_axes,
    nondiff_inputs=frozenset({"k"}),
)


# OneHot(places, depth, values, axis): values[1] at the place, values[0] elsewhere. PyTorch's are 0 and 1, on the last
# axis; its kernel raises where a place is outside [0, depth), and so do nodes that are captured from it.


def _one_hot_type(n: NodeView) -> Sequence[TensorType]:
    shape = list(sizes.dims_of(n.hot))
    (depth,) = required_ints(n.depth, "the depth of OneHot")
    shape.insert(checked_axis(n.axis, len(shape) + 1, "the axis of OneHot"), depth)
    return (TensorType(dtype_of(n.values), tuple(shape)),)


def _one_hot(hot: torch.Tensor, depth: Any, axis: int, dtype: torch.dtype) -> torch.Tensor:
    classes = depth if isinstance(depth, int) else depth[0]
    return torch.nn.functional.one_hot(hot.long(), classes).movedim(-1, axis).to(dtype)


def hot_of_any_place(hot: torch.Tensor, depth: Any, values: torch.Tensor, axis: int) -> torch.Tensor:
    """Places below 0 count from the end; at others outside [0, depth) nothing is hot."""
    classes = depth if isinstance(depth, int) else depth[0]
    places = from_size(hot.long(), classes).unsqueeze(-1) == torch.arange(classes, device=hot.device)
    return torch.where(places, values[1], values[0]).movedim(-1, axis)


def _lower_one_hot(n: NodeView, hot: Any, depth: Any, values: Any) -> Call:
    known = constant_of(n.values)
    if known is not None and known.reshape(-1).tolist() == [0, 1] and never_negative(n, n.hot):
        return Call(_one_hot, hot, depth, n.axis, TORCH_DTYPES[dtype_of(n.values)])
    return Call(hot_of_any_place, hot, depth, values, n.axis)


def _one_hot_axes(n: NodeView) -> str:
    words = axis_names("i", rank_of(n.hot))
    right = list(words)
    right.insert(checked_axis(n.axis, len(words) + 1, "the axis of OneHot"), "[c]")
    return format_axis_map([words, None, None], right)


def _capture_one_hot(op: Builder, x: ir.Value, num_classes: Size = -1) -> Any:
    if num_classes == -1:
        return NotImplemented  # as many classes as the largest label: only the run can tell
    return non_negative(op.OneHot(x, op.size(num_classes), int64_vector(op, [0, 1]), axis=-1))


ONE_HOT = define_movement(
    "OneHot",
    ("hot", "depth", "values"),
    _one_hot_type,
    _lower_one_hot,
    None,
    takes_ints=frozenset({1}),
    attributes={"axis": -1},
    since_version=11,
    from_torch={"aten.one_hot.default": _capture_one_hot},
    axes=_one_hot_axes,
)
