"""Branches on whether values are finite: the graph assumes that they are, and each call checks it.

    if not torch.isfinite(hidden).all():        the graph goes on; isfinite(hidden).all() is one more result of it
        hidden = hidden.clamp(-most, most)

A call in which a check answers otherwise runs in PyTorch, before the graph has changed anything. Models make such
checks after their layers, for float16 (DETR, BART, T5), and they almost never fail. The answer for finite values is
computed from the operators between the check and the branch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.fx.node import map_arg

from onnxtrain.torch_compat.tracing import traced_node

_ATEN = torch.ops.aten
# Operator: its elements, if those of its argument are finite.
_CHECKS = {
    _ATEN.isfinite.default: True,
    _ATEN.isinf.default: False,
    _ATEN.isnan.default: False,
    _ATEN.isposinf.default: False,
    _ATEN.isneginf.default: False,
}
# Operators on their results, in numpy.
_OPERATORS: dict[Any, Callable[..., Any]] = {
    _ATEN.all.default: np.all,
    _ATEN.all.dim: lambda x, dim, keepdim=False: np.all(x, dim, keepdims=keepdim),
    _ATEN.any.default: np.any,
    _ATEN.any.dim: lambda x, dim, keepdim=False: np.any(x, dim, keepdims=keepdim),
    _ATEN.sum.default: np.sum,
    _ATEN.logical_not.default: np.logical_not,
    _ATEN.bitwise_not.default: np.logical_not,
    _ATEN.logical_or.default: np.logical_or,
    _ATEN.bitwise_or.Tensor: np.logical_or,
    _ATEN.__or__.Tensor: np.logical_or,
    _ATEN.__and__.Tensor: np.logical_and,
    _ATEN.logical_and.default: np.logical_and,
    _ATEN.bitwise_and.Tensor: np.logical_and,
    _ATEN.eq.Scalar: operator.eq,
    _ATEN.ne.Scalar: operator.ne,
    _ATEN.gt.Scalar: operator.gt,
    _ATEN.detach.default: lambda x: x,
}


def answer_if_finite(tensor: torch.Tensor) -> bool | None:
    """Return the truth of a traced test if all values are finite; None if the test asks for anything else."""
    node = traced_node(tensor)
    value = None if node is None else _value(node)
    return None if value is None else bool(value)


def _value(node: Any) -> Any:
    """Return a node's value if all values are finite, with two elements along each axis; None if it is unknown."""
    if node.target in _CHECKS:
        return np.full((2,) * node.meta["val"].ndim, _CHECKS[node.target])
    compute = _OPERATORS.get(node.target)
    values = {part: _value(part) for part in node.all_input_nodes} if compute is not None else {}
    if compute is None or not values or any(value is None for value in values.values()):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    return compute(*args, **kwargs)
