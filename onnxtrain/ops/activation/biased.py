"""The gelus of ONNX Runtime Training that add a bias first.

    Gelu(x)                      x * Phi(x)
    FastGelu(x, bias)            gelu(x + bias) with the tanh approximation
    BiasGelu(x, bias)            gelu(x + bias), exactly
    FastGeluGrad(dy, x), BiasGeluGrad_dX(dy, x, bias), BiasFastGeluGrad_dX(dy, x, bias) -> dx

bias is a vector over the last axis. Backward keeps x, and adds the bias again.
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
from onnxtrain.ops.activation import compiled as kernels
from onnxtrain.ops.composite import elementwise_axes
from onnxtrain.ops.definition import Call, Gradient, Infix, Kernel, NodeView, numel
from onnxtrain.ops.fused import fused
from onnxtrain.ops.native import may_compile

_EXACT, _TANH = "none", "tanh"


def _flops(n: NodeView) -> Size:
    return sizes.multiply(10, numel(n.x))


def _same_as_x(n: NodeView) -> Sequence[TensorType]:
    return (type_of(n.x),)


def _bias(n: NodeView) -> ir.Value | None:
    return getattr(n, "bias", None)  # Gelu has no such input


def _shifted(op: Builder, n: NodeView) -> ir.Value:
    result: ir.Value = n.x if (bias := _bias(n)) is None else op.Add(n.x, bias)
    return result


def _shifted_call(n: NodeView, x: Any, bias: Any) -> Any:
    return x if _bias(n) is None else Infix("+", torch.add, x, bias)


def _is_compiled(approximate: str) -> Callable[[NodeView, str], bool]:
    return lambda n, device: approximate == _TANH and may_compile(n, device)


def _gelu(name: str, grad_name: str, inputs: tuple[str, ...], approximate: str) -> None:
    """Defines a gelu of x + bias, whose gradient op is `grad_name`, or `Bias…Grad_dX` where there is a bias."""

    def gradient(op: Builder, n: NodeView, dy: ir.Value) -> Sequence[ir.Value]:
        if _bias(n) is None:
            dx = op.ms.GeluGrad(dy, n.x) if name == "Gelu" else op.ms.FastGeluGrad(dy, n.x)
            return [dx, None][: len(n.node.inputs)]
        dx = op.op(MICROSOFT, grad_name)(dy, n.x, n.bias)
        return dx, dx  # the second is summed to the bias

    def compiled(n: NodeView, x: Any, bias: Any = None) -> Call:
        return kernels.lowered(kernels.tanh_gelu, _shifted_call(n, x, bias))

    def lower(n: NodeView, x: Any, bias: Any = None) -> Call:
        return Call(torch.nn.functional.gelu, _shifted_call(n, x, bias), approximate=approximate)

    fused(
        MICROSOFT,
        name,
        inputs,
        ("y",),
        shapes=_same_as_x,
        body=lambda op, n: op.Gelu(_shifted(op, n), approximate=approximate),
        kernels=(Kernel(lower=compiled, applies=_is_compiled(approximate)),),
        lower=lower,
        axes=elementwise_axes,
        flops=_flops,
        gradient=(Gradient(gradient, reads=tuple(i.rstrip("?") for i in inputs)),),
    )


def _gelu_grad(name: str, inputs: tuple[str, ...], approximate: str) -> None:
    def compiled(n: NodeView, dy: Any, x: Any, bias: Any = None) -> Call:
        return kernels.lowered_tanh_gelu_backward(dy, _shifted_call(n, x, bias))

    def lower(n: NodeView, dy: Any, x: Any, bias: Any = None) -> Call:
        return Call(kernels.gelu_backward, dy, _shifted_call(n, x, bias), approximate)

    fused(
        MICROSOFT,
        name,
        inputs,
        ("dx",),
        shapes=_same_as_x,
        body=lambda op, n: op.ms.GeluGrad(n.dy, _shifted(op, n), approximate=approximate),
        kernels=(Kernel(lower=compiled, applies=_is_compiled(approximate), in_place_input=0),),
        lower=lower,
        axes=elementwise_axes,
        flops=_flops,
    )


_gelu("Gelu", "", ("x",), _EXACT)
_gelu("FastGelu", "BiasFastGeluGrad_dX", ("x", "bias?"), _TANH)
_gelu("BiasGelu", "BiasGeluGrad_dX", ("x", "bias"), _EXACT)
_gelu_grad("FastGeluGrad", ("dy", "x"), _TANH)
_gelu_grad("BiasGeluGrad_dX", ("dy", "x", "bias"), _EXACT)
_gelu_grad("BiasFastGeluGrad_dX", ("dy", "x", "bias"), _TANH)
