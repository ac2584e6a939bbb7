"""Ops that return their input: in another element type, unchanged, copied, or detached from its gradient.

Cast(x, to)             float to integer truncates; for values out of range the result is undefined, as in PyTorch
Identity(x)             x, which may share its memory
Clone(x)                a copy of x, in a memory format
Detach(x)               x, without a gradient
Overwritten(old, new)   new, which PyTorch writes over old in place: the gradient of old is zeros, not None
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import ONNX, OWN, TensorType, dtype_of, is_float, rank_of
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.constructors import define_pure, same_as
from onnxtrain.ops.definition import (
    NOT_DIFFERENTIABLE,
    REQUIRED,
    STANDARD,
    ZEROS,
    Call,
    Effects,
    FromTorch,
    Gradient,
    Kernel,
    Method,
    NodeView,
    OpDef,
)
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.interfaces.cpp import CPP, Array, Elementwise, Source, UnsupportedError
from onnxtrain.ops.interfaces.element_formulas import ELEMENT_FORMULAS, Affine, Formula, FormulaOf
from onnxtrain.ops.interfaces.memory_format import IMAGES, Images
from onnxtrain.ops.registry import define, definition_of

_COMPLEX = frozenset({ir.DataType.COMPLEX64, ir.DataType.COMPLEX128})


# Cast


def _converted(op: Builder, x: ir.Value, copy: bool, memory_format: torch.memory_format | None) -> Any:
    """Convert x to the element type of PyTorch's output; devices are ignored, because a graph has only one."""
    source, target = dtype_of(x), op.out[0].dtype
    if source in _COMPLEX or target in _COMPLEX:
        return NotImplemented
    preserves_format = memory_format in (None, torch.preserve_format)
    if source == target:
        return op.Identity(x) if preserves_format and not copy else _capture_clone(op, x, memory_format=memory_format)
    if is_float(source) and target == ir.DataType.UINT8:
        x = op.Cast(x, to=ir.DataType.INT64)  # values wrap around, as in PyTorch
    result = cast(op, x, target)
    return result if preserves_format else _capture_clone(op, result, memory_format=memory_format)


def _capture_to_copy(op: Builder, x: ir.Value, *, memory_format: torch.memory_format | None = None, **_: Any) -> Any:
    return _converted(op, x, True, memory_format)


def _capture_to(
    op: Builder,
    x: ir.Value,
    target: Any = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
    **_: Any,
) -> Any:
    """Capture `to.dtype`, `to.other`, `to.dtype_layout` and `type_as`."""
    return _converted(op, x, copy, memory_format)


def _capture_to_device(op: Builder, x: ir.Value, device: Any, *arguments: Any, **options: Any) -> Any:
    """Capture `to.device`, whose arguments after the device are those of `to.dtype`."""
    return _capture_to(op, x, *arguments, **options)


def _cast_call(n: NodeView, x: Any) -> Method:
    dtype = TORCH_DTYPES[ir.DataType(n.to)]
    return Method("clone", x) if dtype_of(n.x) == n.to else Method("to", x, dtype)


CAST = define_pure(
    "",
    "Cast",
    ("x",),
    ("y",),
    attributes={"to": REQUIRED, "saturate": 1},
    from_torch={
        "aten._to_copy.default": _capture_to_copy,
        "aten.to.device": _capture_to_device,
        **dict.fromkeys(
            ("aten.to.dtype", "aten.to.dtype_layout", "aten.to.other", "aten.type_as.default"), _capture_to
        ),
    },
    shapes=lambda n: (TensorType(ir.DataType(n.to), sizes.dims_of(n.x)),),
    body=STANDARD,
    gradient=(Gradient(lambda op, n, dy: op.Cast(dy, to=dtype_of(n.x)), ()),),
    lower=_cast_call,
    axes=lambda n: "... -> ...",
    preserves_elements=True,
)
IMAGES.register(CAST, Images(frozenset({"x", "y"})))


@CPP.implements(CAST)
def _cast_in_cpp(source: Source, n: NodeView, inputs: list[Array]) -> list[Array]:
    if n.to == inputs[0].dtype:
        return inputs
    if n.to != ir.DataType.BOOL and is_float(inputs[0].dtype) and not is_float(ir.DataType(n.to)):
        raise UnsupportedError("a cast from floating point to integer")
    return Elementwise("{0} != 0" if n.to == ir.DataType.BOOL else "{0}")(source, n, inputs)


@ELEMENT_FORMULAS.implements(CAST)
def _cast_formula(n: NodeView, formula_of: FormulaOf) -> Formula | None:
    formula = None if is_float(ir.DataType(n.to)) else formula_of(n.x)
    if isinstance(formula, Affine):
        return formula if n.to == ir.DataType.INT64 else None
    if formula is None or n.to == ir.DataType.BOOL:
        return formula
    return Affine(int(formula.is_true), (0,) * rank_of(n.y)) if formula.is_true or formula.is_false else None


# Identity, Clone, Detach


def _capture_clone(op: Builder, x: ir.Value, *, memory_format: torch.memory_format | None = None) -> Any:
    format_name = None if memory_format is None else str(memory_format).removeprefix("torch.")
    return op.own.Clone(x, memory_format=format_name)


def _capture_contiguous(
    op: Builder, x: ir.Value, *, memory_format: torch.memory_format = torch.contiguous_format
) -> Any:
    return _capture_clone(op, x, memory_format=memory_format)


def _capture_copy(op: Builder, x: ir.Value, source: ir.Value, non_blocking: bool = False) -> Any:
    """Capture `x.copy_(source)`, functionalized: source in x's type and shape."""
    return overwritten(op, x, op.own.Clone(op.Expand(cast(op, source, dtype_of(x)), op.shape_of(x))))


def overwritten(op: Builder, old: ir.Value, new: ir.Value) -> ir.Value:
    """Return `new`, written over `old` in place, so that the gradient of `old` is zeros and not None."""
    node = old.producer()
    if not is_float(dtype_of(old)) or old.const_value is not None:
        return new
    if node is not None and definition_of(node).gradient is NOT_DIFFERENTIABLE:
        return new
    return op.own.Overwritten(old, new)


def _clone_call(n: NodeView, x: Any) -> Method:
    if n.memory_format is None:
        return Method("clone", x)
    return Method("clone", x, memory_format=getattr(torch, n.memory_format))


def _define_copy(
    name: str,
    domain: str,
    from_torch: dict[str, FromTorch],
    lower: Callable[..., Call],
    *,
    differentiable: bool = True,
    aliases: Mapping[int, int],
    attributes: Mapping[str, Any] | None = None,
) -> OpDef:
    """Define an op y = x."""
    op = define(
        OpDef(
            domain=domain,
            name=name,
            inputs=("x",),
            outputs=("y",),
            attributes=attributes or {},
            from_torch=from_torch,
            shapes=same_as("x"),
            body=STANDARD if domain == ONNX else lambda op, n: op.Identity(n.x),
            gradient=(Gradient(lambda op, n, dy: dy, ()),) if differentiable else NOT_DIFFERENTIABLE,
            nondiff_inputs=frozenset(),
            kernels=(Kernel(lower=lower),),
            axes=lambda n: "... -> ...",
            effects=Effects.NONE,
            aliases=aliases,
            host_eval=lambda n, x: x,
            preserves_elements=True,
            moved_inputs=frozenset({"x"}),
        )
    )
    FLOPS.register(op, lambda n: 0)
    return op


def _alias_call(n: NodeView, x: Any) -> Method:
    """Call detach, the fastest way to a second tensor with the same memory; programs run without autograd."""
    return Method("detach", x)


IDENTITY = _define_copy(
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
CPP.register(IDENTITY, lambda source, n, inputs: inputs)
ELEMENT_FORMULAS.register(IDENTITY, lambda n, formula_of: formula_of(n.x))
CLONE = _define_copy(
    "Clone",
    OWN,
    {
        "aten.clone.default": _capture_clone,
        "aten.contiguous.default": _capture_contiguous,
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
DETACH = _define_copy(
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
        from_torch={},
        shapes=same_as("new"),
        body=lambda op, n: op.Identity(n.new),
        gradient=(Gradient(lambda op, n, dy: (ZEROS, dy), ()),),
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=lambda n, old, new: _alias_call(n, new)),),
        axes=lambda n: "..., ... -> ...",
        effects=Effects.NONE,
        aliases={0: 1},
        shape_only_inputs=frozenset({"old"}),
    )
)
FLOPS.register(OVERWRITTEN, lambda n: 0)
