"""Kernels of the root mean square norm: composed of PyTorch's operators, compiled, and PyTorch's own for CUDA.

On a CPU PyTorch has none. Its operators serve until the compiled kernel (`native/rms_norm.cpp`) is there, for small
tensors and for element types that differ.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from onnxtrain.native import Library, pointers, text
from onnxtrain.ops import huge_pages
from onnxtrain.ops.definition import Call
from onnxtrain.torch_compat import aten_kernels

Tensor = torch.Tensor
_NAMES = {torch.float32: "float", torch.float64: "double"}
_LEAST = 16384  # elements: below it the way through ctypes costs more than is gained
LIBRARY = Library(
    "rms_norm",
    text("vectors.h", "rms_norm.cpp"),
    {
        f"{way}_{name}": letters
        for name in _NAMES.values()
        for way, letters in (("forward", "ppppiidi"), ("backward", "pppppppiii"))
    },
)


def rms_norm(x: Tensor, axis: int, scale: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """Gives x * inv_std * scale and inv_std = 1 / sqrt(mean(x^2) + epsilon), over the axes from `axis` on."""
    if LIBRARY.functions is None or not _are_plain(x, scale):
        return composed(x, axis, scale, epsilon)
    width = math.prod(x.shape[axis:])
    y = huge_pages.empty_like(x)
    inv_std = x.new_empty((*x.shape[:axis], *[1] * (x.ndim - axis)))
    run = getattr(LIBRARY.functions, f"forward_{_NAMES[x.dtype]}")
    run(*pointers(x, scale, y, inv_std), x.numel() // width, width, epsilon, torch.get_num_threads())
    return y, inv_std


def composed(x: Tensor, axis: int, scale: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """What PyTorch composes where it has no fused kernel."""
    wide = x if x.dtype == torch.float64 else x.float()
    inv_std = wide.square().mean(tuple(range(axis, x.ndim)), keepdim=True).add_(epsilon).rsqrt_()
    y = wide * inv_std
    if scale is not None:
        y = y * scale
    return y.to(x.dtype), inv_std


def rms_norm_backward(
    dy: Tensor, x: Tensor, scale: Tensor | None, inv_std: Tensor, added: Tensor | None, axis: int, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and scale, those that the mask names; `added` is added to that of x."""
    if LIBRARY.functions is None or not _are_plain(x, dy, scale, inv_std, added):
        return composed_backward(dy, x, scale, inv_std, added, axis, mask)
    width = math.prod(x.shape[axis:])
    dx = huge_pages.empty_like(x) if mask[0] else None
    dscale = torch.empty_like(scale) if mask[1] and scale is not None else None
    run = getattr(LIBRARY.functions, f"backward_{_NAMES[x.dtype]}")
    run(*pointers(dy, x, scale, inv_std, added, dx, dscale), x.numel() // width, width, torch.get_num_threads())
    return dx, dscale


def composed_backward(
    dy: Tensor, x: Tensor, scale: Tensor | None, inv_std: Tensor, added: Tensor | None, axis: int, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """By PyTorch's operators, in fewer passes over memory than autograd's own."""
    wide = inv_std.dtype
    z = x.to(wide) * inv_std
    dy = dy.to(wide)
    weighted = dy * z
    dx, dscale = None, None
    if mask[1] and scale is not None:
        rows = tuple(range(axis))
        dscale = (weighted.sum(rows) if rows else weighted).to(scale.dtype)
    if mask[0]:
        rest = tuple(range(axis, x.ndim))
        g = dy if scale is None else dy * scale
        if scale is not None:
            weighted = weighted.mul_(scale) if dscale is not weighted else weighted * scale
        slope = g.addcmul(z, weighted.mean(rest, keepdim=True), value=-1)
        dx = slope.mul_(inv_std).to(x.dtype)
        if added is not None:
            dx = dx.add_(added)
    return dx, dscale


def on_cuda(x: Tensor, axis: int, scale: Tensor | None, epsilon: float) -> Any:
    """PyTorch's kernel; here the normalized sizes need not be known in advance."""
    return aten_kernels.fused_rms_norm(x, x.shape[axis:], scale, epsilon)


def on_cuda_backward(
    dy: Tensor, x: Tensor, scale: Tensor | None, inv_std: Tensor, added: Tensor | None, axis: int, mask: list[bool]
) -> Any:
    """PyTorch's kernel of the gradient."""
    dx, dscale = aten_kernels.fused_rms_norm_grad(dy, x, x.shape[axis:], inv_std, scale, mask)
    return dx if added is None else dx.add_(added), dscale


def lowered(x: Any, axis: int, scale: Any, epsilon: float) -> Call:
    """A call of `rms_norm`, for a node that may run compiled."""
    LIBRARY.request()
    return Call(rms_norm, x, axis, scale, epsilon)


def lowered_backward(*arguments: Any) -> Call:
    """A call of `rms_norm_backward`, for a node that may run compiled."""
    LIBRARY.request()
    return Call(rms_norm_backward, *arguments)


def _are_plain(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the compiled kernel is for them: large, and of x's type."""
    if x.numel() < _LEAST or x.dtype not in _NAMES or not x.is_contiguous():
        return False
    return all(t is None or (t.dtype == x.dtype and t.is_contiguous()) for t in others)
