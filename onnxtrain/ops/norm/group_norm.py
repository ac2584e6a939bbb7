"""Group norm: normalizes groups of channels of each sample.

    GroupNormalization(x[n, c, d], scale[c], b[c]) -> y[n, c, d], mean[n, g], inv_std[n, g]
        y = (x - mean) * inv_std * scale + b       mean and variance over the c/g channels of a group and d

`d` stands for all axes after the channels, g is `num_groups`. ONNX's op of this name does not return the statistics,
which backward needs. They are float32, or double for a double x. (On a CPU PyTorch keeps those of half-precision x and
scale in the dtype of x; only the backward kernel reads them.)

Source: Wu and He 2018, https://arxiv.org/abs/1803.08494 (eq. 1, 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import OWN, TensorType, dtype_of, rank_of, type_of
from onnxtrain.ops.body_parts import add_scalar, cast, int64_vector, mean_over, reshaped, sum_over
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import REQUIRED, Call, Gradient, NodeView, numel
from onnxtrain.ops.dtypes import accumulation_dtype
from onnxtrain.ops.gradient_masks import apply_output_mask, as_bools, first_cotangent, output_mask

aten = torch.ops.aten


def _statistics(n: NodeView) -> TensorType:
    return TensorType(accumulation_dtype(dtype_of(n.x)), (sizes.dims_of(n.x)[0], n.num_groups))


def _parameter(n: NodeView) -> TensorType:
    """Return the type of scale and b, and of their gradients."""
    return TensorType(dtype_of(n.x if n.scale is None else n.scale), (sizes.dims_of(n.x)[1],))


def _grouped(op: Builder, n: NodeView, x: ir.Value) -> ir.Value:
    """Reshape x to [n, g, c/g, d], in the dtype of the statistics."""
    batch, channels, *rest = sizes.dims_of(n.x)
    shape = [batch, n.num_groups, sizes.floor_divide(channels, n.num_groups), sizes.multiply(1, *rest)]
    return reshaped(op, cast(op, x, _statistics(n).dtype), shape)


def _per_group(op: Builder, n: NodeView, statistics: ir.Value) -> ir.Value:
    return reshaped(op, statistics, [sizes.dims_of(n.x)[0], n.num_groups, 1, 1])


def _per_channel(op: Builder, n: NodeView, parameter: ir.Value) -> ir.Value:
    """Reshape scale or b so that it broadcasts over x as [n, g, c/g, d]."""
    channels: Size = sizes.floor_divide(sizes.dims_of(n.x)[1], n.num_groups)
    return reshaped(op, cast(op, parameter, _statistics(n).dtype), [1, n.num_groups, channels, 1])


def _axes(pattern: str) -> Any:
    """Return the axis map of `pattern`.

    X stands for the axes of x, C for a vector over channels, S for the statistics.
    """

    def axes(n: NodeView) -> str:
        axes_of = {"X": " ".join(["n", "[c]", *(f"[d{i}]" for i in range(rank_of(n.x) - 2))]), "C": "[c]", "S": "n [g]"}
        left, right = (part.split() for part in pattern.split("->"))
        inputs = [axes_of[w] if v is not None else "-" for w, v in zip(left, n.node.inputs, strict=False)]
        return f"{', '.join(inputs)} -> {', '.join(axes_of[w] for w in right)}"

    return axes


def _body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    x = _grouped(op, n, n.x)
    mean = mean_over(op, x, (2, 3))
    centered = op.Sub(x, mean)
    inv_std = op.Reciprocal(op.Sqrt(add_scalar(op, mean_over(op, op.Mul(centered, centered), (2, 3)), n.epsilon)))
    y = op.Mul(centered, inv_std)
    if n.scale is not None:
        y = op.Mul(y, _per_channel(op, n, n.scale))
    if n.b is not None:
        y = op.Add(y, _per_channel(op, n, n.b))
    y = cast(op, reshaped(op, y, sizes.dims_of(n.x)), dtype_of(n.x))
    statistics = _statistics(n).shape
    return y, reshaped(op, mean, statistics), reshaped(op, inv_std, statistics)


def _gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> list[ir.Value | None]:
    dy = first_cotangent(n, cotangents)
    mask = output_mask(n, "x", "scale", "b")
    grads = op.own.GroupNormalizationGrad(
        dy, n.x, n.scale, n.mean, n.inv_std, num_groups=n.num_groups, output_mask=mask
    )
    return apply_output_mask(grads, mask, n)


def _in_kernel_format(x: torch.Tensor) -> torch.Tensor:
    """Convert x as PyTorch does for its kernels: channels_last is kept on a CPU, all else becomes contiguous."""
    if x.is_contiguous():
        return x
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    if channels_last is not None and x.device.type == "cpu" and x.is_contiguous(memory_format=channels_last):
        return x
    return x.contiguous()


def group_norm(x: torch.Tensor, scale: Any, b: Any, groups: int, epsilon: float) -> Any:
    """PyTorch's kernel: y, mean, inv_std."""
    batch, channels = x.shape[:2]
    inner = x.shape[2:].numel()
    return torch.native_group_norm(_in_kernel_format(x), scale, b, batch, channels, inner, groups, epsilon)


def group_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, scale: Any, mean: Any, inv_std: Any, groups: int, mask: list[bool]
) -> Any:
    """PyTorch's backward kernel: the gradients of x, scale and b."""
    batch, channels = x.shape[:2]
    inner = x.shape[2:].numel()
    x = _in_kernel_format(x)
    if dy.stride() != x.stride():
        dy = torch.empty_like(x, dtype=dy.dtype).copy_(dy)
    return aten.native_group_norm_backward.default(dy, x, mean, inv_std, scale, batch, channels, inner, groups, mask)


def _capture(
    op: Builder,
    x: ir.Value,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    return op.own.GroupNormalization(x, weight, bias, num_groups=num_groups, epsilon=eps)[0]


def _capture_native(
    op: Builder, x: ir.Value, weight: Any, bias: Any, n: Size, c: Size, inner: Size, group: int, eps: float
) -> Any:
    y = op.own.GroupNormalization(x, weight, bias, num_groups=group, epsilon=eps)[0]
    # PyTorch's statistics are differentiable, those of our op are saved for backward only: compute them separately.
    batch, channels, *rest = sizes.dims_of(x)
    dtype = accumulation_dtype(dtype_of(x))
    group_size = sizes.multiply(sizes.floor_divide(channels, group), *rest)
    rows = reshaped(op, cast(op, x, dtype), [batch, group, group_size])
    axis = int64_vector(op, [2])
    variance = op.own.ReduceVar(rows, axis, keepdims=0, correction=0.0)
    inv_std = op.own.Rsqrt(add_scalar(op, variance, eps))
    statistics = (op.ReduceMean(rows, axis, keepdims=0), inv_std)
    return y, *(cast(op, v, t.dtype) for v, t in zip(statistics, op.out[1:], strict=True))


define_pure(
    OWN,
    "GroupNormalization",
    ("x", "scale?", "b?"),
    ("y", "mean", "inv_std"),
    attributes={"num_groups": REQUIRED, "epsilon": 1e-5},
    from_torch={"aten.group_norm.default": _capture, "aten.native_group_norm.default": _capture_native},
    shapes=lambda n: (type_of(n.x), _statistics(n), _statistics(n)),
    body=_body,
    gradient=(Gradient(_gradient, reads=("x", "scale", "mean", "inv_std")),),
    lower=lambda n, x, scale, b: Call(group_norm, x, scale, b, n.num_groups, n.epsilon),
    axes=_axes("X C C -> X S S"),
    flops=lambda n: sizes.multiply(8, numel(n.x)),
)


# GroupNormalizationGrad(dy, x, scale, mean, inv_std) -> dx, dscale, db    with z = (x - mean) * inv_std, g = dy * scale
#     dx = inv_std * (g - mean(g) - z * mean(g * z))        dscale = sum(dy * z)        db = sum(dy)


def _grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    dy, inv_std = _grouped(op, n, n.dy), _per_group(op, n, n.inv_std)
    z = op.Mul(op.Sub(_grouped(op, n, n.x), _per_group(op, n, n.mean)), inv_std)
    g = dy if n.scale is None else op.Mul(dy, _per_channel(op, n, n.scale))
    dz = op.Sub(op.Sub(g, mean_over(op, g, (2, 3))), op.Mul(z, mean_over(op, op.Mul(g, z), (2, 3))))
    dx = cast(op, reshaped(op, op.Mul(dz, inv_std), sizes.dims_of(n.x)), dtype_of(n.x))
    dtype, channels = _parameter(n)
    sums = (cast(op, reshaped(op, sum_over(op, v, (0, 3)), channels), dtype) for v in (op.Mul(dy, z), dy))
    return dx, *sums


define_pure(
    OWN,
    "GroupNormalizationGrad",
    ("dy", "x", "scale?", "mean", "inv_std"),
    ("dx", "dscale", "db"),
    attributes={"num_groups": REQUIRED, "output_mask": (1, 1, 1)},
    shapes=lambda n: (type_of(n.x), _parameter(n), _parameter(n)),
    body=_grad_body,
    lower=lambda n, dy, x, scale, mean, inv_std: Call(
        group_norm_backward, dy, x, scale, mean, inv_std, n.num_groups, as_bools(n.output_mask)
    ),
    axes=_axes("X X C S S -> X C C"),
    flops=lambda n: sizes.multiply(14, numel(n.x)),
)
