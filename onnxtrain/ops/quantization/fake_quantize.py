"""Rounding to integers and back, as training with quantization does it.

    FakeQuant(x, scale, zero_point) -> y, mask         y = (clip(round(x / scale) + zero_point) - zero_point) * scale,
                                                       scale and zero_point of one element, or broadcasting over x
    FakeQuantGrad(dy, mask) -> dx                      dy where nothing was clipped, 0 elsewhere
    QuantizeLinear(x, scale, zero_point)               to integers
    DequantizeLinear(x, scale, zero_point)             and back; differentiable in scale

The gradient of rounding is taken for 1 (Bengio et al. 2013, https://arxiv.org/abs/1308.3432).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import MICROSOFT, TensorType, dtype_of, is_float, normalize_axis, rank_of, type_of
from onnxtrain.ops.body_parts import as_value, cast, reshaped
from onnxtrain.ops.constructors import define_by_body, define_fused, no_axes
from onnxtrain.ops.definition import Call, Gradient, NodeView, numel
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.torch_compat import dispatch

Tensor = torch.Tensor


# FakeQuant


def _quant_types(n: NodeView) -> Sequence[TensorType]:
    return type_of(n.x), TensorType(ir.DataType.BOOL, sizes.dims_of(n.x))


def _quant_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    """As PyTorch: x is multiplied by the reciprocal of the scale."""
    dtype = dtype_of(n.x)
    scale, zero = (_broadcasting(op, cast(op, v, dtype)) for v in (n.scale, n.zero_point))
    level = op.Add(op.Round(op.Mul(n.x, op.Reciprocal(scale))), zero)
    low, high = (op.scalar(v, dtype) for v in (n.quant_min, n.quant_max))
    mask = op.And(op.GreaterOrEqual(level, low), op.LessOrEqual(level, high))
    return op.Mul(op.Sub(op.Clip(level, low, high), zero), scale), mask


def _broadcasting(op: Builder, parameter: ir.Value) -> ir.Value:
    """One number, or one for each slice of x, in a shape that broadcasts over it."""
    return reshaped(op, parameter, ()) if sizes.dims_of(parameter) == (1,) else parameter


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """PyTorch's own operator where autograd looks on: the derivative of what this is written with is 0."""
    if torch.is_grad_enabled() and x.requires_grad:
        with torch.no_grad():
            _, mask = fake_quantize(x, scale, zero_point, low, high)
        return _differentiable(x, scale.detach(), zero_point.detach().to(torch.int32), low, high), mask
    if scale.numel() == 1:
        scale, zero_point = scale.reshape(()), zero_point.reshape(())
    scale, zero_point = scale.to(x.dtype), zero_point.to(x.dtype)
    level = (x * scale.reciprocal()).round_().add_(zero_point)
    mask = level.ge(low) & level.le(high)
    return level.clamp_(low, high).sub_(zero_point).mul_(scale), mask


def _differentiable(x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int) -> Tensor:
    if scale.numel() == 1:
        parameters = scale.reshape(1), zero_point.reshape(1)
        return torch.fake_quantize_per_tensor_affine(x, *parameters, low, high)
    axis = next(i for i, size in enumerate(scale.shape) if size != 1) - scale.dim() + x.dim()
    return torch.fake_quantize_per_channel_affine(x, scale.flatten(), zero_point.flatten(), axis, low, high)


def _quant_gradient(op: Builder, n: NodeView, dy: ir.Value | None, _: None) -> list[ir.Value | None]:
    return [None if dy is None else op.ms.FakeQuantGrad(dy, n.mask), None, None]


def _capture(op: Builder, x: ir.Value, scale: Any, zero_point: Any, quant_min: int, quant_max: int) -> Any:
    dtype = dtype_of(x)
    if isinstance(scale, ir.Value) and rank_of(scale) and sizes.dims_of(scale) != (1,):
        return NotImplemented
    parts = as_value(op, scale, dtype), as_value(op, zero_point, dtype)
    return op.ms.FakeQuant(x, *parts, quant_min=quant_min, quant_max=quant_max)[0]


def _capture_with_mask(
    op: Builder, x: ir.Value, scale: Any, zero_point: Any, quant_min: int, quant_max: int
) -> tuple[ir.Value, ir.Value]:
    parts = as_value(op, scale, dtype_of(x)), as_value(op, zero_point, dtype_of(x))
    found: tuple[ir.Value, ir.Value] = op.ms.FakeQuant(x, *parts, quant_min=quant_min, quant_max=quant_max)
    return found


def _capture_by_channel(
    op: Builder, x: ir.Value, scale: ir.Value, zero_point: ir.Value, axis: int, quant_min: int, quant_max: int
) -> Any:
    """A zero point that is no integer is rounded with x: another op."""
    if is_float(dtype_of(zero_point)):
        return NotImplemented
    shape = [-1 if i == normalize_axis(axis, rank_of(x)) else 1 for i in range(rank_of(x))]
    parts = (reshaped(op, cast(op, v, dtype_of(x)), shape) for v in (scale, zero_point))
    return op.ms.FakeQuant(x, *parts, quant_min=quant_min, quant_max=quant_max)


def _capture_switched(
    op: Builder, x: ir.Value, scale: ir.Value, zero_point: ir.Value, enabled: ir.Value, *limits: int
) -> tuple[ir.Value, ir.Value]:
    """Where `enabled` is 0, x itself."""
    y, mask = _capture_with_mask(op, x, scale, zero_point, *limits)
    on = op.Cast(reshaped(op, enabled, ()), to=ir.DataType.BOOL)
    return op.Where(on, y, x), op.Or(mask, op.Not(on))


def fake_quantize_on_fakes(
    x: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor]:
    """PyTorch cannot trace its own operator without this."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def switched_on_fakes(
    x: Tensor, scale: Tensor, zero_point: Tensor, enabled: Tensor, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor]:
    """As `fake_quantize_on_fakes`."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def by_channel_on_fakes(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor]:
    """As `fake_quantize_on_fakes`."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


_LIBRARY = torch.library.Library("aten", "FRAGMENT")

for _name, _function in (
    ("aten::fake_quantize_per_channel_affine_cachemask", by_channel_on_fakes),
    ("aten::fake_quantize_per_tensor_affine_cachemask", fake_quantize_on_fakes),
    ("aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", switched_on_fakes),
):
    if not dispatch.has_kernel_for_key(_name, "Meta"):
        dispatch.register_fake(_LIBRARY, _name, _function)


define_fused(
    MICROSOFT,
    "FakeQuant",
    ("x", "scale", "zero_point"),
    ("y", "mask"),
    attributes={"quant_min": 0, "quant_max": 255},
    from_torch={
        "aten.fake_quantize_per_tensor_affine.default": _capture,
        "aten.fake_quantize_per_tensor_affine.tensor_qparams": _capture,
        "aten.fake_quantize_per_tensor_affine_cachemask.default": _capture_with_mask,
        "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default": _capture_switched,
        "aten.fake_quantize_per_channel_affine_cachemask.default": _capture_by_channel,
    },
    shapes=_quant_types,
    body=_quant_body,
    gradient=(Gradient(_quant_gradient, reads=("mask",)),),
    nondiff_inputs=frozenset({"scale", "zero_point"}),
    lower=lambda n, x, scale, zero: Call(fake_quantize, x, scale, zero, n.quant_min, n.quant_max),
    axes=lambda n: "..., ..., ... -> ..., ...",
    flops=lambda n: sizes.multiply(6, numel(n.x)),
)
define_fused(
    MICROSOFT,
    "FakeQuantGrad",
    ("dy", "mask"),
    ("dx",),
    shapes=lambda n: (type_of(n.dy),),
    body=lambda op, n: op.Where(n.mask, n.dy, op.scalar(0, like=n.dy)),
    lower=lambda n, dy, mask: Call(torch.where, mask, dy, 0.0),
    axes=lambda n: "..., ... -> ...",
    flops=lambda n: numel(n.dy),
)


# QuantizeLinear, DequantizeLinear

_LIMITS = {
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT8: (-128, 127),
    ir.DataType.INT16: (-32768, 32767),
    ir.DataType.INT32: (-(2**31), 2**31 - 1),
}


def _integer(n: NodeView) -> ir.DataType:
    """The type of the integers."""
    dtype = dtype_of(n.zero_point) if n.zero_point is not None else ir.DataType(n.output_dtype or ir.DataType.UINT8)
    if dtype not in _LIMITS:
        raise GraphError("QuantizeLinear gives integers of 8 or 16 bits", got=dtype.name)
    return dtype


def _beside(op: Builder, n: NodeView, parameter: ir.Value) -> ir.Value:
    """Scale or zero point, of the tensor or of each slice along `axis`, broadcasting over x."""
    if n.block_size:
        raise GraphError(f"{n.definition.name} by blocks is not supported", got=f"block_size={n.block_size}")
    if not rank_of(parameter) or sizes.dims_of(parameter) == (1,):
        return reshaped(op, parameter, ())
    axis, rank = normalize_axis(n.axis, rank_of(n.x)), rank_of(n.x)
    return reshaped(op, parameter, [*[1] * axis, *sizes.dims_of(parameter), *[1] * (rank - 1 - axis)])


def beside(parameter: Tensor, x: Tensor, axis: int) -> Tensor:
    if parameter.numel() == 1:
        return parameter.reshape(())
    return parameter.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])


def _level_body(op: Builder, n: NodeView) -> ir.Value:
    """The node itself: a step, and the same everywhere."""
    dtype = dtype_of(n.x)
    level = op.Round(op.Div(n.x, cast(op, _beside(op, n, n.scale), dtype)))
    if n.zero_point is not None:
        level = op.Add(level, cast(op, _beside(op, n, n.zero_point), dtype))
    low, high = (op.scalar(v, dtype) for v in _LIMITS[_integer(n)])
    return op.Cast(op.Clip(level, low, high), to=_integer(n))  # type: ignore[no-any-return]


def quantize(x: Tensor, scale: Tensor, zero_point: Any, axis: int, dtype: torch.dtype) -> Tensor:
    level = (x / beside(scale, x, axis)).round_()
    if zero_point is not None:
        level = level + beside(zero_point, x, axis)
    limits = torch.iinfo(dtype)
    return level.clamp_(limits.min, limits.max).to(dtype)


def _real_body(op: Builder, n: NodeView) -> ir.Value:
    dtype = dtype_of(n.scale)
    x = cast(op, n.x, dtype)
    if n.zero_point is not None:
        x = op.Sub(x, cast(op, _beside(op, n, n.zero_point), dtype))
    return op.Mul(x, _beside(op, n, n.scale))  # type: ignore[no-any-return]


def dequantize(x: Tensor, scale: Tensor, zero_point: Any, axis: int) -> Tensor:
    real = x.to(scale.dtype)
    if zero_point is not None:
        real = real - beside(zero_point, x, axis)
    return real * beside(scale, x, axis)


define_by_body(
    "QuantizeLinear",
    ("x", "scale", "zero_point?"),
    _level_body,
    lambda n, x, scale, zero: Call(quantize, x, scale, zero, n.axis, TORCH_DTYPES[_integer(n)]),
    attributes={"axis": 1, "block_size": 0, "output_dtype": 0, "saturate": 1, "precision": 0},
    since_version=23,
    shapes=lambda n: (TensorType(_integer(n), sizes.dims_of(n.x)),),
    axes=no_axes,
    differentiable=False,
    ort_compatible=lambda n: is_float(dtype_of(n.x)) and dtype_of(n.x) != ir.DataType.DOUBLE,
)
define_by_body(
    "DequantizeLinear",
    ("x", "scale", "zero_point?"),
    _real_body,
    lambda n, x, scale, zero: Call(dequantize, x, scale, zero, n.axis),
    attributes={"axis": 1, "block_size": 0, "output_dtype": 0},
    since_version=23,
    shapes=lambda n: (TensorType(dtype_of(n.scale), sizes.dims_of(n.x)),),
    axes=no_axes,
    nondiff_inputs=frozenset({"x", "zero_point"}),
    ort_compatible=lambda n: dtype_of(n.scale) != ir.DataType.DOUBLE,
)
