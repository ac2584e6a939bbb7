"""Maxima and minima, their indices, and logical any and all.

ReduceMax(x, axes)              onnxtrain's op propagates NaN, ai.onnx's may not; ties share the gradient evenly
ArgMax(x) -> int64              the first of several maxima; onnxtrain's op returns the first NaN
MaxDim(x) -> values, indices    over one axis; the first of several maxima gets the gradient

The same holds for ReduceMin, ArgMin and MinDim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import ONNX, OWN, TensorType, dtype_of, is_float, normalize_axis, rank_of
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import (
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
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.reduce.over_axes import (
    Dims,
    axes_from_dim,
    axes_input,
    axes_of,
    axis_map_over,
    define_reduction,
    reduced_type,
    with_reduced_axes,
)
from onnxtrain.ops.registry import define

# ReduceMax, ReduceMin


def _extreme(op: Builder, name: str, x: ir.Value, dim: Dims, keepdim: bool) -> ir.Value:
    domain = OWN if is_float(dtype_of(x)) else ONNX
    return op.op(domain, name)(x, axes_input(op, axes_from_dim(x, dim)), keepdims=int(keepdim))


def _capture_extreme(name: str) -> FromTorch:
    def capture(op: Builder, x: ir.Value, dim: Dims = None, keepdim: bool = False) -> Any:
        return _extreme(op, name, x, dim, keepdim)

    return capture


def _capture_aminmax(op: Builder, x: ir.Value, *, dim: int | None = None, keepdim: bool = False) -> Any:
    return tuple(_extreme(op, name, x, dim, keepdim) for name in ("ReduceMin", "ReduceMax"))


def _lower_over_axes(function: Callable[..., Any]) -> Callable[..., Call]:
    def lower(n: NodeView, x: Any, axes: Any) -> Call:
        dims = list(axes_of(n))
        # To PyTorch an empty list means all axes, or none.
        return Call(function, x, dims, bool(n.keepdims)) if dims else Method("clone", x)

    return lower


def _evenly_shared_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    """Divide the gradient evenly among ties."""
    ties = op.Cast(op.Equal(with_reduced_axes(op, n, n.y), n.x), to=dtype_of(n.x))
    count = op.ReduceSum(ties, axes_input(op, axes_of(n)), keepdims=1)
    return op.Mul(op.Div(with_reduced_axes(op, n, dy), count), ties)


def _any_nan(op: Builder, x: ir.Value, axes: Sequence[int], keepdims: int) -> ir.Value:
    """Return whether there is a NaN among the reduced elements."""
    return op.own.ReduceAny(op.IsNaN(x), axes_input(op, axes), keepdims=keepdims)


def _nan_propagating_body(name: str) -> Callable[[Builder, NodeView], ir.Value]:
    def body(op: Builder, n: NodeView) -> ir.Value:
        axes = axes_of(n)
        without_nan = op.op(ONNX, name)(n.x, axes_input(op, axes), keepdims=n.keepdims)
        nan = op.scalar(float("nan"), like=n.x)
        return op.Where(_any_nan(op, n.x, axes, n.keepdims), nan, without_nan)

    return body


def _define_extreme(name: str, torch_name: str, function: Callable[..., Any]) -> OpDef:
    """Define ONNX's reduction and ours, and return ONNX's."""
    lower, reads = _lower_over_axes(function), ("x", "y")
    op = define_reduction(name, {}, lower, _evenly_shared_gradient, reads=reads)
    from_torch = dict.fromkeys((f"aten.a{torch_name}.default", f"aten.{torch_name}.default"), _capture_extreme(name))
    if torch_name == "min":
        from_torch["aten.aminmax.default"] = _capture_aminmax
    body = _nan_propagating_body(name)
    define_reduction(name, from_torch, lower, _evenly_shared_gradient, reads=reads, domain=OWN, body=body)
    return op


REDUCE_MAX = _define_extreme("ReduceMax", "max", torch.amax)
REDUCE_MIN = _define_extreme("ReduceMin", "min", torch.amin)


# ReduceAny, ReduceAll: False and True for no elements; onnxruntime's ReduceMax of booleans fails there


def _capture_logical(name: str) -> FromTorch:
    def capture(op: Builder, x: ir.Value, dim: Dims = None, keepdim: bool = False) -> Any:
        x = cast(op, x, ir.DataType.BOOL)
        if isinstance(dim, Sequence) and not dim:  # here [] means no axes
            return cast(op, op.Identity(x), op.out[0].dtype)
        y = op.op(OWN, name)(x, axes_input(op, axes_from_dim(x, dim)), keepdims=int(keepdim))
        return cast(op, y, op.out[0].dtype)

    return capture


def _any_body(op: Builder, n: NodeView) -> ir.Value:
    count = op.ReduceSum(op.Cast(n.x, to=ir.DataType.INT32), axes_input(op, axes_of(n)), keepdims=n.keepdims)
    return op.Greater(count, op.scalar(0, like=count))


def _all_body(op: Builder, n: NodeView) -> ir.Value:
    return op.Not(op.own.ReduceAny(op.Not(n.x), n.axes, keepdims=n.keepdims))


def _define_logical(
    torch_name: str, function: Callable[..., Any], body: Callable[[Builder, NodeView], ir.Value]
) -> None:
    name = f"Reduce{torch_name.title()}"
    overloads = (f"aten.{torch_name}.{overload}" for overload in ("default", "dim", "dims"))
    from_torch = dict.fromkeys(overloads, _capture_logical(name))
    define_reduction(name, from_torch, _lower_over_axes(function), None, domain=OWN, body=body)


_define_logical("any", torch.any, _any_body)
_define_logical("all", torch.all, _all_body)


# ArgMax, ArgMin


def _axis_of(n: NodeView) -> tuple[int, ...]:
    return (normalize_axis(n.axis, rank_of(n.x)),)


def _index_type(n: NodeView) -> Sequence[TensorType]:
    return (reduced_type(n, _axis_of(n), bool(n.keepdims), ir.DataType.INT64),)


def _arg_extreme(op: Builder, name: str, x: ir.Value, axis: int, keepdims: int) -> ir.Value:
    """Build ArgMax or ArgMin, by the op that supports the type of x."""
    if dtype_of(x) == ir.DataType.BOOL:
        x = op.Cast(x, to=ir.DataType.UINT8)
    axis = normalize_axis(axis, rank_of(x))  # onnxruntime's result for an empty tensor and a negative axis is wrong
    return op.op(OWN if is_float(dtype_of(x)) else ONNX, name)(x, axis=axis, keepdims=keepdims)


def _capture_arg_extreme(name: str) -> FromTorch:
    def capture(op: Builder, x: ir.Value, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is not None and rank_of(x):
            return _arg_extreme(op, name, x, dim, int(keepdim))
        index = _arg_extreme(op, name, op.Reshape(x, op.sizes([-1])), 0, 0)
        return op.Reshape(index, op.sizes([1] * rank_of(x))) if keepdim else index

    return capture


def last_index(x: torch.Tensor, function: Any, axis: int, keepdim: bool) -> torch.Tensor:
    """Return the last index of the extreme, where `function` (argmax or argmin) returns the first."""
    return x.size(axis) - 1 - function(x.flip(axis), axis, keepdim)


def _lower_arg_extreme(function: Any) -> Callable[..., Call]:
    def lower(n: NodeView, x: Any) -> Call:
        if n.definition.domain == ONNX and n.select_last_index:
            return Call(last_index, x, function, n.axis, bool(n.keepdims))
        return Call(function, x, n.axis, bool(n.keepdims))

    return lower


def _arg_extreme_body(name: str) -> Callable[[Builder, NodeView], ir.Value]:
    def body(op: Builder, n: NodeView) -> ir.Value:
        """Return the index of the first NaN if there is one, else that of ai.onnx's op."""
        zero = op.scalar(0.0, like=n.x)
        is_nan = op.IsNaN(n.x)
        (axis,) = _axis_of(n)
        first_nan = op.ArgMax(op.Cast(is_nan, to=ir.DataType.INT32), axis=axis, keepdims=n.keepdims)
        without_nan = op.op(ONNX, name)(op.Where(is_nan, zero, n.x), axis=axis, keepdims=n.keepdims)
        has_nan = _any_nan(op, n.x, (axis,), n.keepdims)
        return op.Where(has_nan, first_nan, without_nan)

    return body


def _define_arg_extreme(name: str, domain: str, function: Any, from_torch: Mapping[str, FromTorch], body: Any) -> None:
    define_pure(
        domain,
        name,
        ("x",),
        ("y",),
        attributes={"axis": 0, "keepdims": 1, **({"select_last_index": 0} if domain == ONNX else {})},
        from_torch=from_torch,
        shapes=_index_type,
        body=body,
        lower=_lower_arg_extreme(function),
        axes=lambda n: axis_map_over(n, _axis_of(n), bool(n.keepdims)),
        flops=lambda n: numel(n.x),
    )


for _name, _function in (("ArgMax", torch.argmax), ("ArgMin", torch.argmin)):
    _define_arg_extreme(_name, ONNX, _function, {}, STANDARD)
    _from_torch = {f"aten.{_name.lower()}.default": _capture_arg_extreme(_name)}
    _define_arg_extreme(_name, OWN, _function, _from_torch, _arg_extreme_body(_name))


# MaxDim, MinDim


def _capture_dim(name: str) -> FromTorch:
    def capture(op: Builder, x: ir.Value, dim: int, keepdim: bool = False) -> Any:
        if not rank_of(x):
            return op.Identity(x), op.scalar(0, ir.DataType.INT64)
        return op.op(OWN, name)(x, axis=normalize_axis(dim, rank_of(x)), keepdims=int(keepdim))

    return capture


def _dim_types(n: NodeView) -> Sequence[TensorType]:
    values = reduced_type(n, _axis_of(n), bool(n.keepdims))
    return values, TensorType(ir.DataType.INT64, values.shape)


def _dim_body(name: str) -> Callable[[Builder, NodeView], Sequence[ir.Value]]:
    def body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
        values = op.GatherElements(n.x, _arg_extreme(op, f"Arg{name}", n.x, n.axis, 1), axis=n.axis)
        if not n.keepdims:
            values = op.Squeeze(values, axes_input(op, _axis_of(n)))
        return values, _arg_extreme(op, f"Arg{name}", n.x, n.axis, n.keepdims)

    return body


def _dim_gradient(op: Builder, n: NodeView, dvalues: ir.Value | None, dindices: None) -> ir.Value | None:
    """Scatter the gradient to the selected elements."""
    indices = n.indices
    if not n.keepdims:
        axis = axes_input(op, _axis_of(n))
        dvalues, indices = op.Unsqueeze(dvalues, axis), op.Unsqueeze(indices, axis)
    return op.ms.GatherElementsGrad(dvalues, op.shape_of(n.x), indices, axis=n.axis)


def _dim_axes(n: NodeView) -> str:
    axes = axis_map_over(n, _axis_of(n), bool(n.keepdims))
    return f"{axes}, {axes.split('->')[1]}"


def _define_dim_extreme(name: str, function: Any) -> None:
    op = define(
        OpDef(
            domain=OWN,
            name=f"{name}Dim",
            inputs=("x",),
            outputs=("values", "indices"),
            attributes={"axis": -1, "keepdims": 1},
            from_torch={f"aten.{name.lower()}.dim": _capture_dim(f"{name}Dim")},
            shapes=_dim_types,
            body=_dim_body(name),
            gradient=(Gradient(_dim_gradient, ("indices",)),),
            nondiff_inputs=frozenset(),
            kernels=(Kernel(lower=lambda n, x: Call(function, x, n.axis, bool(n.keepdims))),),
            axes=_dim_axes,
            effects=Effects.NONE,
            aliases={},
        )
    )
    FLOPS.register(op, lambda n: numel(n.x))


_define_dim_extreme("Max", torch.max)
_define_dim_extreme("Min", torch.min)
