"""Sums, means, products and cumulative sums.

ReduceSum(x, axes)    ReduceMean(x, axes)    ReduceProd(x, axes)
SumTo(x, shape)       x summed to a shape that broadcasts to x's
CumSum(x, axis)       from the end with reverse=1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder, as_sizes
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import OWN, TensorType, constant_of, dtype_of, is_float, normalize_axis, rank_of
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.constructors import define_pure, same_as
from onnxtrain.ops.definition import STANDARD, Call, Effects, Gradient, Kernel, Method, NodeView, OpDef, numel
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.interfaces.element_formulas import ELEMENT_FORMULAS, Formula, FormulaOf, affine
from onnxtrain.ops.interfaces.stock_kernels import STOCK_KERNELS
from onnxtrain.ops.reduce.over_axes import (
    Dims,
    axes_from_dim,
    axes_input,
    axes_of,
    count_of,
    define_reduction,
    expanded_to_input,
    in_float32,
    lower_reduction,
    with_reduced_axes,
)
from onnxtrain.ops.registry import define

# The types that ai.onnx sums. Other integers are summed in int64, and wrap around when the sum is cast back.
_SUMMABLE = frozenset(
    {
        ir.DataType.FLOAT,
        ir.DataType.DOUBLE,
        ir.DataType.FLOAT16,
        ir.DataType.BFLOAT16,
        ir.DataType.INT32,
        ir.DataType.INT64,
    }
)


def _summable(op: Builder, x: ir.Value) -> ir.Value:
    """Cast x to the type of PyTorch's output, or to int64 if ONNX cannot sum that type."""
    x = cast(op, x, op.out[0].dtype)
    return x if dtype_of(x) in _SUMMABLE else cast(op, x, ir.DataType.INT64)


# ReduceSum


def _capture_sum(op: Builder, x: ir.Value, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    y = op.ReduceSum(_summable(op, x), axes_input(op, axes_from_dim(x, dim)), keepdims=int(keepdim))
    return cast(op, y, op.out[0].dtype)


def _capture_nansum(op: Builder, x: ir.Value, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if is_float(dtype_of(x)):
        x = op.Where(op.IsNaN(x), op.scalar(0.0, like=x), x)
    return _capture_sum(op, x, dim, keepdim)


def _capture_count_nonzero(op: Builder, x: ir.Value, dim: Dims = None) -> Any:
    return _capture_sum(op, op.own.NotEqual(x, op.scalar(0, like=x)), dim)


REDUCE_SUM = define_reduction(
    "ReduceSum",
    {
        "aten.sum.default": _capture_sum,
        "aten.sum.dim_IntList": _capture_sum,
        "aten.nansum.default": _capture_nansum,
        "aten.count_nonzero.default": _capture_count_nonzero,
        "aten.count_nonzero.dim_IntList": _capture_count_nonzero,
    },
    lower_reduction(torch.sum),
    expanded_to_input,
)


# SumTo(x, shape): un-broadcasts x if the broadcast axes are not known; otherwise the differentiator writes ReduceSum.


def _capture_sum_to(op: Builder, x: ir.Value, size: Sequence[Size]) -> Any:
    """Capture `sum_to_size` as a ReduceSum if the summed axes are known, else as SumTo."""
    shape = sizes.dims_of(x)
    leading = len(shape) - len(size)
    pairs = list(zip(shape[leading:], size, strict=True))
    if any(source != target and target != 1 for source, target in pairs):
        return op.own.SumTo(x, op.sizes(size))
    broadcast_axes = [leading + i for i, (source, target) in enumerate(pairs) if source != target]
    x = op.ReduceSum(x, axes_input(op, broadcast_axes), keepdims=1) if broadcast_axes else x
    if not leading:
        return x if broadcast_axes else op.Identity(x)
    return op.ReduceSum(x, axes_input(op, range(leading)), keepdims=0)


def _sum_to_type(n: NodeView) -> Sequence[TensorType]:
    shape = as_sizes(n.shape)
    if shape is None:
        raise GraphError(
            "SumTo: the target shape must follow from constants and sizes of inputs",
            got=f"{n.shape.name}, whose values are unknown",
        )
    return (TensorType(dtype_of(n.x), shape),)


def _sum_to_body(op: Builder, n: NodeView) -> ir.Value:
    """Split each axis of size s and target t (s or 1) into axes of sizes s - t + 1 and t, and sum over the first."""
    source, target = sizes.dims_of(n.x), sizes.dims_of(n.y)
    leading = len(source) - len(target)
    split_shape = list(source[:leading])
    summed_axes = list(range(leading))
    for source_size, target_size in zip(source[leading:], target, strict=True):
        if source_size != target_size:
            summed_axes.append(len(split_shape))
            split_shape.append(sizes.add(sizes.subtract(source_size, target_size), 1))
        split_shape.append(target_size)
    if not summed_axes:
        return op.Identity(n.x)
    x = n.x if len(split_shape) == len(source) else op.Reshape(n.x, op.sizes(split_shape), allowzero=1)
    return op.ReduceSum(x, axes_input(op, summed_axes), keepdims=0)


SUM_TO = define(
    OpDef(
        domain=OWN,
        name="SumTo",
        inputs=("x", "shape"),
        outputs=("y",),
        attributes={},
        from_torch={"aten.sum_to_size.default": _capture_sum_to},
        shapes=_sum_to_type,
        body=_sum_to_body,
        gradient=(Gradient(lambda op, n, dy: (op.Expand(dy, op.shape_of(n.x)), None), ()),),
        nondiff_inputs=frozenset({"shape"}),
        kernels=(Kernel(lower=lambda n, x, shape: Method("sum_to_size", x, shape), host_inputs=frozenset({1})),),
        axes=lambda n: "",
        effects=Effects.NONE,
        aliases={0: 0},
    )
)
FLOPS.register(SUM_TO, lambda n: numel(n.x))


# ReduceMean


def _capture_mean(op: Builder, x: ir.Value, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    x = cast(op, x, op.out[0].dtype)
    return op.ReduceMean(x, axes_input(op, axes_from_dim(x, dim)), keepdims=int(keepdim))


def _mean_body(op: Builder, n: NodeView) -> ir.Value:
    """Divide the sum by the count: the mean of no elements is NaN, while onnxruntime's ReduceMean returns 0."""

    def mean(x: ir.Value) -> ir.Value:
        total = op.ReduceSum(x, axes_input(op, axes_of(n)), keepdims=n.keepdims)
        return op.Div(total, op.size(count_of(n), dtype_of(x)))

    return in_float32(op, n.x, mean) if axes_of(n) else op.Identity(n.x)


def mean_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    """Divide before expanding: the same values from fewer divisions."""
    count = count_of(n)
    return expanded_to_input(op, n, in_float32(op, dy, lambda v: op.Div(v, op.size(count, dtype_of(v)))))


def _has_elements(n: NodeView) -> bool:
    count = count_of(n)
    return isinstance(count, int) and count > 0


REDUCE_MEAN = define_reduction(
    "ReduceMean",
    {"aten.mean.default": _capture_mean, "aten.mean.dim": _capture_mean},
    lower_reduction(torch.mean),
    mean_gradient,
    body=_mean_body,
)
STOCK_KERNELS.register(REDUCE_MEAN, _has_elements)


# ReduceProd


def _capture_prod(op: Builder, x: ir.Value, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    y = op.ReduceProd(_summable(op, x), axes_input(op, axes_from_dim(x, dim)), keepdims=int(keepdim))
    return cast(op, y, op.out[0].dtype)


def _lower_prod(n: NodeView, x: Any, axes: Any) -> Call:
    """Multiply over several axes one after the other: torch.prod takes one axis, or all."""
    dims, dtype = axes_of(n), TORCH_DTYPES[dtype_of(n.x)]
    if not dims:
        return Method("clone", x)
    if len(dims) == rank_of(n.x) and not n.keepdims:
        return Call(torch.prod, x, dtype=dtype)
    result = x
    for dim in reversed(dims):
        result = Call(torch.prod, result, dim, bool(n.keepdims), dtype=dtype)
    return result  # dims is not empty


def _prod_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    """Multiply dy by the product of the other elements: y / x, or with a zero the product of the nonzero ones."""
    zero, one = op.scalar(0.0, like=n.x), op.scalar(1.0, like=n.x)
    axes = axes_input(op, axes_of(n))
    is_zero = op.Equal(n.x, zero)
    nonzero = op.Where(is_zero, one, n.x)
    product = op.ReduceProd(nonzero, axes, keepdims=1)
    zero_count = op.ReduceSum(op.Cast(is_zero, to=dtype_of(n.x)), axes, keepdims=1)
    at_nonzero = op.Where(op.Equal(zero_count, zero), op.Div(product, nonzero), op.Mul(product, zero))
    at_zero = op.Where(op.Equal(zero_count, one), product, zero)
    others = op.Where(is_zero, at_zero, at_nonzero)
    return op.Mul(with_reduced_axes(op, n, dy), others)


REDUCE_PROD = define_reduction(
    "ReduceProd",
    {"aten.prod.default": _capture_prod, "aten.prod.dim_int": _capture_prod},
    _lower_prod,
    _prod_gradient,
    reads=("x",),
)


# CumSum


def _capture_cumsum(op: Builder, x: ir.Value, dim: int, *, dtype: Any = None) -> Any:
    if not rank_of(x):
        return op.Identity(cast(op, x, op.out[0].dtype))
    y = op.CumSum(_summable(op, x), op.scalar(dim, ir.DataType.INT64))
    return cast(op, y, op.out[0].dtype)


def _axis_of(n: NodeView) -> int:
    constant = constant_of(n.axis)
    if constant is None:
        raise GraphError("CumSum: axis must be constant", got=f"{n.axis.name}, which is computed")
    return normalize_axis(int(constant.item()), rank_of(n.x))


def _lower_cumsum(n: NodeView, x: Any, axis: Any) -> Call:
    dim = _axis_of(n)
    call = Call(torch.flip, x, [dim]) if n.reverse else x
    if n.exclusive:
        call = Call(exclusive_cumsum, call, dim)
    else:
        call = Call(torch.cumsum, call, dim, dtype=TORCH_DTYPES[dtype_of(n.x)])
    return Call(torch.flip, call, [dim]) if n.reverse else call


def exclusive_cumsum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the sums of the preceding elements."""
    count = x.size(dim)
    if not count:
        return x.clone()
    sums = x.narrow(dim, 0, count - 1).cumsum(dim, dtype=x.dtype)
    return torch.cat([torch.zeros_like(x.narrow(dim, 0, 1)), sums], dim)


def _cumsum_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[ir.Value, None]:
    return op.CumSum(dy, n.axis, exclusive=n.exclusive, reverse=1 - n.reverse), None


def _cumsum_axes(n: NodeView) -> str:
    axis = _axis_of(n)
    names = " ".join(f"[a{i}]" if i == axis else f"a{i}" for i in range(rank_of(n.x)))
    return f"{names}, - -> {names}"


CUM_SUM = define_pure(
    "",
    "CumSum",
    ("x", "axis"),
    ("y",),
    attributes={"exclusive": 0, "reverse": 0},
    from_torch={"aten.cumsum.default": _capture_cumsum},
    shapes=same_as("x"),
    body=STANDARD,
    gradient=(Gradient(_cumsum_gradient, ()),),
    nondiff_inputs=frozenset({"axis"}),
    lower=_lower_cumsum,
    axes=_cumsum_axes,
    flops=lambda n: numel(n.x),
)


@ELEMENT_FORMULAS.implements(CUM_SUM)
def _cumsum_formula(n: NodeView, formula_of: FormulaOf) -> Formula | None:
    x = affine(formula_of, n.x)
    return x if x is not None and x.is_constant and x.constant == 0 else None
