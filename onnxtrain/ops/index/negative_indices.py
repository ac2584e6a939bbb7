"""Negative indices, which ONNX counts from the end of an axis and PyTorch's kernels reject.

Nodes captured from PyTorch are marked as having no negative indices, so that their kernels skip the check. The mark is
node metadata, which the node's gradient inherits.
"""

from __future__ import annotations

import onnx_ir as ir
import torch

from onnxtrain.graph.values import constant_of
from onnxtrain.ops.definition import NodeView

_MARK = "indices"
_NOT_NEGATIVE = "not negative"


def mark_non_negative(result: ir.Value) -> ir.Value:
    """Mark the node that computes `result` as having no negative indices."""
    node = result.producer()
    assert node is not None
    node.metadata_props[_MARK] = _NOT_NEGATIVE
    return result


def is_non_negative(n: NodeView, indices: ir.Value) -> bool:
    """Return whether the node's indices are known to be at least 0."""
    if n.node.metadata_props.get(_MARK) == _NOT_NEGATIVE:
        return True
    constant = constant_of(indices)
    return constant is not None and bool((constant >= 0).all())


def wrap_negative(indices: torch.Tensor, size: int) -> torch.Tensor:
    """Return the indices with `size` added to the negative ones."""
    return torch.where(indices < 0, indices + size, indices)


def wrap_negative_in_axis(indices: torch.Tensor, x: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the indices with the size of x's axis added to the negative ones."""
    return wrap_negative(indices, x.size(axis))
