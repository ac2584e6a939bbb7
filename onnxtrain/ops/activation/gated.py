"""Gated linear units: one tensor, or one half of a tensor, gates the other.

Glu(x[..., 2k, ...]) -> a * sigmoid(b), with a and b the halves of x along `axis`      https://arxiv.org/abs/1612.08083
GatedActivation(gate, up) -> activation(gate) * up                                     https://arxiv.org/abs/2002.05202

`activation` is "silu" (SwiGLU), "gelu" or "tanh_gelu" (GEGLU). GatedActivationGrad computes both gradients of
GatedActivation from gate and up, so that no other tensor is saved for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import ONNX, OWN, TensorType, dtype_of, normalize_axis, rank_of, type_of
from onnxtrain.ops.activation import compiled_kernels as kernels
from onnxtrain.ops.activation.constructors import scalar
from onnxtrain.ops.constructors import broadcast_axes, define_pure, elementwise_flops
from onnxtrain.ops.definition import REQUIRED, Call, Gradient, Kernel, NodeView
from onnxtrain.ops.interfaces.fused_regions import FUSIBLE
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.torch_compat import aten_kernels

_glu_backward = torch.ops.aten.glu_backward.default


def _glu_types(n: NodeView) -> Sequence[TensorType]:
    shape = list(sizes.dims_of(n.x))
    axis = normalize_axis(n.axis, len(shape))
    shape[axis] = sizes.floor_divide(shape[axis], 2)
    return (TensorType(dtype_of(n.x), tuple(shape)),)


def _halves(op: Builder, n: NodeView) -> tuple[ir.Value, ir.Value]:
    a, b = op.Split(n.x, axis=n.axis, num_outputs=2)
    return a, b


def _glu_body(op: Builder, n: NodeView) -> ir.Value:
    a, b = _halves(op, n)
    return op.Mul(a, op.Sigmoid(b))


def _glu_grad_body(op: Builder, n: NodeView) -> ir.Value:
    a, b = _halves(op, n)
    gate = op.Sigmoid(b)
    da = op.Mul(n.dy, gate)
    db = op.Mul(da, op.Mul(op.Sub(scalar(op, n, 1.0), gate), a))
    return op.Concat(da, db, axis=n.axis)


def _glu_axes(n: NodeView, inputs: int) -> str:
    """Return the axis map of Glu (`inputs` = 1) or GluGrad: all axes but the halved one pass through."""
    rank = rank_of(n.x)
    axis = normalize_axis(n.axis, rank)
    operand = " ".join(f"[a{i}]" if i == axis else f"a{i}" for i in range(rank))
    result = operand.replace(f"[a{axis}]", "[half]")
    return f"{operand} -> {result}" if inputs == 1 else f"{result}, {operand} -> {operand}"


def _capture_glu(op: Builder, x: ir.Value, dim: int = -1) -> Any:
    return op.own.Glu(x, axis=dim)


GLU = define_pure(
    OWN,
    "Glu",
    ("x",),
    ("y",),
    attributes={"axis": -1},
    from_torch={"aten.glu.default": _capture_glu},
    shapes=_glu_types,
    body=_glu_body,
    gradient=(Gradient(lambda op, n, dy: op.own.GluGrad(dy, n.x, axis=n.axis), ("x",)),),
    lower=lambda n, x: Call(aten_kernels.glu, x, n.axis),
    axes=lambda n: _glu_axes(n, 1),
    flops=lambda n: sizes.multiply(5, elementwise_flops(n)),
)
GLU_GRAD = define_pure(
    OWN,
    "GluGrad",
    ("dy", "x"),
    ("dx",),
    attributes={"axis": -1},
    shapes=lambda n: (type_of(n.x),),
    body=_glu_grad_body,
    lower=lambda n, dy, x: Call(_glu_backward, dy, x, n.axis),
    axes=lambda n: _glu_axes(n, 2),
    flops=lambda n: sizes.multiply(8, elementwise_flops(n)),
)


# GatedActivation


def activation_of(n: NodeView) -> str:
    """Return the `activation` of GatedActivation that a node applies to its first input; "" if it applies none."""
    match n.definition.name:
        case "QuickGelu" if n.alpha == 1.0:
            return "silu"
        case "Gelu" if n.definition.domain == ONNX:
            return "tanh_gelu" if n.approximate == "tanh" else "gelu"
        case "FastGelu" if n.bias is None:
            return "tanh_gelu"
    return ""


def _gated_types(n: NodeView, count: int) -> Sequence[TensorType]:
    if n.activation not in ("silu", *kernels.APPROXIMATE):
        raise GraphError(
            f"{n.definition.name} has an unknown activation", expected="silu, gelu or tanh_gelu", got=n.activation
        )
    return (type_of(n.gate),) * count


def _activated(op: Builder, n: NodeView) -> ir.Value:
    if n.activation == "silu":
        return op.ms.QuickGelu(n.gate, alpha=1.0)
    return op.Gelu(n.gate, approximate=kernels.APPROXIMATE[n.activation])


def _gate_gradient(op: Builder, n: NodeView, dactivated: ir.Value) -> ir.Value:
    """Return the gradient of the gate from the gradient of activation(gate)."""
    if n.activation == "silu":
        return op.ms.QuickGeluGrad(dactivated, n.gate, alpha=1.0)
    approximate = kernels.APPROXIMATE[n.activation]
    return op.ms.GeluGrad(dactivated, n.gate, approximate=approximate)


def _gradients(op: Builder, n: NodeView, dy: ir.Value) -> Sequence[ir.Value | None]:
    if n.wants("gate") and n.wants("up"):
        return op.own.GatedActivationGrad(dy, n.gate, n.up, activation=n.activation)
    dgate = _gate_gradient(op, n, op.Mul(dy, n.up)) if n.wants("gate") else None
    return dgate, op.Mul(dy, _activated(op, n)) if n.wants("up") else None


def _can_compile(n: NodeView, device: str) -> bool:
    return n.activation in kernels.COMPILED_GATES and may_compile(n, device)


GATED_ACTIVATION = define_pure(
    OWN,
    "GatedActivation",
    ("gate", "up"),
    ("y",),
    attributes={"activation": REQUIRED},
    shapes=lambda n: _gated_types(n, 1),
    body=lambda op, n: op.Mul(_activated(op, n), n.up),
    kernels=(
        Kernel(lower=lambda n, *xs: kernels.compiled_call(kernels.gated, *xs, n.activation), applies=_can_compile),
    ),
    lower=lambda n, *xs: Call(kernels.aten_gated, *xs, n.activation),
    axes=broadcast_axes,
    flops=lambda n: sizes.multiply(11, elementwise_flops(n)),
    gradient=(Gradient(_gradients, ("gate", "up")),),
)
GATED_ACTIVATION_GRAD = define_pure(
    OWN,
    "GatedActivationGrad",
    ("dy", "gate", "up"),
    ("dgate", "dup"),
    attributes={"activation": REQUIRED},
    shapes=lambda n: _gated_types(n, 2),
    body=lambda op, n: (_gate_gradient(op, n, op.Mul(n.dy, n.up)), op.Mul(n.dy, _activated(op, n))),
    kernels=(
        Kernel(
            lower=lambda n, *xs: kernels.gated_backward_call(*xs, n.activation),
            applies=_can_compile,
            in_place_input=0,
        ),
    ),
    lower=lambda n, *xs: Call(kernels.aten_gated_backward, *xs, n.activation),
    axes=broadcast_axes,
    flops=lambda n: sizes.multiply(22, elementwise_flops(n)),
)
FUSIBLE.add(GATED_ACTIVATION, GATED_ACTIVATION_GRAD)
