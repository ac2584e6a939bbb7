"""Sums, means, extremes and norms over axes; cumulative sums.

The axes of ai.onnx reductions are an input; here it is always a constant that names every axis that is reduced, so that
the meaning does not hang on `noop_with_empty_axes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder, as_sizes
from onnxtrain.graph.values import OWN, TensorType, constant_of, dtype_of, is_float, normalize_axes, rank_of
from onnxtrain.ops.constructors import TORCH_DTYPES, always, cast, reduced_type, reduction_axes
from onnxtrain.ops.definition import STANDARD, Call, Effects, Gradient, Kernel, Method, NodeView, OpDef, numel
from onnxtrain.ops.registry import define


def axes_of(n: NodeView) -> tuple[int, ...]:
    """The axes that a reduction node reduces, each in [0, rank)."""
    rank = rank_of(n.x)
    if n.axes is None:
        return () if n.noop_with_empty_axes else tuple(range(rank))
    constant = constant_of(n.axes)
    if constant is None:
        raise GraphError(f"{n.definition.name} takes its axes as a constant", got=f"{n.axes.name}, which is computed")
    axes = normalize_axes([int(a) for a in constant.reshape(-1)], rank)
    return axes if axes or n.noop_with_empty_axes else tuple(range(rank))


def axes_input(op: Builder, x: ir.Value, dim: int | Sequence[int] | None) -> ir.Value:
    """The axes input for PyTorch's `dim`: None and [] mean all axes."""
    rank = rank_of(x)
    dims = [dim] if isinstance(dim, int) else list(dim or range(rank))
    # A 0-dimensional tensor may be reduced over dim 0 and -1: nothing is there to be reduced.
    axes = normalize_axes(dims, rank) if rank else ()
    return op.constant(list(axes), ir.DataType.INT64)


def spread(op: Builder, n: NodeView, reduced: ir.Value) -> ir.Value:
    """A value of the shape of the reduction's output, broadcast back over the reduced axes to x's shape."""
    axes = axes_of(n)
    if not n.keepdims and axes:
        reduced = op.Unsqueeze(reduced, op.constant(list(axes), ir.DataType.INT64))
    result: ir.Value = op.Expand(reduced, op.shape_of(n.x))
    return result


def _reduced(n: NodeView) -> Sequence[TensorType]:
    return (reduced_type(n, axes_of(n), bool(n.keepdims)),)


def _reduced_axes(n: NodeView) -> str:
    return reduction_axes(n, axes_of(n), bool(n.keepdims))


def _sum_call(n: NodeView, x: Any, axes: Any) -> Call:
    dims = list(axes_of(n))
    if not dims:  # torch takes an empty list for all axes
        return Method("clone", x)
    if is_float(dtype_of(n.x)):
        return Call(torch.sum, x, dims, bool(n.keepdims))
    return Call(torch.sum, x, dims, bool(n.keepdims), dtype=TORCH_DTYPES[dtype_of(n.x)])


def _capture_sum(
    op: Builder, x: ir.Value, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    x = cast(op, x, op.out[0].dtype)
    return op.ReduceSum(x, axes_input(op, x, dim), keepdims=int(keepdim))


REDUCE_SUM = define(
    OpDef(
        domain="",
        name="ReduceSum",
        inputs=("x", "axes?"),
        outputs=("y",),
        attributes={"keepdims": 1, "noop_with_empty_axes": 0},
        since=13,
        from_torch={"aten.sum.default": _capture_sum, "aten.sum.dim_IntList": _capture_sum},
        shapes=_reduced,
        body=STANDARD,
        native_ok=always,
        gradient=(Gradient(lambda op, n, dy: (spread(op, n, dy), None), ()),),
        stops=frozenset({"axes"}),
        kernels=(Kernel(lower=_sum_call),),
        axes=_reduced_axes,
        effects=Effects.NONE,
        aliases={},
        flops=lambda n: numel(n.x),
        host=None,
    )
)


# SumTo(x, shape) -> x summed to `shape`, which broadcasts to x's shape: un-broadcasting where sizes are not proven.
# Where they are, the differentiator writes ReduceSum.


def _sum_to_type(n: NodeView) -> Sequence[TensorType]:
    shape = as_sizes(n.shape)
    if shape is None:
        raise GraphError("SumTo needs to know its sizes", got=f"{n.shape.name}, of unknown contents")
    return (TensorType(dtype_of(n.x), shape),)


def _sum_to_body(op: Builder, n: NodeView) -> ir.Value:
    """Each axis of size s with target t (s or 1) becomes axes of sizes s - t + 1 and t; the first is summed."""
    source, target = sizes.of(n.x), sizes.of(n.y)
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
    return op.ReduceSum(x, op.constant(summed, ir.DataType.INT64), keepdims=0)  # type: ignore[no-any-return]


SUM_TO = define(
    OpDef(
        domain=OWN,
        name="SumTo",
        inputs=("x", "shape"),
        outputs=("y",),
        attributes={},
        since=1,
        from_torch={},
        shapes=_sum_to_type,
        body=_sum_to_body,
        native_ok=always,
        gradient=(Gradient(lambda op, n, dy: (op.Expand(dy, op.shape_of(n.x)), None), ()),),
        stops=frozenset({"shape"}),
        kernels=(Kernel(lower=lambda n, x, shape: Method("sum_to_size", x, shape), host=frozenset({1})),),
        axes=lambda n: "",
        effects=Effects.NONE,
        aliases={0: 0},
        flops=lambda n: numel(n.x),
        host=None,
    )
)
