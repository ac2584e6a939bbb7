"""Access fake tensors and their modes, in which a capture runs operators to learn shapes and dtypes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from onnxtrain.torch_compat.internal import Absent, AbsentError, Internal, accepts, can_be_entered, required
from onnxtrain.torch_compat.modes import TorchDispatchMode

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
else:
    _why = "torch.export traces with fake tensors"

    def _class(name, parent, fallback=Absent):
        find = lambda: getattr(importlib.import_module("torch._subclasses.fake_tensor"), name)
        return required(name, find, _why, lambda part: issubclass(part, parent), fallback)

    FakeTensor, FakeTensorMode = _class("FakeTensor", torch.Tensor), _class("FakeTensorMode", TorchDispatchMode)
    DataDependentOutputException = _class("DataDependentOutputException", Exception, AbsentError)
    DynamicOutputShapeException = _class("DynamicOutputShapeException", Exception, AbsentError)
    UnsupportedOperatorException = _class("UnsupportedOperatorException", Exception, AbsentError)


def _from_module(name: str) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module("torch._subclasses.fake_tensor"), name)


inside_kernel: Callable[[FakeTensorMode], AbstractContextManager[Any]] = required(
    "inside_kernel",
    _from_module("in_kernel_invocation_manager"),
    "turns a meta tensor into a fake tensor, as PyTorch does",
    check=lambda part: accepts(part, "fake_mode"),
)
without_fakes: Callable[[], AbstractContextManager[Any]] = required(
    "without_fakes",
    _from_module("unset_fake_temporarily"),
    "runs functions that read elements on real tensors",
    check=can_be_entered,
)
fake_mode_of: Callable[[Sequence[torch.Tensor]], Any] = required(
    "fake_mode_of",
    lambda: importlib.import_module("torch._guards").detect_fake_mode,
    "the mode of the running capture",
    check=lambda part: isinstance(part([]), FakeTensorMode | None),
)
contiguous_strides: Callable[[Sequence[Any]], tuple[Any, ...]] = required(
    "contiguous_strides",
    lambda: importlib.import_module("torch._prims_common").make_contiguous_strides_for,
    "computes strides of symbolic sizes as PyTorch does, so that their expressions compare equal",
    check=lambda part: tuple(part((2, 3, 4))) == (12, 4, 1),
)


has_symbolic_sizes = Internal[Callable[[torch.Tensor], bool]](
    "has_symbolic_sizes",
    lambda: attrgetter("_has_symbolic_sizes_strides"),
    why="PyTorch treats tensors with symbolic sizes differently; called for each result on fake tensors",
    fallback=lambda tensor: any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride())),
    cost="a capture takes somewhat longer",
    check=lambda part: part(torch.empty(2)) is False,
).get()


def _remembered_item() -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]]:
    return lambda tensor: tensor.item_memo, lambda tensor, item: setattr(tensor, "item_memo", item)


def _remembers_items(part: tuple[Callable[[Any], Any], Callable[[Any, Any], None]]) -> bool:
    read, write = part
    with FakeTensorMode() as mode:
        tensor = FakeTensor(mode, torch.empty((), dtype=torch.int64, device="meta"), torch.device("cpu"))
        write(tensor, 3)
        return read(tensor) == 3 and tensor.item() == 3


# Of a fake tensor: its item if that is known, else None; and set it, until the tensor is changed in place.
remembered_item, remember_item = Internal[Any](
    "items_of_fake_tensors",
    _remembered_item,
    why="a tensor that forward computes from sizes alone has an item that these sizes determine",
    fallback=(lambda tensor: None, lambda tensor, item: None),
    cost="forwards that use such a tensor as a size (Longformer, LED) have graph breaks",
    check=_remembers_items,
).get()


def _find_gradient_modes() -> tuple[Any, Any]:
    module = importlib.import_module("torch._subclasses.functional_tensor")
    return module.FunctionalTensorMode, module.dispatch_functionalize


FunctionalTensorMode, dispatch_functionalize = Internal[Any](
    "functional_tensors",
    _find_gradient_modes,
    why="functionalizes the traced gradient of an operator",
    fallback=(None, None),
    cost="operators without a definition get their gradients from autograd at run time",
    check=lambda part: issubclass(part[0], TorchDispatchMode) and callable(part[1]),
).get()
