"""Definitions for whole classes of ops: what all ops of one or two operands share is said once, here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import ONNX, TensorType, dtype_of, normalize_axes, rank_of, type_of
from onnxtrain.ops.definition import (
    NOT_DIFFERENTIABLE,
    STANDARD,
    Call,
    Effects,
    FromTorch,
    Fusion,
    Gradient,
    GradientRule,
    Infix,
    Kernel,
    Layout,
    NodeView,
    OpDef,
    numel,
)
from onnxtrain.ops.registry import define

_NO_STOPS: frozenset[str] = frozenset()
FUSIBLE = Fusion()


def always(node: NodeView) -> bool:
    return True


def never(node: NodeView) -> bool:
    return False


def same_as(name: str) -> Callable[[NodeView], Sequence[TensorType]]:
    """A shape rule: one output with the type of input `name`."""
    return lambda n: (type_of(getattr(n, name)),)


def elementwise_flops(node: NodeView) -> sizes.Size:
    return numel(node.node.outputs[0])


def cast(op: Builder, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """`value` in element type `dtype`: itself where it has it."""
    if dtype_of(value) == dtype:
        return value
    result: ir.Value = op.Cast(value, to=dtype)
    return result


def as_value(op: Builder, argument: Any, dtype: ir.DataType) -> ir.Value:
    """A tensor argument or a Python number or size of an ATen call, as a value of element type `dtype`."""
    if isinstance(argument, ir.Value):
        return cast(op, argument, dtype)
    if isinstance(argument, str):  # a symbolic size used as a number
        return op.size(argument, dtype)
    if isinstance(argument, int) and dtype.is_integer():  # 200 is -56 in int8, as in PyTorch
        argument = int(np.asarray(argument).astype(dtype.numpy()))
    return op.scalar(argument, dtype)


def with_attributes(op: Builder, n: NodeView, **changed: Any) -> Sequence[ir.Value]:
    """The outputs of the same op of the same inputs with other attributes."""
    attributes = {name: getattr(n, name) for name in n.definition.attributes}
    return op.node(n.node.domain, n.node.op_type, n.node.inputs, {**attributes, **changed}).outputs


def promoted(op: Builder, *arguments: Any) -> tuple[ir.Value, ...]:
    """The operands of an ATen elementwise call in the type that PyTorch computes in: that of its output."""
    return tuple(as_value(op, a, op.out[0].dtype) for a in arguments)


def unary(
    name: str,
    torch_name: str | Sequence[str] | Mapping[str, FromTorch],
    kernel: Callable[..., Any],
    gradient: GradientRule | None,
    *,
    reads: tuple[str, ...] = ("x",),
    domain: str = ONNX,
    attributes: Mapping[str, Any] | None = None,
    since_version: int = 1,
    body: Any = STANDARD,
    ort_compatible: Callable[[NodeView], bool] | None = None,
    lower: Callable[..., Call] | None = None,
    flops: Callable[[NodeView], sizes.Size] = elementwise_flops,
    host_eval: Callable[..., Any] | None = None,
    preferred_kernels: tuple[Kernel, ...] = (),
    fusion: Fusion | None = FUSIBLE,
    cpp_expression: str = "",
) -> OpDef:
    """Defines y = f(x), elementwise, in x's type. `gradient` is (op, n, dy) -> dx; None: not differentiable.

    `first` are kernels that are tried before `lower`.
    """

    def capture(op: Builder, x: ir.Value) -> Any:
        return op.op(domain, name)(cast(op, x, op.out[0].dtype))

    names = (torch_name,) if isinstance(torch_name, str) else torch_name

    return define(
        OpDef(
            domain=domain,
            name=name,
            inputs=("x",),
            outputs=("y",),
            attributes=attributes or {},
            since_version=since_version,
            from_torch=names if isinstance(names, Mapping) else dict.fromkeys(names, capture),
            shapes=same_as("x"),
            body=body,
            ort_compatible=ort_compatible or (always if domain == ONNX else never),
            gradient=(Gradient(gradient, reads),) if gradient else NOT_DIFFERENTIABLE,
            nondiff_inputs=_NO_STOPS,
            kernels=(*preferred_kernels, Kernel(lower=lower or (lambda n, x: Call(kernel, x)), in_place_input=0)),
            axes=lambda n: "... -> ...",
            effects=Effects.NONE,
            aliases={},
            flops=flops,
            host_eval=host_eval,
            layout=Layout(frozenset({"x", "y"})),
            fusion=fusion,
            cpp_expression=cpp_expression,
        )
    )


def _broadcast_type(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(dtype_of(n.a), sizes.broadcast(sizes.dims_of(n.a), sizes.dims_of(n.b))),)


def binary(
    name: str,
    from_torch: Mapping[str, FromTorch],
    kernel: Callable[[Any, Any], Any],
    gradient: GradientRule | None,
    *,
    reads: tuple[str, ...] = ("a", "b"),
    symbol: str | None = None,
    domain: str = ONNX,
    since_version: int = 1,
    body: Any = STANDARD,
    shapes: Callable[[NodeView], Sequence[TensorType]] = _broadcast_type,
    nondiff_inputs: frozenset[str] = _NO_STOPS,
    host_eval: Callable[..., Any] | None = None,
    attributes: Mapping[str, Any] | None = None,
    ort_compatible: Callable[[NodeView], bool] | None = None,
    accepts_scalars: bool = False,
    lower: Callable[..., Call] | None = None,
    commutative: bool = False,
    cpp_expression: str = "",
) -> OpDef:
    """Defines y = f(a, b), elementwise with broadcasting. `gradient` is (op, n, dy) -> (da, db).

    `symbol` is the Python operator that computes it. It takes Python numbers on either side, as does a kernel with
    `accepts_scalars`; `lower` replaces the plain call of `kernel`.
    """
    if lower is None and symbol:
        infix = symbol  # narrows the type inside the lambda
        lower = lambda n, a, b: Infix(infix, kernel, a, b)
    lower = lower or (lambda n, a, b: Call(kernel, a, b))
    scalars, in_place = accepts_scalars or symbol is not None, 0 if symbol else None
    return define(
        OpDef(
            domain=domain,
            name=name,
            inputs=("a", "b"),
            outputs=("y",),
            attributes=attributes or {},
            since_version=since_version,
            from_torch=from_torch,
            shapes=shapes,
            body=body,
            ort_compatible=ort_compatible or (always if domain == ONNX else never),
            gradient=(Gradient(gradient, reads),) if gradient else NOT_DIFFERENTIABLE,
            nondiff_inputs=nondiff_inputs,
            kernels=(Kernel(lower=lower, accepts_scalars=scalars, in_place_input=in_place),),
            axes=lambda n: "..., ... -> ...",
            effects=Effects.NONE,
            aliases={},
            flops=elementwise_flops,
            host_eval=_on_host(host_eval) if host_eval else None,
            layout=Layout(frozenset({"a", "b", "y"})),
            fusion=FUSIBLE,
            commutative=commutative,
            cpp_expression=cpp_expression,
        )
    )


def _on_host(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda n, a, b: elementwise_on_host(function, a, b)


def elementwise_on_host(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """`function` on sizes: ints, or tuples of ints of one length or of length 1."""
    if not isinstance(a, tuple) and not isinstance(b, tuple):
        return function(a, b)
    left = a if isinstance(a, tuple) else (a,)
    right = b if isinstance(b, tuple) else (b,)
    length = max(len(left), len(right))
    left, right = (v * length if len(v) == 1 else v for v in (left, right))
    return tuple(function(x, y) for x, y in zip(left, right, strict=True))


def compared_dtype(op: Builder, a: ir.Value, b: Any) -> ir.DataType:
    """The type in which PyTorch compares a with b (its own promotion rule, asked on empty tensors)."""
    operands = [
        torch.empty((1,) * rank_of(v), dtype=TORCH_DTYPES[dtype_of(v)]) if isinstance(v, ir.Value) else v
        for v in (a, 0 if isinstance(b, str) else b)
    ]
    return ONNX_DTYPES[torch.result_type(operands[0], operands[1])]


def reduced_type(
    n: NodeView, axes: Sequence[int] | None, keepdims: bool, dtype: ir.DataType | None = None
) -> TensorType:
    """The type of x reduced over `axes` (all where None)."""
    shape = sizes.dims_of(n.x)
    gone = set(range(len(shape))) if axes is None else set(normalize_axes(axes, len(shape)))
    kept = [1 if i in gone else s for i, s in enumerate(shape) if keepdims or i not in gone]
    return TensorType(dtype or dtype_of(n.x), tuple(kept))


def reduction_axes(n: NodeView, axes: Sequence[int] | None, keepdims: bool) -> str:
    """The axis map of a reduction of x over `axes`."""
    rank = rank_of(n.x)
    gone = set(range(rank)) if axes is None else set(normalize_axes(axes, rank))
    left = [f"a{i}" for i in range(rank)]
    right = ["1" if i in gone else f"a{i}" for i in range(rank) if keepdims or i not in gone]
    inputs = [" ".join(left)] + ["-"] * (len(n.node.inputs) - 1)
    return f"{', '.join(inputs)} -> {' '.join(right)}"


TORCH_DTYPES: dict[ir.DataType, torch.dtype] = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT8: torch.int8,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.UINT32: torch.uint32,  # words of bits: PyTorch computes little with them
    ir.DataType.BOOL: torch.bool,
    ir.DataType.COMPLEX64: torch.complex64,
    ir.DataType.COMPLEX128: torch.complex128,
}
ONNX_DTYPES: dict[torch.dtype, ir.DataType] = {t: o for o, t in TORCH_DTYPES.items()}
