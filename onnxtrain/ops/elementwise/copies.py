"""Ops that give their input again: in another element type, as it is, or cut off from its gradient.

Cast(x, to)             float to integer truncates; a number that is out of range is undefined in PyTorch too
Identity(x)             clones and no-op copies
Detach(x)               no gradient flows back
Overwritten(old, new)   new, where PyTorch writes it over old in place: the gradient of old is zeros
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import ONNX, OWN, TensorType, dtype_of, is_float
from onnxtrain.ops.constructors import TORCH_DTYPES, always, cast, elementwise_flops, never, same_as
from onnxtrain.ops.definition import (
    NOT_DIFFERENTIABLE,
    REQUIRED,
    STANDARD,
    Call,
    Effects,
    FromTorch,
    Gradient,
    Kernel,
    Layout,
    Method,
    NodeView,
    OpDef,
    numel,
)
from onnxtrain.ops.registry import define, definition_of

_COMPLEX = frozenset({ir.DataType.COMPLEX64, ir.DataType.COMPLEX128})


# Cast


def _converted(op: Builder, x: ir.Value, copy: bool, memory_format: torch.memory_format | None) -> Any:
    """`to`: in the element type of PyTorch's output; the graph lies on one device."""
    source, target = dtype_of(x), op.out[0].dtype
    if source in _COMPLEX or target in _COMPLEX:
        return NotImplemented
    same_layout = memory_format in (None, torch.preserve_format)
    if source == target:
        return op.Identity(x) if same_layout and not copy else _cloned(op, x, memory_format=memory_format)
    if is_float(source) and target == ir.DataType.UINT8:
        x = op.Cast(x, to=ir.DataType.INT64)  # PyTorch's way: numbers wrap around
    result = cast(op, x, target)
    return result if same_layout else _cloned(op, result, memory_format=memory_format)


def _copied(op: Builder, x: ir.Value, *, memory_format: torch.memory_format | None = None, **_: Any) -> Any:
    return _converted(op, x, True, memory_format)


def _to(
    op: Builder,
    x: ir.Value,
    target: Any = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
    **_: Any,
) -> Any:
    """`to.dtype`, `to.other`, `to.dtype_layout`, `type_as`."""
    return _converted(op, x, copy, memory_format)


def _to_device(op: Builder, x: ir.Value, device: Any, *rest: Any, **named: Any) -> Any:
    """`to.device`, which has the element type after the device."""
    return _to(op, x, *rest, **named)


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
        since_version=19,
        from_torch={
            "aten._to_copy.default": _copied,
            "aten.to.device": _to_device,
            **dict.fromkeys(("aten.to.dtype", "aten.to.dtype_layout", "aten.to.other", "aten.type_as.default"), _to),
        },
        shapes=lambda n: (TensorType(ir.DataType(n.to), sizes.dims_of(n.x)),),
        body=STANDARD,
        ort_compatible=always,
        gradient=(Gradient(lambda op, n, dy: op.Cast(dy, to=dtype_of(n.x)), ()),),
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=_cast_call),),
        axes=lambda n: "... -> ...",
        effects=Effects.NONE,
        aliases={},
        flops=elementwise_flops,
        host_eval=None,
        layout=Layout(frozenset({"x", "y"})),
        preserves_elements=True,
    )
)


# Identity, Clone, Detach


def _cloned(op: Builder, x: ir.Value, *, memory_format: torch.memory_format | None = None) -> Any:
    layout = None if memory_format is None else str(memory_format).removeprefix("torch.")
    return op.own.Clone(x, memory_format=layout)


def _contiguous(op: Builder, x: ir.Value, *, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    return _cloned(op, x, memory_format=memory_format)


def _capture_copy(op: Builder, x: ir.Value, source: ir.Value, non_blocking: bool = False) -> Any:
    """`x.copy_(source)`, functionalized: source in x's type and shape."""
    return overwritten(op, x, op.own.Clone(op.Expand(cast(op, source, dtype_of(x)), op.shape_of(x))))


def overwritten(op: Builder, old: ir.Value, new: ir.Value) -> ir.Value:
    """`new` where it is written over `old`, whose gradient is zeros then, and not None.

    A part of a tensor is written back into it, which gives the tensor a gradient already.
    """
    node = old.producer()
    if not is_float(dtype_of(old)) or old.const_value is not None:
        return new
    if node is not None:
        definition = definition_of(node)
        is_part = 0 in definition.aliases and numel(node.inputs[definition.aliases[0]]) != numel(old)
        if is_part or definition.gradient is NOT_DIFFERENTIABLE:
            return new
    result: ir.Value = op.own.Overwritten(old, new)
    return result


def _clone_call(n: NodeView, x: Any) -> Method:
    if n.memory_format is None:
        return Method("clone", x)
    return Method("clone", x, memory_format=getattr(torch, n.memory_format))


def _same(
    name: str,
    domain: str,
    from_torch: dict[str, FromTorch],
    lower: Callable[..., Call],
    *,
    differentiable: bool = True,
    aliases: Mapping[int, int],
    attributes: Mapping[str, Any] | None = None,
) -> OpDef:
    """Defines y = x."""
    return define(
        OpDef(
            domain=domain,
            name=name,
            inputs=("x",),
            outputs=("y",),
            attributes=attributes or {},
            since_version=19 if domain == ONNX else 1,
            from_torch=from_torch,
            shapes=same_as("x"),
            body=STANDARD if domain == ONNX else lambda op, n: op.Identity(n.x),
            ort_compatible=always if domain == ONNX else never,
            gradient=(Gradient(lambda op, n, dy: dy, ()),) if differentiable else NOT_DIFFERENTIABLE,
            nondiff_inputs=frozenset(),
            kernels=(Kernel(lower=lower),),
            axes=lambda n: "... -> ...",
            effects=Effects.NONE,
            aliases=aliases,
            flops=lambda n: 0,
            host_eval=lambda n, x: x,
            preserves_elements=True,
            moved_inputs=frozenset({"x"}),
        )
    )


# The cheapest way to a second tensor on the same memory; programs run without autograd.
def _alias_call(n: NodeView, x: Any) -> Method:
    return Method("detach", x)


IDENTITY = _same(
    "Identity",
    ONNX,
    dict.fromkeys(
        (
            "aten.alias.default",
            "aten.lift_fresh.default",
            "aten.positive.default",
            "aten.resolve_conj.default",
            "aten.resolve_neg.default",
        ),
        lambda op, x: op.Identity(x),
    ),
    _alias_call,
    aliases={0: 0},
)
CLONE = _same(
    "Clone",
    OWN,
    {
        "aten.clone.default": _cloned,
        "aten.contiguous.default": _contiguous,
        "aten.copy.default": _capture_copy,
        **dict.fromkeys(
            ("aten.lift_fresh_copy.default", "aten.alias_copy.default"),
            lambda op, x: op.own.Clone(x),
        ),
    },
    _clone_call,
    aliases={},
    attributes={"memory_format": None},
)
DETACH = _same(
    "Detach",
    OWN,
    dict.fromkeys(("aten.detach.default", "aten.detach_copy.default"), lambda op, x: op.own.Detach(x)),
    _alias_call,
    differentiable=False,
    aliases={0: 0},
)

OVERWRITTEN = define(
    OpDef(
        domain=OWN,
        name="Overwritten",
        inputs=("old", "new"),
        outputs=("y",),
        attributes={},
        since_version=1,
        from_torch={},
        shapes=same_as("new"),
        body=lambda op, n: op.Identity(n.new),
        ort_compatible=never,
        gradient=(Gradient(lambda op, n, dy: (_zeros_like(op, n.old), dy), ()),),
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=lambda n, old, new: _alias_call(n, new)),),
        axes=lambda n: "..., ... -> ...",
        effects=Effects.NONE,
        aliases={0: 1},
        flops=lambda n: 0,
        host_eval=None,
        shape_only_inputs=frozenset({"old"}),
    )
)


def _zeros_like(op: Builder, x: ir.Value) -> ir.Value:
    result: ir.Value = op.Expand(op.scalar(0.0, like=x), op.shape_of(x))
    return result
