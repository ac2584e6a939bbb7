"""Indices below 0, which ONNX counts from the end of an axis and PyTorch's kernels refuse.

A node that is captured from PyTorch is marked: its indices are not negative, and its kernels need not look. The mark is
metadata, which the node's gradient inherits.
"""

from __future__ import annotations

import onnx_ir as ir
import torch

from onnxtrain.graph.values import constant_of
from onnxtrain.ops.definition import NodeView

_MARK = "indices"
_NOT_NEGATIVE = "not negative"


def non_negative(result: ir.Value) -> ir.Value:
    """Marks the node that made this value."""
    node = result.producer()
    assert node is not None
    node.metadata_props[_MARK] = _NOT_NEGATIVE
    return result


def never_negative(n: NodeView, indices: ir.Value) -> bool:
    """Whether the node's indices are known to be at least 0."""
    if n.node.metadata_props.get(_MARK) == _NOT_NEGATIVE:
        return True
    known = constant_of(indices)
    return known is not None and bool((known >= 0).all())


def from_size(indices: torch.Tensor, size: int) -> torch.Tensor:
    """The indices, those below 0 counted from `size`."""
    return torch.where(indices < 0, indices + size, indices)


def from_the_end(indices: torch.Tensor, x: torch.Tensor, axis: int) -> torch.Tensor:
    """The indices, those below 0 counted from the end of x's axis."""
    return from_size(indices, x.size(axis))
