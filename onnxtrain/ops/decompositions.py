"""Captures of PyTorch operators that decompose into ops of several families."""

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

_MAX_DIFF_ORDER = 2  # each order of differences is two more slices


def _capture_diff(
    op: Builder, x: ir.Value, n: int = 1, dim: int = -1, prepend: ir.Value | None = None, append: ir.Value | None = None
) -> Any:
    """Capture differences of adjacent elements, of order n."""
    if n not in range(_MAX_DIFF_ORDER + 1):
        return NotImplemented
    if n == 0:
        return op.Identity(x)  # PyTorch ignores prepend and append
    axis = checked_axis(dim, rank_of(x), "the axis of diff")
    parts = [v for v in (prepend, x, append) if v is not None]
    y = op.Concat(*parts, axis=axis) if len(parts) > 1 else x
    is_bool = dtype_of(x) == ir.DataType.BOOL
    for _ in range(n):
        size = sizes.dims_of(y)[axis]
        if size == 0:
            break
        later = op.Slice(y, int64_vector(op, [1]), op.sizes([size]), int64_vector(op, [axis]))
        earlier = op.Slice(y, int64_vector(op, [0]), int64_vector(op, [-1]), int64_vector(op, [axis]))
        y = op.Xor(later, earlier) if is_bool else op.Sub(later, earlier)
    return y


def _capture_block_diag(op: Builder, tensors: Sequence[ir.Value]) -> Any:
    """Capture block_diag: pad each matrix with zeros to the full width, then stack them."""
    dtype = op.out[0].dtype
    matrices = [cast(op, t, dtype) for t in tensors]
    matrices = [m if rank_of(m) == 2 else reshaped(op, m, (1, sizes.multiply(1, *sizes.dims_of(m)))) for m in matrices]
    widths = [sizes.dims_of(m)[1] for m in matrices]
    rows = []
    for number, matrix in enumerate(matrices):
        height = sizes.dims_of(matrix)[0]
        before, after = (sizes.add(0, *others) for others in (widths[:number], widths[number + 1 :]))
        left, right = (zeros(op, (height, width), dtype) if width != 0 else None for width in (before, after))
        parts = [v for v in (left, matrix, right) if v is not None]
        rows.append(op.Concat(*parts, axis=1))
    return op.Concat(*rows, axis=0)


def _covariance(op: Builder, x: ir.Value, correction: int) -> ir.Value:
    """Return the covariance [n, n] of the rows of x [n, observations]."""
    count = sizes.dims_of(x)[1]
    mean = op.Div(sum_over(op, x, [1]), op.size(count, dtype_of(x)))
    centered = op.Sub(x, mean)
    degrees_of_freedom = op.size(sizes.maximum(0, sizes.subtract(count, correction)), dtype_of(x))
    return op.Div(op.MatMul(centered, transposed(op, centered, [1, 0])), degrees_of_freedom)


def _as_rows(op: Builder, x: ir.Value) -> ir.Value:
    return x if rank_of(x) == 2 else reshaped(op, x, (1, sizes.multiply(1, *sizes.dims_of(x))))


def _capture_cov(op: Builder, x: ir.Value, correction: int = 1) -> Any:
    """Capture cov without weights: with weights torch.export fails, as PyTorch checks whether any is negative."""
    return reshaped(op, _covariance(op, _as_rows(op, x), correction), op.out[0].shape)


def _capture_corrcoef(op: Builder, x: ir.Value) -> Any:
    """Divide covariances by both standard deviations. For a single variable it is 1, or NaN if that is constant."""
    covariance = _covariance(op, _as_rows(op, x), 1)
    if not op.out[0].shape:
        return reshaped(op, op.Div(covariance, covariance), ())
    deviations = op.Sqrt(op.own.Diagonal(covariance, offset=0, row_axis=0, column_axis=1))
    y = op.Div(op.Div(covariance, unsqueezed(op, deviations, 1)), unsqueezed(op, deviations, 0))
    return op.Clip(y, op.scalar(-1, like=y), op.scalar(1, like=y))


_RENORM_EPSILON = 1e-7  # PyTorch's


def _capture_renorm(op: Builder, x: ir.Value, p: float, dim: int, maxnorm: float) -> Any:
    """Capture renorm: scale slices along `dim` whose p-norm exceeds `maxnorm` down to it."""
    axis = checked_axis(dim, rank_of(x), "the axis of renorm")
    others = [i for i in range(rank_of(x)) if i != axis]
    wide = cast(op, x, accumulation_dtype(dtype_of(x)))
    norm_type = TensorType(dtype_of(wide), tuple(s if i == axis else 1 for i, s in enumerate(sizes.dims_of(x))))
    norm = capture_call(op, "aten.linalg_vector_norm.default", norm_type, wide, p, others, True)
    scale = op.Div(op.scalar(maxnorm, like=wide), add_scalar(op, norm, _RENORM_EPSILON))
    factor = op.Where(op.Greater(norm, op.scalar(maxnorm, like=wide)), scale, op.scalar(1, like=wide))
    return op.Mul(x, cast(op, factor, dtype_of(x)))


def _capture_softmax_backward(op: Builder, dy: ir.Value, y: ir.Value, dim: int, input_dtype: Any) -> Any:
    """Return (dy - sum(dy y)) y, in differentiable ops: PyTorch's backward calls it where it is itself captured."""
    if not rank_of(y):
        return op.Mul(op.Sub(dy, op.Mul(dy, y)), y)
    axis = checked_axis(dim, rank_of(y), "the axis of softmax")
    scaled = op.Mul(dy, y)
    return cast(op, op.Sub(scaled, op.Mul(y, sum_over(op, scaled, [axis]))), op.out[0].dtype)


def _capture_dropout_backward(op: Builder, dy: ir.Value, mask: ir.Value, scale: float) -> Any:
    return mul_scalar(op, op.Mul(dy, cast(op, mask, dtype_of(dy))), scale)


def _capture_rrelu(
    op: Builder,
    x: ir.Value,
    noise: ir.Value,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    """Multiply x by sampled slopes. PyTorch's own gradient would read the `noise` argument instead of the slopes."""
    if not training or generator is not None:
        return NotImplemented
    sampled = aten_node(op, torch.ops.aten.rrelu_with_noise_functional.default, [x, noise, lower, upper, True], {})
    slopes = op.own.Detach(sampled.outputs[1])
    return op.Mul(x, slopes), slopes


register_captures(
    {
        "aten._softmax_backward_data.default": _capture_softmax_backward,
        "aten.block_diag.default": _capture_block_diag,
        "aten.corrcoef.default": _capture_corrcoef,
        "aten.cov.default": _capture_cov,
        "aten.diff.default": _capture_diff,
        "aten.native_dropout_backward.default": _capture_dropout_backward,
        "aten.renorm.default": _capture_renorm,
        "aten.rrelu_with_noise_functional.default": _capture_rrelu,
    }
)
