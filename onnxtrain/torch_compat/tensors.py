"""What PyTorch knows of a tensor and does not tell publicly: its storage's identity, views, fake tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import torch

from onnxtrain.torch_compat.internal import Internal


def _identity_of_storage(tensor: torch.Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _address_of_storage(tensor: torch.Tensor) -> int:
    """The memory's address; storages without memory differ by their tensors."""
    return tensor.untyped_storage().data_ptr() or -id(tensor)


def _tells_storages_apart(found: Callable[[torch.Tensor], int]) -> bool:
    empty = torch.empty(0)
    return found(empty) == found(empty.view(0)) != found(torch.empty(0))


storage_id = Internal[Callable[[torch.Tensor], int]](
    "storage_id",
    lambda: _identity_of_storage,
    why="tells whether two tensors share a storage, also where it has no memory (fake and empty tensors)",
    without=_address_of_storage,
    cost="empty tensors that share a storage are not recognized as views of each other",
    check=_tells_storages_apart,
).get()

is_view = Internal[Callable[[torch.Tensor], bool]](
    "is_view",
    lambda: torch.Tensor._is_view,
    why="whether autograd sees a tensor as a view: the one check in C++, without making its base a Python object",
    without=lambda tensor: tensor._base is not None,
    cost="about a microsecond for each result of a recorded program",
    check=lambda found: not found(torch.empty(2)) and found(torch.empty(2)[:1]),
).get()

is_contiguous_or_false = Internal[Callable[[torch.Tensor], bool]](
    "is_contiguous_or_false",
    lambda: importlib.import_module("torch._prims_common").is_contiguous_or_false,
    why="whether a fake tensor is contiguous at all sizes: is_contiguous() makes a guard of what it assumes",
    without=lambda tensor: tensor.is_contiguous(),
    cost="more captures: one for sizes at which a tensor is contiguous, one for others",
    check=lambda found: found(torch.empty(2, 3)) and not found(torch.empty(2, 3).mT),
).get()


class _NoTensor:
    """No tensor is one."""


_fake_tensor = Internal[type](
    "fake_tensor",
    lambda: importlib.import_module("torch._subclasses.fake_tensor").FakeTensor,
    why="tells the tensors of a capture, which have no elements, from real ones",
    without=_NoTensor,
    cost="numbers that follow from sizes are read from fake tensors: modules with such run in PyTorch",
    check=lambda found: issubclass(found, torch.Tensor),
).get()


def is_fake(tensor: object) -> bool:
    """Whether a tensor has a shape and a type, but no elements."""
    return isinstance(tensor, _fake_tensor)


def _empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


empty_strided_cpu = Internal[Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]](
    "empty_strided_cpu",
    lambda: importlib.import_module("torch._C._dynamo.guards")._empty_strided_cpu,
    why="what Inductor's programs call, past the dispatcher: 0.6 us instead of 1.7",
    without=_empty_strided,
    cost="each output of a small program takes about a microsecond longer",
    check=lambda found: found((2, 3), (3, 1), torch.float32).stride() == (3, 1),
    agrees=lambda found: found((2, 3), (1, 2), torch.int64).shape == (2, 3),
).get()
