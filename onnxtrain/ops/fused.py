"""Ops that PyTorch computes in one kernel of its own, and the parts that their bodies are written with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import TensorType, dtype_of, type_of
from onnxtrain.ops.constructors import always
from onnxtrain.ops.cost_model import Shapes
from onnxtrain.ops.definition import (
    NOT_DIFFERENTIABLE,
    STANDARD,
    Body,
    Call,
    Effects,
    FromTorch,
    Fusion,
    Gradient,
    Kernel,
    Layout,
    NodeView,
    NotDifferentiable,
    OpDef,
    Standard,
)
from onnxtrain.ops.registry import FROM_TORCH, define
from onnxtrain.system.machine import Machine


class Facts(TypedDict, total=False):
    """Those of `OpDef` that `fused` hands on as they are."""

    count_outputs: Callable[[Sequence[ir.Value | None], Mapping[str, Any]], int]
    layout: Layout
    fusion: Fusion
    static_shape_inputs: frozenset[str]
    output_addend: str
    input_addend: str
    fusable_activations: frozenset[str]


def never(node: NodeView) -> bool:
    return False


def no_seconds(node: NodeView, shapes: Shapes, machine: Machine) -> float:
    return 0.0


def fused(
    domain: str,
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    *,
    shapes: Callable[[NodeView], Sequence[TensorType]],
    body: Body | Literal[Standard.STANDARD],
    lower: Callable[..., Call],
    axes: Callable[[NodeView], str],
    flops: Callable[[NodeView], Size],
    attributes: Mapping[str, Any] | None = None,
    from_torch: Mapping[str, FromTorch] | None = None,
    # Backward ops have none: second order runs in PyTorch.
    gradient: tuple[Gradient, ...] | Literal[NotDifferentiable.NOT_DIFFERENTIABLE] = NOT_DIFFERENTIABLE,
    nondiff_inputs: frozenset[str] = frozenset(),
    since_version: int = 1,
    host_inputs: frozenset[int] = frozenset(),
    synchronizes: Callable[[NodeView], bool] = never,
    kernels: tuple[Kernel, ...] = (),
    others: tuple[Kernel, ...] = (),
    workspace_bytes: Callable[[NodeView], Size] = lambda node: 0,
    seconds: Callable[[NodeView, Shapes, Machine], float] = no_seconds,
    atomic_on_gpu: bool = False,
    **facts: Unpack[Facts],
) -> OpDef:
    """Defines an op by its body and kernels: `kernels`, then `lower` with `others` beside it. See `_with_others`."""
    own = Kernel(
        lower=lower,
        host_inputs=host_inputs,
        synchronizes=synchronizes,
        workspace_bytes=workspace_bytes,
        seconds=seconds,
    )
    return define(
        OpDef(
            domain=domain,
            name=name,
            inputs=inputs,
            outputs=outputs,
            attributes=attributes or {},
            since_version=since_version,
            from_torch=from_torch or {},
            shapes=shapes,
            body=body,
            ort_compatible=always if body is STANDARD else never,
            gradient=gradient,
            nondiff_inputs=nondiff_inputs,
            kernels=(*kernels, *_with_others(own, others, atomic_on_gpu)),
            axes=axes,
            effects=Effects.NONE,
            aliases={},
            flops=flops,
            host_eval=None,
            **facts,
            nondiff_outputs=frozenset(name.rstrip("?") for name in outputs[1:]),  # saved for backward; see only_first
        )
    )


def _with_others(kernel: Kernel, others: tuple[Kernel, ...], atomic_on_gpu: bool) -> tuple[Kernel, ...]:
    """A kernel that may add in a fixed order on a CPU only, and others: expected seconds, then measurements decide.

    `atomic_on_gpu`: on a GPU it adds in no fixed order.
    """
    own = replace(kernel, name="aten" if others else "")
    if not atomic_on_gpu:
        return own, *others
    return replace(own, applies=lambda node, device: device == "cpu"), replace(own, deterministic=False), *others


def only_first(n: NodeView, cotangents: Sequence[ir.Value | None]) -> ir.Value:
    """The cotangent of the first output. What is saved for backward beside it is no output to differentiate.

    Raises:
        GraphError: a gradient arrives at another output.
    """
    first, *others = cotangents
    if first is None or any(c is not None for c in others):
        names = ", ".join(name for name, c in zip(n.definition.outputs, cotangents, strict=True) if c is not None)
        raise GraphError(
            f"only the first output of {n.definition.name} is differentiable", got=f"a gradient of {names}"
        )
    return first


def wanted(n: NodeView, *names: str) -> list[int]:
    """A backward op's output_mask: 1 for each of these inputs that is there and whose gradient is asked for, else 0."""
    return [int(getattr(n, name) is not None and n.wants(name)) for name in names]


def masked(gradients: Sequence[ir.Value], mask: Sequence[int], n: NodeView) -> list[ir.Value | None]:
    """The gradients that the mask lets through, as many as the node has inputs."""
    found: list[ir.Value | None] = [g if m else None for g, m in zip(gradients, mask, strict=True)]
    count = len(n.node.inputs)
    return (found + [None] * count)[:count]


def flags(mask: Sequence[int]) -> list[bool]:
    """An output_mask as PyTorch's backward kernels take it."""
    return [bool(m) for m in mask]


def another_call(op: Builder, overload: str, gives: TensorType, *arguments: Any, **named: Any) -> ir.Value:
    """Captures an ATen call that the one being captured is composed of; its result has the type `gives`."""
    before, op.out = op.out, (gives,)
    try:
        result: ir.Value = FROM_TORCH[overload](op, *arguments, **named)
    finally:
        op.out = before
    return result


# Parts of bodies


def axes_constant(op: Builder, axes: Sequence[int]) -> ir.Value:
    return op.constant(list(axes), ir.DataType.INT64)


def total(op: Builder, x: ir.Value, axes: Sequence[int], *, keepdims: bool = True) -> ir.Value:
    """Sums x over `axes`; over none, x itself."""
    if not axes:
        return x
    result: ir.Value = op.ReduceSum(x, axes_constant(op, axes), keepdims=int(keepdims))
    return result


def count_over(x: ir.Value, axes: Sequence[int]) -> Size:
    """How many elements of x are summed into one over `axes`."""
    shape = sizes.dims_of(x)
    return sizes.multiply(1, *(shape[a] for a in axes))


def average(op: Builder, x: ir.Value, axes: Sequence[int]) -> ir.Value:
    """Averages x over `axes`, which stay with size 1: 0/0 where there is nothing to average, as in PyTorch."""
    result: ir.Value = op.Div(total(op, x, axes), op.size(count_over(x, axes), dtype_of(x)))
    return result


def plus(op: Builder, x: ir.Value, number: float) -> ir.Value:
    result: ir.Value = op.Add(x, op.scalar(number, like=x))
    return result


def times(op: Builder, x: ir.Value, number: float) -> ir.Value:
    result: ir.Value = op.Mul(x, op.scalar(number, like=x))
    return result


def reshaped(op: Builder, x: ir.Value, wanted_sizes: Sequence[Size]) -> ir.Value:
    """Gives x these sizes; 0 means no elements."""
    result: ir.Value = op.Reshape(x, op.sizes(list(wanted_sizes)), allowzero=1)
    return result


def nothing(op: Builder, kept: ir.Value) -> ir.Value:
    """An empty vector in the place of what a kernel keeps for backward."""
    zero = ir.tensor([0], dtype=dtype_of(kept))
    node = op.node("", "ConstantOfShape", (axes_constant(op, [0]),), {"value": zero}, [type_of(kept)])
    result: ir.Value = node.outputs[0]
    return result


def statistics_type(dtype: ir.DataType) -> ir.DataType:
    """The type in which norms and losses of `dtype` are computed and keep what backward needs: float32, or double."""
    return ir.DataType.DOUBLE if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
