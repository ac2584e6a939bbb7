"""Smooth activations, and ELU and its variants.

Sigmoid       1 / (1 + exp(-x))
Tanh
Gelu          x * Phi(x), or its tanh approximation                              https://arxiv.org/abs/1606.08415
QuickGelu     x * sigmoid(alpha * x); alpha = 1 is silu (swish)
Softplus      log(1 + exp(beta * x)) / beta, and x where beta * x > threshold
Mish          x * tanh(softplus(x))                                              https://arxiv.org/abs/1908.08681
LogSigmoid    log(sigmoid(x))
Elu, Selu, Celu                                                                  https://arxiv.org/abs/1511.07289
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import MICROSOFT, ONNX, OWN, dtype_of
from onnxtrain.ops.activation import compiled_kernels as kernels
from onnxtrain.ops.activation.constructors import define_activation, define_activation_grad, not_double, scalar
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.constructors import define_unary, elementwise_flops
from onnxtrain.ops.definition import STANDARD, Call, FromTorch, Infix, InPlaceCapableCall, Kernel, NodeView
from onnxtrain.ops.interfaces.cpp import CPP, Elementwise
from onnxtrain.ops.interfaces.fused_regions import GAINS_FROM_FUSION
from onnxtrain.ops.interfaces.stock_kernels import STOCK_KERNELS
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.torch_compat import aten_kernels

_aten = torch.ops.aten


# Sigmoid, Tanh: backward reads y, not x


def _sigmoid_grad_body(op: Builder, n: NodeView) -> ir.Value:
    one = scalar(op, n, 1.0)
    return op.Mul(op.Mul(n.dy, op.Sub(one, n.y)), n.y)


def _tanh_grad_body(op: Builder, n: NodeView) -> ir.Value:
    return op.Mul(n.dy, op.Sub(scalar(op, n, 1.0), op.Mul(n.y, n.y)))


def _capture_unary(name: str) -> FromTorch:
    return lambda op, x: op.op(ONNX, name)(cast(op, x, op.out[0].dtype))


SIGMOID, SIGMOID_GRAD = define_activation(
    "Sigmoid",
    dict.fromkeys(("aten.sigmoid.default", "aten.special_expit.default"), _capture_unary("Sigmoid")),
    lambda n, x: Call(torch.sigmoid, x),
    STANDARD,
    lambda n, dy, y: Call(_aten.sigmoid_backward.default, dy, y),
    _sigmoid_grad_body,
    grad_domain=MICROSOFT,
    saved="y",
)
CPP.register(SIGMOID, Elementwise("1 / (1 + std::exp(-{0}))"))
TANH, TANH_GRAD = define_activation(
    "Tanh",
    "aten.tanh.default",
    lambda n, x: Call(torch.tanh, x),
    STANDARD,
    lambda n, dy, y: Call(_aten.tanh_backward.default, dy, y),
    _tanh_grad_body,
    grad_domain=MICROSOFT,
    saved="y",
)
CPP.register(TANH, Elementwise("std::tanh({0})"))


# Gelu

_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715


def _phi(op: Builder, n: NodeView) -> ir.Value:
    """Return Phi(x), the cumulative distribution function of the standard normal, or its tanh approximation."""
    one, half = scalar(op, n, 1.0), scalar(op, n, 0.5)
    if n.approximate == "tanh":
        cube = op.Mul(op.Mul(n.x, n.x), n.x)
        inner = op.Mul(op.Add(n.x, op.Mul(cube, scalar(op, n, _TANH_CUBIC))), scalar(op, n, _TANH_SCALE))
        erf = op.Tanh(inner)  # approximates erf(x / sqrt(2))
    else:
        erf = op.Erf(op.Mul(n.x, scalar(op, n, math.sqrt(0.5))))
    return op.Mul(op.Add(erf, one), half)


def _phi_derivative(op: Builder, n: NodeView) -> ir.Value:
    """Return Phi'(x): the density of the standard normal, or half the derivative of the tanh."""
    square = op.Mul(n.x, n.x)
    if n.approximate != "tanh":
        exponential = op.Exp(op.Mul(square, scalar(op, n, -0.5)))
        return op.Mul(exponential, scalar(op, n, 1 / math.sqrt(2 * math.pi)))
    phi = _phi(op, n)
    # With t = 2 phi - 1: (1 - t^2) / 2 = 2 phi (1 - phi).
    outer = op.Mul(op.Mul(phi, op.Sub(scalar(op, n, 1.0), phi)), scalar(op, n, 2.0))
    inner = op.Add(op.Mul(square, scalar(op, n, 3 * _TANH_CUBIC)), scalar(op, n, 1.0))
    return op.Mul(op.Mul(outer, inner), scalar(op, n, _TANH_SCALE))


def _gelu_grad_body(op: Builder, n: NodeView) -> ir.Value:
    return op.Mul(n.dy, op.Add(_phi(op, n), op.Mul(n.x, _phi_derivative(op, n))))


def _capture_gelu(op: Builder, x: ir.Value, *, approximate: str = "none") -> Any:
    return op.Gelu(x, approximate=approximate)


def _can_compile(n: NodeView, device: str) -> bool:
    return n.approximate == "tanh" and may_compile(n, device)


GELU, GELU_GRAD = define_activation(
    "Gelu",
    {"aten.gelu.default": _capture_gelu},
    lambda n, x: Call(torch.nn.functional.gelu, x, approximate=n.approximate),
    lambda op, n: op.Mul(n.x, _phi(op, n)),
    lambda n, dy, x: InPlaceCapableCall(kernels.gelu_backward, kernels.gelu_backward_, dy, x, n.approximate),
    _gelu_grad_body,
    grad_domain=MICROSOFT,
    grad_in_place=True,
    attributes={"approximate": "none"},
    flops=10,
    preferred_kernels=(
        Kernel(lower=lambda n, x: kernels.compiled_call(kernels.tanh_gelu, x), applies=_can_compile),
        Kernel(lower=lambda n, dy, x: kernels.tanh_gelu_backward_call(dy, x), applies=_can_compile, in_place_input=0),
    ),
)


def _lower_exact_gelu(n: NodeView, x: Any) -> Call:
    return (kernels.compiled_call if may_compile(n, "cpu") else Call)(kernels.exact_gelu, x)


def _lower_exact_gelu_grad(n: NodeView, dy: Any, x: Any) -> Call:
    if may_compile(n, "cpu"):
        kernels.LIBRARY.request()
    return InPlaceCapableCall(kernels.exact_gelu_backward, kernels.exact_gelu_backward_, dy, x)


def _is_float_on_cpu(n: NodeView, device: str) -> bool:
    return device == "cpu" and dtype_of(n.x) == ir.DataType.FLOAT


# The Gelu that forward writes out with erf: PyTorch's float32 kernels on a CPU are less accurate than the formula.
define_unary(
    "Gelu",
    {},
    torch.nn.functional.gelu,
    lambda op, n, dy: op.own.ErfGeluGrad(dy, n.x),
    domain=MICROSOFT,
    body=lambda op, n: op.Gelu(n.x),
    preferred_kernels=(Kernel(lower=_lower_exact_gelu, applies=_is_float_on_cpu),),
    flops=lambda n: sizes.multiply(10, elementwise_flops(n)),
)
define_activation_grad(
    "ErfGeluGrad",
    "x",
    lambda n, dy, x: InPlaceCapableCall(kernels.gelu_backward, kernels.gelu_backward_, dy, x, "none"),
    lambda op, n: op.ms.GeluGrad(n.dy, n.x),
    preferred_kernels=(Kernel(lower=_lower_exact_gelu_grad, applies=_is_float_on_cpu, in_place_input=0),),
    in_place=True,
    flops=10,
)


# QuickGelu: PyTorch has a fused kernel for alpha = 1 (silu); other alphas run as x * sigmoid(alpha * x)


def _quick_gelu_call(n: NodeView, x: Any) -> Call:
    if n.alpha == 1.0:
        return Call(torch.nn.functional.silu, x)
    return Infix("*", torch.mul, x, Call(torch.sigmoid, Infix("*", torch.mul, x, n.alpha)))


def _quick_gelu_grad_call(n: NodeView, dy: Any, x: Any) -> Call:
    if n.alpha == 1.0:
        return Call(_aten.silu_backward.default, dy, x)
    # QuickGelu(x) = silu(alpha * x) / alpha, whose derivative at x is silu's at alpha * x.
    return Call(_aten.silu_backward.default, dy, Infix("*", torch.mul, x, n.alpha))


def _scaled_x_and_sigmoid(op: Builder, n: NodeView) -> tuple[ir.Value, ir.Value]:
    """Return alpha * x and its sigmoid."""
    z = n.x if n.alpha == 1.0 else op.Mul(n.x, scalar(op, n, n.alpha))
    return z, op.Sigmoid(z)


def _quick_gelu_grad_body(op: Builder, n: NodeView) -> ir.Value:
    z, gate = _scaled_x_and_sigmoid(op, n)
    one = scalar(op, n, 1.0)
    derivative = op.Mul(gate, op.Add(op.Mul(z, op.Sub(one, gate)), one))
    return op.Mul(n.dy, derivative)


QUICK_GELU, QUICK_GELU_GRAD = define_activation(
    "QuickGelu",
    {"aten.silu.default": lambda op, x: op.ms.QuickGelu(x, alpha=1.0)},
    _quick_gelu_call,
    lambda op, n: op.Mul(n.x, _scaled_x_and_sigmoid(op, n)[1]),
    _quick_gelu_grad_call,
    _quick_gelu_grad_body,
    domain=MICROSOFT,
    grad_domain=MICROSOFT,
    attributes={"alpha": 1.702},
    flops=6,
)
# silu(gate) * up of [2048, 1536]: 0.91 ms as one kernel, 1.56 ms as two
GAINS_FROM_FUSION.add(QUICK_GELU, QUICK_GELU_GRAD)
STOCK_KERNELS.register(QUICK_GELU, not_double)


# Softplus, Mish, LogSigmoid


def _softplus(op: Builder, n: NodeView, beta: float, threshold: float) -> ir.Value:
    z = n.x if beta == 1 else op.Mul(n.x, scalar(op, n, beta))
    smooth = op.own.Log1p(op.Exp(z))
    smooth = smooth if beta == 1 else op.Div(smooth, scalar(op, n, beta))
    return op.Where(op.Greater(z, scalar(op, n, threshold)), n.x, smooth)


def _softplus_grad_body(op: Builder, n: NodeView) -> ir.Value:
    z = op.Mul(n.x, scalar(op, n, n.beta))
    inside = op.Mul(n.dy, op.Sigmoid(z))
    return op.Where(op.Greater(z, scalar(op, n, n.threshold)), n.dy, inside)


def _capture_softplus(op: Builder, x: ir.Value, beta: float = 1, threshold: float = 20) -> Any:
    if beta == 1 and threshold == 20:
        return op.Softplus(x)
    return op.own.Softplus(x, beta=float(beta), threshold=float(threshold))


SCALED_SOFTPLUS, SOFTPLUS_GRAD = define_activation(
    "Softplus",
    {},
    lambda n, x: Call(aten_kernels.softplus, x, n.beta, n.threshold),
    lambda op, n: _softplus(op, n, n.beta, n.threshold),
    lambda n, dy, x: Call(_aten.softplus_backward.default, dy, x, n.beta, n.threshold),
    _softplus_grad_body,
    domain=OWN,
    attributes={"beta": 1.0, "threshold": 20.0},
    flops=6,
)
SOFTPLUS = define_unary(
    "Softplus",
    {"aten.softplus.default": _capture_softplus},
    aten_kernels.softplus,
    lambda op, n, dy: op.own.SoftplusGrad(dy, n.x),
    body=lambda op, n: _softplus(op, n, 1, 20),
)
# PyTorch returns x above 20: float64 resolves the difference to softplus(x).
STOCK_KERNELS.register(SOFTPLUS, not_double)


def _mish_grad_body(op: Builder, n: NodeView) -> ir.Value:
    tanh, sigmoid = op.Tanh(op.Softplus(n.x)), op.Sigmoid(n.x)
    tanh_derivative = op.Sub(scalar(op, n, 1.0), op.Mul(tanh, tanh))
    derivative = op.Add(tanh, op.Mul(op.Mul(n.x, sigmoid), tanh_derivative))
    return op.Mul(n.dy, derivative)


MISH, MISH_GRAD = define_activation(
    "Mish",
    "aten.mish.default",
    lambda n, x: Call(torch.nn.functional.mish, x),
    lambda op, n: op.Mul(n.x, op.Tanh(op.Softplus(n.x))),
    lambda n, dy, x: Call(_aten.mish_backward.default, dy, x),
    _mish_grad_body,
    flops=8,
)


def _log_sigmoid_body(op: Builder, n: NodeView) -> ir.Value:
    """Return min(0, x) - log1p(exp(-|x|))."""
    low = op.Min(n.x, scalar(op, n, 0.0))
    return op.Sub(low, op.own.Log1p(op.Exp(op.Neg(op.Abs(n.x)))))


def _log_sigmoid_grad_call(n: NodeView, dy: Any, x: Any) -> Call:
    # The CPU kernel reads exp(-|x|) from its third argument; forward does not save it, so it is recomputed.
    return Call(_aten.log_sigmoid_backward.default, dy, x, Call(torch.exp, Call(torch.neg, Call(torch.abs, x))))


LOG_SIGMOID, LOG_SIGMOID_GRAD = define_activation(
    "LogSigmoid",
    "aten.log_sigmoid.default",
    lambda n, x: Call(torch.nn.functional.logsigmoid, x),
    _log_sigmoid_body,
    _log_sigmoid_grad_call,
    lambda op, n: op.Mul(n.dy, op.Sigmoid(op.Neg(n.x))),
    domain=OWN,
    flops=5,
    # The GPU kernel does not read its third argument.
    grad_lower_on_gpu=lambda n, dy, x: Call(_aten.log_sigmoid_backward.default, dy, x, x),
)


# Elu, Selu, Celu: scale * (x where x > 0, alpha * (exp(input_scale * x) - 1) elsewhere)


def _generalized_elu(op: Builder, n: NodeView, alpha: float, scale: float, input_scale: float) -> ir.Value:
    positive = n.x if scale == 1 else op.Mul(n.x, scalar(op, n, scale))
    z = n.x if input_scale == 1 else op.Mul(n.x, scalar(op, n, input_scale))
    negative = op.Mul(op.own.Expm1(z), scalar(op, n, alpha * scale))
    return op.Where(op.Greater(n.x, scalar(op, n, 0.0)), positive, negative)


def _elu_grad_body(op: Builder, n: NodeView) -> ir.Value:
    factor = n.alpha * n.scale * n.input_scale
    z = op.Mul(n.x, scalar(op, n, n.input_scale))
    negative = op.Mul(op.Mul(n.dy, scalar(op, n, factor)), op.Exp(z))
    positive = op.Mul(n.dy, scalar(op, n, n.scale))
    return op.Where(op.Greater(n.x, scalar(op, n, 0.0)), positive, negative)


def _capture_elu(op: Builder, x: ir.Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    if input_scale != 1:
        return NotImplemented
    return op.Elu(x, alpha=float(alpha)) if scale == 1 else op.Selu(x, alpha=float(alpha), gamma=float(scale))


_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
ELU_GRAD = define_activation_grad(
    "EluGrad",
    "x",
    lambda n, dy, x: Call(_aten.elu_backward.default, dy, n.alpha, n.scale, n.input_scale, False, x),
    _elu_grad_body,
    attributes={"alpha": 1.0, "scale": 1.0, "input_scale": 1.0},
)
ELU = define_unary(
    "Elu",
    {"aten.elu.default": _capture_elu},
    aten_kernels.elu,
    lambda op, n, dy: op.own.EluGrad(dy, n.x, alpha=n.alpha),
    attributes={"alpha": 1.0},
    body=lambda op, n: _generalized_elu(op, n, n.alpha, 1.0, 1.0),
    lower=lambda n, x: Call(aten_kernels.elu, x, n.alpha),
)
SELU = define_unary(
    "Selu",
    {"aten.selu.default": lambda op, x: op.Selu(x, alpha=_SELU_ALPHA, gamma=_SELU_SCALE)},
    aten_kernels.elu,
    lambda op, n, dy: op.own.EluGrad(dy, n.x, alpha=n.alpha, scale=n.gamma),
    attributes={"alpha": _SELU_ALPHA, "gamma": _SELU_SCALE},
    body=lambda op, n: _generalized_elu(op, n, n.alpha, n.gamma, 1.0),
    lower=lambda n, x: Call(aten_kernels.elu, x, n.alpha, n.gamma),
)
STOCK_KERNELS.implements(ELU, SELU)(not_double)
CELU = define_unary(
    "Celu",
    {"aten.celu.default": lambda op, x, alpha=1.0: op.own.Celu(x, alpha=float(alpha))},
    torch.celu,
    # PyTorch's gradient rounds alpha to float32.
    lambda op, n, dy: op.own.EluGrad(dy, n.x, alpha=n.alpha, input_scale=1 / torch.tensor(n.alpha).item()),
    attributes={"alpha": 1.0},
    domain=OWN,  # ai.onnx's Celu supports float32 only
    body=lambda op, n: _generalized_elu(op, n, n.alpha, 1.0, 1 / n.alpha),
    lower=lambda n, x: Call(torch.celu, x, n.alpha),
)
