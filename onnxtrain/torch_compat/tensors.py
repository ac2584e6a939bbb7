"""Access properties of tensors without a public name: the storage's identity, views, versions, fake tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from onnxtrain.torch_compat.internal import Internal, missing, required


def _storage_identity(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _weak_identity(tensor: torch.Tensor) -> int:
    """Return the identity of the storage by way of a weak reference, which fake tensors have as well."""
    return StorageWeakRef(tensor.untyped_storage()).cdata


def _distinguishes_storages(storage_id: Callable[[torch.Tensor], int]) -> bool:
    empty = torch.empty(0)
    return storage_id(empty) == storage_id(empty.view(0)) != storage_id(torch.empty(0))


def own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if its memory belongs to another library: numpy changes it without a new version."""
    is_shared = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return tensor.clone() if is_shared and not tensor.untyped_storage().resizable() else tensor


storage_id = Internal[Callable[[torch.Tensor], int]](
    "storage_id",
    lambda: _storage_identity,
    why="tells whether two tensors share a storage, even one without memory (fake and empty tensors)",
    fallback=_weak_identity,
    cost="a capture takes somewhat longer",
    check=_distinguishes_storages,
    agrees=lambda part: all(part(t) == _weak_identity(t) for t in (torch.empty(0), torch.empty(2), torch.empty(2)[1:])),
).get()

is_view = Internal[Callable[[torch.Tensor], bool]](
    "is_view",
    lambda: torch.Tensor._is_view,
    why="tells whether autograd sees a tensor as a view, in C++, without creating a Python object for its base",
    fallback=lambda tensor: tensor._base is not None,
    cost="each result of a recorded program takes about a microsecond longer",
    check=lambda part: not part(torch.empty(2)) and part(torch.empty(2)[:1]),
).get()

is_contiguous_or_false = Internal[Callable[[torch.Tensor], bool]](
    "is_contiguous_or_false",
    lambda: importlib.import_module("torch._prims_common").is_contiguous_or_false,
    why="tells whether a fake tensor is contiguous at all sizes; is_contiguous() adds guards",
    fallback=lambda tensor: tensor.is_contiguous(),
    cost="more captures: one for sizes at which a tensor is contiguous, one for others",
    check=lambda part: part(torch.empty(2, 3)) and not part(torch.empty(2, 3).mT),
).get()


class _AbsentFakeTensor:
    """The fallback for the class of fake tensors, of which no tensor is an instance."""


_fake_tensor = Internal[type](
    "fake_tensor",
    lambda: importlib.import_module("torch._subclasses.fake_tensor").FakeTensor,
    why="tells the tensors of a capture, which have no elements, from real ones",
    fallback=_AbsentFakeTensor,
    cost="numbers computed from sizes are read from fake tensors: modules that compute such numbers run in PyTorch",
    check=lambda part: issubclass(part, torch.Tensor),
).get()


def is_fake(tensor: object) -> bool:
    """Return whether a tensor has a shape and a dtype, but no elements."""
    return isinstance(tensor, _fake_tensor)


def _empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


empty_strided_cpu = Internal[Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]](
    "empty_strided_cpu",
    lambda: importlib.import_module("torch._C._dynamo.guards")._empty_strided_cpu,
    why="bypasses the dispatcher, as in Inductor's programs: 0.6 us instead of 1.7",
    fallback=_empty_strided,
    cost="each output of a small program takes about a microsecond longer",
    check=lambda part: part((2, 3), (3, 1), torch.float32).stride() == (3, 1),
    agrees=lambda part: part((2, 3), (1, 2), torch.int64).shape == (2, 3),
).get()

version_of: Callable[[torch.Tensor], int] = required(
    "version_of",
    lambda: attrgetter("_version"),
    "counts the mutations of a tensor and its views, which backward must notice; no public function does",
    check=lambda part: part(torch.zeros(1).add_(1)) == 1,
    fallback=missing("version_of"),
)


def _one_reference(tensor: torch.Tensor) -> int:
    return 1


use_count = Internal[Callable[[torch.Tensor], int]](
    "use_count",
    lambda: torch.Tensor._use_count,  # type: ignore[attr-defined]  # the stub lacks it
    why="tells whether C++, for example autograd, refers to a tensor, which counts as one Python reference",
    fallback=_one_reference,
    cost="the holders of a tensor are searched even if only autograd refers to it",
    check=lambda part: part(torch.empty(1)) == 1,
).get()


def _storage_use_count(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)


def _counts_sharers(use_count: Callable[[torch.UntypedStorage], int]) -> bool:
    tensor = torch.empty(2)
    storage = tensor.untyped_storage()
    before = use_count(storage)
    view = tensor[:1]
    during = use_count(storage)
    del view
    return before == use_count(storage) == during - 1


storage_use_count = Internal[Callable[[torch.UntypedStorage], int] | None](
    "storage_use_count",
    lambda: _storage_use_count,
    why="tells whether any tensor, for example one that autograd saved, shares a storage",
    fallback=None,
    cost="each replay of a recorded program copies its results",
    check=lambda part: part is not None and _counts_sharers(part),
).get()

negated_view = Internal[Callable[[torch.Tensor], torch.Tensor] | None](
    "negated_view",
    lambda: torch._neg_view,
    why="the only operator that makes a negated view of a real tensor, to check that such inputs are noticed",
    fallback=None,
    cost="the fast check of inputs is not used, and a step takes a few microseconds longer",
    check=lambda part: part is not None and part(torch.ones(1)).is_neg(),
).get()

TENSOR_GUARDS = Internal[Any](
    "tensor_guards",
    lambda: importlib.import_module("torch._C._dynamo.guards").TensorGuards,
    why="compares the dtypes, shapes and devices of all inputs and parameters in one call of C++",
    fallback=None,
    cost="a step takes about a microsecond longer for each tensor",
    check=callable,
)
