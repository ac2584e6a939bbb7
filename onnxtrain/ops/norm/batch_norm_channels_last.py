"""Batch norm of images [n, c, h, w] in channels_last memory format: a matrix of m = n * h * w rows and c channels.

PyTorch's own kernels accumulate all m rows sequentially: for 32768 rows the error of the mean is 50 times that of
contiguous images, more than the one tolerance allows. Here its kernels see g * c channels of m / g rows each, and the g
sums of each channel are added at the end; only the mean, and the gradient of b, are sums in double. For x
[32, 64, 56, 56], forward takes 1.4 times as long as eager for contiguous images (one thread, AMD EPYC). The compiled
kernel (`native/batch_norm.cpp`) accumulates sums of 8 rows in double.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from onnxtrain.native import Library, pointers, read_sources

aten = torch.ops.aten

LIBRARY = Library(
    "batch_norm",
    read_sources("vectors.h", "batch_norm.cpp"),
    {"forward": "pppppppppppiiddii", "backward": "pppppppppppiiii"},
)
_MIN_CHANNELS = 16  # for the compiled kernel: the lanes of a vector
_MAX_GROUP_ROWS, _MIN_GROUP_ROWS = 16, 4  # accumulated sequentially; smaller groups would leave too many sums
_COPIED = 1 << 12  # elements, for a sum in another dtype


def is_channels_last(x: torch.Tensor) -> bool:
    """Return whether the kernels of this file apply.

    In half precision PyTorch's own, which accumulate in float32, suffice.
    """
    if x.dtype != torch.float32 or x.dim() != 4 or x.is_contiguous() or x.device.type != "cpu":
        return False
    return x.numel() > 0 and x.is_contiguous(memory_format=torch.channels_last)


@functools.lru_cache(maxsize=1024)
def _rows_per_group(count: int) -> int:
    """Return the number of rows in each group of `count` rows; 0 if no divisor is suitable."""
    rows = next(d for d in range(min(_MAX_GROUP_ROWS, count), 0, -1) if count % d == 0)
    return rows if rows >= _MIN_GROUP_ROWS or count <= _MAX_GROUP_ROWS else 0


def _grouped(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a view [1, g * c, rows, 1] of x: g groups of `rows` rows."""
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
    """PyTorch's batch norm in training, then the addition of a residual and a Relu, both optional.

    `compiled` says whether the compiled kernel may run once it is loaded.

    Returns:
        y, the updated running statistics (None without them), the mean and 1 / standard deviation of the batch.
    """
    count = x.size(0) * x.size(2) * x.size(3)
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
    if compiled and (functions := _compiled_functions(x, scale, b, mean, var)) is not None:
        return _compiled_forward(functions, x, scale, b, mean, var, residual, momentum, epsilon, relu)
    if _rows_per_group(count):
        y, batch_mean, batch_var, inv_std = _forward_in_groups(x, scale, b, epsilon)
        if mean is not None:
            unbiased = batch_var * (count / (count - 1) if count > 1 else math.inf)  # as in PyTorch
            mean, var = (v.double().lerp_(w, momentum).to(v) for v, w in ((mean, batch_mean), (var, unbiased)))
        batch_mean, inv_std = batch_mean.float(), inv_std.float()
    else:
        mean, var = (None if v is None else v.clone() for v in (mean, var))
        y, batch_mean, inv_std = torch.native_batch_norm(x.contiguous(), scale, b, mean, var, True, momentum, epsilon)
        y = y.contiguous(memory_format=torch.channels_last)
    return add_residual_and_relu(y, residual, relu), mean, var, batch_mean, inv_std


def add_residual_and_relu(y: torch.Tensor, residual: Any, relu: bool) -> torch.Tensor:
    """Add the residual, if any, to y and apply the Relu, if `relu`: in place."""
    if residual is not None:
        y.add_(residual)
    return y.relu_() if relu else y


def _forward_in_groups(x: torch.Tensor, scale: Any, b: Any, epsilon: float) -> tuple[torch.Tensor, ...]:
    """Return y and, in double, the mean, the variance and 1 / standard deviation.

    The shift of a channel is rounded once: its error is in all elements of the channel, so a later mean over them, as
    of another batch norm, keeps it.
    """
    channels = x.size(1)
    rows = _rows_per_group(x.numel() // channels)
    groups = torch.batch_norm_update_stats(_grouped(x, rows), None, None, 0.0)
    means, variances = (v.view(-1, channels).double() for v in groups)
    mean = _sums_in_double(x) / (x.numel() // channels)
    var = variances.mean(0).add_((means - mean).square_().mean(0))
    inv_std = (var + epsilon).rsqrt_()
    factor = (inv_std if scale is None else inv_std * scale).float()
    shift = (-mean * factor if b is None else b - mean * factor).float()
    zeros = torch.zeros_like(factor)
    y = torch.batch_norm(x, factor, shift, zeros, zeros + 1, False, 0.0, 0.0, False)
    return y, mean, var, inv_std


def _sums_in_double(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of each channel, in double; of a few images at a time, because PyTorch copies them."""
    images = max(1, _COPIED * x.size(0) // x.numel())
    return torch.stack([part.sum((0, 2, 3), dtype=torch.double) for part in x.split(images)]).sum(0)


def _compiled_functions(x: torch.Tensor, *parameters: torch.Tensor | None) -> Any:
    """Return the compiled functions, else None: unsupported tensors, or still compiling.

    Requests the compile if needed.
    """
    if x.size(1) < _MIN_CHANNELS or any(
        p is not None and (p.dtype != x.dtype or not p.is_contiguous()) for p in parameters
    ):
        return None
    LIBRARY.request()
    return LIBRARY.functions


def _compiled_forward(
    functions: Any,
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
    new_mean, new_var = (None, None) if mean is None else x.new_empty(2, channels)
    tensors = (x, scale, b, residual, mean, var, y, new_mean, new_var, batch_mean, inv_std)
    scalars = (x.numel() // channels, channels, momentum, epsilon, relu, torch.get_num_threads())
    functions.forward(*pointers(*tensors), *scalars)
    return y, new_mean, new_var, batch_mean, inv_std


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
    """Return the gradients of x, scale, b and the residual; None for each that the mask excludes.

    Args:
        dy: the gradient of y.
        x: the input of forward.
        scale: that of forward, or None.
        mean: the mean that forward normalized with.
        inv_std: 1 / the standard deviation that forward normalized with.
        y: the output of forward if it ended with a Relu, else None.
        added: a further gradient of y, or None.
        batch: whether the statistics are those of x, so that its gradient passes through them.
        mask: which gradients to compute.
        compiled: whether the compiled kernel may run.
    """
    channels, count = x.size(1), x.numel() // x.size(1)
    dy = dy.contiguous(memory_format=torch.channels_last)
    if compiled and (functions := _compiled_functions(x, scale, mean, inv_std)) is not None:
        return _compiled_backward(functions, dy, x, scale, mean, inv_std, y, added, batch, mask)
    dy = gradient_before_relu(dy, y, added)
    dresidual = dy if mask[3] else None
    rows = _rows_per_group(count)
    if not rows:
        contiguous = (dy.contiguous(), x.contiguous(), scale, mean, inv_std.square().reciprocal_(), mean, inv_std)
        dx, dscale, db = aten.native_batch_norm_backward(*contiguous, batch, 0.0, mask[:3])
        dx = None if dx is None else dx.contiguous(memory_format=torch.channels_last)
        return dx, dscale, db, dresidual
    groups = x.numel() // rows // channels
    statistics = (mean.repeat(groups), inv_std.repeat(groups))
    _, sums_z, _ = aten.native_batch_norm_backward(
        _grouped(dy, rows), _grouped(x, rows), None, None, None, *statistics, True, 0.0, [False, True, False]
    )
    dscale = sums_z.view(-1, channels).sum(0)
    db = _sums_in_double(dy).float()
    dx = None
    if mask[0]:
        factor = inv_std if scale is None else inv_std * scale
        dx = _grad_x(dy, x, factor, mean, inv_std, dscale / count, db / count) if batch else dy * _per_channel(factor)
    return dx, dscale if mask[1] else None, db if mask[2] else None, dresidual


def gradient_before_relu(dy: torch.Tensor, y: Any, added: Any) -> torch.Tensor:
    """Return the gradient dy + added, passed back through the Relu with output y.

    Both `added` and the Relu are optional.
    """
    dy = dy if added is None else dy + added
    return dy if y is None else aten.threshold_backward.default(dy, y, 0)


def _compiled_backward(
    functions: Any,
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
    functions.backward(*pointers(*tensors), x.numel() // channels, channels, batch, torch.get_num_threads())
    return dx, dscale if mask[1] else None, db if mask[2] else None, dresidual


def _grad_x(dy: torch.Tensor, x: torch.Tensor, factor: Any, mean: Any, inv_std: Any, dscale: Any, db: Any) -> Any:
    """Return the gradient factor * (dy - db - z * dscale) with z = (x - mean) * inv_std.

    x is centered first: the rounding error of a channel's constant would accumulate in the sums over dx of earlier
    layers.
    """
    dx = torch.sub(x, _per_channel(mean))
    dx = torch.addcmul(dy, dx, _per_channel(inv_std * dscale), value=-1, out=dx)
    return torch.addcmul(_per_channel(-db * factor), dx, _per_channel(factor), out=dx)


def _per_channel(v: torch.Tensor) -> torch.Tensor:
    return v.view(-1, 1, 1)
