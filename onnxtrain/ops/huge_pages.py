"""Allocate large tensors in huge pages of 2 MB, if the system has them.

From 32 MB on, glibc maps new pages at each allocation and unmaps them when the memory is freed. Writing 32 MB then
takes 8.4 ms and freeing it 1.5 ms; in huge pages 3.2 and 0.2 (Linux 6, 2 threads of a virtual Xeon). Smaller tensors
use memory that the process keeps: huge pages gain nothing there.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxtrain.system.machine import current_machine

LARGE = 32 << 20  # bytes: glibc raises M_MMAP_THRESHOLD by itself up to this
_PAGE = 2 << 20
_MADV_HUGEPAGE = 14
_MAX_ITEMSIZE = 16  # bytes of an element, at most


def empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized contiguous tensor with the element type and device of `like`."""
    tensor = like.new_empty(shape)
    if tensor.nbytes >= LARGE and tensor.device.type == "cpu":
        _advise_huge_pages(tensor)
    return tensor


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor of the shape of x, which must be contiguous; takes 1.6 µs, `empty` 3.8."""
    tensor = torch.empty_like(x)
    if x.numel() >= LARGE // _MAX_ITEMSIZE and tensor.nbytes >= LARGE and tensor.device.type == "cpu":
        _advise_huge_pages(tensor)
    return tensor


def _advise_huge_pages(tensor: torch.Tensor) -> None:
    """Advise the kernel for the whole huge pages inside the tensor: memory around it is unaffected, none is added."""
    advise = _madvise() if current_machine().system.startswith("linux") else None
    begin = -(-tensor.data_ptr() // _PAGE) * _PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE
    if advise is not None and end > begin:
        advise(begin, end - begin, _MADV_HUGEPAGE)  # if the system refuses, the pages stay small


@functools.cache
def _madvise() -> Callable[[int, int, int], Any] | None:
    advise: Any = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None:
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise  # a C function has no types
