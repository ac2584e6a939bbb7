"""Constructors for classes of ops: each fills the fields of `OpDef` that the class has in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.axes import NO_AXES
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import ONNX, TensorType, dtype_of, type_of
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.cost_model import Shapes
from onnxtrain.ops.definition import (
    BY_BODY,
    NOT_DIFFERENTIABLE,
    STANDARD,
    Body,
    Call,
    Effects,
    FromTorch,
    Gradient,
    GradientRule,
    Infix,
    Kernel,
    NodeView,
    NotDifferentiable,
    OpDef,
    Standard,
    numel,
)
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.interfaces.fused_regions import FUSIBLE
from onnxtrain.ops.interfaces.memory_format import IMAGES, Images
from onnxtrain.ops.registry import define
from onnxtrain.system.machine import Machine

ShapeRule = Callable[[NodeView], Sequence[TensorType]]


def always(node: NodeView) -> bool:
    return True


def never(node: NodeView) -> bool:
    return False


def same_as(name: str) -> ShapeRule:
    """Return a shape rule: one output with the type of input `name`."""
    return lambda n: (type_of(getattr(n, name)),)


def with_addend(name: str, shapes: ShapeRule) -> ShapeRule:
    """Return the shape rule of an op that adds its optional input `name` to its first output, which has that type."""

    def checked(n: NodeView) -> Sequence[TensorType]:
        types, addend = shapes(n), getattr(n, name)
        if addend is not None and type_of(addend) != types[0]:
            raise GraphError(
                f"{n.definition.name}: {name} must have the type of the output it is added to",
                expected=str(types[0]),
                got=str(type_of(addend)),
                todo=f"cast or expand {name}, or add it by an Add after the node",
            )
        return types

    return checked


def elementwise_flops(node: NodeView) -> sizes.Size:
    return numel(node.node.outputs[0])


def define_unary(
    name: str,
    torch_name: str | Sequence[str] | Mapping[str, FromTorch],
    kernel: Callable[..., Any],
    gradient: GradientRule | None,
    *,
    reads: tuple[str, ...] = ("x",),
    domain: str = ONNX,
    attributes: Mapping[str, Any] | None = None,
    body: Any = STANDARD,
    lower: Callable[..., Call] | None = None,
    flops: Callable[[NodeView], sizes.Size] = elementwise_flops,
    host_eval: Callable[..., Any] | None = None,
    preferred_kernels: tuple[Kernel, ...] = (),
) -> OpDef:
    """Define y = f(x), elementwise, in x's type.

    `gradient` is (op, n, dy) -> dx; None: not differentiable. `preferred_kernels` are tried before `lower`.
    """

    def capture(op: Builder, x: ir.Value) -> Any:
        return op.op(domain, name)(cast(op, x, op.out[0].dtype))

    names = (torch_name,) if isinstance(torch_name, str) else torch_name

    op = define_pure(
        domain,
        name,
        ("x",),
        ("y",),
        attributes=attributes,
        from_torch=names if isinstance(names, Mapping) else dict.fromkeys(names, capture),
        shapes=same_as("x"),
        body=body,
        gradient=(Gradient(gradient, reads),) if gradient else NOT_DIFFERENTIABLE,
        kernels=(*preferred_kernels, Kernel(lower=lower or (lambda n, x: Call(kernel, x)), in_place_input=0)),
        axes=lambda n: "... -> ...",
        flops=flops,
        host_eval=host_eval,
    )
    IMAGES.register(op, Images(frozenset({"x", "y"})))
    FUSIBLE.add(op)
    return op


def _broadcast_type(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(dtype_of(n.a), sizes.broadcast(sizes.dims_of(n.a), sizes.dims_of(n.b))),)


def define_binary(
    name: str,
    from_torch: Mapping[str, FromTorch],
    kernel: Callable[[Any, Any], Any],
    gradient: GradientRule | None,
    *,
    reads: tuple[str, ...] = ("a", "b"),
    symbol: str | None = None,
    domain: str = ONNX,
    body: Any = STANDARD,
    shapes: ShapeRule = _broadcast_type,
    host_eval: Callable[..., Any] | None = None,
    attributes: Mapping[str, Any] | None = None,
    accepts_scalars: bool = False,
    lower: Callable[..., Call] | None = None,
) -> OpDef:
    """Define y = f(a, b), elementwise with broadcasting. `gradient` is (op, n, dy) -> (da, db).

    `symbol` is the Python operator that computes it, which accepts Python numbers on either side, as does a kernel with
    `accepts_scalars`. `lower` replaces the call of `kernel`.
    """
    if lower is None and symbol:
        infix = symbol  # narrows the type inside the lambda
        lower = lambda n, a, b: Infix(infix, kernel, a, b)
    lower = lower or (lambda n, a, b: Call(kernel, a, b))
    accepts_scalars, in_place_input = accepts_scalars or symbol is not None, 0 if symbol else None
    op = define_pure(
        domain,
        name,
        ("a", "b"),
        ("y",),
        attributes=attributes,
        from_torch=from_torch,
        shapes=shapes,
        body=body,
        gradient=(Gradient(gradient, reads),) if gradient else NOT_DIFFERENTIABLE,
        kernels=(Kernel(lower=lower, accepts_scalars=accepts_scalars, in_place_input=in_place_input),),
        axes=lambda n: "..., ... -> ...",
        host_eval=_on_host(host_eval) if host_eval else None,
    )
    IMAGES.register(op, Images(frozenset({"a", "b", "y"})))
    FUSIBLE.add(op)
    return op


def _on_host(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda n, a, b: elementwise_on_host(function, a, b)


def elementwise_on_host(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Apply `function` to sizes: ints, or tuples of ints of equal length or of length 1."""
    if not isinstance(a, tuple) and not isinstance(b, tuple):
        return function(a, b)
    left = a if isinstance(a, tuple) else (a,)
    right = b if isinstance(b, tuple) else (b,)
    length = max(len(left), len(right))
    left, right = (v * length if len(v) == 1 else v for v in (left, right))
    return tuple(function(x, y) for x, y in zip(left, right, strict=True))


# Ops with a body and kernels


def no_seconds(node: NodeView, shapes: Shapes, machine: Machine) -> float:
    return 0.0


# Backward ops are not differentiable: PyTorch computes second-order gradients.
def define_pure(
    domain: str,
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    *,
    shapes: ShapeRule,
    body: Body | Literal[Standard.STANDARD],
    axes: Callable[[NodeView], str],
    lower: Callable[..., Call] | None = None,
    flops: Callable[[NodeView], Size] = elementwise_flops,
    attributes: Mapping[str, Any] | None = None,
    from_torch: Mapping[str, FromTorch] | None = None,
    gradient: tuple[Gradient, ...] | Literal[NotDifferentiable.NOT_DIFFERENTIABLE] = NOT_DIFFERENTIABLE,
    nondiff_inputs: frozenset[str] = frozenset(),
    host_inputs: frozenset[int] = frozenset(),
    synchronizes: Callable[[NodeView], bool] = never,
    kernels: tuple[Kernel, ...] = (),
    others: tuple[Kernel, ...] = (),
    workspace_bytes: Callable[[NodeView], Size] = lambda node: 0,
    seconds: Callable[[NodeView, Shapes, Machine], float] = no_seconds,
    atomic_on_gpu: bool = False,
    count_outputs: Callable[[Sequence[ir.Value | None], Mapping[str, Any]], int] | None = None,
    host_eval: Callable[..., Any] | None = None,
    preserves_elements: bool = False,
) -> OpDef:
    """Define an op without effects and views: `kernels`, then that of `lower` and its alternatives `others`."""
    if lower is not None:
        kernel = Kernel(
            lower=lower,
            host_inputs=host_inputs,
            synchronizes=synchronizes,
            workspace_bytes=workspace_bytes,
            seconds=seconds,
        )
        kernels += _with_alternatives(kernel, others, atomic_on_gpu)
    op = define(
        OpDef(
            domain=domain,
            name=name,
            inputs=inputs,
            outputs=outputs,
            attributes=attributes or {},
            from_torch=from_torch or {},
            shapes=shapes,
            body=body,
            gradient=gradient,
            nondiff_inputs=nondiff_inputs,
            kernels=kernels,
            axes=axes,
            effects=Effects.NONE,
            aliases={},
            count_outputs=count_outputs,
            host_eval=host_eval,
            preserves_elements=preserves_elements,
            nondiff_outputs=frozenset(n.rstrip("?") for n in outputs[1:]),  # saved for backward; see first_cotangent
        )
    )
    FLOPS.register(op, flops)
    return op


def _with_alternatives(kernel: Kernel, others: tuple[Kernel, ...], atomic_on_gpu: bool) -> tuple[Kernel, ...]:
    """Return a kernel and its alternatives; expected seconds, then measurements choose between them.

    With `atomic_on_gpu` the kernel is not deterministic on a GPU, where it adds atomically.
    """
    kernel = replace(kernel, name="aten" if others else "")
    if not atomic_on_gpu:
        return kernel, *others
    return replace(kernel, applies=lambda node, device: device == "cpu"), replace(kernel, deterministic=False), *others


# Ops that are differentiated through their body


def broadcast_axes(n: NodeView) -> str:
    """Return the axis map of inputs that broadcast against each other, 0-dimensional ones included."""
    inputs = ", ".join("-" if v is None else "..." for v in n.node.inputs)
    return f"{inputs} -> {', '.join(['...'] * len(n.node.outputs))}"


def no_axes(n: NodeView) -> str:
    return NO_AXES


def define_by_body(
    name: str,
    inputs: tuple[str, ...],
    body: Body,
    lower: Callable[..., Call],
    *,
    domain: str = ONNX,
    outputs: tuple[str, ...] = ("y",),
    attributes: Mapping[str, Any] | None = None,
    from_torch: Mapping[str, FromTorch] | None = None,
    shapes: ShapeRule | None = None,
    axes: Callable[[NodeView], str] = broadcast_axes,
    nondiff_inputs: frozenset[str] = frozenset(),
    flops: Callable[[NodeView], Size] = elementwise_flops,
    host_inputs: frozenset[int] = frozenset(),
    synchronizes: Callable[[NodeView], bool] = never,
    differentiable: bool = True,
    count_outputs: Callable[[Sequence[ir.Value | None], Mapping[str, Any]], int] | None = None,
    effects: Effects = Effects.NONE,
    aliases: Mapping[int, int] | None = None,
) -> OpDef:
    """Define an op by its body. Without `shapes` its output has the type of the first input."""
    op = define(
        OpDef(
            domain=domain,
            name=name,
            inputs=inputs,
            outputs=outputs,
            attributes=attributes or {},
            from_torch=from_torch or {},
            shapes=shapes or same_as(inputs[0].removesuffix("...")),
            body=body,
            gradient=BY_BODY if differentiable else NOT_DIFFERENTIABLE,
            nondiff_inputs=nondiff_inputs,
            kernels=(Kernel(lower=lower, host_inputs=host_inputs, synchronizes=synchronizes),),
            axes=axes,
            effects=effects,
            aliases=aliases or {},
            count_outputs=count_outputs,
        )
    )
    FLOPS.register(op, flops)
    return op
