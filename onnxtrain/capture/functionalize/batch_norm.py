"""Rewrite a batch norm as PyTorch's functionalization does, for exports that are converted without it.

    batch_norm(x, w, b, mean, var, training=True)   ──>  _native_batch_norm_legit_functional: y, …, new mean, new var
    batch_norm(x, w, b, mean, var, training=False)  ──>  _native_batch_norm_legit_no_training: y, …
    batch_norm(x, w, b, None, None, …)              ──>  _native_batch_norm_legit.no_stats: y, …

For an empty input, and possibly on other devices, PyTorch decomposes the operator differently: such calls are left to
its functionalization.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from onnxtrain.torch_compat.aten_operators import (
    NATIVE_BATCH_NORM,
    NATIVE_BATCH_NORM_FUNCTIONAL,
    NATIVE_BATCH_NORM_NO_TRAINING,
)
from onnxtrain.torch_compat.fake_tensors import FakeTensor
from onnxtrain.torch_compat.operators import schema_of

aten = torch.ops.aten
BATCH_NORM = aten.batch_norm.default


@functools.cache
def _argument_names() -> tuple[str, ...]:
    return tuple(argument.name for argument in schema_of(BATCH_NORM).arguments)


class FunctionalNorm(NamedTuple):
    """The functional call that replaces a batch norm.

    Attributes:
        target, arguments: the call.
        results: the call's results as fake tensors; the first replaces the batch norm's result.
        updates: for each running statistic to update, the index of the result, and the node of the buffer.
    """

    target: Any
    arguments: tuple[Any, ...]
    results: tuple[FakeTensor, ...]
    updates: tuple[tuple[int, Node], ...]


def updates_statistics(node: Node) -> bool:
    """Return whether a node is a batch norm that writes to running statistics, which its schema does not declare."""
    if node.target is not BATCH_NORM:
        return False
    named = _arguments(node)
    return bool(named["training"]) and any(named[name] is not None for name in ("running_mean", "running_var"))


def functional_batch_norm(node: Node) -> FunctionalNorm | None:
    """Return the functional call for a batch norm; None if PyTorch may decompose it differently."""
    named = _arguments(node)
    x, weight, bias, mean, var, training, momentum, eps, _ = (named[name] for name in _argument_names())
    if type(training) is not bool or type(momentum) is not float or type(eps) is not float:
        return None
    updates: tuple[tuple[int, Node], ...] = ()
    if isinstance(mean, Node) and isinstance(var, Node):
        if training:
            target: Any = NATIVE_BATCH_NORM_FUNCTIONAL.default
            arguments: tuple[Any, ...] = (x, weight, bias, mean, var, True, momentum, eps)
            updates = ((3, mean), (4, var))
        else:
            target = NATIVE_BATCH_NORM_NO_TRAINING.default
            arguments = (x, weight, bias, mean, var, momentum, eps)
    elif mean is None and var is None and training:
        target = NATIVE_BATCH_NORM.no_stats
        arguments = (x, weight, bias, True, momentum, eps)
    else:
        return None
    results = _results(target, arguments)
    if results is None or not _same_type(results[0], node.meta.get("val")):
        return None
    if not all(_same_type(results[index], statistic.meta.get("val")) for index, statistic in updates):
        return None  # in half precision: PyTorch's meta function returns the new statistics as float32
    return FunctionalNorm(target, arguments, results, updates)


def _arguments(node: Node) -> dict[str, Any]:
    return {**dict(zip(_argument_names(), node.args, strict=False)), **node.kwargs}


def _results(target: Any, arguments: tuple[Any, ...]) -> tuple[FakeTensor, ...] | None:
    """Run the call on fake tensors; None if they are not on the CPU, or may be empty."""
    values: Any = map_arg(arguments, lambda n: n.meta.get("val"))
    tensors = [value for value in values[:5] if value is not None and not isinstance(value, (bool, float))]
    if not all(isinstance(t, FakeTensor) and t.fake_device.type == "cpu" for t in tensors) or _is_empty(values[0]):
        return None
    mode = values[0].fake_mode
    with mode, mode.shape_env.suppress_guards(), mode.shape_env.ignore_fresh_unbacked_symbols():
        results: tuple[FakeTensor, ...] = target(*values)
    return results


def _is_empty(x: torch.Tensor) -> bool:
    """Return whether the tensor is empty at the example's sizes; True if its size depends on data."""
    count: Any = x.numel()
    return not (count if isinstance(count, int) else count.node.hint)


def _same_type(a: Any, b: Any) -> bool:
    return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.dim() == b.dim()
