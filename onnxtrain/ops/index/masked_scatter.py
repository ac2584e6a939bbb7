"""MaskedScatter: write the elements of a source in order where a mask is true; and its gradient.

MaskedScatter(x, mask, source) -> y         x, with the k-th element of source at the k-th true element of mask
MaskedScatterGrad(dy, mask, shape) -> ds    the elements of dy where mask is true, then zeros, in `shape`
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, TensorType, dtype_of
from onnxtrain.ops.body_parts import cast, reshaped
from onnxtrain.ops.definition import Call, NodeView
from onnxtrain.ops.reshape.dims import expanded
from onnxtrain.ops.reshape.movement import define_movement
from onnxtrain.ops.reshape.rows import zeros
from onnxtrain.ops.symbolic_ints import required_ints


def _flat(op: Builder, value: ir.Value) -> ir.Value:
    return reshaped(op, value, (sizes.multiply(1, *sizes.dims_of(value)),))


def _true_counts(op: Builder, mask: ir.Value) -> ir.Value:
    """Return for each element of a flat mask the number of true elements before it."""
    ones = op.Cast(mask, to=ir.DataType.INT64)
    return op.CumSum(ones, op.constant(0, ir.DataType.INT64), exclusive=1)


def _scatter_body(op: Builder, n: NodeView) -> ir.Value:
    """Gather the source by the count of true elements, and select by the mask.

    The source is padded by one element, because Gather reads index 0 where the mask is false, even of an empty source.
    """
    mask = _flat(op, n.mask)
    source = op.Concat(_flat(op, n.source), op.constant([0], dtype_of(n.x)), axis=0)
    indices = op.Where(mask, _true_counts(op, mask), op.scalar(0, ir.DataType.INT64))
    written = reshaped(op, op.Gather(source, indices, axis=0), sizes.dims_of(n.x))
    return op.Where(n.mask, written, n.x)


def _scatter_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[ir.Value | None, None, ir.Value | None]:
    dx = op.Where(n.mask, op.scalar(0, like=dy), dy) if n.wants("x") else None
    dsource = op.own.MaskedScatterGrad(dy, n.mask, op.shape_of(n.source)) if n.wants("source") else None
    return dx, None, dsource


def _capture_masked_scatter(op: Builder, x: ir.Value, mask: ir.Value, source: ir.Value) -> ir.Value:
    dtype, shape = op.out[0]
    x, mask = expanded(op, x, shape), expanded(op, mask, shape)
    return op.own.MaskedScatter(x, mask, cast(op, source, dtype))


MASKED_SCATTER = define_movement(
    "MaskedScatter",
    ("x", "mask", "source"),
    lambda n: (TensorType(dtype_of(n.x), sizes.dims_of(n.x)),),
    lambda n, x, mask, source: Call(torch.masked_scatter, x, mask, source),
    _scatter_gradient,
    reads=("mask",),
    domain=OWN,
    from_torch={"aten.masked_scatter.default": _capture_masked_scatter},
    body=_scatter_body,
    nondiff_inputs=frozenset({"mask"}),
)


def _grad_body(op: Builder, n: NodeView) -> ir.Value:
    """Scatter each element of dy to its index in the source.

    Elements where the mask is false go to one additional element at the end, which is sliced off.
    """
    mask = _flat(op, n.mask)
    count = sizes.multiply(1, *sizes.dims_of(n.ds))
    past_end = op.size(count)
    indices = op.Unsqueeze(op.Where(mask, _true_counts(op, mask), past_end), op.constant([1], ir.DataType.INT64))
    padded = zeros(op, (sizes.add(count, 1),), dtype_of(n.dy))
    updates = op.Where(mask, _flat(op, n.dy), op.scalar(0, like=n.dy))
    padded = op.ScatterND(padded, indices, updates, reduction="add")
    bounds = (op.constant([0], ir.DataType.INT64), op.sizes([count]))
    return reshaped(op, op.Slice(padded, *bounds), sizes.dims_of(n.ds))


def _lower_grad(n: NodeView, dy: Any, mask: Any, shape: Any) -> Call:
    return Call(torch.ops.aten.masked_scatter_backward.default, dy, mask, shape)


MASKED_SCATTER_GRAD = define_movement(
    "MaskedScatterGrad",
    ("dy", "mask", "shape"),
    lambda n: (TensorType(dtype_of(n.dy), required_ints(n.shape, "the shape of MaskedScatterGrad")),),
    _lower_grad,
    None,
    host_inputs=frozenset({2}),
    domain=OWN,
    outputs=("ds",),
    body=_grad_body,
    nondiff_inputs=frozenset({"mask", "shape"}),
)
