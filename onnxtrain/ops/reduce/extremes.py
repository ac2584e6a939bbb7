"""Largest and smallest elements, where they stand, and the truth of any and all.

ReduceMax(x, axes)              onnxtrain's lets NaN through, ai.onnx's may not; ties share the gradient evenly
ArgMax(x) -> int64              the first of equals; onnxtrain's finds the first NaN
MaxDim(x) -> values, indices    over one axis; the first of equals gets the gradient
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import ONNX, OWN, TensorType, dtype_of, is_float, normalize_axis, rank_of
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.constructors import always, never
from onnxtrain.ops.definition import (
    NOT_DIFFERENTIABLE,
    STANDARD,
    Call,
    Effects,
    FromTorch,
    Gradient,
    Kernel,
    Method,
    NodeView,
    OpDef,
    numel,
)
from onnxtrain.ops.reduce.over_axes import (
    Dims,
    axes_input,
    axes_of,
    define_reduction,
    dims_of,
    reduced_type,
    reduction_axes,
    restored,
)
from onnxtrain.ops.registry import define

# ReduceMax, ReduceMin


def _extreme(op: Builder, name: str, x: ir.Value, dim: Dims, keepdim: bool) -> ir.Value:
    domain = OWN if is_float(dtype_of(x)) else ONNX
    result: ir.Value = op.op(domain, name)(x, axes_input(op, dims_of(x, dim)), keepdims=int(keepdim))
    return result


def _capture_extreme(name: str) -> FromTorch:
    def capture(op: Builder, x: ir.Value, dim: Dims = None, keepdim: bool = False) -> Any:
        return _extreme(op, name, x, dim, keepdim)

    return capture


def _capture_both(op: Builder, x: ir.Value, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """`aminmax`."""
    return tuple(_extreme(op, name, x, dim, keepdim) for name in ("ReduceMin", "ReduceMax"))


def _over_dims(function: Callable[..., Any]) -> Callable[..., Call]:
    def lower(n: NodeView, x: Any, axes: Any) -> Call:
        dims = list(axes_of(n))
        # PyTorch takes an empty list for all axes, or for none.
        return Call(function, x, dims, bool(n.keepdims)) if dims else Method("clone", x)

    return lower


def _shared_evenly(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    """The gradient by the number of ties, to each of them."""
    ties = op.Cast(op.Equal(restored(op, n, n.y), n.x), to=dtype_of(n.x))
    count = op.ReduceSum(ties, axes_input(op, axes_of(n)), keepdims=1)
    return op.Mul(op.Div(restored(op, n, dy), count), ties)  # type: ignore[no-any-return]


def _any_nan(op: Builder, x: ir.Value, axes: Sequence[int], keepdims: int) -> ir.Value:
    """Whether there is a NaN among the reduced elements."""
    result: ir.Value = op.own.ReduceAny(op.IsNaN(x), axes_input(op, axes), keepdims=keepdims)
    return result


def _nan_through(name: str) -> Callable[[Builder, NodeView], ir.Value]:
    def body(op: Builder, n: NodeView) -> ir.Value:
        axes = axes_of(n)
        plain = op.op(ONNX, name)(n.x, axes_input(op, axes), keepdims=n.keepdims)
        nan = op.scalar(float("nan"), like=n.x)
        return op.Where(_any_nan(op, n.x, axes, n.keepdims), nan, plain)  # type: ignore[no-any-return]

    return body


def _reduce_extreme(name: str, word: str, function: Callable[..., Any]) -> None:
    lower, reads = _over_dims(function), ("x", "y")
    define_reduction(name, {}, lower, _shared_evenly, reads=reads, since_version=20)
    captured = dict.fromkeys((f"aten.a{word}.default", f"aten.{word}.default"), _capture_extreme(name))
    if word == "min":
        captured["aten.aminmax.default"] = _capture_both
    define_reduction(name, captured, lower, _shared_evenly, reads=reads, domain=OWN, body=_nan_through(name))


_reduce_extreme("ReduceMax", "max", torch.amax)
_reduce_extreme("ReduceMin", "min", torch.amin)


# ReduceAny, ReduceAll: of nothing False and True, where onnxruntime's ReduceMax of truth values fails


def _capture_truth(name: str) -> FromTorch:
    def capture(op: Builder, x: ir.Value, dim: Dims = None, keepdim: bool = False) -> Any:
        x = cast(op, x, ir.DataType.BOOL)
        if isinstance(dim, Sequence) and not dim:  # here [] means no axes
            return cast(op, op.Identity(x), op.out[0].dtype)
        y = op.op(OWN, name)(x, axes_input(op, dims_of(x, dim)), keepdims=int(keepdim))
        return cast(op, y, op.out[0].dtype)

    return capture


def _any_body(op: Builder, n: NodeView) -> ir.Value:
    count = op.ReduceSum(op.Cast(n.x, to=ir.DataType.INT32), axes_input(op, axes_of(n)), keepdims=n.keepdims)
    return op.Greater(count, op.scalar(0, like=count))  # type: ignore[no-any-return]


def _all_body(op: Builder, n: NodeView) -> ir.Value:
    return op.Not(op.own.ReduceAny(op.Not(n.x), n.axes, keepdims=n.keepdims))  # type: ignore[no-any-return]


def _truth(word: str, function: Callable[..., Any], body: Callable[[Builder, NodeView], ir.Value]) -> None:
    name = f"Reduce{word.title()}"
    overloads = dict.fromkeys((f"aten.{word}.{kind}" for kind in ("default", "dim", "dims")), _capture_truth(name))
    define_reduction(name, overloads, _over_dims(function), None, domain=OWN, body=body)


_truth("any", torch.any, _any_body)
_truth("all", torch.all, _all_body)


# ArgMax, ArgMin


def _one_axis(n: NodeView) -> tuple[int, ...]:
    return (normalize_axis(n.axis, rank_of(n.x)),)


def _place_type(n: NodeView) -> Sequence[TensorType]:
    return (reduced_type(n, _one_axis(n), bool(n.keepdims), ir.DataType.INT64),)


def _place(op: Builder, name: str, x: ir.Value, axis: int, keepdims: int) -> ir.Value:
    """The index of the extreme, by the op that suits the type of x."""
    if dtype_of(x) == ir.DataType.BOOL:
        x = op.Cast(x, to=ir.DataType.UINT8)
    axis = normalize_axis(axis, rank_of(x))  # onnxruntime reduces an empty tensor wrongly over a negative axis
    result: ir.Value = op.op(OWN if is_float(dtype_of(x)) else ONNX, name)(x, axis=axis, keepdims=keepdims)
    return result


def _capture_place(name: str) -> FromTorch:
    def capture(op: Builder, x: ir.Value, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is not None and rank_of(x):
            return _place(op, name, x, dim, int(keepdim))
        place = _place(op, name, op.Reshape(x, op.sizes([-1])), 0, 0)
        return op.Reshape(place, op.sizes([1] * rank_of(x))) if keepdim else place

    return capture


def last_place(x: torch.Tensor, function: Any, axis: int, keepdim: bool) -> torch.Tensor:
    """The last of equals: the first from the end."""
    last: torch.Tensor = x.size(axis) - 1 - function(x.flip(axis), axis, keepdim)
    return last


def _place_call(function: Any) -> Callable[..., Call]:
    def lower(n: NodeView, x: Any) -> Call:
        if n.definition.domain == ONNX and n.select_last_index:
            return Call(last_place, x, function, n.axis, bool(n.keepdims))
        return Call(function, x, n.axis, bool(n.keepdims))

    return lower


def _place_body(name: str) -> Callable[[Builder, NodeView], ir.Value]:
    def body(op: Builder, n: NodeView) -> ir.Value:
        """The first NaN, where there is one; without NaN, ai.onnx's own."""
        zero = op.scalar(0.0, like=n.x)
        is_nan = op.IsNaN(n.x)
        (axis,) = _one_axis(n)
        first_nan = op.ArgMax(op.Cast(is_nan, to=ir.DataType.INT32), axis=axis, keepdims=n.keepdims)
        plain = op.op(ONNX, name)(op.Where(is_nan, zero, n.x), axis=axis, keepdims=n.keepdims)
        found = _any_nan(op, n.x, (axis,), n.keepdims)
        return op.Where(found, first_nan, plain)  # type: ignore[no-any-return]

    return body


def _arg_extreme(name: str, domain: str, function: Any, captured: Mapping[str, FromTorch], body: Any) -> None:
    define(
        OpDef(
            domain=domain,
            name=name,
            inputs=("x",),
            outputs=("y",),
            attributes={"axis": 0, "keepdims": 1, **({"select_last_index": 0} if domain == ONNX else {})},
            since_version=13 if domain == ONNX else 1,
            from_torch=captured,
            shapes=_place_type,
            body=body,
            ort_compatible=always if domain == ONNX else never,
            gradient=NOT_DIFFERENTIABLE,
            nondiff_inputs=frozenset(),
            kernels=(Kernel(lower=_place_call(function)),),
            axes=lambda n: reduction_axes(n, _one_axis(n), bool(n.keepdims)),
            effects=Effects.NONE,
            aliases={},
            flops=lambda n: numel(n.x),
            host_eval=None,
        )
    )


_arg_extreme("ArgMax", ONNX, torch.argmax, {}, STANDARD)
_arg_extreme("ArgMin", ONNX, torch.argmin, {}, STANDARD)
_arg_extreme("ArgMax", OWN, torch.argmax, {"aten.argmax.default": _capture_place("ArgMax")}, _place_body("ArgMax"))
_arg_extreme("ArgMin", OWN, torch.argmin, {"aten.argmin.default": _capture_place("ArgMin")}, _place_body("ArgMin"))


# MaxDim, MinDim


def _capture_dim(name: str) -> FromTorch:
    def capture(op: Builder, x: ir.Value, dim: int, keepdim: bool = False) -> Any:
        if not rank_of(x):
            return op.Identity(x), op.scalar(0, ir.DataType.INT64)
        return op.op(OWN, name)(x, axis=normalize_axis(dim, rank_of(x)), keepdims=int(keepdim))

    return capture


def _dim_types(n: NodeView) -> Sequence[TensorType]:
    values = reduced_type(n, _one_axis(n), bool(n.keepdims))
    return values, TensorType(ir.DataType.INT64, values.shape)


def _dim_body(name: str) -> Callable[[Builder, NodeView], Sequence[ir.Value]]:
    def body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
        values = op.GatherElements(n.x, _place(op, f"Arg{name}", n.x, n.axis, 1), axis=n.axis)
        if not n.keepdims:
            values = op.Squeeze(values, axes_input(op, _one_axis(n)))
        return values, _place(op, f"Arg{name}", n.x, n.axis, n.keepdims)

    return body


def _to_chosen(op: Builder, n: NodeView, dvalues: ir.Value | None, dindices: None) -> ir.Value | None:
    """The gradient goes to the element that was chosen."""
    places = n.indices
    if not n.keepdims:
        axis = axes_input(op, _one_axis(n))
        dvalues, places = op.Unsqueeze(dvalues, axis), op.Unsqueeze(places, axis)
    return op.ms.GatherElementsGrad(dvalues, op.shape_of(n.x), places, axis=n.axis)  # type: ignore[no-any-return]


def _dim_axes(n: NodeView) -> str:
    both = reduction_axes(n, _one_axis(n), bool(n.keepdims))
    return f"{both}, {both.split('->')[1]}"


def _dim_extreme(name: str, function: Any) -> None:
    define(
        OpDef(
            domain=OWN,
            name=f"{name}Dim",
            inputs=("x",),
            outputs=("values", "indices"),
            attributes={"axis": -1, "keepdims": 1},
            since_version=1,
            from_torch={f"aten.{name.lower()}.dim": _capture_dim(f"{name}Dim")},
            shapes=_dim_types,
            body=_dim_body(name),
            ort_compatible=never,
            gradient=(Gradient(_to_chosen, ("indices",)),),
            nondiff_inputs=frozenset(),
            kernels=(Kernel(lower=lambda n, x: Call(function, x, n.axis, bool(n.keepdims))),),
            axes=_dim_axes,
            effects=Effects.NONE,
            aliases={},
            flops=lambda n: numel(n.x),
            host_eval=None,
        )
    )


_dim_extreme("Max", torch.max)
_dim_extreme("Min", torch.min)
