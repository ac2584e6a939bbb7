"""Defines ops that are a composition of others: a gradient flows through their bodies.

They come from ONNX models, which other exporters wrote, and from graphs with the names of ONNX Runtime Training. Where
no gradient flows, their kernel computes them in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.graph.axes import NO_AXES
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import ONNX, TensorType
from onnxtrain.ops.constructors import always, elementwise_flops, never, same_as
from onnxtrain.ops.definition import (
    BY_BODY,
    NOT_DIFFERENTIABLE,
    Body,
    Call,
    Effects,
    FromTorch,
    Kernel,
    NodeView,
    OpDef,
)
from onnxtrain.ops.registry import define


def elementwise_axes(n: NodeView) -> str:
    """All inputs broadcast against each other; 0-dimensional ones too."""
    inputs = ", ".join("-" if v is None else "..." for v in n.node.inputs)
    return f"{inputs} -> {', '.join(['...'] * len(n.node.outputs))}"


def no_axes(n: NodeView) -> str:
    return NO_AXES


def composite(
    name: str,
    inputs: tuple[str, ...],
    body: Body,
    lower: Callable[..., Call],
    *,
    domain: str = ONNX,
    outputs: tuple[str, ...] = ("y",),
    attributes: Mapping[str, Any] | None = None,
    since_version: int = 1,
    from_torch: Mapping[str, FromTorch] | None = None,
    shapes: Callable[[NodeView], Sequence[TensorType]] | None = None,
    axes: Callable[[NodeView], str] = elementwise_axes,
    nondiff_inputs: frozenset[str] = frozenset(),
    flops: Callable[[NodeView], Size] = elementwise_flops,
    ort_compatible: Callable[[NodeView], bool] | None = None,
    host_inputs: frozenset[int] = frozenset(),
    synchronizes: Callable[[NodeView], bool] = never,
    differentiable: bool = True,
    count_outputs: Callable[[Sequence[ir.Value | None], Mapping[str, Any]], int] | None = None,
    effects: Effects = Effects.NONE,
    aliases: Mapping[int, int] | None = None,
) -> OpDef:
    """Defines an op by its body.

    Its output has the type of the first input where `shapes` says nothing else. Stock onnxruntime's kernel may run
    an op of ONNX's own domain; one of com.microsoft is always written out, unless `ort_compatible` says otherwise.
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
            shapes=shapes or same_as(inputs[0].removesuffix("...")),
            body=body,
            ort_compatible=ort_compatible or (always if domain == ONNX else never),
            gradient=BY_BODY if differentiable else NOT_DIFFERENTIABLE,
            nondiff_inputs=nondiff_inputs,
            kernels=(Kernel(lower=lower, host_inputs=host_inputs, synchronizes=synchronizes),),
            axes=axes,
            effects=effects,
            aliases=aliases or {},
            flops=flops,
            host_eval=None,
            count_outputs=count_outputs,
        )
    )
