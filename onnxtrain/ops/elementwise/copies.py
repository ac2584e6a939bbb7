"""Ops that give their input again: in another element type, as it is, or cut off from its gradient.

Cast(x, to)      float to integer truncates; a number that is out of range is undefined in PyTorch too
Identity(x)      clones and no-op copies
Detach(x)        no gradient flows back
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import ONNX, OWN, TensorType, dtype_of, is_float
from onnxtrain.ops.constructors import TORCH_DTYPES, always, cast, elementwise_flops, same_as
from onnxtrain.ops.definition import (
    NOT_DIFFERENTIABLE,
    REQUIRED,
    STANDARD,
    Effects,
    FromTorch,
    Gradient,
    Kernel,
    Method,
    NodeView,
    OpDef,
)
from onnxtrain.ops.registry import define

_COMPLEX = frozenset({ir.DataType.COMPLEX64, ir.DataType.COMPLEX128})


# Cast


def _converted(op: Builder, x: ir.Value, *_: Any, **__: Any) -> Any:
    """`_to_copy`, `to`, `type_as`: only the element type matters to a graph that lies on one device."""
    source, target = dtype_of(x), op.out[0].dtype
    if source == target:
        return op.Identity(x)
    if source in _COMPLEX or target in _COMPLEX:
        return NotImplemented
    if is_float(source) and target == ir.DataType.UINT8:
        x = op.Cast(x, to=ir.DataType.INT64)  # PyTorch's way: numbers wrap around
    return cast(op, x, target)


def _cast_call(n: NodeView, x: Any) -> Method:
    dtype = TORCH_DTYPES[ir.DataType(n.to)]
    return Method("clone", x) if dtype_of(n.x) == n.to else Method("to", x, dtype)


CAST = define(
    OpDef(
        domain="",
        name="Cast",
        inputs=("x",),
        outputs=("y",),
        attributes={"to": REQUIRED, "saturate": 1},
        since=19,
        from_torch=dict.fromkeys(
            (
                "aten._to_copy.default",
                "aten.to.dtype",
                "aten.to.device",
                "aten.to.dtype_layout",
                "aten.to.other",
                "aten.type_as.default",
            ),
            _converted,
        ),
        shapes=lambda n: (TensorType(ir.DataType(n.to), sizes.of(n.x)),),
        body=STANDARD,
        native_ok=always,
        gradient=(Gradient(lambda op, n, dy: op.Cast(dy, to=dtype_of(n.x)), ()),),
        stops=frozenset(),
        kernels=(Kernel(lower=_cast_call),),
        axes=lambda n: "... -> ...",
        effects=Effects.NONE,
        aliases={},
        flops=elementwise_flops,
        host=None,
    )
)


# Identity and Detach


def _copied(op: Builder, x: ir.Value, *_: Any, **__: Any) -> Any:
    """Clones: memory formats and devices do not change the elements."""
    return op.Identity(x)


def _overwritten(op: Builder, x: ir.Value, source: ir.Value, non_blocking: bool = False) -> Any:
    """`x.copy_(source)`, functionalized: source in x's type and shape."""
    return op.Expand(cast(op, source, dtype_of(x)), op.shape_of(x))


def _identity(name: str, domain: str, from_torch: dict[str, FromTorch], differentiable: bool) -> OpDef:
    return define(
        OpDef(
            domain=domain,
            name=name,
            inputs=("x",),
            outputs=("y",),
            attributes={},
            since=19 if domain == ONNX else 1,
            from_torch=from_torch,
            shapes=same_as("x"),
            body=STANDARD if domain == ONNX else lambda op, n: op.Identity(n.x),
            native_ok=always,
            gradient=(Gradient(lambda op, n, dy: dy, ()),) if differentiable else NOT_DIFFERENTIABLE,
            stops=frozenset(),
            # The cheapest way to a second tensor on the same memory; programs run without autograd.
            kernels=(Kernel(lower=lambda n, x: Method("detach", x)),),
            axes=lambda n: "... -> ...",
            effects=Effects.NONE,
            aliases={0: 0},
            flops=lambda n: 0,
            host=lambda n, x: x,
        )
    )


IDENTITY = _identity(
    "Identity",
    ONNX,
    {
        **dict.fromkeys(
            (
                "aten.clone.default",
                "aten.contiguous.default",
                "aten.alias.default",
                "aten.alias_copy.default",
                "aten.lift_fresh.default",
                "aten.lift_fresh_copy.default",
                "aten.positive.default",
                "aten.resolve_conj.default",
                "aten.resolve_neg.default",
            ),
            _copied,
        ),
        "aten.copy.default": _overwritten,
    },
    differentiable=True,
)
DETACH = _identity(
    "Detach",
    OWN,
    dict.fromkeys(("aten.detach.default", "aten.detach_copy.default"), lambda op, x: op.own.Detach(x)),
    differentiable=False,
)
