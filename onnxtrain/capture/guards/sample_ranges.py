"""Answer comparisons of samples that are the same for every sample, as those of LayerDrop at probability 0.

if torch.rand([]) < 0.0:          always False: torch.rand samples from [0, 1)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from onnxtrain.torch_compat.operators import OpOverload, schema_of
from onnxtrain.torch_compat.tracing import traced_node

_ATEN = torch.ops.aten
# Operator: its result for all samples of [0, 1), given the number that they are compared with; None if it varies.
_COMPARISONS: dict[Any, Callable[[float], bool | None]] = {
    _ATEN.lt.Scalar: lambda bound: _certain(bound <= 0, bound >= 1),
    _ATEN.le.Scalar: lambda bound: _certain(bound < 0, bound >= 1),
    _ATEN.gt.Scalar: lambda bound: _certain(bound >= 1, bound < 0),
    _ATEN.ge.Scalar: lambda bound: _certain(bound >= 1, bound <= 0),
}


def _certain(is_false: bool, is_true: bool) -> bool | None:
    return is_true if is_false or is_true else None


def certain_answer(tensor: torch.Tensor) -> bool | None:
    """Return the truth of a traced comparison if it is the same for all samples; None if it varies or is unknown."""
    node = traced_node(tensor)
    if node is None or node.users or node.target not in _COMPARISONS:
        return None
    sample, bound = node.args
    if not isinstance(bound, int | float) or not _is_sample(sample):
        return None
    return _COMPARISONS[node.target](bound)


def _is_sample(node: Any) -> bool:
    """Return whether a node is torch.rand, and forward has not changed the result so far, nor a view of it."""
    if not isinstance(node, Node) or node.target is not _ATEN.rand.default:
        return False
    schemas = [schema_of(user.target) for user in node.users if isinstance(user.target, OpOverload)]
    is_read_only = all(not s.is_mutable and not any(r.alias_info for r in s.returns) for s in schemas)
    return is_read_only and len(schemas) == len(node.users)
