"""Softmax fused with a bias and dropout, and softmax over several flattened axes.

    BiasSoftmax(x, bias) -> y = softmax(x + bias)               over all axes from `axis` on, flattened
    BiasSoftmaxDropout(x, bias, ratio) -> y, mask, probabilities            y = dropout(softmax(x + bias))
    SoftmaxDropoutGrad(dy, mask, probabilities, ratio) -> dx    over `axis` only
    SoftmaxGrad, LogSoftmaxGrad(dy, y) -> dx                    over all axes from `axis` on, as ONNX before opset 13

`is_inner_broadcast` tells ONNX Runtime's kernel which axes of bias have size 1; here the shape of bias does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import MICROSOFT, TensorType, dtype_of, normalize_axis, rank_of, type_of
from onnxtrain.ops.body_parts import reshaped
from onnxtrain.ops.constructors import define_by_body, define_pure
from onnxtrain.ops.definition import REQUIRED, Call, Effects, NodeView, numel
from onnxtrain.ops.random.dropout import dropout_backward_of_dynamic_ratio, dropout_of_dynamic_ratio
from onnxtrain.torch_compat import aten_kernels

Tensor = torch.Tensor


def _axis(n: NodeView, value: ir.Value) -> int:
    return normalize_axis(n.axis, rank_of(value))


def _row_axes(n: NodeView, value: ir.Value) -> str:
    axis = _axis(n, value)
    return " ".join(f"[a{i}]" if i >= axis else f"a{i}" for i in range(rank_of(value)))


def _over_last_axes(op: Builder, softmax: Callable[..., ir.Value], axis: int, *operands: ir.Value) -> ir.Value:
    """Apply a softmax op to `operands` with all axes from `axis` on flattened."""
    shape = sizes.dims_of(operands[0])
    if axis == len(shape) - 1:
        return softmax(*operands, axis=axis)
    rows = (sizes.multiply(1, *shape[:axis]), sizes.multiply(1, *shape[axis:]))
    return reshaped(op, softmax(*(reshaped(op, v, rows) for v in operands), axis=1), shape)


def _bias_softmax_axes(n: NodeView) -> str:
    x = _row_axes(n, n.x)
    bias = " ".join(x.split()[rank_of(n.x) - rank_of(n.bias) :])
    others = ", -" * (len(n.node.inputs) - 2)
    return f"{x}, {bias}{others} -> {', '.join([x] * len(n.node.outputs))}"


def _flops(n: NodeView) -> sizes.Size:
    return sizes.multiply(6, numel(n.x))


# BiasSoftmax, BiasSoftmaxDropout


def _bias_softmax_body(op: Builder, n: NodeView) -> ir.Value:
    return _over_last_axes(op, op.Softmax, _axis(n, n.x), op.Add(n.x, n.bias))


def bias_softmax(x: Tensor, bias: Tensor, axis: int) -> Tensor:
    biased = x + bias
    return torch.softmax(biased.flatten(axis), axis).view(biased.shape)


define_by_body(
    "BiasSoftmax",
    ("x", "bias"),
    _bias_softmax_body,
    lambda n, x, bias: Call(bias_softmax, x, bias, _axis(n, n.x)),
    domain=MICROSOFT,
    attributes={"axis": 1, "is_inner_broadcast": REQUIRED},
    shapes=lambda n: (type_of(n.x),),
    axes=_bias_softmax_axes,
    flops=_flops,
)


def _bias_softmax_dropout_types(n: NodeView) -> Sequence[TensorType]:
    return type_of(n.x), TensorType(ir.DataType.BOOL, sizes.dims_of(n.x)), type_of(n.x)


def _bias_softmax_dropout_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    probabilities = op.ms.BiasSoftmax(n.x, n.bias, axis=n.axis, is_inner_broadcast=n.is_inner_broadcast)
    y, mask = op.Dropout(probabilities, n.ratio, op.scalar(True, ir.DataType.BOOL), seed=n.seed)
    return y, mask, probabilities


def _has_ratio(n: NodeView) -> bool:
    """Return whether the kernel reads a ratio on the host."""
    return n.ratio is not None


def bias_softmax_dropout(x: Tensor, bias: Tensor, axis: int, ratio: Any) -> tuple[Tensor, Tensor, Tensor]:
    probabilities = bias_softmax(x, bias, axis)
    return *dropout_of_dynamic_ratio(probabilities, ratio, True), probabilities


define_by_body(
    "BiasSoftmaxDropout",
    ("x", "bias", "ratio?"),
    _bias_softmax_dropout_body,
    lambda n, x, bias, ratio: Call(bias_softmax_dropout, x, bias, _axis(n, n.x), ratio),
    domain=MICROSOFT,
    outputs=("y", "mask", "probabilities"),
    attributes={"axis": 1, "is_inner_broadcast": REQUIRED, "seed": None},
    shapes=_bias_softmax_dropout_types,
    axes=_bias_softmax_axes,
    nondiff_inputs=frozenset({"ratio"}),
    synchronizes=_has_ratio,
    effects=Effects.RANDOM,
    flops=_flops,
)


# Gradients


def _softmax_dropout_grad_body(op: Builder, n: NodeView) -> ir.Value:
    dy = op.ms.DropoutGrad(n.dy, n.mask, n.ratio, op.scalar(True, ir.DataType.BOOL))
    return op.ms.SoftmaxGrad_13(dy, n.probabilities, axis=n.axis)


def softmax_dropout_backward(dy: Tensor, mask: Tensor, probabilities: Tensor, ratio: Any, axis: int) -> Tensor:
    dy = dropout_backward_of_dynamic_ratio(dy, mask, ratio, True)
    return aten_kernels.softmax_grad(dy, probabilities, axis, probabilities.dtype)


def _softmax_dropout_grad_axes(n: NodeView) -> str:
    axis = _axis(n, n.dy)
    names = " ".join(f"[a{i}]" if i == axis else f"a{i}" for i in range(rank_of(n.dy)))
    return f"{names}, {names}, {names}{', -' * (len(n.node.inputs) - 3)} -> {names}"


define_pure(
    MICROSOFT,
    "SoftmaxDropoutGrad",
    ("dy", "mask", "probabilities", "ratio?"),
    ("dx",),
    attributes={"axis": REQUIRED},
    shapes=lambda n: (type_of(n.dy),),
    body=_softmax_dropout_grad_body,
    lower=lambda n, dy, mask, probabilities, ratio: Call(
        softmax_dropout_backward, dy, mask, probabilities, ratio, _axis(n, n.dy)
    ),
    synchronizes=_has_ratio,
    axes=_softmax_dropout_grad_axes,
    flops=lambda n: sizes.multiply(7, numel(n.dy)),
)


def softmax_backward(dy: Tensor, y: Tensor, axis: int, kernel: Callable[..., Tensor]) -> Tensor:
    """Apply a gradient kernel with all axes from `axis` on flattened."""
    return kernel(dy.flatten(axis), y.flatten(axis), axis, y.dtype).view(y.shape)


def _define_flattened_gradient(name: str, kernel: Callable[..., Tensor]) -> None:
    define_pure(
        MICROSOFT,
        name,
        ("dy", "y"),
        ("dx",),
        attributes={"axis": 1},
        shapes=lambda n: (TensorType(dtype_of(n.dy), sizes.dims_of(n.dy)),),
        body=lambda op, n: _over_last_axes(op, op.op(MICROSOFT, f"{name}_13"), _axis(n, n.dy), n.dy, n.y),
        lower=lambda n, dy, y: Call(softmax_backward, dy, y, _axis(n, n.dy), kernel),
        axes=lambda n: f"{_row_axes(n, n.dy)}, {_row_axes(n, n.dy)} -> {_row_axes(n, n.dy)}",
        flops=lambda n: sizes.multiply(5, numel(n.dy)),
    )


_define_flattened_gradient("SoftmaxGrad", aten_kernels.softmax_grad)
_define_flattened_gradient("LogSoftmaxGrad", aten_kernels.log_softmax_grad)
