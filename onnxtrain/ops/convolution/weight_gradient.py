"""The gradient of a convolution's weight by a compiled kernel (`native/convolution.cpp`), a candidate beside oneDNN's.

It reads pictures that lie channels-last, and copies others to that order. How fast it is:
docs/explanation/kernel-choice.md.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain.native import Library, pointers, text

LIBRARY = Library("convolution", text("vectors.h", "tiles.h", "convolution.cpp"), {"weight_gradient": "ppppi"})


def weight_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
) -> torch.Tensor:
    """The gradient of w[o, c, k, l], of a convolution of x[n, c, h, w] without groups whose result's is dy[n, o, e, f].

    Float32 on a CPU; PyTorch's kernel runs where there are no elements, and until the compiled one is there.
    """
    if LIBRARY.functions is None or not (dy.numel() and x.numel() and w.numel()):
        how = (None, strides, pads, dilations, False, [0, 0], 1, [False, True, False])
        return torch.ops.aten.convolution_backward.default(dy, x, w, *how)[1]  # type: ignore[no-any-return]
    dy, x = (v.contiguous(memory_format=torch.channels_last) for v in (dy, x))
    axes = zip(x.shape[2:], dy.shape[2:], w.shape[2:], strides, pads, dilations, strict=True)
    sizes = _sizes((x.size(0), x.size(1), dy.size(1), *(number for axis in axes for number in axis)))
    dw = torch.empty(w.shape, dtype=w.dtype)
    LIBRARY.functions.weight_gradient(*pointers(x, dy, dw), ctypes.addressof(sizes), torch.get_num_threads())
    return dw


@functools.lru_cache(maxsize=1024)
def _sizes(numbers: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """As the kernel reads them; kept, as the address alone is handed on."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def convolution_gradients(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, *how: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x, w and b, of those that the mask names.

    Args:
        dy: the gradient of the result.
        x: the pictures.
        w: the weight.
        how: strides, pads, dilations and the mask.
    """
    *geometry, mask = how
    dx, dw, db = None, None, None
    if mask[0]:
        only_x = (None, *geometry, False, [0, 0], 1, [True, False, False])
        dx = torch.ops.aten.convolution_backward.default(dy, x, w, *only_x)[0]
    if mask[1]:
        dw = weight_gradient(dy, x, w, *geometry)
    if mask[2]:
        db = dy.sum((0, 2, 3))
    return dx, dw, db
