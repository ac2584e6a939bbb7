"""GEMM and convolution fused with an activation: ops that ONNX Runtime's inference optimizer writes.

    FusedGemm(a, b, c) -> activation(alpha * a @ b + beta * c)
    FusedConv(x, w, b, z) -> activation(conv(x, w, b) + z)

`activation` is the name of an ONNX op. Its attributes are in activation_alpha and activation_beta, or in
activation_params, in the op's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import MICROSOFT, TensorType, dtype_of, rank_of
from onnxtrain.ops.constructors import define_by_body, elementwise_flops, no_axes
from onnxtrain.ops.definition import Call, NodeView
from onnxtrain.ops.sliding_windows import attribute_per_axis, spatial_sizes, symmetric_pads, window_count

# For each activation: its attributes in order, with ONNX's defaults, and PyTorch's function of x and these.
_ACTIVATIONS: dict[str, tuple[dict[str, float], Any]] = {
    "": ({}, torch.clone),
    "Relu": ({}, torch.relu),
    "Tanh": ({}, torch.tanh),
    "Sigmoid": ({}, torch.sigmoid),
    "LeakyRelu": ({"alpha": 0.01}, torch.nn.functional.leaky_relu),
    "ThresholdedRelu": ({"alpha": 1.0}, lambda x, alpha: torch.nn.functional.threshold(x, alpha, 0.0)),
    "HardSigmoid": ({"alpha": 0.2, "beta": 0.5}, lambda x, alpha, beta: (x * alpha + beta).clamp_(0, 1)),
    "Clip": ({"min": -3.4e38, "max": 3.4e38}, torch.clamp),
}


def _activation(n: NodeView, values: Sequence[float | None]) -> tuple[str, dict[str, float]]:
    """Return the activation's name and attributes; ONNX's default for a value that is None or missing."""
    name = n.activation or ""
    if name not in _ACTIVATIONS:
        raise GraphError(
            f"{n.definition.name}: unsupported activation", expected=", ".join(filter(None, _ACTIVATIONS)), got=name
        )
    defaults = _ACTIVATIONS[name][0]
    padded = [*values, *[None] * len(defaults)]
    return name, {k: default if v is None else v for (k, default), v in zip(defaults.items(), padded, strict=False)}


def _gemm_activation(n: NodeView) -> tuple[str, dict[str, float]]:
    return _activation(n, (n.activation_alpha, n.activation_beta))


def _conv_activation(n: NodeView) -> tuple[str, dict[str, float]]:
    return _activation(n, n.activation_params or ())


def _apply_activation(op: Builder, x: ir.Value, name: str, attributes: dict[str, float]) -> ir.Value:
    if not name:
        return x
    if name == "Clip":
        return op.Clip(x, *(op.scalar(v, like=x) for v in attributes.values()))
    return op.op("", name)(x, **attributes)


# FusedGemm


def _gemm_type(n: NodeView) -> Sequence[TensorType]:
    rows, columns = sizes.dims_of(n.a)[1 if n.transA else 0], sizes.dims_of(n.b)[0 if n.transB else 1]
    return (TensorType(dtype_of(n.a), (rows, columns)),)


def _gemm_body(op: Builder, n: NodeView) -> ir.Value:
    y = op.Gemm(n.a, n.b, n.c, alpha=n.alpha, beta=n.beta, transA=n.transA, transB=n.transB)
    return _apply_activation(op, y, *_gemm_activation(n))


def gemm_with_activation(
    a: torch.Tensor, b: torch.Tensor, c: Any, alpha: float, beta: float, activation: Any, *attributes: float
) -> torch.Tensor:
    y = torch.mm(a, b).mul_(alpha) if c is None else torch.addmm(c, a, b, beta=beta, alpha=alpha)
    return activation(y, *attributes)


def _lower_gemm(n: NodeView, a: Any, b: Any, c: Any) -> Call:
    name, attributes = _gemm_activation(n)
    a, b = (Call(torch.t, v) if trans else v for v, trans in ((a, n.transA), (b, n.transB)))
    return Call(gemm_with_activation, a, b, c, n.alpha, n.beta, _ACTIVATIONS[name][1], *attributes.values())


define_by_body(
    "FusedGemm",
    ("a", "b", "c?"),
    _gemm_body,
    _lower_gemm,
    domain=MICROSOFT,
    attributes={
        "alpha": 1.0,
        "beta": 1.0,
        "transA": 0,
        "transB": 0,
        "activation": None,
        "activation_alpha": None,
        "activation_beta": None,
        "activation_gamma": None,
    },
    shapes=_gemm_type,
    axes=no_axes,
    flops=lambda n: sizes.multiply(2, *sizes.dims_of(n.a), sizes.dims_of(n.y)[1]),
)


# FusedConv


def _window(n: NodeView) -> tuple[list[int], list[int], list[int]]:
    """Return strides, padding and dilations, one of each per spatial axis."""
    count = rank_of(n.x) - 2
    if n.auto_pad not in ("NOTSET", "VALID"):
        raise GraphError(
            "FusedConv: unsupported auto_pad",
            expected="NOTSET or VALID",
            got=n.auto_pad,
            todo="use pads instead",
        )
    return (
        attribute_per_axis(n, "strides", count, 1),
        symmetric_pads(n, count),
        attribute_per_axis(n, "dilations", count, 1),
    )


def _conv_type(n: NodeView) -> Sequence[TensorType]:
    axes = zip(spatial_sizes(n.x), spatial_sizes(n.w), *_window(n), strict=True)
    inner = [window_count(s, k, stride, pad, dilation) for s, k, stride, pad, dilation in axes]
    return (TensorType(dtype_of(n.x), (sizes.dims_of(n.x)[0], sizes.dims_of(n.w)[0], *inner)),)


def _conv_body(op: Builder, n: NodeView) -> ir.Value:
    strides, pads, dilations = _window(n)
    y = op.Conv(n.x, n.w, n.b, strides=strides, pads=pads * 2, dilations=dilations, group=n.group)
    return _apply_activation(op, y if n.z is None else op.Add(y, n.z), *_conv_activation(n))


def conv_with_activation(
    x: torch.Tensor, w: torch.Tensor, b: Any, z: Any, convolution: Any, activation: Any, *attributes: float
) -> torch.Tensor:
    """Return activation(conv(x, w, b) + z); `convolution` holds the other arguments of torch.convolution."""
    y = torch.convolution(x, w, b, *convolution)
    return activation(y if z is None else y + z, *attributes)


def _lower_conv(n: NodeView, x: Any, w: Any, b: Any, z: Any) -> Call:
    strides, pads, dilations = _window(n)
    name, attributes = _conv_activation(n)
    convolution = (strides, pads, dilations, False, [0] * len(pads), n.group)
    return Call(conv_with_activation, x, w, b, z, convolution, _ACTIVATIONS[name][1], *attributes.values())


define_by_body(
    "FusedConv",
    ("x", "w", "b?", "z?"),
    _conv_body,
    _lower_conv,
    domain=MICROSOFT,
    attributes={
        "auto_pad": "NOTSET",
        "dilations": None,
        "group": 1,
        "kernel_shape": None,
        "pads": None,
        "strides": None,
        "activation": None,
        "activation_params": None,
    },
    shapes=_conv_type,
    axes=no_axes,
    flops=lambda n: sizes.multiply(2, elementwise_flops(n), *sizes.dims_of(n.w)[1:]),
)
