"""ONNX Runtime's fusions of an addition and a norm; and the gradient of layer norm computed from its output.

    SkipLayerNormalization(x, skip, scale, b, bias) -> y, mean, inv_std, total           total = x + skip + bias
    SkipSimplifiedLayerNormalization(x, skip, scale, bias) -> y, mean, inv_std, total    mean is not computed: it is 0
    InvertibleLayerNormalizationGrad(dy, y, scale, b, inv_std) -> dx, dscale, db         the norm's input is not saved

The last op divides by scale: where scale is 0, the input cannot be recovered from the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import MICROSOFT, TensorType, dtype_of, normalize_axis, rank_of, type_of
from onnxtrain.ops.body_parts import cast, reshaped
from onnxtrain.ops.constructors import define_by_body, define_pure
from onnxtrain.ops.definition import Call, NodeView, numel
from onnxtrain.ops.dtypes import accumulation_dtype
from onnxtrain.ops.norm import rms_norm_kernels

aten = torch.ops.aten
Tensor = torch.Tensor


def _types(n: NodeView) -> Sequence[TensorType]:
    dtype, shape = type_of(n.x)
    statistics = TensorType(accumulation_dtype(dtype), (*shape[:-1], 1))
    return [type_of(n.x), statistics, statistics, type_of(n.x)][: len(n.node.outputs)]


def _axes(n: NodeView) -> str:
    rows = " ".join(f"r{i}" for i in range(rank_of(n.x) - 1))
    x = f"{rows} [h]"
    skip = x if sizes.dims_of(n.skip) == sizes.dims_of(n.x) else " ".join(f"[s{i}]" for i in range(rank_of(n.skip)))
    inputs = [x, skip, *("-" if v is None else "[h]" for v in n.node.inputs[2:])]
    outputs = [x, f"{rows} 1", f"{rows} 1", x][: len(n.node.outputs)]
    return f"{', '.join(inputs)} -> {', '.join(outputs)}"


def _total(op: Builder, n: NodeView) -> ir.Value:
    total: ir.Value = op.Add(n.x, n.skip)
    return total if n.bias is None else op.Add(total, n.bias)


def _layer_norm_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    total = _total(op, n)
    outputs = (*op.own.LayerNormalization(total, n.scale, n.b, axis=-1, epsilon=n.epsilon), total)
    return outputs[: len(n.node.outputs)]


def skip_layer_norm(x: Tensor, skip: Tensor, scale: Tensor, b: Any, bias: Any, epsilon: float, count: int) -> Any:
    """Return the first `count` outputs."""
    total = x + skip if bias is None else x + skip + bias
    outputs = (*torch.native_layer_norm(total, x.shape[-1:], scale, b, epsilon), total)
    return outputs[:count] if count > 1 else outputs[0]


def _rms_norm_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    total = _total(op, n)
    y, inv_std = op.ms.SimplifiedLayerNormalization(total, n.scale, axis=-1, epsilon=n.epsilon)
    mean = op.Expand(op.scalar(0, like=inv_std), op.shape_of(inv_std))
    return (y, mean, inv_std, total)[: len(n.node.outputs)]


def skip_rms_norm(x: Tensor, skip: Tensor, scale: Tensor, bias: Any, epsilon: float, count: int) -> Any:
    """Return the first `count` outputs."""
    total = x + skip if bias is None else x + skip + bias
    y, inv_std = rms_norm_kernels.rms_norm_by_aten(total, x.ndim - 1, scale, epsilon)
    return (y, torch.zeros_like(inv_std), inv_std, total)[:count] if count > 1 else y


_OUTPUTS = ("y", "mean?", "inv_std?", "total?")
_EPSILON = {"epsilon": 1e-12}

define_by_body(
    "SkipLayerNormalization",
    ("x", "skip", "scale", "b?", "bias?"),
    _layer_norm_body,
    lambda n, *inputs: Call(skip_layer_norm, *inputs, n.epsilon, len(n.node.outputs)),
    domain=MICROSOFT,
    outputs=_OUTPUTS,
    attributes=_EPSILON,
    shapes=_types,
    axes=_axes,
    flops=lambda n: sizes.multiply(9, numel(n.x)),
)
define_by_body(
    "SkipSimplifiedLayerNormalization",
    ("x", "skip", "scale", "bias?"),
    _rms_norm_body,
    lambda n, *inputs: Call(skip_rms_norm, *inputs, n.epsilon, len(n.node.outputs)),
    domain=MICROSOFT,
    outputs=_OUTPUTS,
    attributes=_EPSILON,
    shapes=_types,
    axes=_axes,
    flops=lambda n: sizes.multiply(5, numel(n.x)),
)


# InvertibleLayerNormalizationGrad


def _grad_types(n: NodeView) -> Sequence[TensorType]:
    return type_of(n.y), type_of(n.scale), type_of(n.b)


def _grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    """The normalized input is z = (y - b) / scale: the gradient for z, with mean 0 and inv_std 1, times inv_std."""
    dtype = accumulation_dtype(dtype_of(n.y))
    scale, b = cast(op, n.scale, dtype), cast(op, n.b, dtype)
    z = op.Div(op.Sub(cast(op, n.y, dtype), b), scale)
    zero, one = (op.Expand(op.scalar(v, like=n.inv_std), op.shape_of(n.inv_std)) for v in (0, 1))
    dx, dscale, db = op.ms.LayerNormalizationGrad(cast(op, n.dy, dtype), z, scale, zero, one, axis=n.axis)
    shape = sizes.dims_of(n.y)
    axis = normalize_axis(n.axis, len(shape))
    inv_std = reshaped(op, cast(op, n.inv_std, dtype), (*shape[:axis], *[1] * (len(shape) - axis)))
    parameter = dtype_of(n.scale)
    return cast(op, op.Mul(dx, inv_std), dtype_of(n.y)), cast(op, dscale, parameter), cast(op, db, parameter)


def invertible_layer_norm_backward(
    dy: Tensor, y: Tensor, scale: Tensor, b: Tensor, inv_std: Tensor, axis: int
) -> tuple[Tensor, Tensor, Tensor]:
    wide = inv_std.dtype
    z = (y.to(wide) - b) / scale
    zero, one = torch.zeros_like(inv_std), torch.ones_like(inv_std)
    parameters = (scale.to(wide), b.to(wide))
    dx, dscale, db = aten.native_layer_norm_backward.default(
        dy.to(wide), z, y.shape[axis:], zero, one, *parameters, [True] * 3
    )
    return (dx * inv_std).to(y.dtype), dscale.to(scale.dtype), db.to(b.dtype)


def _grad_axes(n: NodeView) -> str:
    rank = rank_of(n.y)
    axis = normalize_axis(n.axis, rank)
    rows = [f"r{i}" for i in range(axis)]
    normalized = [f"[h{i}]" for i in range(rank - axis)]
    x, h, s = " ".join(rows + normalized), " ".join(normalized), " ".join(rows + ["1"] * len(normalized))
    return f"{x}, {x}, {h}, {h}, {s} -> {x}, {h}, {h}"


define_pure(
    MICROSOFT,
    "InvertibleLayerNormalizationGrad",
    ("dy", "y", "scale", "b", "inv_std"),
    ("dx", "dscale", "db"),
    attributes={"axis": -1},
    shapes=_grad_types,
    body=_grad_body,
    lower=lambda n, dy, y, scale, b, inv_std: Call(
        invertible_layer_norm_backward, dy, y, scale, b, inv_std, normalize_axis(n.axis, rank_of(n.y))
    ),
    axes=_grad_axes,
    flops=lambda n: sizes.multiply(16, numel(n.y)),
)
