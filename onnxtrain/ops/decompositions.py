"""PyTorch's operators that are several ops, of several families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, dtype_of, rank_of
from onnxtrain.ops.aten_node import aten_node
from onnxtrain.ops.body_parts import add_scalar, cast, int64_vector, mul_scalar, reshaped, sum_over
from onnxtrain.ops.dtypes import accumulation_dtype
from onnxtrain.ops.registry import capture_call, register_captures
from onnxtrain.ops.reshape.dims import transposed, unsqueezed
from onnxtrain.ops.reshape.movement import checked_axis
from onnxtrain.ops.reshape.rows import zeros

_ORDERS = 3  # of differences that are written out: each is two slices


def _diff(
    op: Builder, x: ir.Value, n: int = 1, dim: int = -1, prepend: ir.Value | None = None, append: ir.Value | None = None
) -> Any:
    """Differences of neighbours, n times."""
    if n not in range(_ORDERS):
        return NotImplemented
    if n == 0:
        return op.Identity(x)  # whatever is to come before and after
    axis = checked_axis(dim, rank_of(x), "the axis of diff")
    parts = [v for v in (prepend, x, append) if v is not None]
    found = op.Concat(*parts, axis=axis) if len(parts) > 1 else x
    is_truth = dtype_of(x) == ir.DataType.BOOL
    for _ in range(n):
        last = sizes.dims_of(found)[axis]
        if last == 0:
            break
        later = op.Slice(found, int64_vector(op, [1]), op.sizes([last]), int64_vector(op, [axis]))
        earlier = op.Slice(found, int64_vector(op, [0]), int64_vector(op, [-1]), int64_vector(op, [axis]))
        found = op.Xor(later, earlier) if is_truth else op.Sub(later, earlier)
    return found


def _block_diag(op: Builder, tensors: Sequence[ir.Value]) -> Any:
    """Each matrix in rows and columns of its own."""
    dtype = op.out[0].dtype
    matrices = [cast(op, t, dtype) for t in tensors]
    matrices = [m if rank_of(m) == 2 else reshaped(op, m, (1, sizes.multiply(1, *sizes.dims_of(m)))) for m in matrices]
    widths = [sizes.dims_of(m)[1] for m in matrices]
    rows = []
    for number, matrix in enumerate(matrices):
        height = sizes.dims_of(matrix)[0]
        before, after = (sizes.add(0, *part) for part in (widths[:number], widths[number + 1 :]))
        sides = [zeros(op, (height, width), dtype) if width != 0 else None for width in (before, after)]
        parts = [v for v in (sides[0], matrix, sides[1]) if v is not None]
        rows.append(op.Concat(*parts, axis=1))
    return op.Concat(*rows, axis=0)


def _covariance(op: Builder, x: ir.Value, correction: int) -> ir.Value:
    """Of the rows of x [n, observations]: [n, n]."""
    count = sizes.dims_of(x)[1]
    mean = op.Div(sum_over(op, x, [1]), op.size(count, dtype_of(x)))
    centred = op.Sub(x, mean)
    free = op.size(sizes.maximum(0, sizes.subtract(count, correction)), dtype_of(x))
    result: ir.Value = op.Div(op.MatMul(centred, transposed(op, centred, [1, 0])), free)
    return result


def _as_rows(op: Builder, x: ir.Value) -> ir.Value:
    return x if rank_of(x) == 2 else reshaped(op, x, (1, sizes.multiply(1, *sizes.dims_of(x))))


def _cov(op: Builder, x: ir.Value, correction: int = 1) -> Any:
    """Without weights: with them the export ends before, because PyTorch asks whether any is negative."""
    return reshaped(op, _covariance(op, _as_rows(op, x), correction), op.out[0].shape)


def _corrcoef(op: Builder, x: ir.Value) -> Any:
    """Covariances divided by both standard deviations. That of one variable is 1, or NaN where it does not vary."""
    found = _covariance(op, _as_rows(op, x), 1)
    if not op.out[0].shape:
        return reshaped(op, op.Div(found, found), ())
    deviations = op.Sqrt(op.own.Diagonal(found, offset=0, row_axis=0, column_axis=1))
    found = op.Div(op.Div(found, unsqueezed(op, deviations, 1)), unsqueezed(op, deviations, 0))
    return op.Clip(found, op.scalar(-1, like=found), op.scalar(1, like=found))


_RENORM_EPSILON = 1e-7  # PyTorch's


def _renorm(op: Builder, x: ir.Value, p: float, dim: int, maxnorm: float) -> Any:
    """Slices along `dim` whose p-norm is above `maxnorm` are scaled down to it."""
    axis = checked_axis(dim, rank_of(x), "the axis of renorm")
    others = [i for i in range(rank_of(x)) if i != axis]
    wide = cast(op, x, accumulation_dtype(dtype_of(x)))
    gives = TensorType(dtype_of(wide), tuple(s if i == axis else 1 for i, s in enumerate(sizes.dims_of(x))))
    norm = capture_call(op, "aten.linalg_vector_norm.default", gives, wide, p, others, True)
    scale = op.Div(op.scalar(maxnorm, like=wide), add_scalar(op, norm, _RENORM_EPSILON))
    factor = op.Where(op.Greater(norm, op.scalar(maxnorm, like=wide)), scale, op.scalar(1, like=wide))
    return op.Mul(x, cast(op, factor, dtype_of(x)))


def _softmax_backward(op: Builder, dy: ir.Value, y: ir.Value, dim: int, input_dtype: Any) -> Any:
    """(dy - sum(dy y)) y: an operator of PyTorch's own backward, and differentiable here."""
    if not rank_of(y):
        return op.Mul(op.Sub(dy, op.Mul(dy, y)), y)
    axis = checked_axis(dim, rank_of(y), "the axis of softmax")
    products = op.Mul(dy, y)
    return cast(op, op.Sub(products, op.Mul(y, sum_over(op, products, [axis]))), op.out[0].dtype)


def _dropout_backward(op: Builder, dy: ir.Value, mask: ir.Value, scale: float) -> Any:
    return mul_scalar(op, op.Mul(dy, cast(op, mask, dtype_of(dy))), scale)


def _rrelu(
    op: Builder,
    x: ir.Value,
    noise: ir.Value,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    """X times slopes that are drawn. PyTorch's own gradient reads the noise that it was given instead of the slopes."""
    if not training or generator is not None:
        return NotImplemented
    drawn = aten_node(op, torch.ops.aten.rrelu_with_noise_functional.default, [x, noise, lower, upper, True], {})
    slopes = op.own.Detach(drawn.outputs[1])
    return op.Mul(x, slopes), slopes


register_captures(
    {
        "aten._softmax_backward_data.default": _softmax_backward,
        "aten.block_diag.default": _block_diag,
        "aten.corrcoef.default": _corrcoef,
        "aten.cov.default": _cov,
        "aten.diff.default": _diff,
        "aten.native_dropout_backward.default": _dropout_backward,
        "aten.renorm.default": _renorm,
        "aten.rrelu_with_noise_functional.default": _rrelu,
    }
)
