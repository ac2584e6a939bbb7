"""Optimizer steps for one parameter.

    AdamWStep(weight, gradient, m, v, step_size, epsilon, decay) -> weight', m', v'
        m' = beta1 * m + (1 - beta1) * gradient         v' = beta2 * v + (1 - beta2) * gradient^2
        update = step_size * m' / (sqrt(v') + epsilon)
        weight' = decay * weight - update               or, with decay_last,  decay * (weight - update)
    SGDStep(weight, gradient, buffer, learning_rate) -> weight', buffer'
        buffer' = momentum * buffer + gradient          weight' = weight - learning_rate * buffer'

step_size, epsilon and decay are scalars. They include the bias corrections, which are the same for all parameters. All
is computed in the type of m: float32 if the weight is of half precision.

Source: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101 (algorithm 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import OWN, TensorType, dtype_of, type_of
from onnxtrain.ops.body_parts import cast, mul_scalar
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import REQUIRED, Call, NodeView, numel

Tensor = torch.Tensor


def _flops(per_element: int) -> Any:
    def count(n: NodeView) -> Size:
        return sizes.multiply(per_element, numel(n.weight))

    return count


# AdamWStep


def _adamw_types(n: NodeView) -> Sequence[TensorType]:
    return type_of(n.weight), type_of(n.m), type_of(n.v)


def _adamw_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    dtype = dtype_of(n.m)
    weight, gradient = cast(op, n.weight, dtype), cast(op, n.gradient, dtype)
    m = op.Add(mul_scalar(op, n.m, n.beta1), mul_scalar(op, gradient, 1 - n.beta1))
    v = op.Add(mul_scalar(op, n.v, n.beta2), mul_scalar(op, op.Mul(gradient, gradient), 1 - n.beta2))
    update = op.Mul(op.Div(m, op.Add(op.Sqrt(v), n.epsilon)), n.step_size)
    if n.decay_last:
        weight = op.Sub(weight, update)
        return cast(op, weight if n.decay is None else op.Mul(weight, n.decay), dtype_of(n.weight)), m, v
    weight = weight if n.decay is None else op.Mul(weight, n.decay)
    return cast(op, op.Sub(weight, update), dtype_of(n.weight)), m, v


def adamw_step(
    weight: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    step_size: Tensor,
    epsilon: Tensor,
    decay: Tensor | None,
    beta1: float,
    beta2: float,
    decay_last: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new weight, m and v, in as few passes as PyTorch's functions allow; nothing is written in place."""
    wide, gradient = weight.to(m.dtype), gradient.to(m.dtype)
    m = torch.lerp(gradient, m, beta1)
    v = (v * beta2).addcmul_(gradient, gradient, value=1 - beta2)
    update = v.sqrt().add_(epsilon).reciprocal_().mul_(m).mul_(step_size)
    if decay is None:
        return (wide - update).to(weight.dtype), m, v
    wide = (wide - update).mul_(decay) if decay_last else wide * decay - update
    return wide.to(weight.dtype), m, v


def _lower_adamw(n: NodeView, *arguments: Any) -> Call:
    return Call(adamw_step, *arguments, n.beta1, n.beta2, n.decay_last)


def _elementwise(n: NodeView) -> str:
    outputs = ", ".join(["..."] * len(n.node.outputs))
    return f"{', '.join('-' if v is None else '...' for v in n.node.inputs)} -> {outputs}"


define_pure(
    OWN,
    "AdamWStep",
    ("weight", "gradient", "m", "v", "step_size", "epsilon", "decay?"),
    ("new_weight", "new_m", "new_v"),
    attributes={"beta1": REQUIRED, "beta2": REQUIRED, "decay_last": 0},
    shapes=_adamw_types,
    body=_adamw_body,
    lower=_lower_adamw,
    axes=_elementwise,
    flops=_flops(14),
)


# SGDStep


def _sgd_types(n: NodeView) -> Sequence[TensorType]:
    return type_of(n.weight), type_of(n.buffer)


def _sgd_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    dtype = dtype_of(n.buffer)
    buffer = op.Add(mul_scalar(op, n.buffer, n.momentum), cast(op, n.gradient, dtype))
    weight = op.Sub(cast(op, n.weight, dtype), op.Mul(buffer, n.learning_rate))
    return cast(op, weight, dtype_of(n.weight)), buffer


def sgd_step(
    weight: Tensor, gradient: Tensor, buffer: Tensor, learning_rate: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    """Return the new weight and buffer; nothing is written in place."""
    buffer = (buffer * momentum).add_(gradient)
    return (weight - buffer * learning_rate).to(weight.dtype), buffer


define_pure(
    OWN,
    "SGDStep",
    ("weight", "gradient", "buffer", "learning_rate"),
    ("new_weight", "new_buffer"),
    attributes={"momentum": REQUIRED},
    shapes=_sgd_types,
    body=_sgd_body,
    lower=lambda n, *arguments: Call(sgd_step, *arguments, n.momentum),
    axes=_elementwise,
    flops=_flops(4),
)
