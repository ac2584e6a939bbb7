"""The cross product of vectors of three elements along an axis (torch.linalg.cross).

Cross(a, b) -> y          y[i] = a[i + 1] b[i + 2] - a[i + 2] b[i + 1], with indices modulo 3
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, rank_of
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.constructors import define_pure, same_as
from onnxtrain.ops.definition import REQUIRED, Call, Gradient, NodeView, numel
from onnxtrain.ops.reshape.dims import expanded
from onnxtrain.ops.reshape.movement import checked_axis


def _capture(op: Builder, a: ir.Value, b: ir.Value, *, dim: int = -1) -> Any:
    shape = op.out[0].shape
    a, b = (expanded(op, cast(op, v, op.out[0].dtype), shape) for v in (a, b))
    return op.own.Cross(a, b, axis=checked_axis(dim, len(shape), "the axis of cross"))


def _body(op: Builder, n: NodeView) -> ir.Value:
    def rolled(x: ir.Value, steps: int) -> ir.Value:
        indices = op.constant([(i + steps) % 3 for i in range(3)], ir.DataType.INT64)
        return op.Gather(x, indices, axis=n.axis)

    return op.Sub(op.Mul(rolled(n.a, 1), rolled(n.b, 2)), op.Mul(rolled(n.a, 2), rolled(n.b, 1)))


def _gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    return [op.own.Cross(n.b, dy, axis=n.axis), op.own.Cross(dy, n.a, axis=n.axis)]


def _axes(n: NodeView) -> str:
    names = " ".join(f"[a{i}]" if i == n.axis else f"a{i}" for i in range(rank_of(n.a)))
    return f"{names}, {names} -> {names}"


define_pure(
    OWN,
    "Cross",
    ("a", "b"),
    ("y",),
    attributes={"axis": REQUIRED},
    from_torch={"aten.linalg_cross.default": _capture},
    shapes=same_as("a"),
    body=_body,
    gradient=(Gradient(_gradient, reads=("a", "b")),),
    lower=lambda n, a, b: Call(torch.ops.aten.linalg_cross.default, a, b, dim=n.axis),
    axes=_axes,
    flops=lambda n: numel(n.a),
)
