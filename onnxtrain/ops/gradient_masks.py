"""Which gradients of an op are computed, as the `output_mask` of PyTorch's backward kernels."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.ops.definition import NodeView


def first_cotangent(n: NodeView, cotangents: Sequence[ir.Value | None]) -> ir.Value:
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


def output_mask(n: NodeView, *names: str) -> list[int]:
    """A backward op's output_mask: 1 for each of these inputs that is there and whose gradient is asked for, else 0."""
    return [int(getattr(n, name) is not None and n.wants(name)) for name in names]


def apply_output_mask(gradients: Sequence[ir.Value], mask: Sequence[int], n: NodeView) -> list[ir.Value | None]:
    """The gradients that the mask lets through, as many as the node has inputs."""
    found: list[ir.Value | None] = [g if m else None for g, m in zip(gradients, mask, strict=True)]
    count = len(n.node.inputs)
    return (found + [None] * count)[:count]


def as_bools(mask: Sequence[int]) -> list[bool]:
    """An output_mask as PyTorch's backward kernels take it."""
    return [bool(m) for m in mask]
