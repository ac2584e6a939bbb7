"""Gelu ops of ONNX Runtime Training that add a bias.

    FastGelu(x, bias)            gelu(x + bias) with the tanh approximation
    BiasGelu(x, bias)            gelu(x + bias), exactly
    FastGeluGrad(dy, x), BiasGeluGrad_dX(dy, x, bias), BiasFastGeluGrad_dX(dy, x, bias) -> dx

bias has shape [x.shape[-1]]. Forward saves x for backward, which recomputes x + bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import MICROSOFT, TensorType, type_of
from onnxtrain.ops.activation import compiled_kernels as kernels
from onnxtrain.ops.constructors import broadcast_axes, define_pure
from onnxtrain.ops.definition import Call, Gradient, Infix, Kernel, NodeView, numel
from onnxtrain.ops.native_kernels import may_compile

_EXACT, _TANH = "none", "tanh"  # values of the attribute `approximate`


def _flops(n: NodeView) -> Size:
    return sizes.multiply(10, numel(n.x))


def _types(n: NodeView) -> Sequence[TensorType]:
    return (type_of(n.x),)


def _bias(n: NodeView) -> ir.Value | None:
    return getattr(n, "bias", None)  # FastGeluGrad has no such input


def _plus_bias(op: Builder, n: NodeView) -> ir.Value:
    return n.x if (bias := _bias(n)) is None else op.Add(n.x, bias)


def _plus_bias_call(n: NodeView, x: Any, bias: Any) -> Any:
    return x if _bias(n) is None else Infix("+", torch.add, x, bias)


def _can_compile(approximate: str) -> Callable[[NodeView, str], bool]:
    return lambda n, device: approximate == _TANH and may_compile(n, device)


def _define_gelu(name: str, bias_grad_name: str, inputs: tuple[str, ...], approximate: str) -> None:
    """Define gelu(x + bias). `bias_grad_name` is the gradient op of a node that has a bias."""

    def gradient(op: Builder, n: NodeView, dy: ir.Value) -> Sequence[ir.Value]:
        if n.bias is None:
            return [op.ms.FastGeluGrad(dy, n.x), None][: len(n.node.inputs)]
        dx = op.op(MICROSOFT, bias_grad_name)(dy, n.x, n.bias)
        return dx, dx  # the differentiator sums the second to the bias's shape

    def lower_compiled(n: NodeView, x: Any, bias: Any = None) -> Call:
        return kernels.compiled_call(kernels.tanh_gelu, _plus_bias_call(n, x, bias))

    def lower(n: NodeView, x: Any, bias: Any = None) -> Call:
        return Call(torch.nn.functional.gelu, _plus_bias_call(n, x, bias), approximate=approximate)

    define_pure(
        MICROSOFT,
        name,
        inputs,
        ("y",),
        shapes=_types,
        body=lambda op, n: op.Gelu(_plus_bias(op, n), approximate=approximate),
        kernels=(Kernel(lower=lower_compiled, applies=_can_compile(approximate)),),
        lower=lower,
        axes=broadcast_axes,
        flops=_flops,
        gradient=(Gradient(gradient, reads=tuple(i.rstrip("?") for i in inputs)),),
    )


def _define_gelu_grad(name: str, inputs: tuple[str, ...], approximate: str) -> None:
    def lower_compiled(n: NodeView, dy: Any, x: Any, bias: Any = None) -> Call:
        return kernels.tanh_gelu_backward_call(dy, _plus_bias_call(n, x, bias))

    def lower(n: NodeView, dy: Any, x: Any, bias: Any = None) -> Call:
        return Call(kernels.gelu_backward, dy, _plus_bias_call(n, x, bias), approximate)

    define_pure(
        MICROSOFT,
        name,
        inputs,
        ("dx",),
        shapes=_types,
        body=lambda op, n: op.ms.GeluGrad(n.dy, _plus_bias(op, n), approximate=approximate),
        kernels=(Kernel(lower=lower_compiled, applies=_can_compile(approximate), in_place_input=0),),
        lower=lower,
        axes=broadcast_axes,
        flops=_flops,
    )


_define_gelu("FastGelu", "BiasFastGeluGrad_dX", ("x", "bias?"), _TANH)
_define_gelu("BiasGelu", "BiasGeluGrad_dX", ("x", "bias"), _EXACT)
_define_gelu_grad("FastGeluGrad", ("dy", "x"), _TANH)
_define_gelu_grad("BiasGeluGrad_dX", ("dy", "x", "bias"), _EXACT)
_define_gelu_grad("BiasFastGeluGrad_dX", ("dy", "x", "bias"), _TANH)
