"""IndexAdd and IndexCopy: add rows to a tensor or write them into it, at a vector of indices along one axis.

    IndexAdd(x, rows[n], source[.., n, ..]) -> y        y = x, then y[.., rows[i], ..] += source[.., i, ..]
    IndexCopy(x, rows[n], source[.., n, ..]) -> y       y = x, then y[.., rows[i], ..] = source[.., i, ..]

Indices are in [0, size): PyTorch's kernels raise for others. aten.index_fill is an IndexCopy of one value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Sizes
from onnxtrain.graph.values import OWN, dtype_of, rank_of
from onnxtrain.ops.body_parts import as_value, cast, reshaped
from onnxtrain.ops.constructors import same_as
from onnxtrain.ops.definition import Call, FromTorch, GradientRule, Kernel, NodeView, OpDef
from onnxtrain.ops.reshape.dims import expanded
from onnxtrain.ops.reshape.movement import axis_names, axis_of, checked_axis, define_movement, format_axis_map
from onnxtrain.ops.reshape.rows import scatter_rows

Gradients = tuple[ir.Value | None, None, ir.Value | None]


def _axes(n: NodeView) -> str:
    axis = axis_of(n, n.x)
    left = [f"[x{i}]" if i == axis else name for i, name in enumerate(axis_names("a", rank_of(n.x)))]
    source = ["[r]" if i == axis else name for i, name in enumerate(left)]
    return format_axis_map([left, ["[r]"], source], left)


def _define(
    name: str, kernel: Callable[..., Any], gradient: GradientRule, add: bool, capture: dict[str, FromTorch]
) -> OpDef:
    def lower(n: NodeView, x: Any, rows: Any, source: Any) -> Call:
        return Call(kernel, x, axis_of(n, n.x), rows, source)

    def body(op: Builder, n: NodeView) -> ir.Value:
        return scatter_rows(op, n.x, n.rows, n.source, axis_of(n, n.x), reduction="add" if add else "none")

    return define_movement(
        name,
        ("x", "rows", "source"),
        same_as("x"),
        (
            Kernel(lower=lower, applies=lambda n, device: device == "cpu"),
            Kernel(lower=lower, deterministic=False),  # on a GPU repeated indices are written in any order
        ),
        gradient,
        reads=("rows",),
        domain=OWN,
        attributes={"axis": 0},
        from_torch=capture,
        body=body,
        axes=_axes,
        nondiff_inputs=frozenset({"rows"}),
    )


def _add_gradient(op: Builder, n: NodeView, dy: ir.Value) -> Gradients:
    return dy, None, op.Gather(dy, n.rows, axis=axis_of(n, n.x)) if n.wants("source") else None


def _copy_gradient(op: Builder, n: NodeView, dy: ir.Value) -> Gradients:
    dx = None
    if n.wants("x"):
        zeros = op.Expand(op.scalar(0, like=dy), op.shape_of(n.source))
        dx = op.own.IndexCopy(dy, n.rows, zeros, axis=axis_of(n, n.x))
    return dx, None, op.Gather(dy, n.rows, axis=axis_of(n, n.x)) if n.wants("source") else None


def _build(op: Builder, name: str, x: ir.Value, dim: int, index: ir.Value, source: ir.Value) -> ir.Value:
    """Build the op `name`; 0-dimensional tensors become vectors of one element, as PyTorch treats them."""
    shape = sizes.dims_of(x)
    if not shape:
        x, source = reshaped(op, x, (1,)), reshaped(op, source, (1,))
    if not rank_of(index):
        index = reshaped(op, index, (1,))
    axis = checked_axis(dim, rank_of(x), f"the axis of {name}")
    if not rank_of(source):
        source = reshaped(op, source, (1,) * rank_of(x))
    return reshaped(op, op.op(OWN, name)(x, index, source, axis=axis), shape)


def _capture_add(op: Builder, x: ir.Value, dim: int, index: ir.Value, source: ir.Value, *, alpha: Any = 1) -> ir.Value:
    if alpha != 1:
        source = op.Mul(source, as_value(op, alpha, dtype_of(source)))
    return _build(op, "IndexAdd", x, dim, index, source)


def _capture_copy(op: Builder, x: ir.Value, dim: int, index: ir.Value, source: ir.Value) -> ir.Value:
    return _build(op, "IndexCopy", x, dim, index, cast(op, source, dtype_of(x)))


def _capture_fill(op: Builder, x: ir.Value, dim: int, index: ir.Value, value: Any) -> ir.Value:
    shape, rows = sizes.dims_of(x) or (1,), sizes.dims_of(index) or (1,)
    axis = checked_axis(dim, len(shape), "the axis of index_fill")
    source_shape: Sizes = (*shape[:axis], *rows, *shape[axis + 1 :])
    if isinstance(value, ir.Value):  # its gradient counts each element once, even if an index is repeated
        false, true = (op.scalar(boolean, ir.DataType.BOOL) for boolean in (False, True))
        mask = expanded(op, false, sizes.dims_of(x))
        mask = _build(op, "IndexCopy", mask, dim, index, expanded(op, true, source_shape))
        return op.Where(mask, cast(op, value, dtype_of(x)), x)
    return _build(op, "IndexCopy", x, dim, index, expanded(op, as_value(op, value, dtype_of(x)), source_shape))


INDEX_ADD = _define("IndexAdd", torch.index_add, _add_gradient, True, {"aten.index_add.default": _capture_add})
INDEX_COPY = _define(
    "IndexCopy",
    torch.index_copy,
    _copy_gradient,
    False,
    {
        "aten.index_copy.default": _capture_copy,
        "aten.index_fill.int_Scalar": _capture_fill,
        "aten.index_fill.int_Tensor": _capture_fill,
    },
)
