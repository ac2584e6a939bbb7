"""TopK, Sort and KthValue along an axis, and OneHot.

    TopK(x, k) -> values, indices        the k largest (or smallest); the order of equal elements is unspecified
    Sort(x) -> values, indices           all elements; with stable=1 equal elements keep their order, otherwise they
                                         are in the order of PyTorch's kernel; NaN is larger than every number
    KthValue(x, k) -> value, index       the k-th smallest, counted from 1; of equal elements any
    OneHot(indices, depth, values) -> y  values[1] at the index, values[0] elsewhere

The gradient of values is scattered to the indices they came from.
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
from onnxtrain.ops.body_parts import cast, int64_vector, reshaped
from onnxtrain.ops.definition import Call, NodeView
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.index.negative_indices import is_non_negative, mark_non_negative, wrap_negative
from onnxtrain.ops.reshape.movement import axis_names, axis_of, checked_axis, define_movement, format_axis_map
from onnxtrain.ops.symbolic_ints import required_ints


def _ordered_gradient(op: Builder, n: NodeView, dvalues: ir.Value | None, dindices: None) -> Sequence[ir.Value | None]:
    if dvalues is None:
        return [None] * len(n.node.inputs)
    dx = op.op(MICROSOFT, "GatherElementsGrad")(dvalues, op.shape_of(n.x), n.node.outputs[1], axis=axis_of(n, n.x))
    return [dx, *[None] * (len(n.node.inputs) - 1)]


def _ordered_axes(n: NodeView) -> str:
    axis = axis_of(n, n.x)
    left = [f"[{name}]" if i == axis else name for i, name in enumerate(axis_names("a", rank_of(n.x)))]
    right = ["[k]" if i == axis else name for i, name in enumerate(left)]
    return format_axis_map([left, *[None] * (len(n.node.inputs) - 1)], right, right)


def _top_types(n: NodeView) -> Sequence[TensorType]:
    axis = axis_of(n, n.x)
    (k,) = required_ints(n.k, "the k of TopK")
    shape = sizes.dims_of(n.x)
    result = (*shape[:axis], k, *shape[axis + 1 :])
    return TensorType(dtype_of(n.x), result), TensorType(ir.DataType.INT64, result)


def _lower_top(n: NodeView, x: Any, k: Any) -> Call:
    return Call(torch.topk, x, k[0], axis_of(n, n.x), bool(n.largest), bool(n.sorted))


def _capture_topk(
    op: Builder, x: ir.Value, k: Size, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[ir.Value, ir.Value]:
    if not rank_of(x):
        values, order = _capture_topk(op, reshaped(op, x, (1,)), k, 0, largest, sorted)
        return reshaped(op, values, ()), reshaped(op, order, ())
    axis = checked_axis(dim, rank_of(x), "the axis of topk")
    dtype = dtype_of(x)
    if dtype == ir.DataType.BFLOAT16:  # not supported by ONNX's TopK
        x = cast(op, x, ir.DataType.FLOAT)
    values, order = op.TopK(x, op.sizes([k]), axis=axis, largest=int(largest), sorted=int(sorted))
    return cast(op, values, dtype), order


TOP_K = define_movement(
    "TopK",
    ("x", "k"),
    _top_types,
    _lower_top,
    _ordered_gradient,
    reads=("indices",),
    host_inputs=frozenset({1}),
    outputs=("values", "indices"),
    attributes={"axis": -1, "largest": 1, "sorted": 1},
    from_torch={"aten.topk.default": _capture_topk},
    axes=_ordered_axes,
    nondiff_inputs=frozenset({"k"}),
)


# Sort


def _sort_body(op: Builder, n: NodeView) -> tuple[ir.Value, ir.Value]:
    """Build TopK of all elements, which is stable.

    ONNX does not specify the order of NaN: NaN is sorted as infinity, and a second stable sort separates the two.
    """
    axis, x = axis_of(n, n.x), n.x
    attributes = {"axis": axis, "largest": n.descending, "sorted": 1}
    count = op.sizes([sizes.dims_of(x)[axis]])
    if dtype_of(x) == ir.DataType.BOOL:
        integers = op.Cast(x, to=ir.DataType.INT64)
        order = op.TopK(integers, count, **attributes)[1]
    elif is_float(dtype_of(x)):
        nan = op.IsNaN(x)
        first = op.TopK(op.Where(nan, op.scalar(float("inf"), like=x), x), count, **attributes)[1]
        sorted_nan = op.GatherElements(op.Cast(nan, to=ir.DataType.INT64), first, axis=axis)
        order = op.GatherElements(first, op.TopK(sorted_nan, count, **attributes)[1], axis=axis)
    else:
        order = op.TopK(x, count, **attributes)[1]
    return op.GatherElements(x, order, axis=axis), order


def _capture_sort(
    op: Builder, x: ir.Value, *arguments: Any, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[ir.Value, ir.Value]:
    """Capture `sort(x, dim, descending)` and `sort.stable(x, *, stable, dim, descending)`."""
    dim = arguments[0] if arguments else dim
    descending = arguments[1] if len(arguments) > 1 else descending
    attributes = {"descending": int(descending), "stable": int(bool(stable))}
    if not rank_of(x):
        values, order = op.own.Sort(reshaped(op, x, (1,)), axis=0, **attributes)
        return reshaped(op, values, ()), reshaped(op, order, ())
    values, order = op.own.Sort(x, axis=checked_axis(dim, rank_of(x), "the axis of sort"), **attributes)
    return values, order


def _capture_argsort(op: Builder, x: ir.Value, *arguments: Any, **options: Any) -> ir.Value:
    return _capture_sort(op, x, *arguments, **options)[1]


def _capture_msort(op: Builder, x: ir.Value) -> ir.Value:
    return _capture_sort(op, x, 0)[0]


SORT = define_movement(
    "Sort",
    ("x",),
    lambda n: (TensorType(dtype_of(n.x), sizes.dims_of(n.x)), TensorType(ir.DataType.INT64, sizes.dims_of(n.x))),
    lambda n, x: Call(torch.sort, x, dim=axis_of(n, n.x), descending=bool(n.descending), stable=bool(n.stable)),
    _ordered_gradient,
    reads=("indices",),
    domain=OWN,
    outputs=("values", "indices"),
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


# KthValue: its axis has size 1 in the outputs


def _kth_types(n: NodeView) -> Sequence[TensorType]:
    shape = list(sizes.dims_of(n.x))
    shape[axis_of(n, n.x)] = 1
    return TensorType(dtype_of(n.x), tuple(shape)), TensorType(ir.DataType.INT64, tuple(shape))


def _kth_body(op: Builder, n: NodeView) -> tuple[ir.Value, ...]:
    """Sort and gather the k-th element."""
    index = op.Sub(n.k, int64_vector(op, [1]))
    return tuple(op.Gather(v, index, axis=axis_of(n, n.x)) for v in op.own.Sort(n.x, axis=axis_of(n, n.x)))


def _capture_kth(op: Builder, x: ir.Value, k: Size, dim: int = -1, keepdim: bool = False) -> tuple[ir.Value, ...]:
    x = x if rank_of(x) else reshaped(op, x, (1,))
    results = op.own.KthValue(x, op.sizes([k]), axis=checked_axis(dim, rank_of(x), "the axis of kthvalue"))
    return tuple(reshaped(op, v, t.shape) for v, t in zip(results, op.out, strict=True))


KTH_VALUE = define_movement(
    "KthValue",
    ("x", "k"),
    _kth_types,
    lambda n, x, k: Call(torch.kthvalue, x, k[0], axis_of(n, n.x), True),
    _ordered_gradient,
    reads=("index",),
    host_inputs=frozenset({1}),
    domain=OWN,
    outputs=("value", "index"),
    attributes={"axis": -1},
    from_torch={"aten.kthvalue.default": _capture_kth},
    body=_kth_body,
    axes=_ordered_axes,
    nondiff_inputs=frozenset({"k"}),
)


# OneHot: PyTorch's values are 0 and 1, on the last axis. Its kernel raises for an index outside [0, depth), and so do
# nodes captured from it.


def _one_hot_types(n: NodeView) -> Sequence[TensorType]:
    shape = list(sizes.dims_of(n.indices))
    (depth,) = required_ints(n.depth, "the depth of OneHot")
    shape.insert(checked_axis(n.axis, len(shape) + 1, "the axis of OneHot"), depth)
    return (TensorType(dtype_of(n.values), tuple(shape)),)


def _one_hot(indices: torch.Tensor, depth: Any, axis: int, dtype: torch.dtype) -> torch.Tensor:
    classes = depth if isinstance(depth, int) else depth[0]
    return torch.nn.functional.one_hot(indices.long(), classes).movedim(-1, axis).to(dtype)


def one_hot_wrapping_negative(indices: torch.Tensor, depth: Any, values: torch.Tensor, axis: int) -> torch.Tensor:
    """Return ONNX's OneHot: negative indices count from the end, and indices out of range select no element."""
    classes = depth if isinstance(depth, int) else depth[0]
    is_hot = wrap_negative(indices.long(), classes).unsqueeze(-1) == torch.arange(classes, device=indices.device)
    return torch.where(is_hot, values[1], values[0]).movedim(-1, axis)


def _lower_one_hot(n: NodeView, indices: Any, depth: Any, values: Any) -> Call:
    constant = constant_of(n.values)
    if constant is not None and constant.reshape(-1).tolist() == [0, 1] and is_non_negative(n, n.indices):
        return Call(_one_hot, indices, depth, n.axis, TORCH_DTYPES[dtype_of(n.values)])
    return Call(one_hot_wrapping_negative, indices, depth, values, n.axis)


def _one_hot_axes(n: NodeView) -> str:
    index_axes = axis_names("i", rank_of(n.indices))
    right = list(index_axes)
    right.insert(checked_axis(n.axis, len(index_axes) + 1, "the axis of OneHot"), "[c]")
    return format_axis_map([index_axes, None, None], right)


def _capture_one_hot(op: Builder, x: ir.Value, num_classes: Size = -1) -> Any:
    if num_classes == -1:
        return NotImplemented  # the number of classes depends on the largest label
    return mark_non_negative(op.OneHot(x, op.size(num_classes), int64_vector(op, [0, 1]), axis=-1))


ONE_HOT = define_movement(
    "OneHot",
    ("indices", "depth", "values"),
    _one_hot_types,
    _lower_one_hot,
    None,
    host_inputs=frozenset({1}),
    attributes={"axis": -1},
    from_torch={"aten.one_hot.default": _capture_one_hot},
    axes=_one_hot_axes,
)
