"""ONNX's norms, which do not return statistics; their bodies use our norms, which do, for backward.

    InstanceNormalization(x[n, c, d], scale[c], b[c])        over d, per sample and channel
    GroupNormalization(x[n, c, d], scale[c], b[c])           over d and the channels of a group
    RMSNormalization(x, scale)                               x / sqrt(mean(x^2) + epsilon) * scale, from `axis` on
    MeanVarianceNormalization(x)                             (x - mean) / (std + 1e-9) over `axes`
    LpNormalization(x)                                       x / norm(x) along `axis`; x where the norm is 0
    LRN(x[n, c, d])         x / (bias + alpha / size * sum of x^2 over the `size` nearest channels)^beta

Source of LRN: Krizhevsky et al. 2012, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import dtype_of, normalize_axes, normalize_axis, rank_of
from onnxtrain.ops.activation.constructors import not_double
from onnxtrain.ops.body_parts import add_scalar, int64_vector, mean_over, mul_scalar, reshaped
from onnxtrain.ops.constructors import define_by_body
from onnxtrain.ops.definition import REQUIRED, Call, NodeView, numel
from onnxtrain.ops.interfaces.stock_kernels import STOCK_KERNELS


def _flops(per_element: int) -> Any:
    return lambda n: sizes.multiply(per_element, numel(n.x))


def _axes(n: NodeView, x_axes: Sequence[str]) -> str:
    """Return the axis map of an op that keeps the axes of x; the axes of its parameters do not reach the output."""
    x = " ".join(x_axes)
    parameters = [" ".join(f"[p{i}]" for i in range(rank_of(v))) for v in n.node.inputs[1:] if v is not None]
    return f"{', '.join([x, *parameters])} -> {x}"


def _batch_axes(n: NodeView) -> str:
    return _axes(n, ["n", *(f"[d{i}]" for i in range(1, rank_of(n.x)))])


# InstanceNormalization, GroupNormalization


def _channels(n: NodeView) -> int:
    channels = sizes.dims_of(n.x)[1]
    if not isinstance(channels, int):
        raise GraphError(
            "the number of channels of InstanceNormalization is symbolic", expected="a static dimension", got=channels
        )
    return channels


def instance_norm(x: torch.Tensor, scale: torch.Tensor, b: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Compute a group norm with groups of one channel: PyTorch's instance norm raises for a single spatial position."""
    return torch.group_norm(x, x.shape[1], scale, b, epsilon)


INSTANCE_NORMALIZATION = define_by_body(
    "InstanceNormalization",
    ("x", "scale", "b"),
    lambda op, n: op.own.GroupNormalization(n.x, n.scale, n.b, num_groups=_channels(n), epsilon=n.epsilon)[0],
    lambda n, x, scale, b: Call(instance_norm, x, scale, b, n.epsilon),
    attributes={"epsilon": 1e-5},
    axes=_batch_axes,
    flops=_flops(8),
)
GROUP_NORMALIZATION = define_by_body(
    "GroupNormalization",
    ("x", "scale", "b"),
    lambda op, n: op.own.GroupNormalization(n.x, n.scale, n.b, num_groups=n.num_groups, epsilon=n.epsilon)[0],
    lambda n, x, scale, b: Call(torch.group_norm, x, n.num_groups, scale, b, n.epsilon),
    attributes={"num_groups": REQUIRED, "epsilon": 1e-5, "stash_type": 1},
    axes=_batch_axes,
    flops=_flops(8),
)


# RMSNormalization


def _rms_body(op: Builder, n: NodeView) -> ir.Value:
    axis = normalize_axis(n.axis, rank_of(n.x))
    if sizes.dims_of(n.scale) == sizes.dims_of(n.x)[axis:]:
        y, _ = op.ms.SimplifiedLayerNormalization(n.x, n.scale, axis=axis, epsilon=n.epsilon)
        return y
    y, _ = op.ms.SimplifiedLayerNormalization(n.x, axis=axis, epsilon=n.epsilon)
    return op.Mul(y, n.scale)  # the scale broadcasts


def _rms_axes(n: NodeView) -> str:
    axis = normalize_axis(n.axis, rank_of(n.x))
    return _axes(n, [f"r{i}" if i < axis else f"[h{i}]" for i in range(rank_of(n.x))])


def rms_norm(x: torch.Tensor, scale: torch.Tensor, axis: int, epsilon: float) -> torch.Tensor:
    return torch.rms_norm(x, x.shape[axis:], None, epsilon) * scale


RMS_NORMALIZATION = define_by_body(
    "RMSNormalization",
    ("x", "scale"),
    _rms_body,
    lambda n, x, scale: Call(rms_norm, x, scale, normalize_axis(n.axis, rank_of(n.x)), n.epsilon),
    attributes={"axis": -1, "epsilon": 1e-5, "stash_type": 1},
    axes=_rms_axes,
    flops=_flops(4),
)
STOCK_KERNELS.implements(INSTANCE_NORMALIZATION, GROUP_NORMALIZATION, RMS_NORMALIZATION)(not_double)


# MeanVarianceNormalization, LpNormalization

_EPSILON = 1e-9  # ONNX adds it to the standard deviation


def _axes_with_normalized(n: NodeView, axes: Sequence[int]) -> str:
    return _axes(n, [f"[a{i}]" if i in axes else f"a{i}" for i in range(rank_of(n.x))])


def _mvn_body(op: Builder, n: NodeView) -> ir.Value:
    axes = normalize_axes(n.axes, rank_of(n.x))
    centered = op.Sub(n.x, mean_over(op, n.x, axes))
    deviation = op.Sqrt(mean_over(op, op.Mul(centered, centered), axes))
    return op.Div(centered, add_scalar(op, deviation, _EPSILON))


def mean_variance_norm(x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    variance, mean = torch.var_mean(x, list(axes), correction=0, keepdim=True)
    return (x - mean) / (variance.sqrt() + _EPSILON)


define_by_body(
    "MeanVarianceNormalization",
    ("x",),
    _mvn_body,
    lambda n, x: Call(mean_variance_norm, x, n.axes),
    attributes={"axes": (0, 2, 3)},
    axes=lambda n: _axes_with_normalized(n, normalize_axes(n.axes, rank_of(n.x))),
    flops=_flops(6),
)


def _lp_body(op: Builder, n: NodeView) -> ir.Value:
    axes = int64_vector(op, [normalize_axis(n.axis, rank_of(n.x))])
    norm = op.op("", f"ReduceL{_order(n)}")(n.x, axes, keepdims=1)
    one = op.scalar(1, like=norm)
    return op.Div(n.x, op.Where(op.Equal(norm, op.scalar(0, like=norm)), one, norm))


def _order(n: NodeView) -> int:
    if n.p not in (1, 2):
        raise GraphError("the order p of LpNormalization is unsupported", expected="1 or 2", got=n.p)
    return int(n.p)


def lp_normalize(x: torch.Tensor, axis: int, order: int) -> torch.Tensor:
    norm = torch.linalg.vector_norm(x, order, axis, keepdim=True)
    return x / torch.where(norm == 0, 1.0, norm)


define_by_body(
    "LpNormalization",
    ("x",),
    _lp_body,
    lambda n, x: Call(lp_normalize, x, n.axis, _order(n)),
    attributes={"axis": -1, "p": 2},
    axes=lambda n: _axes_with_normalized(n, [normalize_axis(n.axis, rank_of(n.x))]),
    flops=_flops(4),
)


# LRN


def _lrn_body(op: Builder, n: NodeView) -> ir.Value:
    """Sum over neighbouring channels by average pooling of images [c, d] with windows [size, 1]."""
    batch, channels, *inner = sizes.dims_of(n.x)
    inner_size: Size = sizes.multiply(1, *inner)
    before = (n.size - 1) // 2
    squares = reshaped(op, op.Mul(n.x, n.x), [batch, 1, channels, inner_size])
    amounts = int64_vector(op, [before, n.size - 1 - before])
    padded = op.Pad(squares, amounts, op.scalar(0, like=n.x), int64_vector(op, [2]))
    mean = op.AveragePool(padded, kernel_shape=[n.size, 1])
    divisor = op.Pow(add_scalar(op, mul_scalar(op, mean, n.alpha), n.bias), op.scalar(n.beta, like=n.x))
    return op.Div(n.x, reshaped(op, divisor, sizes.dims_of(n.x)))


def local_response_norm(x: torch.Tensor, size: int, alpha: float, beta: float, bias: float) -> torch.Tensor:
    """LRN with ONNX's window: an even size has one more channel after than before; PyTorch's has it before."""
    before = (size - 1) // 2
    squares = torch.constant_pad_nd(x.square().flatten(2), [0, 0, before, size - 1 - before])
    mean = squares.unfold(1, size, 1).mean(-1).reshape(x.shape)
    return x / (mean * alpha + bias) ** beta


LRN = define_by_body(
    "LRN",
    ("x",),
    _lrn_body,
    lambda n, x: Call(local_response_norm, x, n.size, n.alpha, n.beta, n.bias),
    attributes={"size": REQUIRED, "alpha": 1e-4, "beta": 0.75, "bias": 1.0},
    axes=lambda n: _axes(n, ["n", "[c]", *(f"d{i}" for i in range(rank_of(n.x) - 2))]),
    flops=lambda n: sizes.multiply(n.size + 6, numel(n.x)),
)
# onnxruntime refuses even sizes.
STOCK_KERNELS.register(LRN, lambda n: dtype_of(n.x) == ir.DataType.FLOAT and n.size % 2 == 1)
