"""Fresh memory of large tensors, in pages of 2 MB where the system has them.

From 32 MB on, glibc asks the system for new pages at each allocation and gives them back when it is freed. Writing
32 MB takes 8.4 ms then, and freeing it 1.5; in large pages 3.2 and 0.2 (Linux 6, 2 threads of a virtual Xeon). Smaller
tensors lie in memory that the process keeps: nothing is gained there.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxtrain.system.machine import current_machine

LARGE = 32 << 20  # bytes: the most to which glibc raises M_MMAP_THRESHOLD by itself
_PAGE = 2 << 20
_MADV_HUGEPAGE = 14
_WIDEST = 16  # bytes of an element, at most


def empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of any elements, with the type and device of `like`."""
    tensor = like.new_empty(shape)
    if tensor.nbytes >= LARGE and tensor.device.type == "cpu":
        _ask_for_large_pages(tensor)
    return tensor


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """The same of x's shape, where x is contiguous: 1.6 µs where the way above takes 3.8."""
    tensor = torch.empty_like(x)
    if x.numel() >= LARGE // _WIDEST and tensor.nbytes >= LARGE and tensor.device.type == "cpu":
        _ask_for_large_pages(tensor)
    return tensor


def _ask_for_large_pages(tensor: torch.Tensor) -> None:
    """Of the whole pages in it: no memory beside it is touched, and none is used that it would not use."""
    advise = _madvise() if current_machine().system.startswith("linux") else None
    begin = -(-tensor.data_ptr() // _PAGE) * _PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE
    if advise is not None and end > begin:
        advise(begin, end - begin, _MADV_HUGEPAGE)  # where the system refuses, its pages stay small


@functools.cache
def _madvise() -> Callable[[int, int, int], Any] | None:
    advise: Any = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None:
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise  # type: ignore[no-any-return]  # a function of C has no types
