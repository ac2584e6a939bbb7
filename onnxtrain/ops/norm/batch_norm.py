"""Batch norm: normalizes each channel over the batch.

    BatchNormInternal(x[n, c, d], scale[c], b[c], input_mean[c], input_var[c], residual[n, c, d])
            -> y[n, c, d], running_mean[c], running_var[c], saved_mean[c], saved_inv_std[c]
        y = act((x - mean) * inv_std * scale + b + residual)   mean, var over n and d, inv_std = 1 / sqrt(var + epsilon)
        running_mean = momentum * input_mean + (1 - momentum) * mean
        running_var = momentum * input_var + (1 - momentum) * var * m / (m - 1)          m = n * d
    BatchNormalization(x, scale, b, input_mean, input_var) -> y        eval mode: normalizes with the running statistics

`d` stands for all axes after the channels. Three points follow PyTorch, not ONNX: the running variance is unbiased; an
x without elements updates nothing; and without running statistics (`track_running_stats=False`) nothing is updated: the
body then returns the statistics of this batch as the running outputs, and the kernel omits them. `momentum` is ONNX's:
1 minus PyTorch's. The statistics are float32, or double for a double x. `act` is the op named by `activation`: Relu or
none.

Source: Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167 (algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import UnsupportedOperatorError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import MICROSOFT, ONNX, OWN, TensorType, dtype_of, rank_of, type_of
from onnxtrain.ops.activation.rectified import RELU
from onnxtrain.ops.body_parts import add_scalar, cast, count_over, mul_scalar, reshaped, sum_over
from onnxtrain.ops.constructors import define_pure, with_addend
from onnxtrain.ops.definition import STANDARD, Body, Call, Gradient, Kernel, NodeView, OpDef, numel
from onnxtrain.ops.dtypes import accumulation_dtype
from onnxtrain.ops.gradient_masks import apply_output_mask, as_bools, first_cotangent, output_mask
from onnxtrain.ops.interfaces.addends import INPUT_ADDENDS, OUTPUT_ADDENDS
from onnxtrain.ops.interfaces.fused_activations import FUSED_ACTIVATIONS
from onnxtrain.ops.interfaces.memory_format import IMAGES, Images
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.ops.norm.batch_norm_channels_last import (
    add_residual_and_relu,
    batch_norm_backward_channels_last,
    batch_norm_channels_last,
    gradient_before_relu,
    is_channels_last,
)

aten = torch.ops.aten
Grads = list[ir.Value | None]


def _complement(momentum: float) -> float:
    """1 - momentum, to convert between PyTorch and ONNX; computed in decimal: 0.1 becomes 0.9 and 0.9 becomes 0.1."""
    return float(1 - Decimal(repr(momentum)))


def _reduced_axes(n: NodeView) -> list[int]:
    """Return all axes but that of the channels."""
    return [axis for axis in range(rank_of(n.x)) if axis != 1]


def _channel_vector(n: NodeView, dtype: ir.DataType) -> TensorType:
    return TensorType(dtype, (sizes.dims_of(n.x)[1],))


def _parameter(n: NodeView) -> TensorType:
    """Return the type of scale and b, and of their gradients."""
    return _channel_vector(n, dtype_of(n.x if n.scale is None else n.scale))


def _broadcast_channels(op: Builder, n: NodeView, channels: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Reshape a vector of one value per channel, in `dtype`, so that it broadcasts over x."""
    rank = rank_of(n.x)
    return reshaped(op, cast(op, channels, dtype), [1, sizes.dims_of(n.x)[1], *[1] * (rank - 2)])


def _channel_axes(pattern: str) -> Any:
    """Return the axis map of `pattern`: X stands for the axes of x, C for a vector of one value per channel."""

    def axes(n: NodeView) -> str:
        axes_of = {"X": " ".join(["[n]", "c", *(f"[d{i}]" for i in range(rank_of(n.x) - 2))]), "C": "c"}
        left, right = (part.split() for part in pattern.split("->"))
        inputs = [axes_of[w] if v is not None else "-" for w, v in zip(left, n.node.inputs, strict=False)]
        return f"{', '.join(inputs)} -> {', '.join(axes_of[w] for w in right)}"

    return axes


# BatchNormInternal


def batch_norm(
    x: Any,
    scale: Any,
    b: Any,
    mean: Any,
    var: Any,
    residual: Any,
    momentum: float,
    epsilon: float,
    relu: bool = False,
    compiled: bool = False,
) -> tuple[Any, ...]:
    """Batch norm in training with PyTorch's kernel, or, if `compiled`, with our own where it applies.

    PyTorch's kernel updates the running statistics in place; it gets copies.

    Returns:
        y, the updated running statistics (None without them), the mean and 1 / standard deviation of the batch.
    """
    if not x.numel():
        return _batch_norm_of_no_elements(x, mean, var, epsilon)
    if is_channels_last(x):
        return batch_norm_channels_last(x, scale, b, mean, var, residual, momentum, epsilon, relu, compiled)
    if mean is not None:
        mean, var = mean.clone(), var.clone()
    y, *saved = torch.native_batch_norm(x, scale, b, mean, var, True, momentum, epsilon)
    return add_residual_and_relu(y, residual, relu), mean, var, *saved


def _batch_norm_of_no_elements(x: Any, mean: Any, var: Any, epsilon: float) -> tuple[Any, ...]:
    """Return the results of `batch_norm`. PyTorch's kernel raises, and that of the gradient crashes the process."""
    saved_mean = x.new_zeros(x.size(1), dtype=torch.promote_types(x.dtype, torch.float32))
    running = (None if v is None else v.clone() for v in (mean, var))
    return torch.empty_like(x), *running, saved_mean, (saved_mean + epsilon).rsqrt_()


def batch_norm_backward(
    dy: Any,
    x: Any,
    scale: Any,
    mean: Any,
    deviation: Any,
    y: Any,
    added: Any,
    batch: bool,
    epsilon: float,
    mask: list[bool],
    compiled: bool = False,
) -> tuple[Any, ...]:
    """Compute the backward of `batch_norm` with PyTorch's kernel, or, if `compiled`, with our own where it applies.

    Args:
        dy: the gradient of y.
        x: the input of forward.
        scale: that of forward, or None.
        mean: the mean of the batch if `batch`, else the running mean.
        deviation: 1 / standard deviation of the batch if `batch`, else the running variance.
        y: the output of forward if it ended with a Relu, else None.
        added: a further gradient of y, or None.
        batch: whether forward normalized with the statistics of the batch.
        epsilon: that of forward.
        mask: which gradients to compute.
        compiled: whether our kernel may run.

    Returns:
        The gradients of x, scale, b and, if the mask has four flags, the residual; None for those not in the mask.
    """
    if not x.numel():
        channels = x.new_zeros(x.size(1), dtype=deviation.dtype) if scale is None else scale
        likes = (x, channels, channels, x)[: len(mask)]
        return tuple(torch.zeros_like(like) if m else None for like, m in zip(likes, mask, strict=True))
    if is_channels_last(x):
        inv_std = deviation if batch else (deviation + epsilon).rsqrt_()
        mask4 = [*mask, False][:4]  # an op without a residual has three flags
        gradients = batch_norm_backward_channels_last(dy, x, scale, mean, inv_std, y, added, batch, mask4, compiled)
        return gradients[: len(mask)]
    missing = None if x.is_cpu else x.new_empty(0)  # the kernel for a GPU requires a defined tensor
    statistics = (None, None, mean, deviation) if batch else (mean, deviation, missing, missing)
    dy = gradient_before_relu(dy, y, added)
    gradients = aten.native_batch_norm_backward.default(dy, x, scale, *statistics, batch, epsilon, mask[:3])
    return *gradients, *(dy if m else None for m in mask[3:])


def _lower_batch_norm(*, compiled: bool) -> Callable[..., Call]:
    return lambda n, *arguments: Call(
        batch_norm, *arguments, _complement(n.momentum), n.epsilon, n.activation == "Relu", compiled
    )


def _batch_norm_types(n: NodeView) -> Sequence[TensorType]:
    saved = _channel_vector(n, accumulation_dtype(dtype_of(n.x)))
    running = [saved if v is None else type_of(v) for v in (n.input_mean, n.input_var)]
    return type_of(n.x), *running, saved, saved


def _batch_norm_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    dtype = accumulation_dtype(dtype_of(n.x))
    x, axes = cast(op, n.x, dtype), _reduced_axes(n)
    size = count_over(n.x, axes)
    count = op.size(size, dtype)
    at_least_one = op.Max(count, op.scalar(1.0, dtype)) if _may_be_zero(size) else count
    mean = op.Div(sum_over(op, x, axes), at_least_one)
    centered = op.Sub(x, mean)
    squares = sum_over(op, op.Mul(centered, centered), axes)
    inv_std = op.Reciprocal(op.Sqrt(add_scalar(op, op.Div(squares, at_least_one), n.epsilon)))
    y = op.Mul(centered, inv_std)
    if n.scale is not None:
        y = op.Mul(y, _broadcast_channels(op, n, n.scale, dtype))
    if n.b is not None:
        y = op.Add(y, _broadcast_channels(op, n, n.b, dtype))
    channels = [sizes.dims_of(n.x)[1]]
    saved_mean, saved_inv_std = reshaped(op, mean, channels), reshaped(op, inv_std, channels)
    running_mean, running_var = saved_mean, reshaped(op, op.Div(squares, add_scalar(op, count, -1)), channels)
    updates = op.Greater(count, op.scalar(0.0, dtype)) if _may_be_zero(size) else None
    if n.input_mean is not None:
        running_mean = _update_running(op, n, n.input_mean, running_mean, updates)
    if n.input_var is not None:
        running_var = _update_running(op, n, n.input_var, running_var, updates)
    y = cast(op, y, dtype_of(n.x))
    if n.residual is not None:
        y = op.Add(y, n.residual)
    if n.activation:
        y = op.op(ONNX, n.activation)(y)
    return y, running_mean, running_var, saved_mean, saved_inv_std


def _may_be_zero(size: sizes.Size) -> bool:
    return not isinstance(size, int) or size == 0


def _update_running(op: Builder, n: NodeView, running: ir.Value, batch: ir.Value, updates: ir.Value | None) -> ir.Value:
    """Return the exponential moving average of a running statistic and that of this batch; `running` if not `updates`.

    Args:
        op: adds nodes.
        n: the batch norm.
        running: the statistic.
        batch: that of this batch.
        updates: a bool scalar; None if it is true.
    """
    wide = cast(op, running, dtype_of(batch))
    updated = op.Add(mul_scalar(op, wide, n.momentum), mul_scalar(op, batch, _complement(n.momentum)))
    updated = cast(op, updated, dtype_of(running))
    return updated if updates is None else op.Where(updates, updated, running)


def _batch_norm_gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> Grads:
    """With an activation, the backward op returns the residual's gradient too; without one, it is the gradient of y."""
    dy, y = first_cotangent(n, cotangents), n.y if n.activation else None
    mask = output_mask(n, "x", "scale", "b", "residual")
    residual = mask.pop()
    statistics = (n.saved_mean, n.saved_inv_std)
    *grads, dresidual = op.ms.BatchNormalizationGrad(
        dy, n.x, n.scale, *statistics, y, epsilon=n.epsilon, output_mask=[*mask, residual if y is not None else 0]
    )
    gradients = apply_output_mask(grads, mask, n)
    if residual:
        gradients[-1] = dy if y is None else dresidual
    return gradients


def _capture_functional(
    op: Builder,
    x: ir.Value,
    weight: Any,
    bias: Any,
    running_mean: ir.Value,
    running_var: ir.Value,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not training:
        outputs = _capture_no_training(op, x, weight, bias, running_mean, running_var, momentum, eps)
        return *outputs, running_mean, running_var
    y, new_mean, new_var, *saved = op.ms.BatchNormInternal(
        x, weight, bias, running_mean, running_var, epsilon=eps, momentum=_complement(momentum)
    )
    # PyTorch's export assumes float32 running statistics even in half-precision modules: they are cast back to the
    # dtype of the buffer.
    return y, *(cast(op, v, t.dtype) for v, t in zip((*saved, new_mean, new_var), op.out[1:], strict=True))


def _capture_no_stats(
    op: Builder, x: ir.Value, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Any:
    y, _, _, *saved = op.ms.BatchNormInternal(x, weight, bias, epsilon=eps, momentum=_complement(momentum))
    return y, *(cast(op, v, t.dtype) for v, t in zip(saved, op.out[1:], strict=True))


def _capture_instance_norm(
    op: Builder,
    x: ir.Value,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """Capture a batch norm of one sample whose channels are all channels of all samples, as PyTorch does."""
    if not use_input_stats:
        return _capture_no_training(op, x, weight, bias, running_mean, running_var, momentum, eps)[0]
    if running_mean is not None:
        raise UnsupportedOperatorError(
            "an instance norm that updates running statistics is not supported: PyTorch's export loses the update",
            todo="set track_running_stats=False, or put the module in eval mode",
        )
    batch, channels, *rest = sizes.dims_of(x)
    if 0 in (batch, channels, *rest):  # PyTorch's composite operator returns early; its batch norm kernel raises
        return NotImplemented
    flat = sizes.multiply(batch, channels)
    parameters = (None if p is None else _repeat(op, p, batch, channels) for p in (weight, bias))
    y = op.ms.BatchNormInternal(reshaped(op, x, [1, flat, *rest]), *parameters, epsilon=eps)[0]
    return reshaped(op, y, [batch, channels, *rest])


def _repeat(op: Builder, vector: ir.Value, batch: sizes.Size, channels: sizes.Size) -> ir.Value:
    return reshaped(op, op.Expand(vector, op.sizes([batch, channels])), [sizes.multiply(batch, channels)])


BATCH_NORM_INTERNAL = define_pure(
    MICROSOFT,
    "BatchNormInternal",
    ("x", "scale?", "b?", "input_mean?", "input_var?", "residual?"),
    ("y", "running_mean", "running_var", "saved_mean", "saved_inv_std"),
    attributes={"epsilon": 1e-5, "momentum": 0.9, "activation": ""},
    from_torch={
        "aten._native_batch_norm_legit_functional.default": _capture_functional,
        "aten._native_batch_norm_legit.no_stats": _capture_no_stats,
        "aten.instance_norm.default": _capture_instance_norm,
    },
    shapes=with_addend("residual", _batch_norm_types),
    body=_batch_norm_body,
    gradient=(Gradient(_batch_norm_gradient, reads=("x", "scale", "saved_mean", "saved_inv_std", "y")),),
    nondiff_inputs=frozenset({"input_mean", "input_var"}),
    kernels=(Kernel(lower=_lower_batch_norm(compiled=True), applies=may_compile),),
    lower=_lower_batch_norm(compiled=False),
    axes=_channel_axes("X C C C C X -> X C C C C"),
    flops=lambda n: sizes.multiply(8, numel(n.x)),
)
IMAGES.register(BATCH_NORM_INTERNAL, Images(frozenset({"x", "y", "residual"})))
OUTPUT_ADDENDS.register(BATCH_NORM_INTERNAL, "residual")
FUSED_ACTIVATIONS.register(BATCH_NORM_INTERNAL, (RELU,))


# BatchNormalizationGrad(dy, x, scale, mean, inv_std, y, added) -> dx, dscale, db, dresidual
#     dx = scale * inv_std * (g - (db + z * dscale) / m)   dscale = sum(g * z)   db = sum(g)   z = (x - mean) * inv_std
#     g = dresidual = dy + added; if y, the output of a Relu, is given: g is 0 where y <= 0


def _grad_types(n: NodeView) -> Sequence[TensorType]:
    return (type_of(n.x), _parameter(n), _parameter(n), type_of(n.x))[: len(n.definition.outputs)]


def _batch_norm_grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    """`dx` = scale * inv_std * (g - c * (dscale * inv_std / m) - db / m) with c = x - mean; divides per channel."""
    dtype, axes = accumulation_dtype(dtype_of(n.x)), _reduced_axes(n)
    dresidual = n.dy if n.added is None else op.Add(n.dy, n.added)
    if n.y is not None:
        dresidual = op.ms.ReluGrad(dresidual, n.y)
    dy = cast(op, dresidual, dtype)
    inv_std = _broadcast_channels(op, n, n.inv_std, dtype)
    centered = op.Sub(cast(op, n.x, dtype), _broadcast_channels(op, n, n.mean, dtype))
    db = sum_over(op, dy, axes)
    dscale = op.Mul(sum_over(op, op.Mul(dy, centered), axes), inv_std)
    count = op.size(count_over(n.x, axes), dtype)
    projection = op.Mul(centered, op.Div(op.Mul(dscale, inv_std), count))
    dz = op.Sub(dy, op.Add(projection, op.Div(db, count)))
    return *_cast_gradients(op, n, op.Mul(dz, _channel_factor(op, n, inv_std)), dscale, db), dresidual


def _channel_factor(op: Builder, n: NodeView, inv_std: ir.Value) -> ir.Value:
    """Return the factor inv_std * scale of each channel: one pass over the gradient instead of two."""
    return inv_std if n.scale is None else op.Mul(inv_std, _broadcast_channels(op, n, n.scale, dtype_of(inv_std)))


def _cast_gradients(op: Builder, n: NodeView, dx: ir.Value, dscale: ir.Value, db: ir.Value) -> Sequence[ir.Value]:
    """Return the gradients in the dtypes of x, scale and b."""
    dtype, channels = _parameter(n)
    sums = (cast(op, reshaped(op, v, channels), dtype) for v in (dscale, db))
    return cast(op, dx, dtype_of(n.x)), *sums


def _define_grad(
    domain: str,
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    body: Body,
    *,
    batch: bool,
    flops: int,
) -> OpDef:
    """Define a backward op that reads the statistics of the batch if `batch`, else the running statistics."""

    def lower(*, compiled: bool) -> Callable[..., Call]:
        return lambda n, dy, x, scale, mean, deviation, y=None, added=None: Call(
            batch_norm_backward,
            *(dy, x, scale, mean, deviation, y, added, batch, n.epsilon, as_bools(n.output_mask), compiled),
        )

    image_axes = {"dy": "X", "x": "X", "y": "X", "added": "X", "dx": "X", "dresidual": "X"}
    sides = (" ".join(image_axes.get(v.rstrip("?"), "C") for v in side) for side in (inputs, outputs))
    op = define_pure(
        domain,
        name,
        inputs,
        outputs,
        attributes={"epsilon": 1e-5, "output_mask": (1, 1, 1, 0)[: len(outputs)]},
        shapes=_grad_types,
        body=body,
        kernels=(Kernel(lower=lower(compiled=True), applies=may_compile),),
        lower=lower(compiled=False),
        axes=_channel_axes(" -> ".join(sides)),
        flops=lambda n: sizes.multiply(flops, numel(n.x)),
    )
    IMAGES.register(op, Images(frozenset(op.slots.keys() & image_axes.keys())))
    return op


BATCH_NORM_GRAD = _define_grad(
    MICROSOFT,
    "BatchNormalizationGrad",
    ("dy", "x", "scale?", "mean", "inv_std", "y?", "added?"),
    ("dx", "dscale", "db", "dresidual"),
    _batch_norm_grad_body,
    batch=True,
    flops=12,
)
INPUT_ADDENDS.register(BATCH_NORM_GRAD, "added")


# BatchNormalization with the running statistics, which are not differentiable


def _capture_no_training(
    op: Builder,
    x: ir.Value,
    weight: Any,
    bias: Any,
    running_mean: ir.Value,
    running_var: ir.Value,
    momentum: float,
    eps: float,
) -> Any:
    """ONNX requires scale and b: ones and zeros stand for absent ones."""
    scale = _filled(op, running_mean, 1.0) if weight is None else weight
    b = _filled(op, running_mean, 0.0) if bias is None else bias
    y = op.BatchNormalization(x, scale, b, running_mean, running_var, epsilon=eps)
    return y, *(op.constant([], t.dtype) if t.shape == (0,) else None for t in op.out[1:3])  # no saved statistics


def _filled(op: Builder, like: ir.Value, number: float) -> ir.Value:
    return op.Expand(op.scalar(number, like=like), op.shape_of(like))


def _inference_gradient(op: Builder, n: NodeView, dy: ir.Value) -> Grads:
    mask = output_mask(n, "x", "scale", "b")
    grads = op.own.BatchNormalizationInferenceGrad(
        dy, n.x, n.scale, n.input_mean, n.input_var, epsilon=n.epsilon, output_mask=mask
    )
    return apply_output_mask(grads, mask, n)


BATCH_NORMALIZATION = define_pure(
    ONNX,
    "BatchNormalization",
    ("x", "scale", "b", "input_mean", "input_var"),
    ("y",),
    attributes={"epsilon": 1e-5, "momentum": 0.9, "training_mode": 0},
    from_torch={"aten._native_batch_norm_legit_no_training.default": _capture_no_training},
    shapes=lambda n: (type_of(n.x),),
    body=STANDARD,
    gradient=(Gradient(_inference_gradient, reads=("x", "scale", "input_mean", "input_var")),),
    nondiff_inputs=frozenset({"input_mean", "input_var"}),
    lower=lambda n, x, scale, b, mean, var: Call(
        torch.batch_norm, x, scale, b, mean, var, False, 0.0, n.epsilon, cudnn_enabled=True
    ),
    axes=_channel_axes("X C C C C -> X"),
    flops=lambda n: sizes.multiply(2, numel(n.x)),
)
IMAGES.register(BATCH_NORMALIZATION, Images(frozenset({"x", "y"})))


# BatchNormalizationInferenceGrad(dy, x, scale, input_mean, input_var) -> dx, dscale, db
#     dx = dy * scale * inv_std        dscale = sum(dy * (x - input_mean)) * inv_std        db = sum(dy)


def _inference_grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    dtype, axes = accumulation_dtype(dtype_of(n.x)), _reduced_axes(n)
    dy = cast(op, n.dy, dtype)
    var = _broadcast_channels(op, n, n.input_var, dtype)
    inv_std = op.Reciprocal(op.Sqrt(add_scalar(op, var, n.epsilon)))
    centered = op.Sub(cast(op, n.x, dtype), _broadcast_channels(op, n, n.input_mean, dtype))
    dscale = op.Mul(sum_over(op, op.Mul(dy, centered), axes), inv_std)
    return _cast_gradients(op, n, op.Mul(dy, _channel_factor(op, n, inv_std)), dscale, sum_over(op, dy, axes))


_define_grad(
    OWN,
    "BatchNormalizationInferenceGrad",
    ("dy", "x", "scale?", "input_mean", "input_var"),
    ("dx", "dscale", "db"),
    _inference_grad_body,
    batch=False,
    flops=6,
)
