"""Rounding to integers. The derivative is 0: as in PyTorch, the gradient is a tensor of zeros, not None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import ONNX, OWN, dtype_of, is_float
from onnxtrain.ops.constructors import define_unary
from onnxtrain.ops.definition import STANDARD, NodeView, OpDef
from onnxtrain.ops.elementwise.arithmetic import zeros_like
from onnxtrain.ops.interfaces.cpp import CPP, Elementwise


def _define_rounding(
    name: str,
    kernel: Callable[..., Any],
    *,
    aliases: tuple[str, ...] = (),
    domain: str = ONNX,
    body: Any = STANDARD,
) -> OpDef:
    def capture(op: Builder, x: ir.Value) -> Any:
        """Capture integers as Identity: PyTorch copies them, ONNX's op does not support them."""
        return op.op(domain, name)(x) if is_float(dtype_of(x)) else op.Identity(x)

    return define_unary(
        name,
        dict.fromkeys((f"aten.{n}.default" for n in (name.lower(), *aliases)), capture),
        kernel,
        lambda op, n, dy: zeros_like(op, n.x),
        reads=(),
        domain=domain,
        body=body,
    )


def _trunc_body(op: Builder, n: NodeView) -> ir.Value:
    return op.Where(op.Less(n.x, op.scalar(0.0, like=n.x)), op.Ceil(n.x), op.Floor(n.x))


FLOOR = _define_rounding("Floor", torch.floor)
CPP.register(FLOOR, Elementwise("std::floor({0})"))
CEIL = _define_rounding("Ceil", torch.ceil)
CPP.register(CEIL, Elementwise("std::ceil({0})"))
ROUND = _define_rounding("Round", torch.round)
TRUNC = _define_rounding("Trunc", torch.trunc, aliases=("fix",), domain=OWN, body=_trunc_body)
