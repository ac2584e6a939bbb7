"""Norms over the batch, channel by channel.

    BatchNormInternal(x[n, c, d], scale[c], b[c], input_mean[c], input_var[c], residual[n, c, d])
            -> y[n, c, d], running_mean[c], running_var[c], saved_mean[c], saved_inv_std[c]
        y = act((x - mean) * inv_std * scale + b + residual)   mean, var over n and d, inv_std = 1 / sqrt(var + epsilon)
        running_mean = momentum * input_mean + (1 - momentum) * mean
        running_var = momentum * input_var + (1 - momentum) * var * m / (m - 1)          m = n * d
    BatchNormalization(x, scale, b, input_mean, input_var) -> y        with the running statistics: in eval mode

`d` stands for all axes after the channels. Two things are PyTorch's and not ONNX's: the running variance is the
unbiased one, and without running statistics (`track_running_stats=False`) there is nothing to update: the running
outputs are then those of this batch, and the kernel leaves them out. `momentum` is ONNX's: 1 minus PyTorch's. The
statistics are float32, of a double x double. `act` is the op that `activation` names, Relu, or nothing.

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
from onnxtrain.ops.constructors import cast
from onnxtrain.ops.definition import STANDARD, Body, Call, Gradient, Kernel, Layout, NodeView, OpDef, numel
from onnxtrain.ops.fused import (
    average,
    count_over,
    flags,
    fused,
    masked,
    only_first,
    plus,
    reshaped,
    statistics_type,
    times,
    total,
    wanted,
)
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.ops.norm.channels_last import (
    batch_norm_backward_channels_last,
    batch_norm_channels_last,
    before_relu,
    finished,
    is_channels_last,
)

aten = torch.ops.aten
Grads = list[ir.Value | None]


def _complement(momentum: float) -> float:
    """1 - momentum, between PyTorch's and ONNX's. In decimal, so that 0.1 becomes 0.9 and 0.9 becomes 0.1."""
    return float(1 - Decimal(repr(momentum)))


def _others(n: NodeView) -> list[int]:
    """All axes but the channels'."""
    return [axis for axis in range(rank_of(n.x)) if axis != 1]


def _per_channel(n: NodeView, dtype: ir.DataType) -> TensorType:
    return TensorType(dtype, (sizes.dims_of(n.x)[1],))


def _parameter(n: NodeView) -> TensorType:
    """The type of scale and b, and of their gradients."""
    return _per_channel(n, dtype_of(n.x if n.scale is None else n.scale))


def _aligned(op: Builder, n: NodeView, channels: ir.Value, dtype: ir.DataType) -> ir.Value:
    """A vector over channels, in `dtype`, broadcasting over x."""
    rank = rank_of(n.x)
    return reshaped(op, cast(op, channels, dtype), [1, sizes.dims_of(n.x)[1], *[1] * (rank - 2)])


def _channel_axes(pattern: str) -> Any:
    """An axis map: in `pattern` X stands for x's axes, C for a vector over channels."""

    def axes(n: NodeView) -> str:
        named = {"X": " ".join(["[n]", "c", *(f"[d{i}]" for i in range(rank_of(n.x) - 2))]), "C": "c"}
        left, right = (part.split() for part in pattern.split("->"))
        inputs = [named[w] if v is not None else "-" for w, v in zip(left, n.node.inputs, strict=False)]
        return f"{', '.join(inputs)} -> {', '.join(named[w] for w in right)}"

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
    """PyTorch's kernel, which updates the running statistics in place: here in copies. `compiled`: or one of ours."""
    if is_channels_last(x):
        return batch_norm_channels_last(x, scale, b, mean, var, residual, momentum, epsilon, relu, compiled)
    if mean is not None:
        mean, var = mean.clone(), var.clone()
    y, *saved = torch.native_batch_norm(x, scale, b, mean, var, True, momentum, epsilon)
    return finished(y, residual, relu), mean, var, *saved


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
    """PyTorch's kernel; `deviation` is 1 / standard deviation of the `batch`, or else the running variance.

    Gives a fourth gradient, the residual's, where the mask has as many.
    """
    if is_channels_last(x):
        inv_std = deviation if batch else (deviation + epsilon).rsqrt_()
        whole = [*mask, False][:4]  # an op without a residual has no flag for it
        found = batch_norm_backward_channels_last(dy, x, scale, mean, inv_std, y, added, batch, whole, compiled)
        return found[: len(mask)]
    statistics = (None, None, mean, deviation) if batch else (mean, deviation, None, None)
    dy = before_relu(dy, y, added)
    found = aten.native_batch_norm_backward.default(dy, x, scale, *statistics, batch, epsilon, mask[:3])
    return *found, *(dy if m else None for m in mask[3:])


def _lower_batch_norm(*, compiled: bool) -> Callable[..., Call]:
    return lambda n, *arguments: Call(
        batch_norm, *arguments, _complement(n.momentum), n.epsilon, n.activation == "Relu", compiled
    )


def _batch_norm_types(n: NodeView) -> Sequence[TensorType]:
    saved = _per_channel(n, statistics_type(dtype_of(n.x)))
    running = [saved if v is None else type_of(v) for v in (n.input_mean, n.input_var)]
    return type_of(n.x), *running, saved, saved


def _batch_norm_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    dtype = statistics_type(dtype_of(n.x))
    x, others = cast(op, n.x, dtype), _others(n)
    mean = average(op, x, others)
    centred = op.Sub(x, mean)
    squares = total(op, op.Mul(centred, centred), others)
    count = op.size(count_over(n.x, others), dtype)
    inv_std = op.Reciprocal(op.Sqrt(plus(op, op.Div(squares, count), n.epsilon)))
    y = op.Mul(centred, inv_std)
    if n.scale is not None:
        y = op.Mul(y, _aligned(op, n, n.scale, dtype))
    if n.b is not None:
        y = op.Add(y, _aligned(op, n, n.b, dtype))
    channels = [sizes.dims_of(n.x)[1]]
    saved_mean, saved_inv_std = reshaped(op, mean, channels), reshaped(op, inv_std, channels)
    running_mean, running_var = saved_mean, reshaped(op, op.Div(squares, plus(op, count, -1)), channels)
    if n.input_mean is not None:
        running_mean = _moved(op, n, n.input_mean, running_mean)
    if n.input_var is not None:
        running_var = _moved(op, n, n.input_var, running_var)
    y = cast(op, y, dtype_of(n.x))
    if n.residual is not None:
        y = op.Add(y, n.residual)
    if n.activation:
        y = op.op(ONNX, n.activation)(y)
    return y, running_mean, running_var, saved_mean, saved_inv_std


def _moved(op: Builder, n: NodeView, running: ir.Value, batch: ir.Value) -> ir.Value:
    """A running statistic moved towards that of this batch."""
    wide = cast(op, running, dtype_of(batch))
    moved = op.Add(times(op, wide, n.momentum), times(op, batch, _complement(n.momentum)))
    return cast(op, moved, dtype_of(running))


def _batch_norm_gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> Grads:
    """Behind an activation the residual's gradient is the one in front of it, which the backward op computes anyway."""
    dy, y = only_first(n, cotangents), n.y if n.activation else None
    mask = wanted(n, "x", "scale", "b", "residual")
    residual = mask.pop()
    statistics = (n.saved_mean, n.saved_inv_std)
    *grads, dresidual = op.ms.BatchNormalizationGrad(
        dy, n.x, n.scale, *statistics, y, epsilon=n.epsilon, output_mask=[*mask, residual if y is not None else 0]
    )
    found = masked(grads, mask, n)
    if residual:
        found[-1] = dy if y is None else dresidual
    return found


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
        found = _capture_no_training(op, x, weight, bias, running_mean, running_var, momentum, eps)
        return *found, running_mean, running_var
    y, new_mean, new_var, *saved = op.ms.BatchNormInternal(
        x, weight, bias, running_mean, running_var, epsilon=eps, momentum=_complement(momentum)
    )
    # PyTorch's export takes the running statistics of half-precision modules for float32: they are written back in the
    # buffer's own type.
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
    """As PyTorch runs it: a batch norm over one sample whose channels are all channels of all samples."""
    if not use_input_stats:
        return _capture_no_training(op, x, weight, bias, running_mean, running_var, momentum, eps)[0]
    if running_mean is not None:
        raise UnsupportedOperatorError(
            "an instance norm that updates running statistics: PyTorch's export loses the update",
            todo="set track_running_stats=False, or put the module in eval mode",
        )
    batch, channels, *rest = sizes.dims_of(x)
    flat = sizes.multiply(batch, channels)
    parameters = (None if p is None else _repeated(op, p, batch, channels) for p in (weight, bias))
    y = op.ms.BatchNormInternal(reshaped(op, x, [1, flat, *rest]), *parameters, epsilon=eps)[0]
    return reshaped(op, y, [batch, channels, *rest])


def _repeated(op: Builder, vector: ir.Value, batch: sizes.Size, channels: sizes.Size) -> ir.Value:
    return reshaped(op, op.Expand(vector, op.sizes([batch, channels])), [sizes.multiply(batch, channels)])


fused(
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
    shapes=_batch_norm_types,
    body=_batch_norm_body,
    gradient=(Gradient(_batch_norm_gradient, reads=("x", "scale", "saved_mean", "saved_inv_std", "y")),),
    nondiff_inputs=frozenset({"input_mean", "input_var"}),
    kernels=(Kernel(lower=_lower_batch_norm(compiled=True), applies=may_compile),),
    lower=_lower_batch_norm(compiled=False),
    axes=_channel_axes("X C C C C X -> X C C C C"),
    flops=lambda n: sizes.multiply(8, numel(n.x)),
    layout=Layout(frozenset({"x", "y", "residual"})),
    output_addend="residual",
    fusable_activations=frozenset({"Relu"}),
)


# BatchNormalizationGrad(dy, x, scale, mean, inv_std, y, added) -> dx, dscale, db, dresidual
#     dx = scale * inv_std * (g - (db + z * dscale) / m)   dscale = sum(g * z)   db = sum(g)   z = (x - mean) * inv_std
#     g = dresidual = dy + added; where y, what Relu gave, is there: 0 where it is not above 0


def _grad_types(n: NodeView) -> Sequence[TensorType]:
    return (type_of(n.x), _parameter(n), _parameter(n), type_of(n.x))[: len(n.definition.outputs)]


def _batch_norm_grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    """Dx = scale * inv_std * (g - c * (dscale * inv_std / m) - db / m) with c = x - mean; quotients are by channel."""
    dtype, others = statistics_type(dtype_of(n.x)), _others(n)
    dresidual = n.dy if n.added is None else op.Add(n.dy, n.added)
    if n.y is not None:
        dresidual = op.ms.ReluGrad(dresidual, n.y)
    dy = cast(op, dresidual, dtype)
    inv_std = _aligned(op, n, n.inv_std, dtype)
    centred = op.Sub(cast(op, n.x, dtype), _aligned(op, n, n.mean, dtype))
    db = total(op, dy, others)
    dscale = op.Mul(total(op, op.Mul(dy, centred), others), inv_std)
    count = op.size(count_over(n.x, others), dtype)
    along = op.Mul(centred, op.Div(op.Mul(dscale, inv_std), count))
    slope = op.Sub(dy, op.Add(along, op.Div(db, count)))
    return *_results(op, n, op.Mul(slope, _factor(op, n, inv_std)), dscale, db), dresidual


def _factor(op: Builder, n: NodeView, inv_std: ir.Value) -> ir.Value:
    """What each channel of a gradient is multiplied with: one pass over it, and not two."""
    return inv_std if n.scale is None else op.Mul(inv_std, _aligned(op, n, n.scale, dtype_of(inv_std)))


def _results(op: Builder, n: NodeView, dx: ir.Value, dscale: ir.Value, db: ir.Value) -> Sequence[ir.Value]:
    """The gradients in the types of what they are gradients of."""
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
    input_addend: str = "",
) -> OpDef:
    """A backward op that reads the statistics of the `batch`, or the running ones."""

    def lower(*, compiled: bool) -> Callable[..., Call]:
        return lambda n, dy, x, scale, mean, deviation, y=None, added=None: Call(
            batch_norm_backward,
            *(dy, x, scale, mean, deviation, y, added, batch, n.epsilon, flags(n.output_mask), compiled),
        )

    pictures = {"dy": "X", "x": "X", "y": "X", "added": "X", "dx": "X", "dresidual": "X"}
    sides = (" ".join(pictures.get(v.rstrip("?"), "C") for v in side) for side in (inputs, outputs))
    return fused(
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
        layout=Layout(frozenset(pictures) & {v.rstrip("?") for v in (*inputs, *outputs)}),
        input_addend=input_addend,
    )


BATCH_NORM_GRAD = _define_grad(
    MICROSOFT,
    "BatchNormalizationGrad",
    ("dy", "x", "scale?", "mean", "inv_std", "y?", "added?"),
    ("dx", "dscale", "db", "dresidual"),
    _batch_norm_grad_body,
    batch=True,
    flops=12,
    input_addend="added",
)


# BatchNormalization with the running statistics, which get no gradient


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
    """Without scale and b: with ones and zeros, which ONNX wants."""
    scale = _filled(op, running_mean, 1.0) if weight is None else weight
    b = _filled(op, running_mean, 0.0) if bias is None else bias
    y = op.BatchNormalization(x, scale, b, running_mean, running_var, epsilon=eps)
    return y, *(op.constant([], t.dtype) if t.shape == (0,) else None for t in op.out[1:3])  # nothing was saved


def _filled(op: Builder, like: ir.Value, number: float) -> ir.Value:
    result: ir.Value = op.Expand(op.scalar(number, like=like), op.shape_of(like))
    return result


def _inference_gradient(op: Builder, n: NodeView, dy: ir.Value) -> Grads:
    mask = wanted(n, "x", "scale", "b")
    grads = op.own.BatchNormalizationInferenceGrad(
        dy, n.x, n.scale, n.input_mean, n.input_var, epsilon=n.epsilon, output_mask=mask
    )
    return masked(grads, mask, n)


fused(
    ONNX,
    "BatchNormalization",
    ("x", "scale", "b", "input_mean", "input_var"),
    ("y",),
    attributes={"epsilon": 1e-5, "momentum": 0.9, "training_mode": 0},
    since_version=15,
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
    layout=Layout(frozenset({"x", "y"})),
)


# BatchNormalizationInferenceGrad(dy, x, scale, input_mean, input_var) -> dx, dscale, db
#     dx = dy * scale * inv_std        dscale = sum(dy * (x - input_mean)) * inv_std        db = sum(dy)


def _inference_grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    dtype, others = statistics_type(dtype_of(n.x)), _others(n)
    dy = cast(op, n.dy, dtype)
    var = _aligned(op, n, n.input_var, dtype)
    inv_std = op.Reciprocal(op.Sqrt(plus(op, var, n.epsilon)))
    centred = op.Sub(cast(op, n.x, dtype), _aligned(op, n, n.input_mean, dtype))
    dscale = op.Mul(total(op, op.Mul(dy, centred), others), inv_std)
    return _results(op, n, op.Mul(dy, _factor(op, n, inv_std)), dscale, total(op, dy, others))


_define_grad(
    OWN,
    "BatchNormalizationInferenceGrad",
    ("dy", "x", "scale?", "input_mean", "input_var"),
    ("dx", "dscale", "db"),
    _inference_grad_body,
    batch=False,
    flops=6,
)
