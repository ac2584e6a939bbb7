"""What PyTorch knows of a tensor and does not tell publicly: its storage's identity, views, fake tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from onnxtrain.torch_compat.internal import Internal, missing


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

version_of = Internal[Callable[[torch.Tensor], int]](
    "version_of",
    lambda: attrgetter("_version"),
    why="counts the in-place changes of a tensor, those of views of it too; nothing public tells of them",
    without=missing("version_of"),
    cost="modules with constants or custom autograd functions run in PyTorch",
    check=lambda found: found(torch.zeros(1).add_(1)) == 1,
).get()


def _one_reference(tensor: torch.Tensor) -> int:
    return 1


use_count = Internal[Callable[[torch.Tensor], int]](
    "use_count",
    lambda: torch.Tensor._use_count,  # type: ignore[attr-defined]  # the stub lacks it
    why="whether C++ holds a tensor, as autograd does: that counts as a reference from Python",
    without=_one_reference,
    cost="all holders of a tensor are searched where autograd alone holds it",
    check=lambda found: found(torch.empty(1)) == 1,
).get()

negated_view = Internal[Callable[[torch.Tensor], torch.Tensor] | None](
    "negated_view",
    lambda: torch._neg_view,
    why="the one operator that makes a negated view of a real tensor, to check that such inputs are noticed",
    without=None,
    cost="the check of inputs is not used, and a call takes a few microseconds longer",
    check=lambda found: found is not None and found(torch.ones(1)).is_neg(),
).get()

TENSOR_GUARDS = Internal[Any](
    "tensor_guards",
    lambda: importlib.import_module("torch._C._dynamo.guards").TensorGuards,
    why="compares the types, shapes and devices of all inputs and parameters in one call of C++",
    without=None,
    cost="a call takes about a microsecond longer for each tensor",
    check=callable,
)
