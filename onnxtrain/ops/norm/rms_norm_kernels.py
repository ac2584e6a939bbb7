"""Kernels of RMS norm: with ATen operators, compiled, and PyTorch's fused one for CUDA.

PyTorch has no fused kernel for CPUs. There, ATen operators run until the compiled kernel (`native/rms_norm.cpp`) is
loaded, for small tensors and for mixed dtypes.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from onnxtrain.native import Library, pointers, read_sources
from onnxtrain.ops import huge_pages
from onnxtrain.ops.definition import Call
from onnxtrain.torch_compat import aten_kernels

Tensor = torch.Tensor
_CPP_TYPES = {torch.float32: "float", torch.float64: "double"}
_MIN_ELEMENTS = 16384  # below, the call through ctypes costs more than the kernel gains
LIBRARY = Library(
    "rms_norm",
    read_sources("vectors.h", "rms_norm.cpp"),
    {
        f"{direction}_{cpp_type}": letters
        for cpp_type in _CPP_TYPES.values()
        for direction, letters in (("forward", "ppppiidi"), ("backward", "pppppppiii"))
    },
)


def rms_norm(x: Tensor, axis: int, scale: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """`x` * inv_std * scale, and inv_std = 1 / sqrt(mean(x^2) + epsilon) over the axes from `axis` on."""
    if LIBRARY.functions is None or not _are_supported(x, scale):
        return rms_norm_by_aten(x, axis, scale, epsilon)
    width = math.prod(x.shape[axis:])
    y = huge_pages.empty_like(x)
    inv_std = x.new_empty((*x.shape[:axis], *[1] * (x.ndim - axis)))
    run = getattr(LIBRARY.functions, f"forward_{_CPP_TYPES[x.dtype]}")
    run(*pointers(x, scale, y, inv_std), x.numel() // width, width, epsilon, torch.get_num_threads())
    return y, inv_std


def rms_norm_by_aten(x: Tensor, axis: int, scale: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """PyTorch's decomposition, which it runs where it has no fused kernel."""
    wide = x if x.dtype == torch.float64 else x.float()
    inv_std = wide.square().mean(tuple(range(axis, x.ndim)), keepdim=True).add_(epsilon).rsqrt_()
    y = wide * inv_std
    if scale is not None:
        y = y * scale
    return y.to(x.dtype), inv_std


def rms_norm_backward(
    dy: Tensor, x: Tensor, scale: Tensor | None, inv_std: Tensor, added: Tensor | None, axis: int, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x (plus `added`) and scale; None for each that the mask excludes."""
    if LIBRARY.functions is None or not _are_supported(x, dy, scale, inv_std, added):
        return rms_norm_backward_by_aten(dy, x, scale, inv_std, added, axis, mask)
    width = math.prod(x.shape[axis:])
    dx = huge_pages.empty_like(x) if mask[0] else None
    dscale = torch.empty_like(scale) if mask[1] and scale is not None else None
    run = getattr(LIBRARY.functions, f"backward_{_CPP_TYPES[x.dtype]}")
    run(*pointers(dy, x, scale, inv_std, added, dx, dscale), x.numel() // width, width, torch.get_num_threads())
    return dx, dscale


def rms_norm_backward_by_aten(
    dy: Tensor, x: Tensor, scale: Tensor | None, inv_std: Tensor, added: Tensor | None, axis: int, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the backward with ATen operators, in fewer passes over memory than autograd."""
    wide = inv_std.dtype
    z = x.to(wide) * inv_std
    dy = dy.to(wide)
    weighted = dy * z
    dx, dscale = None, None
    if mask[1] and scale is not None:
        rows = tuple(range(axis))
        dscale = (weighted.sum(rows) if rows else weighted).to(scale.dtype)
    if mask[0]:
        axes = tuple(range(axis, x.ndim))
        g = dy if scale is None else dy * scale
        if scale is not None:
            weighted = weighted.mul_(scale) if dscale is not weighted else weighted * scale
        dz = g.addcmul(z, weighted.mean(axes, keepdim=True), value=-1)
        dx = dz.mul_(inv_std).to(x.dtype)
        if added is not None:
            dx = dx.add_(added)
    return dx, dscale


def rms_norm_on_cuda(x: Tensor, axis: int, scale: Tensor | None, epsilon: float) -> Any:
    """PyTorch's fused kernel; takes the normalized shape, which may be symbolic, from x."""
    return aten_kernels.fused_rms_norm(x, x.shape[axis:], scale, epsilon)


def rms_norm_backward_on_cuda(
    dy: Tensor, x: Tensor, scale: Tensor | None, inv_std: Tensor, added: Tensor | None, axis: int, mask: list[bool]
) -> Any:
    """PyTorch's fused backward kernel."""
    dx, dscale = aten_kernels.fused_rms_norm_grad(dy, x, x.shape[axis:], inv_std, scale, mask)
    return dx if added is None else dx.add_(added), dscale


def lower_rms_norm(x: Any, axis: int, scale: Any, epsilon: float) -> Call:
    """Request the compiled kernel and call `rms_norm`."""
    LIBRARY.request()
    return Call(rms_norm, x, axis, scale, epsilon)


def lower_rms_norm_backward(*arguments: Any) -> Call:
    """Request the compiled kernel and call `rms_norm_backward`."""
    LIBRARY.request()
    return Call(rms_norm_backward, *arguments)


def _are_supported(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether the compiled kernel applies: x is large, and all tensors are contiguous and of its dtype."""
    if x.numel() < _MIN_ELEMENTS or x.dtype not in _CPP_TYPES or not x.is_contiguous():
        return False
    return all(t is None or (t.dtype == x.dtype and t.is_contiguous()) for t in others)
