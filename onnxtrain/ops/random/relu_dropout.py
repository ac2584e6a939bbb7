"""Relu and keyed dropout in one op: backward needs only its result.

    ReluDropout(x, key) -> y           y = max(x, 0) * (bits >= dropped ? scale : 0), with the bits of `keyed_bits.py`
    ReluDropoutGrad(dy, y) -> dx       dx = y > 0 ? dy * scale : 0

Separately they save max(x, 0) and generate the bits again for the matmul that reads y, and once more for dy. The pass
`fuse_relu_dropout` replaces them by this op.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, type_of
from onnxtrain.native import pointers
from onnxtrain.ops import huge_pages
from onnxtrain.ops.activation.rectified import threshold_backward, threshold_backward_
from onnxtrain.ops.body_parts import mul_scalar
from onnxtrain.ops.constructors import always, define_pure, no_axes
from onnxtrain.ops.definition import (
    REQUIRED,
    Gradient,
    InPlaceCapableCall,
    Kernel,
    NodeView,
    numel,
)
from onnxtrain.ops.interfaces.memory_format import IMAGES, Images
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.ops.random import keyed_bits
from onnxtrain.ops.random.keyed_dropout import node_keep_scale

Tensor = torch.Tensor


def relu_drop(x: Tensor, key: Tensor, dropped: int, scale: float) -> Tensor:
    """Multiply some elements of max(x, 0) by `scale` and the others by 0; see `keyed_bits.drop`."""
    return keyed_bits.drop_(x.relu(), key, dropped, scale)


def relu_drop_(x: Tensor, key: Tensor, dropped: int, scale: float) -> Tensor:
    """Do the same in place."""
    return keyed_bits.drop_(x.relu_(), key, dropped, scale)


def relu_drop_compiled(x: Tensor, key: Tensor, dropped: int, scale: float) -> Tensor:
    """Do the same with the compiled kernel, once it is ready."""
    return _relu_drop(x, key, dropped, scale, in_place=False)


def relu_drop_compiled_(x: Tensor, key: Tensor, dropped: int, scale: float) -> Tensor:
    """Do the same in place."""
    return _relu_drop(x, key, dropped, scale, in_place=True)


def _relu_drop(x: Tensor, key: Tensor, dropped: int, scale: float, *, in_place: bool) -> Tensor:
    run = keyed_bits.compiled_function("relu_dropout", x)
    if run is None:
        return keyed_bits.drop_compiled_(x.relu_() if in_place else x.relu(), key, dropped, scale)
    y = x if in_place else huge_pages.empty_like(x)
    run(*pointers(x, y, key), keyed_bits.keep_threshold(dropped), scale, x.numel(), torch.get_num_threads())
    return y


def backward(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """Return dy * scale where y is above 0, else 0."""
    return threshold_backward(dy, y, 0).mul_(scale)


def backward_(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """Do the same in place."""
    return threshold_backward_(dy, y, 0).mul_(scale)


def backward_compiled(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """Do the same with the compiled kernel, once it is ready."""
    return _backward(dy, y, scale, in_place=False)


def backward_compiled_(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """Do the same in place."""
    return _backward(dy, y, scale, in_place=True)


def _backward(dy: Tensor, y: Tensor, scale: float, *, in_place: bool) -> Tensor:
    run = keyed_bits.compiled_function("relu_dropout_backward", dy, y)
    if run is None:
        return (backward_ if in_place else backward)(dy, y, scale)
    dx = dy if in_place else huge_pages.empty_like(dy)
    run(*pointers(dy, y, dx), scale, dy.numel(), torch.get_num_threads())
    return dx


def _body(op: Builder, n: NodeView) -> ir.Value:
    return op.own.KeyedDropout(op.Relu(n.x), n.key, dropped=n.dropped)


def _lower(n: NodeView, x: Any, key: Any) -> InPlaceCapableCall:
    return InPlaceCapableCall(relu_drop, relu_drop_, x, key, n.dropped, node_keep_scale(n, n.x))


def _lower_compiled(n: NodeView, x: Any, key: Any) -> InPlaceCapableCall:
    keyed_bits.LIBRARY.request()
    return InPlaceCapableCall(relu_drop_compiled, relu_drop_compiled_, x, key, n.dropped, node_keep_scale(n, n.x))


def _gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    return [op.own.ReluDropoutGrad(dy, n.y, dropped=n.dropped) if n.wants("x") else None, None]


RELU_DROPOUT = define_pure(
    OWN,
    "ReluDropout",
    ("x", "key"),
    ("y",),
    attributes={"dropped": REQUIRED},
    shapes=lambda n: (type_of(n.x),),
    body=_body,
    gradient=(Gradient(_gradient, reads=("y",)),),
    nondiff_inputs=frozenset({"key"}),
    kernels=(
        Kernel(lower=_lower_compiled, applies=may_compile, in_place_input=0),
        Kernel(lower=_lower, synchronizes=always, in_place_input=0),
    ),
    axes=no_axes,  # the bits of an element depend on its index
    flops=lambda n: sizes.multiply(3, numel(n.x)),
)


def _grad_body(op: Builder, n: NodeView) -> ir.Value:
    zero = op.scalar(0.0, like=n.dy)
    scaled = mul_scalar(op, n.dy, node_keep_scale(n, n.dy))
    return op.Where(op.LessOrEqual(n.y, zero), zero, scaled)


def _lower_grad(n: NodeView, dy: Any, y: Any) -> InPlaceCapableCall:
    return InPlaceCapableCall(backward, backward_, dy, y, node_keep_scale(n, n.dy))


def _lower_grad_compiled(n: NodeView, dy: Any, y: Any) -> InPlaceCapableCall:
    keyed_bits.LIBRARY.request()
    return InPlaceCapableCall(backward_compiled, backward_compiled_, dy, y, node_keep_scale(n, n.dy))


RELU_DROPOUT_GRAD = define_pure(
    OWN,
    "ReluDropoutGrad",
    ("dy", "y"),
    ("dx",),
    attributes={"dropped": REQUIRED},
    shapes=lambda n: (type_of(n.y),),
    body=_grad_body,
    kernels=(
        Kernel(lower=_lower_grad_compiled, applies=may_compile, in_place_input=0),
        Kernel(lower=_lower_grad, in_place_input=0),
    ),
    axes=lambda n: "..., ... -> ...",
    flops=lambda n: sizes.multiply(2, numel(n.y)),
)
IMAGES.register(RELU_DROPOUT_GRAD, Images(frozenset({"dy", "y", "dx"})))
