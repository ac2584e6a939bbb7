"""The compiled kernel of a convolution's weight gradient (`native/convolution.cpp`), an alternative to oneDNN's.

It reads images in channels_last memory format, and copies images in other formats. For measurements see
docs/explanation/kernel-choice.md.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain.native import Library, pointers, read_sources
from onnxtrain.ops.convolution.input_gradient import input_gradient

LIBRARY = Library(
    "convolution", read_sources("vectors.h", "gemm_tile.h", "tiles.h", "convolution.cpp"), {"weight_gradient": "ppppi"}
)


def weight_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
) -> torch.Tensor:
    """Return the gradient of w[o, c, k, l] in the convolution of x[n, c, h, w] to [n, o, e, f], without groups.

    All tensors are float32 on a CPU. PyTorch's kernel runs for tensors without elements, and until the library is
    compiled.
    """
    if LIBRARY.functions is None or not (dy.numel() and x.numel() and w.numel()):
        options = (None, strides, pads, dilations, False, [0, 0], 1, [False, True, False])
        return torch.ops.aten.convolution_backward.default(dy, x, w, *options)[1]
    dy, x = (v.contiguous(memory_format=torch.channels_last) for v in (dy, x))
    axes = zip(x.shape[2:], dy.shape[2:], w.shape[2:], strides, pads, dilations, strict=True)
    sizes = _int64_array((x.size(0), x.size(1), dy.size(1), *(size for axis in axes for size in axis)))
    dw = torch.empty(w.shape, dtype=w.dtype)
    LIBRARY.functions.weight_gradient(*pointers(x, dy, dw), ctypes.addressof(sizes), torch.get_num_threads())
    return dw


@functools.lru_cache(maxsize=1024)
def _int64_array(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """Return the values as the kernel reads them. Only the array's address is passed on: the cache keeps it alive."""
    return (ctypes.c_int64 * len(values))(*values)


def convolution_gradients(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, *geometry_and_mask: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x, w and b; None for those that the output mask excludes.

    Args:
        dy: the gradient of the result.
        x: the images.
        w: the weight.
        geometry_and_mask: strides, pads, dilations and the output mask.
    """
    *geometry, mask = geometry_and_mask
    dx, dw, db = None, None, None
    if mask[0]:
        dx = input_gradient(dy, x, w, *geometry)
    if mask[1]:
        dw = weight_gradient(dy, x, w, *geometry)
    if mask[2]:
        db = dy.sum((0, 2, 3))
    return dx, dw, db
