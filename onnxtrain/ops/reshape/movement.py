"""Constructor and helpers for ops that move elements and compute none."""

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
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.registry import define

NO_NAMES: frozenset[str] = frozenset()


def define_movement(
    name: str,
    inputs: tuple[str, ...],
    shapes: Callable[[NodeView], Sequence[TensorType]],
    kernels: Callable[..., Call] | tuple[Kernel, ...],
    gradient: GradientRule | None,
    *,
    reads: tuple[str, ...] = (),
    host_inputs: frozenset[int] = frozenset(),
    domain: str = ONNX,
    outputs: tuple[str, ...] = ("y",),
    attributes: Mapping[str, Any] | None = None,
    from_torch: Mapping[str, FromTorch] | None = None,
    body: Body | Literal[Standard.STANDARD] = STANDARD,
    nondiff_inputs: frozenset[str] = NO_NAMES,
    axes: Callable[[NodeView], str] = lambda n: "",
    view: bool = False,
    effects: Effects = Effects.NONE,
    host_eval: Callable[..., Any] | None = None,
    shape_only_inputs: frozenset[str] = frozenset(),
    count_outputs: Callable[[Sequence[ir.Value | None], Mapping[str, Any]], int] | None = None,
    preserves_elements: bool = False,
    moved_inputs: frozenset[str] = NO_NAMES,
) -> OpDef:
    """Define an op that moves elements.

    Arguments are as in `OpDef`, except for these: `kernels` are kernels, or the lowering of the only one, which takes
    `host_inputs` as Python ints. `gradient` is the rule, which reads the elements of `reads`, or None if the op is not
    differentiable. `view` says whether the first output may be a view of the first input.
    """
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
            gradient=(Gradient(gradient, reads),) if gradient else NOT_DIFFERENTIABLE,
            nondiff_inputs=nondiff_inputs,
            kernels=kernels if isinstance(kernels, tuple) else (Kernel(lower=kernels, host_inputs=host_inputs),),
            axes=axes,
            effects=effects,
            aliases={0: 0} if view else {},
            host_eval=host_eval,
            count_outputs=count_outputs,
            shape_only_inputs=shape_only_inputs,
            preserves_elements=preserves_elements,
            moved_inputs=moved_inputs,
        )
    )
    FLOPS.register(op, lambda n: 0)
    return op


def constant_ints(value: ir.Value, use: str) -> tuple[int, ...]:
    """Return the integers of a constant input.

    Raises:
        GraphError: the input is not a constant.
    """
    array = constant_of(value)
    if array is None:
        raise GraphError(f"{use} must be constant", got=f"{value.name}, which is computed")
    return tuple(int(v) for v in array.reshape(-1))


def checked_axis(axis: int, rank: int, label: str) -> int:
    """Return `axis` in [0, rank).

    Raises:
        GraphError: it is outside [-rank, rank).
    """
    if not -rank <= axis < rank:
        raise GraphError(f"{label} is out of range for the tensor's rank", expected=f"[{-rank}, {rank})", got=axis)
    return normalize_axis(axis, rank)


def axis_of(n: NodeView, value: ir.Value) -> int:
    """Return the node's `axis` in [0, rank of `value`)."""
    return checked_axis(n.axis, rank_of(value), f"the axis of {n.definition.name}")


def axis_names(prefix: str, count: int) -> list[str]:
    """Return numbered names for an axis map."""
    return [f"{prefix}{i}" for i in range(count)]


def format_axis_map(inputs: Sequence[Sequence[str] | None], *outputs: Sequence[str]) -> str:
    """Return the text of an axis map; None stands for an input that shares no axis with the outputs."""
    left = ["-" if words is None else " ".join(words) for words in inputs]
    return f"{', '.join(left)} -> {', '.join(' '.join(words) for words in outputs)}"
