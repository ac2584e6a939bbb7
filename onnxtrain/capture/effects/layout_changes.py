"""Refuse in-place changes of the shape, strides or requires_grad of inputs, parameters and buffers: `x.t_()`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain.capture.node_storage import layout_of
from onnxtrain.errors import ChangedArgumentError
from onnxtrain.torch_compat.dispatch import function_modes_disabled


class Layouts:
    """The shapes and strides of a call's tensors, parameters and buffers before forward."""

    def __init__(self, module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        state = itertools.chain(module.named_parameters(), module.named_buffers())
        named = [*((f"tensor {i} of the call", t) for i, t in enumerate(tensors)), *state]
        with function_modes_disabled():
            self._before = [(name, tensor, layout_of(tensor), tensor.requires_grad) for name, tensor in named]
        self._where = type(module).__name__

    def check(self) -> None:
        """Check after forward that no shape, stride or requires_grad has changed.

        Raises:
            ChangedArgumentError: forward changed one in place.
        """
        with function_modes_disabled():
            self._check()

    def _check(self) -> None:
        for name, tensor, layout, requires_grad in self._before:
            if layout_of(tensor) != layout:
                raise ChangedArgumentError(
                    "forward changes the shape or strides of its argument or buffer in place",
                    where=self._where,
                    expected=f"{name} with {_describe(layout)}",
                    got=_describe(layout_of(tensor)),
                    todo="the module runs in PyTorch; write x = x.t() instead of x.t_()",
                )
            if requires_grad and not tensor.requires_grad:
                raise ChangedArgumentError(
                    "forward detaches its argument in place",
                    where=self._where,
                    expected=f"{name} with requires_grad=True",
                    got="requires_grad=False",
                    todo="the module runs in PyTorch; write x = x.detach() instead of x.detach_()",
                )


def _describe(layout: tuple[Any, ...]) -> str:
    names = ("shape", "strides", "offset")
    return " and ".join(f"{name} ({', '.join(map(str, part))})" for name, part in zip(names, layout, strict=False))
