"""Trace `tensor.data` as a detach: PyTorch's tracer does not record which tensor it was read from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from onnxtrain.capture import source_location
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat.patch_points import TENSOR_DATA


@contextmanager
def trace_data_as_detach() -> Iterator[None]:
    """Trace a read of `tensor.data` on this thread as `tensor.detach()`, and refuse an assignment to it.

    Raises:
        CaptureError: forward assigns to `tensor.data`.
    """
    owner = threading.get_ident()
    original = TENSOR_DATA.original

    def read(tensor: torch.Tensor) -> torch.Tensor:
        traced = threading.get_ident() == owner and get_proxy_mode() is not None
        data: torch.Tensor = tensor.detach() if traced else original.__get__(tensor)
        return data

    def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if threading.get_ident() == owner and get_proxy_mode() is not None:
            raise CaptureError(
                "an assignment to tensor.data inside forward cannot be captured: a graph would not repeat it",
                where=source_location.of_caller(),
                todo="the module runs in PyTorch; copy into the tensor: tensor.copy_(value)",
            )
        original.__set__(tensor, value)

    with TENSOR_DATA.wrapped(lambda _: property(read, assign)):
        yield
