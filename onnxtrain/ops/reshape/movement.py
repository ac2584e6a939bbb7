"""What definitions of data movement have in common: elements are moved, none is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph.values import ONNX, TensorType, constant_of, normalize_axis, rank_of
from onnxtrain.ops.definition import (
    NOT_DIFFERENTIABLE,
    STANDARD,
    Body,
    Call,
    Effects,
    FromTorch,
    Gradient,
    GradientRule,
    Kernel,
    NodeView,
    OpDef,
    Standard,
)
from onnxtrain.ops.registry import define

NO_STOPS: frozenset[str] = frozenset()


def define_movement(
    name: str,
    inputs: tuple[str, ...],
    shapes: Callable[[NodeView], Sequence[TensorType]],
    kernels: Callable[..., Call] | tuple[Kernel, ...],
    gradient: GradientRule | None,
    *,
    reads: tuple[str, ...] = (),
    takes_ints: frozenset[int] = frozenset(),
    domain: str = ONNX,
    outputs: tuple[str, ...] = ("y",),
    attributes: Mapping[str, Any] | None = None,
    since_version: int = 1,
    from_torch: Mapping[str, FromTorch] | None = None,
    body: Body | Literal[Standard.STANDARD] = STANDARD,
    nondiff_inputs: frozenset[str] = NO_STOPS,
    axes: Callable[[NodeView], str] = lambda n: "",
    view: bool = False,
    effects: Effects = Effects.NONE,
    host_eval: Callable[..., Any] | None = None,
    shape_only_inputs: frozenset[str] = frozenset(),
    count_outputs: Callable[[Sequence[ir.Value | None], Mapping[str, Any]], int] | None = None,
    preserves_elements: bool = False,
    moved_inputs: frozenset[str] = NO_STOPS,
    output_addend: str = "",
) -> OpDef:
    """Defines an op that moves elements.

    `kernels` is the one lowering, which takes the inputs `takes_ints` as Python ints, or kernels; `gradient` is the
    rule, which reads `reads`, or None where the op is not differentiable; `view` says that outputs may be views of the
    first input.
    """
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
            ort_compatible=(lambda n: True) if domain == ONNX else (lambda n: False),
            gradient=(Gradient(gradient, reads),) if gradient else NOT_DIFFERENTIABLE,
            nondiff_inputs=nondiff_inputs,
            kernels=kernels if isinstance(kernels, tuple) else (Kernel(lower=kernels, host_inputs=takes_ints),),
            axes=axes,
            effects=effects,
            aliases={0: 0} if view else {},
            flops=lambda n: 0,
            host_eval=host_eval,
            count_outputs=count_outputs,
            shape_only_inputs=shape_only_inputs,
            preserves_elements=preserves_elements,
            moved_inputs=moved_inputs,
            output_addend=output_addend,
        )
    )


def constant_ints(value: ir.Value, use: str) -> tuple[int, ...]:
    """The integers of an input that must be known before the graph runs. Raises GraphError where they are not."""
    array = constant_of(value)
    if array is None:
        raise GraphError(f"{use} must be constant", got=f"{value.name}, which is computed")
    return tuple(int(v) for v in array.reshape(-1))


def checked_axis(axis: int, rank: int, what: str) -> int:
    """`axis` in [0, rank). Raises GraphError where it is outside [-rank, rank)."""
    if not -rank <= axis < rank:
        raise GraphError(f"{what} is outside the tensor's rank", expected=f"[{-rank}, {rank})", got=axis)
    return normalize_axis(axis, rank)


def axis_of(n: NodeView, value: ir.Value) -> int:
    """The node's `axis` in [0, rank of `value`)."""
    return checked_axis(n.axis, rank_of(value), f"the axis of {n.definition.name}")


def axis_names(prefix: str, count: int) -> list[str]:
    """Axis names for an axis map."""
    return [f"{prefix}{i}" for i in range(count)]


def format_axis_map(inputs: Sequence[Sequence[str] | None], *outputs: Sequence[str]) -> str:
    """The text of an axis map; None for an input that has no axes of the output's."""
    left = ["-" if words is None else " ".join(words) for words in inputs]
    return f"{', '.join(left)} -> {', '.join(' '.join(words) for words in outputs)}"
