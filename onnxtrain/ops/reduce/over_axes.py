"""Constructor and helpers for reductions: their axes, and gradients that broadcast over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import ONNX, TensorType, constant_of, dtype_of, is_float, normalize_axes, rank_of
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import (
    NOT_DIFFERENTIABLE,
    STANDARD,
    Call,
    FromTorch,
    Gradient,
    GradientRule,
    Method,
    NodeView,
    OpDef,
    numel,
)
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.interfaces.fused_regions import FUSIBLE

Dims = int | Sequence[int] | None
_HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def axes_of(n: NodeView) -> tuple[int, ...]:
    """Return the axes that a node reduces, each in [0, rank)."""
    rank = rank_of(n.x)
    if n.axes is None:
        return () if n.noop_with_empty_axes else tuple(range(rank))
    constant = constant_of(n.axes)
    if constant is None:
        raise GraphError(f"{n.definition.name}: axes must be constant", got=f"{n.axes.name}, which is computed")
    axes = normalize_axes([int(a) for a in constant.reshape(-1)], rank)
    return axes if axes or n.noop_with_empty_axes else tuple(range(rank))


def axes_from_dim(x: ir.Value, dim: Dims) -> tuple[int, ...]:
    """Return the axes of PyTorch's `dim`: None and [] are all axes; dim 0 and -1 of a scalar are none."""
    rank = rank_of(x)
    dims = [dim] if isinstance(dim, int) else list(dim or range(rank))
    return normalize_axes(dims, rank) if rank else ()


def axes_input(op: Builder, axes: Sequence[int]) -> ir.Value:
    return op.constant(list(axes), ir.DataType.INT64)


def with_reduced_axes(op: Builder, n: NodeView, reduced: ir.Value) -> ir.Value:
    """Restore the reduced axes of a value of the output's shape with size 1: it broadcasts against x."""
    axes = axes_of(n)
    if n.keepdims or not axes:
        return reduced
    return op.Unsqueeze(reduced, axes_input(op, axes))


def expanded_to_input(op: Builder, n: NodeView, reduced: ir.Value) -> ir.Value:
    """Expand a value of the output's shape over the reduced axes to x's shape."""
    return op.Expand(with_reduced_axes(op, n, reduced), op.shape_of(n.x))


def count_of(n: NodeView) -> Size:
    """Return the number of elements that are reduced to one."""
    shape = sizes.dims_of(n.x)
    return sizes.multiply(1, *(shape[axis] for axis in axes_of(n)))


def in_float32(op: Builder, value: ir.Value, compute: Callable[[ir.Value], ir.Value]) -> ir.Value:
    """Run `compute` in float32 for half precision, which cannot represent a count; PyTorch does so for scalars."""
    dtype = dtype_of(value)
    if dtype not in _HALVES:
        return compute(value)
    return cast(op, compute(cast(op, value, ir.DataType.FLOAT)), dtype)


# Definitions


def output_types(n: NodeView) -> Sequence[TensorType]:
    return (reduced_type(n, axes_of(n), bool(n.keepdims)),)


def axis_map(n: NodeView) -> str:
    return axis_map_over(n, axes_of(n), bool(n.keepdims))


def lower_reduction(function: Callable[..., Any]) -> Callable[..., Call]:
    """Lower to function(x, dims, keepdim); integers keep their type, where PyTorch by default sums in int64."""

    def lower(n: NodeView, x: Any, axes: Any) -> Call:
        dims = list(axes_of(n))
        if not dims and n.noop_with_empty_axes:  # to PyTorch an empty list means all axes
            return Method("clone", x)
        dim: Any = dims[0] if len(dims) == 1 else dims  # a list costs 0.3 us of 2.1
        keepdim = (True,) if n.keepdims else ()
        if is_float(dtype_of(n.x)):
            return Call(function, x, dim, *keepdim)
        return Call(function, x, dim, *keepdim, dtype=TORCH_DTYPES[dtype_of(n.x)])

    return lower


def define_reduction(
    name: str,
    from_torch: Mapping[str, FromTorch],
    lower: Callable[..., Call],
    gradient: GradientRule | None,
    *,
    reads: tuple[str, ...] = (),
    domain: str = ONNX,
    body: Any = STANDARD,
    attributes: Mapping[str, Any] | None = None,
) -> OpDef:
    """Define y = f(x) over the axes that the constant `axes` lists. `gradient` is (op, n, dy) -> dx."""
    rule = gradient
    op = define_pure(
        domain,
        name,
        ("x", "axes?"),
        ("y",),
        attributes={"keepdims": 1, "noop_with_empty_axes": 0, **(attributes or {})},
        from_torch=from_torch,
        shapes=output_types,
        body=body,
        gradient=(Gradient(lambda op, n, dy: _one_per_input(n, rule(op, n, dy)), reads),)
        if rule
        else NOT_DIFFERENTIABLE,
        nondiff_inputs=frozenset({"axes"}),
        lower=lower,
        axes=axis_map,
        flops=lambda n: numel(n.x),
    )
    FUSIBLE.add(op)
    return op


def _one_per_input(n: NodeView, dx: Any) -> tuple[ir.Value | None, ...]:
    return (dx, None)[: len(n.node.inputs)]


def reduced_type(
    n: NodeView, axes: Sequence[int] | None, keepdims: bool, dtype: ir.DataType | None = None
) -> TensorType:
    """Return the type of x reduced over `axes`; None means all axes."""
    shape = sizes.dims_of(n.x)
    reduced = set(range(len(shape))) if axes is None else set(normalize_axes(axes, len(shape)))
    result = [1 if i in reduced else s for i, s in enumerate(shape) if keepdims or i not in reduced]
    return TensorType(dtype or dtype_of(n.x), tuple(result))


def axis_map_over(n: NodeView, axes: Sequence[int] | None, keepdims: bool) -> str:
    """Return the axis map of a reduction of x over `axes`; None means all axes."""
    rank = rank_of(n.x)
    reduced = set(range(rank)) if axes is None else set(normalize_axes(axes, rank))
    left = [f"a{i}" for i in range(rank)]
    right = ["1" if i in reduced else f"a{i}" for i in range(rank) if keepdims or i not in reduced]
    inputs = [" ".join(left)] + ["-"] * (len(n.node.inputs) - 1)
    return f"{', '.join(inputs)} -> {' '.join(right)}"
