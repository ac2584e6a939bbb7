"""Constructors that define an activation together with its gradient op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import ONNX, OWN, TensorType, dtype_of, type_of
from onnxtrain.ops.constructors import define_pure, define_unary, elementwise_flops
from onnxtrain.ops.definition import (
    Body,
    Call,
    FromTorch,
    Kernel,
    NodeView,
    OpDef,
)
from onnxtrain.ops.interfaces.fused_regions import FUSIBLE
from onnxtrain.ops.interfaces.memory_format import IMAGES, Images

Lower = Callable[..., Call]


def not_double(n: NodeView) -> bool:
    """Return whether x is narrower than float64, so that a 32-bit attribute is exact enough."""
    return dtype_of(n.x) != ir.DataType.DOUBLE


def scalar(op: Builder, n: NodeView, value: float) -> ir.Value:
    """Return a constant of the node's element type."""
    return op.scalar(value, like=n.node.outputs[0])


def define_activation_grad(
    name: str,
    saved: str,
    lower: Lower,
    body: Body,
    *,
    domain: str = OWN,
    attributes: Mapping[str, Any] | None = None,
    flops: int = 4,
    lower_on_gpu: Lower | None = None,
    preferred_kernels: Sequence[Kernel] = (),
    in_place: bool = False,
) -> OpDef:
    """Define dx = f'(saved) * dy, elementwise; `saved` is "x" or "y".

    `lower_on_gpu` replaces `lower` on a GPU; `preferred_kernels` are tried before `lower`. With `in_place`, `lower`
    returns an `InPlaceCapableCall` whose first argument is dy.
    """
    kernels = [*preferred_kernels, Kernel(lower=lower, in_place_input=0 if in_place else None)]
    if lower_on_gpu is not None:
        kernels.insert(0, Kernel(lower=lower_on_gpu, applies=lambda node, device: device == "cuda"))

    def shapes(n: NodeView) -> Sequence[TensorType]:
        return (type_of(getattr(n, saved)),)

    op = define_pure(
        domain,
        name,
        ("dy", saved),
        ("dx",),
        attributes=attributes or {},
        shapes=shapes,
        body=body,
        kernels=tuple(kernels),
        axes=lambda n: "..., ... -> ...",
        flops=lambda n: sizes.multiply(flops, elementwise_flops(n)),
    )
    IMAGES.register(op, Images(frozenset({"dy", saved, "dx"})))
    FUSIBLE.add(op)
    return op


def define_activation(
    name: str,
    from_torch: str | Mapping[str, FromTorch],
    lower: Lower,
    body: Any,
    grad_lower: Lower,
    grad_body: Body,
    *,
    domain: str = ONNX,
    grad_domain: str = OWN,
    saved: str = "x",
    attributes: Mapping[str, Any] | None = None,
    flops: int = 4,
    grad_lower_on_gpu: Lower | None = None,
    preferred_kernels: tuple[Kernel, Kernel] | None = None,
    grad_in_place: bool = False,
) -> tuple[OpDef, OpDef]:
    """Define y = f(x), and dx as `define_activation_grad` does. `preferred_kernels` holds a kernel of each."""
    grad_name, defaults = f"{name}Grad", attributes or {}

    def gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
        values = {key: getattr(n, key) for key in defaults}
        return op.op(grad_domain, grad_name)(dy, getattr(n, saved), **values)

    forward = define_unary(
        name,
        from_torch,
        lower,
        gradient,
        reads=(saved,),
        domain=domain,
        attributes=defaults,
        body=body,
        lower=lower,
        flops=lambda n: sizes.multiply(flops, elementwise_flops(n)),
        preferred_kernels=preferred_kernels[:1] if preferred_kernels else (),
    )
    return forward, define_activation_grad(
        grad_name,
        saved,
        grad_lower,
        grad_body,
        domain=grad_domain,
        attributes=defaults,
        flops=flops,
        lower_on_gpu=grad_lower_on_gpu,
        preferred_kernels=preferred_kernels[1:] if preferred_kernels else (),
        in_place=grad_in_place,
    )
