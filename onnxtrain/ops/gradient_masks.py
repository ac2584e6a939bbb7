"""Which gradients of an op are computed, as the `output_mask` of PyTorch's backward kernels."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.ops.definition import NodeView


def first_cotangent(n: NodeView, cotangents: Sequence[ir.Value | None]) -> ir.Value:
    """Return the cotangent of the first output. The other outputs are saved for backward and are not differentiable.

    Raises:
        GraphError: another output has a cotangent, or the first has none.
    """
    first, *others = cotangents
    if first is None or any(c is not None for c in others):
        names = ", ".join(name for name, c in zip(n.definition.outputs, cotangents, strict=True) if c is not None)
        raise GraphError(
            f"{n.definition.name}: only the first output is differentiable",
            expected=f"a gradient of {n.definition.outputs[0]} only",
            got=f"a gradient of {names or 'none'}",
        )
    return first


def output_mask(n: NodeView, *names: str) -> list[int]:
    """Return a backward op's output_mask: 1 for each of these inputs that is present and needs a gradient, else 0."""
    return [int(getattr(n, name) is not None and n.wants(name)) for name in names]


def apply_output_mask(gradients: Sequence[ir.Value], mask: Sequence[int], n: NodeView) -> list[ir.Value | None]:
    """Return one gradient per input of the node, None if the mask excludes it."""
    masked: list[ir.Value | None] = [g if m else None for g, m in zip(gradients, mask, strict=True)]
    count = len(n.node.inputs)
    return (masked + [None] * count)[:count]


def as_bools(mask: Sequence[int]) -> list[bool]:
    """Return an output_mask in the form that PyTorch's backward kernels take."""
    return [bool(m) for m in mask]
