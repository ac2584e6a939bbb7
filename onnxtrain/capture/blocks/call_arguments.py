"""The arguments and the results of a block as a list of tensors, and a key for everything else in them.

Supported are Python's tuples, lists and dicts of tensors, constants and symbolic sizes. A block with any other
argument, such as a cache that it fills, is traced by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from onnxtrain.capture.structure import constant_key
from onnxtrain.torch_compat.fake_tensors import FakeTensor
from onnxtrain.torch_compat.symbols import unreplaced_expression

_CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class NotReusableError(Exception):
    """A block has to be traced by itself."""


def flatten(value: Any, tensors: list[torch.Tensor]) -> Hashable:
    """Append the tensors in a value to `tensors`; return a key of everything else.

    Raises:
        NotReusableError: the value has a part that is neither a tensor, nor a constant, nor a container of these.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if not isinstance(value, FakeTensor) or value.constant is not None:
            raise NotReusableError
        tensors.append(value)
        return "tensor"
    if kind is torch.SymInt:
        return "size", unreplaced_expression(value)
    if kind in _CONSTANTS:
        return constant_key(value)
    if kind in (tuple, list):
        return kind, *(flatten(item, tensors) for item in value)
    if kind is dict:
        return kind, *((constant_key(key), flatten(item, tensors)) for key, item in value.items())
    raise NotReusableError


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value that can be flattened."""
    tensors: list[torch.Tensor] = []
    flatten(value, tensors)
    return tensors


_TENSOR = object()  # stands for a tensor


def without_tensors(value: Any) -> Any:
    """Copy a flattened value, for `rebuild`."""
    return rebuild(value, itertools.repeat(_TENSOR))


def rebuild(value: Any, tensors: Iterator[Any]) -> Any:
    """Copy a flattened value, with other tensors."""
    kind = type(value)
    if isinstance(value, torch.Tensor) or value is _TENSOR:
        return next(tensors)
    if kind in (tuple, list):
        return kind([rebuild(item, tensors) for item in value])
    return {key: rebuild(item, tensors) for key, item in value.items()} if kind is dict else value


def argument_key(argument: Any, key_of_node: Callable[[torch.fx.Node], Hashable]) -> Hashable:
    """Return a key of the arguments of a traced call.

    Raises:
        NotReusableError: an argument is not supported.
    """
    if isinstance(argument, torch.fx.Node):
        return key_of_node(argument)
    if isinstance(argument, (tuple, list)):
        return tuple, *(argument_key(item, key_of_node) for item in argument)
    if isinstance(argument, dict):
        return dict, *((key, argument_key(item, key_of_node)) for key, item in argument.items())
    if isinstance(argument, slice):
        parts = (argument.start, argument.stop, argument.step)
        return slice, *(argument_key(part, key_of_node) for part in parts)
    if type(argument) not in _CONSTANTS:
        raise NotReusableError
    return constant_key(argument)
