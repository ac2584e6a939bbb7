"""Sums, means, products and cumulative sums.

ReduceSum(x, axes)    ReduceMean(x, axes)    ReduceProd(x, axes)
SumTo(x, shape)       x summed to a shape that broadcasts to x's
CumSum(x, axis)       with reverse=1 from the end
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
from onnxtrain.ops.constructors import always, never, same_as
from onnxtrain.ops.definition import STANDARD, Call, Effects, Gradient, Kernel, Method, NodeView, OpDef, numel
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.reduce.over_axes import (
    Dims,
    axes_input,
    axes_of,
    count_of,
    define_reduction,
    dims_of,
    in_single,
    kernel_call,
    restored,
    spread,
)
from onnxtrain.ops.registry import define

# What ai.onnx sums; PyTorch's other integers are summed in int64 and wrap around in the end.
_SUMMED = frozenset(
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
    """X in the type of PyTorch's output, or in int64 where ONNX does not sum that."""
    x = cast(op, x, op.out[0].dtype)
    return x if dtype_of(x) in _SUMMED else cast(op, x, ir.DataType.INT64)


# ReduceSum


def _capture_sum(op: Builder, x: ir.Value, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    y = op.ReduceSum(_summable(op, x), axes_input(op, dims_of(x, dim)), keepdims=int(keepdim))
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
    kernel_call(torch.sum),
    spread,
    since_version=13,
)


# SumTo(x, shape): un-broadcasting where sizes are not proven. Where they are, the differentiator writes ReduceSum.


def _capture_sum_to(op: Builder, x: ir.Value, size: Sequence[Size]) -> Any:
    """`sum_to_size`: a ReduceSum where it shows which axes are summed."""
    have = sizes.dims_of(x)
    leading = len(have) - len(size)
    pairs = list(zip(have[leading:], size, strict=True))
    if any(h != s and s != 1 for h, s in pairs):
        return op.own.SumTo(x, op.sizes(size))
    ones = [leading + i for i, (h, s) in enumerate(pairs) if h != s]
    x = op.ReduceSum(x, axes_input(op, ones), keepdims=1) if ones else x
    if not leading:
        return x if ones else op.Identity(x)
    return op.ReduceSum(x, axes_input(op, range(leading)), keepdims=0)


def _sum_to_type(n: NodeView) -> Sequence[TensorType]:
    shape = as_sizes(n.shape)
    if shape is None:
        raise GraphError("SumTo needs to know its sizes", got=f"{n.shape.name}, of unknown contents")
    return (TensorType(dtype_of(n.x), shape),)


def _sum_to_body(op: Builder, n: NodeView) -> ir.Value:
    """Each axis of size s with target t (s or 1) becomes axes of sizes s - t + 1 and t; the first is summed."""
    source, target = sizes.dims_of(n.x), sizes.dims_of(n.y)
    leading = len(source) - len(target)
    split = list(source[:leading])
    summed = list(range(leading))
    for size, wanted in zip(source[leading:], target, strict=True):
        if size != wanted:
            summed.append(len(split))
            split.append(sizes.add(sizes.subtract(size, wanted), 1))
        split.append(wanted)
    if not summed:
        return op.Identity(n.x)  # type: ignore[no-any-return]
    x = n.x if len(split) == len(source) else op.Reshape(n.x, op.sizes(split), allowzero=1)
    return op.ReduceSum(x, axes_input(op, summed), keepdims=0)  # type: ignore[no-any-return]


SUM_TO = define(
    OpDef(
        domain=OWN,
        name="SumTo",
        inputs=("x", "shape"),
        outputs=("y",),
        attributes={},
        since_version=1,
        from_torch={"aten.sum_to_size.default": _capture_sum_to},
        shapes=_sum_to_type,
        body=_sum_to_body,
        ort_compatible=never,
        gradient=(Gradient(lambda op, n, dy: (op.Expand(dy, op.shape_of(n.x)), None), ()),),
        nondiff_inputs=frozenset({"shape"}),
        kernels=(Kernel(lower=lambda n, x, shape: Method("sum_to_size", x, shape), host_inputs=frozenset({1})),),
        axes=lambda n: "",
        effects=Effects.NONE,
        aliases={0: 0},
        flops=lambda n: numel(n.x),
        host_eval=None,
    )
)


# ReduceMean


def _capture_mean(op: Builder, x: ir.Value, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    x = cast(op, x, op.out[0].dtype)
    return op.ReduceMean(x, axes_input(op, dims_of(x, dim)), keepdims=int(keepdim))


def _mean_body(op: Builder, n: NodeView) -> ir.Value:
    """The sum by the count, so that the mean of nothing is NaN; onnxruntime's own says 0."""

    def mean(x: ir.Value) -> ir.Value:
        total = op.ReduceSum(x, axes_input(op, axes_of(n)), keepdims=n.keepdims)
        return op.Div(total, op.size(count_of(n), dtype_of(x)))  # type: ignore[no-any-return]

    return in_single(op, n.x, mean) if axes_of(n) else op.Identity(n.x)


def mean_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    """Divided before it is spread: the same numbers, from fewer elements."""
    count = count_of(n)
    return spread(op, n, in_single(op, dy, lambda v: op.Div(v, op.size(count, dtype_of(v)))))


def _has_elements(n: NodeView) -> bool:
    count = count_of(n)
    return isinstance(count, int) and count > 0


REDUCE_MEAN = define_reduction(
    "ReduceMean",
    {"aten.mean.default": _capture_mean, "aten.mean.dim": _capture_mean},
    kernel_call(torch.mean),
    mean_gradient,
    since_version=18,
    body=_mean_body,
    ort_compatible=_has_elements,
)


# ReduceProd


def _capture_prod(op: Builder, x: ir.Value, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    y = op.ReduceProd(_summable(op, x), axes_input(op, dims_of(x, dim)), keepdims=int(keepdim))
    return cast(op, y, op.out[0].dtype)


def _prod_call(n: NodeView, x: Any, axes: Any) -> Call:
    """PyTorch multiplies over one axis, or over all; over several, one after the other."""
    dims, dtype = axes_of(n), TORCH_DTYPES[dtype_of(n.x)]
    if not dims:
        return Method("clone", x)
    if len(dims) == rank_of(n.x) and not n.keepdims:
        return Call(torch.prod, x, dtype=dtype)
    result = x
    for dim in reversed(dims):
        result = Call(torch.prod, result, dim, bool(n.keepdims), dtype=dtype)
    return result  # type: ignore[no-any-return]  # dims is not empty


def _prod_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    """The product of the other elements: y / x, or where zeros are, the product of what is not zero."""
    zero, one = op.scalar(0.0, like=n.x), op.scalar(1.0, like=n.x)
    axes = axes_input(op, axes_of(n))
    is_zero = op.Equal(n.x, zero)
    without = op.Where(is_zero, one, n.x)
    product = op.ReduceProd(without, axes, keepdims=1)
    zeros = op.ReduceSum(op.Cast(is_zero, to=dtype_of(n.x)), axes, keepdims=1)
    at_nonzero = op.Where(op.Equal(zeros, zero), op.Div(product, without), op.Mul(product, zero))
    at_zero = op.Where(op.Equal(zeros, one), product, zero)
    others = op.Where(is_zero, at_zero, at_nonzero)
    return op.Mul(restored(op, n, dy), others)  # type: ignore[no-any-return]


REDUCE_PROD = define_reduction(
    "ReduceProd",
    {"aten.prod.default": _capture_prod, "aten.prod.dim_int": _capture_prod},
    _prod_call,
    _prod_gradient,
    reads=("x",),
    since_version=18,
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
        raise GraphError("CumSum takes its axis as a constant", got=f"{n.axis.name}, which is computed")
    return normalize_axis(int(constant.item()), rank_of(n.x))


def _cumsum_call(n: NodeView, x: Any, axis: Any) -> Call:
    dim = _axis_of(n)
    call = Call(torch.flip, x, [dim]) if n.reverse else x
    if n.exclusive:
        call = Call(cumsum_before, call, dim)
    else:
        call = Call(torch.cumsum, call, dim, dtype=TORCH_DTYPES[dtype_of(n.x)])
    return Call(torch.flip, call, [dim]) if n.reverse else call


def cumsum_before(x: torch.Tensor, dim: int) -> torch.Tensor:
    """For each place the sum of what stands before it."""
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


CUM_SUM = define(
    OpDef(
        domain="",
        name="CumSum",
        inputs=("x", "axis"),
        outputs=("y",),
        attributes={"exclusive": 0, "reverse": 0},
        since_version=14,
        from_torch={"aten.cumsum.default": _capture_cumsum},
        shapes=same_as("x"),
        body=STANDARD,
        ort_compatible=always,
        gradient=(Gradient(_cumsum_gradient, ()),),
        nondiff_inputs=frozenset({"axis"}),
        kernels=(Kernel(lower=_cumsum_call),),
        axes=_cumsum_axes,
        effects=Effects.NONE,
        aliases={},
        flops=lambda n: numel(n.x),
        host_eval=None,
    )
)
