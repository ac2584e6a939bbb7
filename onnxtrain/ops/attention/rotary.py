"""Rotary position embedding over the halves of the last axis, as models write it.

    RotaryEmbedding(x[..., d], cos[..., d], sin[..., d]) -> y = x cos + rotate(x) sin        rotate(a, b) = (-b, a)
    RotaryEmbeddingGrad(dy, cos, sin) -> dx = dy cos + rotateᵀ(dy sin)                       rotateᵀ(a, b) = (b, -a)

cos and sin broadcast to x and match its last dimension. ONNX's RotaryEmbedding takes cos and sin of half that size.
Source: Su et al. 2021, https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, TensorType, rank_of, type_of
from onnxtrain.graph.verify import format_type
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import Call, Gradient, NodeView, numel
from onnxtrain.ops.reshape.join import concatenated, split

Tensor = torch.Tensor


def _types(n: NodeView) -> Sequence[TensorType]:
    x = n.node.inputs[0]
    assert x is not None
    *_, width = sizes.dims_of(x)
    for name, table in (("cos", n.cos), ("sin", n.sin)):
        if sizes.dims_of(table)[-1:] != (width,) or sizes.broadcast(
            sizes.dims_of(x), sizes.dims_of(table)
        ) != sizes.dims_of(x):
            raise GraphError(
                f"{name} of {n.definition.name} must broadcast to x and match its last dimension",
                expected=f"a shape that broadcasts to {format_type(type_of(x))} and ends with {width}",
                got=format_type(type_of(table)),
            )
    if not isinstance(width, int) or width % 2:
        raise GraphError(
            f"the last dimension of {n.definition.name} cannot be split into halves",
            expected="a known even size",
            got=str(width),
        )
    return (type_of(x),)


def _rotate(op: Builder, x: ir.Value, transpose: bool = False) -> ir.Value:
    half = int(sizes.dims_of(x)[-1]) // 2
    first, second = split(op, x, [half, half], rank_of(x) - 1)
    halves = [second, op.Neg(first)] if transpose else [op.Neg(second), first]
    return concatenated(op, halves, rank_of(x) - 1)


def _body(op: Builder, n: NodeView) -> ir.Value:
    return op.Add(op.Mul(n.x, n.cos), op.Mul(_rotate(op, n.x), n.sin))


def _grad_body(op: Builder, n: NodeView) -> ir.Value:
    return op.Add(op.Mul(n.dy, n.cos), _rotate(op, op.Mul(n.dy, n.sin), transpose=True))


def _gradient(op: Builder, n: NodeView, dy: ir.Value) -> Sequence[ir.Value | None]:
    dcos = op.Mul(dy, n.x) if n.wants("cos") else None
    dsin = op.Mul(dy, _rotate(op, n.x)) if n.wants("sin") else None
    return op.own.RotaryEmbeddingGrad(dy, n.cos, n.sin) if n.wants("x") else None, dcos, dsin


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute RotaryEmbedding in three passes over x; as separate ops it takes five passes and three copies."""
    half = x.size(-1) // 2
    y = x * cos
    y[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    y[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return y


def rotary_embedding_backward(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = dy.size(-1) // 2
    dx = dy * cos
    dx[..., :half].addcmul_(dy[..., half:], sin[..., half:])
    dx[..., half:].addcmul_(dy[..., :half], sin[..., :half], value=-1)
    return dx


def _axes(n: NodeView) -> str:
    operands = [" ".join([*["..."] * (rank_of(v) > 1), "[d]"]) for v in n.node.inputs if v is not None]
    return f"{', '.join(operands)} -> {operands[0]}"


define_pure(
    OWN,
    "RotaryEmbedding",
    ("x", "cos", "sin"),
    ("y",),
    shapes=_types,
    body=_body,
    lower=lambda n, x, cos, sin: Call(rotary_embedding, x, cos, sin),
    axes=_axes,
    flops=lambda n: sizes.multiply(3, numel(n.x)),
    gradient=(Gradient(_gradient, reads=("x", "cos", "sin")),),
)
define_pure(
    OWN,
    "RotaryEmbeddingGrad",
    ("dy", "cos", "sin"),
    ("dx",),
    shapes=_types,
    body=_grad_body,
    lower=lambda n, dy, cos, sin: Call(rotary_embedding_backward, dy, cos, sin),
    axes=_axes,
    flops=lambda n: sizes.multiply(3, numel(n.dy)),
)
