"""The batch norm of pictures [n, c, h, w] that lie channels-last in memory: m = n * h * w rows of c channels.

PyTorch's own kernels add all m rows one after the other: of 32768 rows the mean is 50 times as far off as in the usual
order, more than the one tolerance allows. Here its kernels see g * c channels of m / g rows each, and the g sums of a
channel are added in the end: as exact as in the usual order, in 1.2 times the time. The compiled kernel
(`native/batch_norm.cpp`) adds in double what it has added of 16 rows.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from onnxtrain.native import Library, pointers, text

aten = torch.ops.aten

LIBRARY = Library(
    "batch_norm",
    text("vectors.h", "batch_norm.cpp"),
    {"forward": "pppppppppppiiddii", "backward": "pppppppppppiiii"},
)
_LEAST_CHANNELS = 16  # for the compiled kernel: a vector holds as many
_MOST_ROWS, _LEAST_ROWS = 16, 4  # that are added one after the other; of fewer, too many sums would be left


def is_channels_last(x: torch.Tensor) -> bool:
    """Whether the kernels here are for it: in narrow types PyTorch adds in float32, exact enough."""
    if x.dtype != torch.float32 or x.dim() != 4 or x.is_contiguous() or x.device.type != "cpu":
        return False
    return x.numel() > 0 and x.is_contiguous(memory_format=torch.channels_last)


@functools.lru_cache(maxsize=1024)
def _rows(count: int) -> int:
    """Into sums of how many rows `count` rows are divided; 0 where they cannot be."""
    rows = next(d for d in range(min(_MOST_ROWS, count), 0, -1) if count % d == 0)
    return rows if rows >= _LEAST_ROWS or count <= _MOST_ROWS else 0


def _grouped(x: torch.Tensor, rows: int) -> torch.Tensor:
    """A view [1, g * c, rows, 1]: rows of g pixels."""
    channels = x.numel() // rows
    return x.as_strided((1, channels, rows, 1), (x.numel(), 1, channels, channels))


def batch_norm_channels_last(
    x: torch.Tensor,
    scale: Any,
    b: Any,
    mean: Any,
    var: Any,
    residual: Any,
    momentum: float,
    epsilon: float,
    relu: bool,
    compiled: bool,
) -> tuple[Any, ...]:
    """As PyTorch's in training, then adds the residual where there is one, and where `relu` gives max(., 0) of it.

    `compiled` says whether the compiled kernel may run, as soon as it is there.

    Returns:
        y, the moved running statistics where there are any, mean and 1 / standard deviation.
    """
    count = x.size(0) * x.size(2) * x.size(3)
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
    if compiled and (native := _native(x, scale, b, mean, var)) is not None:
        return _compiled(native, x, scale, b, mean, var, residual, momentum, epsilon, relu)
    if mean is not None:
        mean, var = mean.clone(), var.clone()
    if _rows(count):
        y, batch_mean, batch_var, inv_std = _in_groups(x, scale, b, epsilon)
        if mean is not None:
            mean.lerp_(batch_mean, momentum)
            unbiased = batch_var * (count / (count - 1) if count > 1 else math.inf)  # as in PyTorch
            var.mul_(1 - momentum).add_(unbiased, alpha=momentum)
    else:
        y, batch_mean, inv_std = torch.native_batch_norm(x.contiguous(), scale, b, mean, var, True, momentum, epsilon)
        y = y.contiguous(memory_format=torch.channels_last)
    return finished(y, residual, relu), mean, var, batch_mean, inv_std


def finished(y: torch.Tensor, residual: Any, relu: bool) -> torch.Tensor:
    """What is behind a batch norm, written over its y."""
    if residual is not None:
        y.add_(residual)
    return y.relu_() if relu else y


def _in_groups(x: torch.Tensor, scale: Any, b: Any, epsilon: float) -> tuple[torch.Tensor, ...]:
    """Gives y, mean, variance and 1 / standard deviation."""
    channels = x.size(1)
    rows = _rows(x.numel() // channels)
    means, variances = (v.view(-1, channels) for v in torch.batch_norm_update_stats(_grouped(x, rows), None, None, 0.0))
    batch_mean = means.mean(0)
    batch_var = variances.mean(0).add_((means - batch_mean).square_().mean(0))
    y = torch.batch_norm(x, scale, b, batch_mean, batch_var, False, 0.0, epsilon, False)
    return y, batch_mean, batch_var, (batch_var + epsilon).rsqrt_()


def _native(x: torch.Tensor, *parameters: torch.Tensor | None) -> Any:
    """The compiled functions, where they are there and such tensors are theirs; asks for them where they are not."""
    if x.size(1) < _LEAST_CHANNELS or any(
        p is not None and (p.dtype != x.dtype or not p.is_contiguous()) for p in parameters
    ):
        return None
    LIBRARY.request()
    return LIBRARY.functions


def _compiled(
    native: Any,
    x: torch.Tensor,
    scale: Any,
    b: Any,
    mean: Any,
    var: Any,
    residual: Any,
    momentum: float,
    epsilon: float,
    relu: bool,
) -> tuple[Any, ...]:
    y, channels = torch.empty_like(x), x.size(1)
    batch_mean, inv_std = x.new_empty(2, channels)
    moved_mean, moved_var = (None, None) if mean is None else x.new_empty(2, channels)
    tensors = (x, scale, b, residual, mean, var, y, moved_mean, moved_var, batch_mean, inv_std)
    numbers = (x.numel() // channels, channels, momentum, epsilon, relu, torch.get_num_threads())
    native.forward(*pointers(*tensors), *numbers)
    return y, moved_mean, moved_var, batch_mean, inv_std


def batch_norm_backward_channels_last(
    dy: torch.Tensor,
    x: torch.Tensor,
    scale: Any,
    mean: torch.Tensor,
    inv_std: torch.Tensor,
    y: Any,
    added: Any,
    batch: bool,
    mask: list[bool],
    compiled: bool,
) -> tuple[Any, ...]:
    """The gradients of x, scale, b and residual, of those that the mask names.

    `y`: what a relu gave, whose gradient is dy, or dy + `added`. `batch`: mean and deviation are those of x and depend
    on it. `compiled`: the compiled kernel may run.
    """
    channels, count = x.size(1), x.numel() // x.size(1)
    dy = dy.contiguous(memory_format=torch.channels_last)
    if compiled and (native := _native(x, scale, mean, inv_std)) is not None:
        return _compiled_backward(native, dy, x, scale, mean, inv_std, y, added, batch, mask)
    dy = before_relu(dy, y, added)
    dresidual = dy if mask[3] else None
    rows = _rows(count)
    if not rows:
        in_order = (dy.contiguous(), x.contiguous(), scale, mean, inv_std.square().reciprocal_(), mean, inv_std)
        dx, dscale, db = aten.native_batch_norm_backward(*in_order, batch, 0.0, mask[:3])
        dx = None if dx is None else dx.contiguous(memory_format=torch.channels_last)
        return dx, dscale, db, dresidual
    groups = x.numel() // rows // channels
    statistics = (mean.repeat(groups), inv_std.repeat(groups))
    _, sums_z, sums = aten.native_batch_norm_backward(
        _grouped(dy, rows), _grouped(x, rows), None, None, None, *statistics, True, 0.0, [False, True, True]
    )
    dscale, db = sums_z.view(-1, channels).sum(0), sums.view(-1, channels).sum(0)
    dx = None
    if mask[0]:
        factor = inv_std if scale is None else inv_std * scale
        dx = _slope(dy, x, factor, mean, inv_std, dscale / count, db / count) if batch else dy * _per_channel(factor)
    return dx, dscale if mask[1] else None, db if mask[2] else None, dresidual


def before_relu(dy: torch.Tensor, y: Any, added: Any) -> torch.Tensor:
    """The gradient dy, with what is added to it, in front of the relu that gave y, where there was one."""
    dy = dy if added is None else dy + added
    return dy if y is None else aten.threshold_backward.default(dy, y, 0)


def _compiled_backward(
    native: Any,
    dy: Any,
    x: torch.Tensor,
    scale: Any,
    mean: Any,
    inv_std: Any,
    y: Any,
    added: Any,
    batch: bool,
    mask: list[bool],
) -> tuple[Any, ...]:
    channels = x.size(1)
    dx, dresidual = (torch.empty_like(x) if m else None for m in (mask[0], mask[3]))
    dscale, db = x.new_empty(2, channels)
    y, added = (None if t is None else t.contiguous(memory_format=torch.channels_last) for t in (y, added))
    tensors = (dy, x, scale, mean, inv_std, y, added, dx, dscale, db, dresidual)
    native.backward(*pointers(*tensors), x.numel() // channels, channels, batch, torch.get_num_threads())
    return dx, dscale if mask[1] else None, db if mask[2] else None, dresidual


def _slope(dy: torch.Tensor, x: torch.Tensor, factor: Any, mean: Any, inv_std: Any, dscale: Any, db: Any) -> Any:
    """The gradient factor * (dy - db - z * dscale) with z = (x - mean) * inv_std.

    x is centred first: a rounded constant of a channel would add up in the sums of dx further back.
    """
    dx = torch.sub(x, _per_channel(mean))
    dx = torch.addcmul(dy, dx, _per_channel(inv_std * dscale), value=-1, out=dx)
    return torch.addcmul(_per_channel(-db * factor), dx, _per_channel(factor), out=dx)


def _per_channel(v: torch.Tensor) -> torch.Tensor:
    return v.view(-1, 1, 1)
