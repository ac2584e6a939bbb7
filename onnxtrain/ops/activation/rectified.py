"""Piecewise linear activations: Relu and its variants, and the hard approximations of smooth activations.

Relu          max(x, 0)
LeakyRelu     x where x > 0, alpha * x elsewhere
PRelu         x where x > 0, slope * x elsewhere; one learned slope, or one for each channel
Threshold     x where x > threshold, value elsewhere
Hardtanh      clip(x, low, high); unlike Clip, the gradient at low and high is 0
HardSigmoid   clip(x + 3, 0, 6) / 6
HardSwish     x * HardSigmoid(x)
Hardshrink    x where |x| > lambd, 0 elsewhere
Softshrink    x - sign(x) * lambd where |x| > lambd, 0 elsewhere
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import MICROSOFT, OWN, TensorType, dtype_of, is_float, rank_of, type_of
from onnxtrain.ops.activation.constructors import define_activation, not_double, scalar
from onnxtrain.ops.constructors import define_pure, elementwise_flops, same_as
from onnxtrain.ops.definition import (
    NOT_DIFFERENTIABLE,
    STANDARD,
    Call,
    Effects,
    Gradient,
    InPlaceCapableCall,
    Kernel,
    NodeView,
    OpDef,
)
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.interfaces.cpp import CPP, Elementwise
from onnxtrain.ops.interfaces.stock_kernels import STOCK_KERNELS
from onnxtrain.ops.registry import define
from onnxtrain.torch_compat import aten_kernels

Grad = ir.Value | None
_aten = torch.ops.aten


# Relu, LeakyRelu, Threshold


def _relu_grad_body(op: Builder, n: NodeView) -> ir.Value:
    zero = scalar(op, n, 0.0)
    return op.Where(op.LessOrEqual(n.y, zero), zero, n.dy)


def _leaky_relu_body(op: Builder, n: NodeView) -> ir.Value:
    sloped = op.Mul(n.x, scalar(op, n, n.alpha))
    return op.Where(op.Greater(n.x, scalar(op, n, 0.0)), n.x, sloped)


def _leaky_relu_grad_body(op: Builder, n: NodeView) -> ir.Value:
    sloped = op.Mul(n.dy, scalar(op, n, n.alpha))
    return op.Where(op.Greater(n.x, scalar(op, n, 0.0)), n.dy, sloped)


def _capture_leaky_relu(op: Builder, x: ir.Value, negative_slope: float = 0.01) -> Any:
    return op.LeakyRelu(x, alpha=float(negative_slope))


def _capture_threshold(op: Builder, x: ir.Value, threshold: float, value: float) -> Any:
    return op.own.Threshold(x, threshold=float(threshold), value=float(value))


def _threshold_body(op: Builder, n: NodeView) -> ir.Value:
    below = op.LessOrEqual(n.x, scalar(op, n, n.threshold))
    return op.Where(below, scalar(op, n, n.value), n.x)


def _threshold_grad_body(op: Builder, n: NodeView) -> ir.Value:
    below = op.LessOrEqual(n.x, scalar(op, n, n.threshold))
    return op.Where(below, scalar(op, n, 0.0), n.dy)


def threshold_backward(dy: torch.Tensor, x: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return dy where x is above the threshold, 0 elsewhere."""
    return _aten.threshold_backward.default(dy, x, threshold)


def threshold_backward_(dy: torch.Tensor, x: torch.Tensor, threshold: float) -> torch.Tensor:
    """Compute `threshold_backward` in place: the result overwrites dy."""
    return _aten.threshold_backward.grad_input(dy, x, threshold, grad_input=dy)


RELU, RELU_GRAD = define_activation(
    "Relu",
    "aten.relu.default",
    lambda n, x: Call(torch.relu, x),
    STANDARD,
    lambda n, dy, y: InPlaceCapableCall(threshold_backward, threshold_backward_, dy, y, 0),
    _relu_grad_body,
    grad_domain=MICROSOFT,
    grad_in_place=True,
    saved="y",  # y > 0 exactly where x > 0
    flops=1,
)
CPP.register(RELU, Elementwise("{0} < 0 ? 0 : {0}"))
LEAKY_RELU, LEAKY_RELU_GRAD = define_activation(
    "LeakyRelu",
    {"aten.leaky_relu.default": _capture_leaky_relu},
    lambda n, x: Call(aten_kernels.leaky_relu, x, n.alpha),
    _leaky_relu_body,
    lambda n, dy, x: Call(_aten.leaky_relu_backward.default, dy, x, n.alpha, False),
    _leaky_relu_grad_body,
    grad_domain=MICROSOFT,
    attributes={"alpha": 0.01},
    flops=2,
)
THRESHOLD, THRESHOLD_GRAD = define_activation(
    "Threshold",
    {"aten.threshold.default": _capture_threshold},
    lambda n, x: Call(torch.threshold, x, n.threshold, n.value),
    _threshold_body,
    lambda n, dy, x: InPlaceCapableCall(threshold_backward, threshold_backward_, dy, x, n.threshold),
    _threshold_grad_body,
    domain=OWN,
    grad_in_place=True,
    attributes={"threshold": 0.0, "value": 0.0},
    flops=1,
)


# Hardtanh, HardSigmoid, HardSwish


def _capture_hardtanh(op: Builder, x: ir.Value, min_val: float = -1, max_val: float = 1) -> Any:
    if not is_float(dtype_of(x)):
        return NotImplemented
    return op.own.Hardtanh(x, low=float(min_val), high=float(max_val))


def _hardtanh_body(op: Builder, n: NodeView) -> ir.Value:
    return op.Clip(n.x, scalar(op, n, n.low), scalar(op, n, n.high))


def _within(op: Builder, n: NodeView, low: float, high: float, inside: ir.Value) -> ir.Value:
    """Return `inside` where low < x < high, 0 elsewhere."""
    between = op.And(op.Greater(n.x, scalar(op, n, low)), op.Less(n.x, scalar(op, n, high)))
    return op.Where(between, inside, scalar(op, n, 0.0))


def _hard_sigmoid(op: Builder, n: NodeView) -> ir.Value:
    """Return clip(x + 3, 0, 6) / 6."""
    three, six = scalar(op, n, 3.0), scalar(op, n, 6.0)
    return op.Div(op.Clip(op.Add(n.x, three), scalar(op, n, 0.0), six), six)


def _hard_sigmoid_body(op: Builder, n: NodeView) -> ir.Value:
    if n.beta != 0.5 or abs(n.alpha - 1 / 6) > 1e-7:
        raise GraphError(
            "HardSigmoid supports only the attributes of PyTorch's hardsigmoid",
            expected="alpha = 1/6 and beta = 0.5",
            got=f"alpha = {n.alpha} and beta = {n.beta}",
        )
    return _hard_sigmoid(op, n)


def _hard_sigmoid_grad_body(op: Builder, n: NodeView) -> ir.Value:
    """Return dy / 6 where -3 < x < 3, 0 elsewhere. PyTorch's kernels round 1/6 to float32, for float64 too."""
    return _within(op, n, -3.0, 3.0, op.Mul(n.dy, scalar(op, n, torch.tensor(1 / 6).item())))


def _hard_swish_grad_body(op: Builder, n: NodeView) -> ir.Value:
    """Return 0 where x <= -3, dy where x >= 3, dy * (x / 3 + 1/2) between."""
    three, zero = scalar(op, n, 3.0), scalar(op, n, 0.0)
    between = op.Mul(n.dy, op.Add(op.Div(n.x, three), scalar(op, n, 0.5)))
    lower = op.Where(op.LessOrEqual(n.x, scalar(op, n, -3.0)), zero, between)
    return op.Where(op.GreaterOrEqual(n.x, three), n.dy, lower)


HARDTANH, HARDTANH_GRAD = define_activation(
    "Hardtanh",
    {
        "aten.hardtanh.default": _capture_hardtanh,
        "aten.relu6.default": lambda op, x: _capture_hardtanh(op, x, 0, 6),
    },
    lambda n, x: Call(aten_kernels.hardtanh, x, n.low, n.high),
    _hardtanh_body,
    lambda n, dy, x: Call(_aten.hardtanh_backward.default, dy, x, n.low, n.high),
    lambda op, n: _within(op, n, n.low, n.high, n.dy),
    domain=OWN,
    attributes={"low": -1.0, "high": 1.0},
    flops=2,
)
HARD_SIGMOID, HARD_SIGMOID_GRAD = define_activation(
    "HardSigmoid",
    {"aten.hardsigmoid.default": lambda op, x: op.HardSigmoid(x, alpha=1 / 6, beta=0.5)},
    lambda n, x: Call(aten_kernels.hardsigmoid, x),
    _hard_sigmoid_body,
    lambda n, dy, x: Call(_aten.hardsigmoid_backward.default, dy, x),
    _hard_sigmoid_grad_body,
    attributes={"alpha": 0.2, "beta": 0.5},
)
HARD_SWISH, HARD_SWISH_GRAD = define_activation(
    "HardSwish",
    "aten.hardswish.default",
    lambda n, x: Call(aten_kernels.hardswish, x),
    lambda op, n: op.Mul(n.x, _hard_sigmoid(op, n)),
    lambda n, dy, x: Call(_aten.hardswish_backward.default, dy, x),
    _hard_swish_grad_body,
)


# Hardshrink, Softshrink


def _hardshrink_body(op: Builder, n: NodeView) -> ir.Value:
    zero = scalar(op, n, 0.0)
    small = op.LessOrEqual(op.Abs(n.x), scalar(op, n, n.lambd))
    return op.Where(small, zero, n.x)


def _softshrink_body(op: Builder, n: NodeView) -> ir.Value:
    zero, lambd = scalar(op, n, 0.0), scalar(op, n, n.lambd)
    low = op.Where(op.Less(n.x, op.Neg(lambd)), op.Add(n.x, lambd), op.Mul(n.x, zero))
    return op.Where(op.Greater(n.x, lambd), op.Sub(n.x, lambd), low)


def _shrink_grad_body(op: Builder, n: NodeView) -> ir.Value:
    large = op.Greater(op.Abs(n.x), scalar(op, n, n.lambd))
    return op.Where(large, n.dy, scalar(op, n, 0.0))


HARDSHRINK, HARDSHRINK_GRAD = define_activation(
    "Hardshrink",
    {"aten.hardshrink.default": lambda op, x, lambd=0.5: op.own.Hardshrink(x, lambd=float(lambd))},
    lambda n, x: Call(torch.hardshrink, x, n.lambd),
    _hardshrink_body,
    lambda n, dy, x: Call(_aten.hardshrink_backward.default, dy, x, n.lambd),
    _shrink_grad_body,
    domain=OWN,
    attributes={"lambd": 0.5},
    flops=2,
)
SOFTSHRINK, SOFTSHRINK_GRAD = define_activation(
    "Softshrink",
    {"aten.softshrink.default": lambda op, x, lambd=0.5: op.own.Softshrink(x, lambd=float(lambd))},
    lambda n, x: Call(aten_kernels.softshrink, x, n.lambd),
    _softshrink_body,
    lambda n, dy, x: Call(_aten.softshrink_backward.default, dy, x, n.lambd),
    _shrink_grad_body,
    domain=OWN,
    attributes={"lambd": 0.5},
    flops=2,
)


# PRelu(x, slope): slope broadcasts to x


def _capture_prelu(op: Builder, x: ir.Value, weight: ir.Value) -> Any:
    """Capture `prelu`, whose weight has one slope, or one for each channel (axis 1)."""
    rank = rank_of(x)
    if rank_of(weight) == 1 and rank > 2:
        weight = op.Reshape(weight, op.sizes([sizes.dims_of(weight)[0], *[1] * (rank - 2)]))
    elif rank == 0 or rank == 1:
        weight = op.Reshape(weight, op.sizes([]))
    return op.PRelu(x, weight)


def _prelu_gradient(op: Builder, n: NodeView, dy: ir.Value) -> Sequence[Grad]:
    return op.own.PReluGrad(dy, n.x, n.slope)


def _prelu_grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    positive, zero = op.Greater(n.x, scalar(op, n, 0.0)), scalar(op, n, 0.0)
    dx = op.Where(positive, n.dy, op.Mul(n.dy, n.slope))
    return dx, op.Where(positive, zero, op.Mul(n.dy, n.x))


PRELU = define_pure(
    "",
    "PRelu",
    ("x", "slope"),
    ("y",),
    from_torch={
        "aten.prelu.default": _capture_prelu,
        "aten._prelu_kernel.default": lambda op, x, weight: op.PRelu(x, weight),
    },
    shapes=same_as("x"),
    body=STANDARD,
    gradient=(Gradient(_prelu_gradient, ("x", "slope")),),
    lower=lambda n, x, slope: Call(aten_kernels.prelu, x, slope),
    axes=lambda n: "..., ... -> ...",
    flops=lambda n: sizes.multiply(2, elementwise_flops(n)),
)
# PReluGrad(dy, x, slope) -> dx, dslope, both of x's shape: the differentiator sums dslope to slope's shape.
PRELU_GRAD = define(
    OpDef(
        domain=OWN,
        name="PReluGrad",
        inputs=("dy", "x", "slope"),
        outputs=("dx", "dslope"),
        attributes={},
        from_torch={},
        shapes=lambda n: (type_of(n.x), TensorType(dtype_of(n.slope), sizes.dims_of(n.x))),
        body=_prelu_grad_body,
        gradient=NOT_DIFFERENTIABLE,
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=lambda n, dy, x, slope: Call(aten_kernels.prelu_grad, dy, x, slope)),),
        axes=lambda n: "..., ..., ... -> ..., ...",
        effects=Effects.NONE,
        aliases={},
    )
)
FLOPS.register(PRELU_GRAD, lambda n: sizes.multiply(4, elementwise_flops(n)))
STOCK_KERNELS.implements(LEAKY_RELU, HARD_SIGMOID, HARD_SWISH)(not_double)
