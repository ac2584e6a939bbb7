"""Elementwise ops of ONNX and of onnxruntime that PyTorch composes of several operators.

Mean(terms...)          the sum of the terms, divided by their number
CastLike(x, target)     x in the element type of target
BitShift(a, b)          a shifted by b bits; `direction` is "LEFT" or "RIGHT"
Scale(x, scale)         x * scale, or x / scale if `scale_down` is 1            (com.microsoft)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import MICROSOFT, TensorType, dtype_of
from onnxtrain.ops.body_parts import cast, reshaped
from onnxtrain.ops.constructors import define_binary, define_by_body
from onnxtrain.ops.definition import REQUIRED, Call, Infix, Method, NodeView
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.elementwise.arithmetic import broadcast_terms

# Mean


def _mean_body(op: Builder, n: NodeView) -> ir.Value:
    return op.Div(op.Sum(*n.terms), op.scalar(len(n.terms), like=n.terms[0]))


def _mean_call(n: NodeView, terms: Sequence[Any]) -> Call:
    total = terms[0]
    for term in terms[1:]:
        total = Infix("+", operator.add, total, term)
    return Infix("/", operator.truediv, total, len(terms))


define_by_body("Mean", ("terms...",), _mean_body, _mean_call, shapes=broadcast_terms)


# CastLike, BitShift, Scale


def _scaled(x: torch.Tensor, scale: torch.Tensor, scale_down: bool) -> torch.Tensor:
    scale = scale.reshape(()).to(x.dtype)
    return x / scale if scale_down else x * scale


define_by_body(
    "CastLike",
    ("x", "target"),
    lambda op, n: cast(op, n.x, dtype_of(n.target)) if dtype_of(n.x) != dtype_of(n.target) else op.Identity(n.x),
    lambda n, x, target: Method("to", Method("clone", x), TORCH_DTYPES[dtype_of(n.target)]),
    attributes={"saturate": 1},
    shapes=lambda n: (TensorType(dtype_of(n.target), sizes.dims_of(n.x)),),
    axes=lambda n: "..., - -> ...",
    nondiff_inputs=frozenset({"target"}),
)
define_binary(
    "BitShift",
    {},
    torch.bitwise_left_shift,
    None,
    attributes={"direction": REQUIRED},
    lower=lambda n, a, b: Call(torch.bitwise_left_shift if n.direction == "LEFT" else torch.bitwise_right_shift, a, b),
)
define_by_body(
    "Scale",
    ("x", "scale"),
    lambda op, n: (op.Div if n.scale_down else op.Mul)(n.x, cast(op, reshaped(op, n.scale, ()), dtype_of(n.x))),
    lambda n, x, scale: Call(_scaled, x, scale, bool(n.scale_down)),
    domain=MICROSOFT,
    attributes={"scale_down": 0},
    axes=lambda n: "..., - -> ...",
    nondiff_inputs=frozenset({"scale"}),
)
