"""Access the classes, schemas and implementations of the operators of torch.ops."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from onnxtrain.torch_compat.internal import Internal, missing, required

if TYPE_CHECKING:
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
else:  # the classes have no public name, but their instances have

    class _AbsentOperator:
        """The fallback for HigherOrderOperator, of which onnxtrain has subclasses. No trace calls them."""

        def __init__(self, name):
            self.__name__ = name

    OpOverload = type(torch.ops.aten.add.Tensor)
    OpOverloadPacket = type(torch.ops.aten.add)
    HigherOrderOperator = required(
        "HigherOrderOperator",
        lambda: importlib.import_module("torch._ops").HigherOrderOperator,
        "the class of operators that take graphs as arguments",
        check=lambda part: issubclass(part, type(torch.ops.aten.add.Tensor).__mro__[1]),
        fallback=_AbsentOperator,
    )


def name_and_overload(operator: OpOverload) -> tuple[str, str]:
    """Return for example "aten::add" and "Tensor"; the overload without a name is "default"."""
    name, _, overload = operator.name().partition(".")
    return name, overload or "default"


schema_of = Internal[Callable[[OpOverload], Any]](
    "schema_of",
    lambda: attrgetter("_schema"),
    why="tells the names, defaults and aliases of an operator's arguments; no public function does",
    fallback=missing("schema_of"),
    cost="every module runs in PyTorch",
    required=True,
    check=lambda part: [a.name for a in part(torch.ops.aten.add.Tensor).arguments] == ["self", "other", "alpha"],
).get()


def written_arguments(operator: OpOverload) -> list[str]:
    """Return the names of the arguments that an operator mutates."""
    return [a.name for a in schema_of(operator).arguments if a.alias_info and a.alias_info.is_write]


def _identity(operator: Callable[..., Any]) -> Callable[..., Any]:
    return operator


direct_call = Internal[Callable[[Any], Callable[..., Any]]](
    "direct_call",
    lambda: attrgetter("_op"),
    why="OpOverload.__call__ only passes its arguments on to it, which takes 0.5 us",
    fallback=_identity,
    cost="each ATen operator of a program takes 0.5 us longer",
    check=lambda part: callable(part(torch.ops.aten.add.Tensor)),
    agrees=lambda part: torch.equal(part(torch.ops.aten.neg.default)(torch.ones(2)), -torch.ones(2)),
).get()
