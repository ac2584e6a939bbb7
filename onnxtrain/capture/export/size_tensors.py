"""Give tensors that forward computes from sizes alone these sizes as their items.

    n = torch.div(x.shape[1], 8, rounding_mode="trunc")        x.view(-1, n, 8); x.new_zeros(n - 1, 8)

`torch.div` of two Python ints is a tensor, and forward uses it as a size. Tracing takes the item of a tensor for a
data-dependent size, of which nothing is known. Longformer and LED compute the number of their chunks so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onnxtrain.torch_compat.fake_tensors import FakeTensor, remember_item, remembered_item

_ROUNDS_DOWN = ("floor", "trunc")  # of numbers that are not negative


def _divide(original: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    result = original(*args, **kwargs)
    if len(args) == 2 and kwargs.keys() == {"rounding_mode"} and kwargs["rounding_mode"] in _ROUNDS_DOWN:
        _remember(operator.floordiv, result, *args)
    return result


def _arithmetic(operation: Callable[[Any, Any], Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    if len(args) == 2 and not kwargs:
        _remember(operation, result, *args)
    return result


def _remember(operation: Callable[[Any, Any], Any], result: Any, x: Any, y: Any) -> None:
    """Compute the item of a result if those of both operands are sizes."""
    if not isinstance(result, FakeTensor) or result.dtype != torch.int64 or result.dim():
        return
    items = _size(x), _size(y)
    if None in items:
        return
    if operation is not operator.floordiv or all(map(statically_known_true, (items[0] >= 0, items[1] > 0))):
        remember_item(result, operation(*items))


def _size(value: Any) -> Any:
    """Return an int, a symbolic size, or that of a tensor; None for anything else."""
    if isinstance(value, FakeTensor):
        return remembered_item(value)
    return value if type(value) is int or isinstance(value, torch.SymInt) else None


_FUNCTIONS = {operator.add: ("add", "__radd__"), operator.sub: ("sub",), operator.mul: ("mul", "__rmul__")}
REPLACEMENTS: Mapping[Any, Callable[..., Any]] = {
    torch.div: _divide,
    **{
        function: partial(_arithmetic, operation)
        for operation, names in _FUNCTIONS.items()
        for name in names
        for function in (getattr(torch.Tensor, name), getattr(torch, name, None))
        if function is not None
    },
}
