"""Quantization and dequantization for quantization-aware training.

    FakeQuant(x, scale, zero_point) -> y, mask         y = (clip(round(x / scale) + zero_point) - zero_point) * scale;
                                                       scale and zero_point have one element or broadcast over x
    FakeQuantGrad(dy, mask) -> dx                      dy where nothing was clipped, else 0
    QuantizeLinear(x, scale, zero_point)               to integers
    DequantizeLinear(x, scale, zero_point)             back to floating point; differentiable in scale

PyTorch multiplies x by the reciprocal of scale, QuantizeLinear divides: near a tie they round to different levels.
FakeQuant's attribute `divide` says which it does: 0 in nodes captured from torch.fake_quantize_*, 1 in nodes that
replace a QuantizeLinear and DequantizeLinear of an ONNX file.

The straight-through estimator takes the gradient of rounding as 1 (Bengio et al. 2013,
https://arxiv.org/abs/1308.3432).
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
from onnxtrain.ops.constructors import define_by_body, define_pure, no_axes
from onnxtrain.ops.definition import Call, Gradient, NodeView, numel
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.interfaces.stock_kernels import STOCK_KERNELS
from onnxtrain.torch_compat import dispatch

Tensor = torch.Tensor


# FakeQuant


def _quant_types(n: NodeView) -> Sequence[TensorType]:
    return type_of(n.x), TensorType(ir.DataType.BOOL, sizes.dims_of(n.x))


def _quant_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    dtype = dtype_of(n.x)
    scale, zero = (_broadcasting(op, cast(op, v, dtype)) for v in (n.scale, n.zero_point))
    scaled = op.Div(n.x, scale) if n.divide else op.Mul(n.x, op.Reciprocal(scale))
    level = op.Add(op.Round(scaled), zero)
    low, high = (op.scalar(v, dtype) for v in (n.quant_min, n.quant_max))
    mask = op.And(op.GreaterOrEqual(level, low), op.LessOrEqual(level, high))
    return op.Mul(op.Sub(op.Clip(level, low, high), zero), scale), mask


def _broadcasting(op: Builder, parameter: ir.Value) -> ir.Value:
    """Reshape a parameter of one element to a scalar; others broadcast over x as they are."""
    return reshaped(op, parameter, ()) if sizes.dims_of(parameter) == (1,) else parameter


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int, *, divide: bool
) -> tuple[Tensor, Tensor]:
    """Compute FakeQuant, under autograd with the straight-through gradient."""
    if scale.numel() == 1:
        scale, zero_point = scale.reshape(()), zero_point.reshape(())
    scale, zero_point = scale.to(x.dtype), zero_point.to(x.dtype)
    differentiable = torch.is_grad_enabled() and x.requires_grad
    if divide and (differentiable or torch.compiler.is_compiling()):
        y, mask = _BY_DIVISION(x, scale, zero_point, low, high)
        return y, mask
    if not differentiable:
        return _fake_quantize(x, scale, zero_point, low, high, divide)
    with torch.no_grad():
        _, mask = _fake_quantize(x, scale, zero_point, low, high, divide)
    return _fake_quantize_by_torch(x, scale, zero_point, low, high), mask


def _fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int, divide: bool
) -> tuple[Tensor, Tensor]:
    level = (x / scale if divide else x * scale.reciprocal()).round_().add_(zero_point)
    mask = level.ge(low) & level.le(high)
    return level.clamp_(low, high).sub_(zero_point).mul_(scale), mask


def _fake_quantize_by_torch(x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int) -> Tensor:
    """Compute y by PyTorch's operator, which multiplies by the reciprocal and has the straight-through gradient."""
    scale, zero_point = scale.detach(), zero_point.detach().to(torch.int32)
    if scale.numel() == 1:
        parameters = scale.reshape(1), zero_point.reshape(1)
        return torch.fake_quantize_per_tensor_affine(x, *parameters, low, high)
    axis = next(i for i, size in enumerate(scale.shape) if size != 1) - scale.dim() + x.dim()
    return torch.fake_quantize_per_channel_affine(x, scale.flatten(), zero_point.flatten(), axis, low, high)


# With divide=1 the operator is ours: autograd gets its gradient, and a captured module one node.
_OWN_LIBRARY = torch.library.Library("onnxtrain", "FRAGMENT")
_OWN_LIBRARY.define(
    "fake_quantize_by_division(Tensor x, Tensor scale, Tensor zero_point, int quant_min, int quant_max)"
    " -> (Tensor, Tensor)"
)
_BY_DIVISION = torch.ops.onnxtrain.fake_quantize_by_division.default


def _by_division(x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    return _fake_quantize(x, scale, zero_point, low, high, True)


def _save_mask(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _by_division_backward(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
    (mask,) = ctx.saved_tensors
    return torch.where(mask, dy, 0.0), None, None, None, None


_OWN_LIBRARY.impl("fake_quantize_by_division", _by_division, "CompositeExplicitAutograd")
torch.library.register_autograd(
    "onnxtrain::fake_quantize_by_division", _by_division_backward, setup_context=_save_mask, lib=_OWN_LIBRARY
)


def _capture_by_division(op: Builder, x: ir.Value, *parameters: Any) -> tuple[ir.Value, ir.Value]:
    *scale_and_zero_point, quant_min, quant_max = parameters
    return op.ms.FakeQuant(x, *scale_and_zero_point, quant_min=quant_min, quant_max=quant_max, divide=1)


def _quant_gradient(op: Builder, n: NodeView, dy: ir.Value | None, _: None) -> list[ir.Value | None]:
    return [None if dy is None else op.ms.FakeQuantGrad(dy, n.mask), None, None]


def _capture(op: Builder, x: ir.Value, scale: Any, zero_point: Any, quant_min: int, quant_max: int) -> Any:
    dtype = dtype_of(x)
    if isinstance(scale, ir.Value) and rank_of(scale) and sizes.dims_of(scale) != (1,):
        return NotImplemented
    parameters = as_value(op, scale, dtype), as_value(op, zero_point, dtype)
    return op.ms.FakeQuant(x, *parameters, quant_min=quant_min, quant_max=quant_max)[0]


def _capture_with_mask(
    op: Builder, x: ir.Value, scale: Any, zero_point: Any, quant_min: int, quant_max: int
) -> tuple[ir.Value, ir.Value]:
    parameters = as_value(op, scale, dtype_of(x)), as_value(op, zero_point, dtype_of(x))
    return op.ms.FakeQuant(x, *parameters, quant_min=quant_min, quant_max=quant_max)


def _capture_per_channel(
    op: Builder, x: ir.Value, scale: ir.Value, zero_point: ir.Value, axis: int, quant_min: int, quant_max: int
) -> Any:
    """Refuse floating-point zero points: PyTorch rounds them together with x."""
    if is_float(dtype_of(zero_point)):
        return NotImplemented
    shape = [-1 if i == normalize_axis(axis, rank_of(x)) else 1 for i in range(rank_of(x))]
    parameters = (reshaped(op, cast(op, v, dtype_of(x)), shape) for v in (scale, zero_point))
    return op.ms.FakeQuant(x, *parameters, quant_min=quant_min, quant_max=quant_max)


def _capture_with_switch(
    op: Builder, x: ir.Value, scale: ir.Value, zero_point: ir.Value, enabled: ir.Value, *limits: int
) -> tuple[ir.Value, ir.Value]:
    """Return x itself if `enabled` is 0."""
    y, mask = _capture_with_mask(op, x, scale, zero_point, *limits)
    on = op.Cast(reshaped(op, enabled, ()), to=ir.DataType.BOOL)
    return op.Where(on, y, x), op.Or(mask, op.Not(on))


def fake_quantize_meta(x: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


_LIBRARY = torch.library.Library("aten", "FRAGMENT")

# PyTorch cannot trace these operators: it has no meta functions of them.
for _name in (
    "aten::fake_quantize_per_channel_affine_cachemask",
    "aten::fake_quantize_per_tensor_affine_cachemask",
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
):
    if not dispatch.has_kernel_for_key(_name, "Meta"):
        dispatch.register_fake(_LIBRARY, _name, fake_quantize_meta)
dispatch.register_fake(_OWN_LIBRARY, "onnxtrain::fake_quantize_by_division", fake_quantize_meta)


define_pure(
    MICROSOFT,
    "FakeQuant",
    ("x", "scale", "zero_point"),
    ("y", "mask"),
    attributes={"quant_min": 0, "quant_max": 255, "divide": 0},
    from_torch={
        "aten.fake_quantize_per_tensor_affine.default": _capture,
        "aten.fake_quantize_per_tensor_affine.tensor_qparams": _capture,
        "aten.fake_quantize_per_tensor_affine_cachemask.default": _capture_with_mask,
        "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default": _capture_with_switch,
        "aten.fake_quantize_per_channel_affine_cachemask.default": _capture_per_channel,
        "onnxtrain.fake_quantize_by_division.default": _capture_by_division,
    },
    shapes=_quant_types,
    body=_quant_body,
    gradient=(Gradient(_quant_gradient, reads=("mask",)),),
    nondiff_inputs=frozenset({"scale", "zero_point"}),
    lower=lambda n, x, scale, zero: Call(
        fake_quantize, x, scale, zero, n.quant_min, n.quant_max, divide=bool(n.divide)
    ),
    axes=lambda n: "..., ..., ... -> ..., ...",
    flops=lambda n: sizes.multiply(6, numel(n.x)),
)
define_pure(
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


def _integer_dtype(n: NodeView) -> ir.DataType:
    dtype = dtype_of(n.zero_point) if n.zero_point is not None else ir.DataType(n.output_dtype or ir.DataType.UINT8)
    if dtype not in _LIMITS:
        raise GraphError(
            "QuantizeLinear: unsupported output type", expected=", ".join(d.name for d in _LIMITS), got=dtype.name
        )
    return dtype


def _aligned_body(op: Builder, n: NodeView, parameter: ir.Value) -> ir.Value:
    """Reshape a scale or zero point, per tensor or per slice along `axis`, to broadcast over x."""
    if n.block_size:
        raise GraphError(
            f"{n.definition.name}: blocked quantization is not supported",
            expected="block_size=0",
            got=f"block_size={n.block_size}",
            todo="quantize per tensor or per channel",
        )
    if not rank_of(parameter) or sizes.dims_of(parameter) == (1,):
        return reshaped(op, parameter, ())
    axis, rank = normalize_axis(n.axis, rank_of(n.x)), rank_of(n.x)
    return reshaped(op, parameter, [*[1] * axis, *sizes.dims_of(parameter), *[1] * (rank - 1 - axis)])


def _aligned(parameter: Tensor, x: Tensor, axis: int) -> Tensor:
    """Align as `_aligned_body` does, for tensors."""
    if parameter.numel() == 1:
        return parameter.reshape(())
    return parameter.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])


def _quantize_body(op: Builder, n: NodeView) -> ir.Value:
    dtype = dtype_of(n.x)
    level = op.Round(op.Div(n.x, cast(op, _aligned_body(op, n, n.scale), dtype)))
    if n.zero_point is not None:
        level = op.Add(level, cast(op, _aligned_body(op, n, n.zero_point), dtype))
    low, high = (op.scalar(v, dtype) for v in _LIMITS[_integer_dtype(n)])
    return op.Cast(op.Clip(level, low, high), to=_integer_dtype(n))


def quantize(x: Tensor, scale: Tensor, zero_point: Any, axis: int, dtype: torch.dtype) -> Tensor:
    level = (x / _aligned(scale, x, axis)).round_()
    if zero_point is not None:
        level = level + _aligned(zero_point, x, axis)
    limits = torch.iinfo(dtype)
    return level.clamp_(limits.min, limits.max).to(dtype)


def _dequantize_body(op: Builder, n: NodeView) -> ir.Value:
    dtype = dtype_of(n.scale)
    level = cast(op, n.x, dtype)
    if n.zero_point is not None:
        level = op.Sub(level, cast(op, _aligned_body(op, n, n.zero_point), dtype))
    return op.Mul(level, _aligned_body(op, n, n.scale))


def dequantize(x: Tensor, scale: Tensor, zero_point: Any, axis: int) -> Tensor:
    level = x.to(scale.dtype)
    if zero_point is not None:
        level = level - _aligned(zero_point, x, axis)
    return level * _aligned(scale, x, axis)


QUANTIZE_LINEAR = define_by_body(
    "QuantizeLinear",
    ("x", "scale", "zero_point?"),
    _quantize_body,
    lambda n, x, scale, zero: Call(quantize, x, scale, zero, n.axis, TORCH_DTYPES[_integer_dtype(n)]),
    attributes={"axis": 1, "block_size": 0, "output_dtype": 0, "saturate": 1, "precision": 0},
    shapes=lambda n: (TensorType(_integer_dtype(n), sizes.dims_of(n.x)),),
    axes=no_axes,
    differentiable=False,
)
STOCK_KERNELS.register(QUANTIZE_LINEAR, lambda n: is_float(dtype_of(n.x)) and dtype_of(n.x) != ir.DataType.DOUBLE)
DEQUANTIZE_LINEAR = define_by_body(
    "DequantizeLinear",
    ("x", "scale", "zero_point?"),
    _dequantize_body,
    lambda n, x, scale, zero: Call(dequantize, x, scale, zero, n.axis),
    attributes={"axis": 1, "block_size": 0, "output_dtype": 0},
    shapes=lambda n: (TensorType(dtype_of(n.scale), sizes.dims_of(n.x)),),
    axes=no_axes,
    nondiff_inputs=frozenset({"x", "zero_point"}),
)
STOCK_KERNELS.register(DEQUANTIZE_LINEAR, lambda n: dtype_of(n.scale) != ir.DataType.DOUBLE)
