"""Read known elements as Python numbers, and use them as constants, where a capture fixes inputs.

    counts.tolist()                         the Python numbers
    x.repeat_interleave(counts, 0)          traced as x[positions]: its size would depend on elements
    torch.unique_consecutive(ends)          a constant

Without known values (`guards.known_values`) PyTorch's functions are traced as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from onnxtrain.capture.guards.known_values import known_values
from onnxtrain.ops.python_function.run_context import untraced
from onnxtrain.torch_compat.fake_tensors import FakeTensor
from onnxtrain.torch_compat.pytree import tree_leaves, tree_map


def _read(original: Callable[..., Any], x: torch.Tensor) -> Any:
    known = known_values()
    value = None if known is None else known.read(x)
    return original(x if value is None else value)


def _of_numbers(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Pass known tensors of one element as numbers, where a function takes numbers after its first argument."""
    known = known_values()
    if known is None:
        return original(*args, **kwargs)

    def number(part: Any) -> Any:
        value = known.read(part) if isinstance(part, FakeTensor) and part.dim() == 0 else None
        return part if value is None else value.item()

    numbers, named = tree_map(number, (args[1:], kwargs))
    return original(*args[:1], *numbers, **named)


def _of_numbers_only(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `_of_numbers`, for a function whose first argument is a number, too."""
    return _of_numbers(lambda _, *numbers, **named: original(*numbers, **named), None, *args, **kwargs)


def _repeat_interleave(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    known = known_values()
    given = dict(zip(("input", "repeats", "dim"), args, strict=False)) | kwargs
    repeats = given.get("repeats", given["input"])
    value = None if known is None else known.constant(repeats)
    if value is None or given.get("output_size") is not None:
        return original(*args, **kwargs)
    x, dim = given["input"], given.get("dim")
    if "repeats" not in given:
        return _as_constant(_outside(original, value))
    if dim is None:
        x, dim = x.flatten(), 0
    count = int(x.shape[dim])
    repeated = _as_constant(_outside(lambda: torch.repeat_interleave(torch.arange(count), value.cpu())), x.device)
    return x.index_select(dim, repeated)


def _computed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute a function of known tensors now; its results are constants of the graph."""
    known = known_values()
    if known is None:
        return original(*args, **kwargs)
    values = [known.constant(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if any(value is None for value in values):
        return original(*args, **kwargs)
    remaining = iter(values)
    real_args, real_kwargs = tree_map(lambda a: next(remaining) if isinstance(a, torch.Tensor) else a, (args, kwargs))
    return tree_map(_as_constant, _outside(original, *real_args, **real_kwargs))


def _tensor(original: Callable[..., torch.Tensor], data: Any, **kwargs: Any) -> torch.Tensor:
    """Stack traced tensors of one element, as forward makes a tensor of their elements."""
    if not isinstance(data, list | tuple) or not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(data)):
        return original(data, **kwargs)
    leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else original(leaf) for leaf in tree_leaves(data)]
    dtype = kwargs.get("dtype") or functools.reduce(torch.promote_types, [leaf.dtype for leaf in leaves])
    device = kwargs.get("device") or "cpu"
    remaining = iter([leaf.reshape(()).to(device, dtype) for leaf in leaves])

    def stacked(part: Any) -> torch.Tensor:
        return torch.stack([*map(stacked, part)]) if isinstance(part, list | tuple) else next(remaining)

    return stacked(data).requires_grad_(kwargs.get("requires_grad", False))


REPLACEMENTS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.Tensor.tolist, torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.__float__), _read),
    **dict.fromkeys((torch.arange, torch.linspace, torch.zeros, torch.ones, torch.empty, torch.full), _of_numbers_only),
    **dict.fromkeys(
        (
            torch.split,
            torch.reshape,
            torch.narrow,
            torch.Tensor.split,
            torch.Tensor.split_with_sizes,
            torch.Tensor.view,
            torch.Tensor.reshape,
            torch.Tensor.expand,
            torch.Tensor.repeat,
            torch.Tensor.narrow,
            torch.Tensor.unflatten,
            torch.Tensor.new_zeros,
            torch.Tensor.new_ones,
        ),
        _of_numbers,
    ),
    torch.tensor: _tensor,
    **dict.fromkeys((torch.repeat_interleave, torch.Tensor.repeat_interleave), _repeat_interleave),
    **dict.fromkeys(
        (
            torch.bincount,
            torch.masked_select,
            torch.unique,
            torch.unique_consecutive,
            torch.Tensor.bincount,
            torch.Tensor.masked_select,
            torch.Tensor.unique,
            torch.Tensor.unique_consecutive,
        ),
        _computed,
    ),
}


def _outside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with untraced(), torch.no_grad():
        return function(*args, **kwargs)


def _as_constant(value: Any, device: torch.device | None = None) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    elements = _outside(value.tolist)
    return torch.tensor(elements, dtype=value.dtype, device=device or value.device).reshape(value.shape)
