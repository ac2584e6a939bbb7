"""The state of a block that its forward can read, as keys that are equal for blocks with the same state.

A submodule is named by its path in the block. Attributes are compared by value, containers and plain objects by their
contents. Functions, classes and tensors are compared by identity. Any other object compares unequal, even to itself: an
iterator, for example, changes when forward reads it.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from torch.nn.modules import module as torch_module

from onnxtrain.capture.blocks.call_arguments import NotReusableError
from onnxtrain.capture.blocks.parameter_table import registered
from onnxtrain.capture.key.snapshot import CONTAINER_TYPES, SINGLETON_TYPES, VALUE_TYPES, slots, submodules
from onnxtrain.capture.node_storage import layout_of
from onnxtrain.capture.structure import Identity, constant_key
from onnxtrain.torch_compat.fake_tensors import FakeTensor

Read: TypeAlias = tuple[str, str]  # the path of a submodule in the block, the name of an attribute; "*": all of them

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_BOOKKEEPING = frozenset(torch.nn.Module().__dict__) - {"training"}
_MAX_DEPTH = 4  # levels of containers and objects that are compared by their contents
# A trace does not depend on the state of these, or contains them as constants.
_IDENTITIES = (torch.Tensor, type, FunctionType, BuiltinFunctionType, ModuleType, logging.Logger)


class Block:
    """A module with its submodules, as it is now: keys of objects are cached.

    Attributes:
        module: the module.
        submodules: the module and its submodules, each once, by their paths in it.
        tensors: its parameters and buffers, by the path of the submodule and their names.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.submodules = dict(submodules(module))
        self.paths = {id(submodule): path for path, submodule in self.submodules.items()}
        self.tensors: dict[Read, torch.Tensor] = {
            (path, name): tensor
            for path, submodule in self.submodules.items()
            for table in ("_parameters", "_buffers")
            for name, tensor in registered(submodule, table).items()
            if tensor is not None
        }
        self._keys: dict[int, Hashable] = {}  # of objects, by their ids
        self._key_of_others: Callable[[object], Hashable] = _never_equal

    def structure(self) -> Hashable:
        """Return the classes, the training flags and the types of the tensors.

        Raises:
            NotReusableError: there are hooks or sparse tensors.
        """
        if any(getattr(torch_module, f"_global{name}") for name in _HOOKS):
            raise NotReusableError
        if any(tensor.layout is not torch.strided for tensor in self.tensors.values()):
            raise NotReusableError
        parts: list[Hashable] = []
        for path, submodule in self.submodules.items():
            attributes = submodule.__dict__
            if any(attributes[name] for name in _HOOKS):
                raise NotReusableError
            children = [(name, child and self.paths[id(child)]) for name, child in attributes["_modules"].items()]
            names = [
                (name, tensor is None)
                for table in ("_parameters", "_buffers")
                for name, tensor in registered(submodule, table).items()
            ]
            parts.append((path, type(submodule), attributes["training"], tuple(children), tuple(names)))
        return tuple(parts), tuple(map(tensor_key, self.tensors.values()))

    def attributes(self, reads: Iterable[Read]) -> dict[Read, Hashable]:
        """Return the keys of these attributes."""
        keys: dict[Read, Hashable] = {}
        for path, name in reads:
            submodule = self.submodules[path]
            names = submodule.__dict__.keys() - _BOOKKEEPING if name == "*" else {name}
            for attribute in names:
                if attribute in submodule.__dict__:
                    keys[path, attribute] = self.key_of(submodule.__dict__[attribute])
                elif name != "*":
                    keys[path, attribute] = self._key_of_class_attribute(type(submodule), attribute)
        return keys

    def all_attributes(self) -> dict[Read, Hashable]:
        """Return the keys of all attributes of the instances, to see which have changed."""
        self._key_of_others = Identity
        try:
            return self.attributes([(path, "*") for path in self.submodules])
        finally:
            self._key_of_others = _never_equal
            self._keys.clear()

    def _key_of_class_attribute(self, kind: type, name: str) -> Hashable:
        value = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
        return Identity(value) if hasattr(type(value), "__get__") else self.key_of(value)

    def reads_in(self, reads: Iterable[tuple[int, str]]) -> list[Read] | None:
        """Translate ids of modules to paths; None if one is not in this block. Bookkeeping of modules is skipped."""
        own_reads: list[Read] = []
        for owner, name in reads:
            path = self.paths.get(owner)
            if path is None:
                return None
            if name not in _BOOKKEEPING:
                own_reads.append((path, name))
        return own_reads

    def ids_of(self, reads: Iterable[Read]) -> Iterator[tuple[int, str]]:
        """Yield the reads with the ids of this block's modules."""
        return ((id(self.submodules[path]), name) for path, name in reads)

    def key_of(self, value: Any, depth: int = _MAX_DEPTH) -> Hashable:
        """Return a key that is equal for values that forward cannot tell apart."""
        if isinstance(value, SINGLETON_TYPES) or (isinstance(value, VALUE_TYPES) and not isinstance(value, type)):
            return constant_key(value)
        if isinstance(value, torch.nn.Module):
            path = self.paths.get(id(value))
            return Identity(value) if path is None else ("submodule", path)
        if isinstance(value, _IDENTITIES):
            return Identity(value)
        if not depth:
            return self._key_of_others(value)
        key = self._keys.get(id(value))
        if key is None:
            self._keys[id(value)] = self._key_of_others(value)  # of an object that contains itself
            key = self._keys[id(value)] = self._key_of_contents(value, depth - 1)
        return key

    def _key_of_contents(self, value: Any, depth: int) -> Hashable:
        kind = type(value)
        if isinstance(value, MethodType):
            return kind, Identity(value.__func__), self.key_of(value.__self__, depth)
        if kind is functools.partial:
            return kind, *(self.key_of(part, depth) for part in (value.func, value.args, value.keywords))
        attributes = getattr(value, "__dict__", None)
        if kind is list or (isinstance(value, tuple) and not attributes):
            return kind, *(self.key_of(item, depth) for item in value)
        if kind in (dict, OrderedDict):
            return kind, *((constant_key(k), self.key_of(v, depth)) for k, v in value.items())
        if kind in (set, frozenset):
            return kind, frozenset(map(constant_key, value))
        if type(attributes) is not dict or hasattr(kind, "__next__") or isinstance(value, CONTAINER_TYPES):
            return self._key_of_others(value)
        in_slots = ((name, self.key_of(getattr(value, name, None), depth)) for name in slots(value))
        return kind, *in_slots, *((name, self.key_of(item, depth)) for name, item in attributes.items())


def tensor_key(tensor: torch.Tensor) -> Hashable:
    """Return the properties of a tensor that forward can read, except its elements and its memory.

    The key of a parameter is that of the fake tensor which replaces it in a trace.
    """
    kind: type = FakeTensor if type(tensor) is torch.nn.Parameter else type(tensor)
    return (
        *(kind, tensor.dtype, tensor.device, tensor.layout, layout_of(tensor)),
        *(tensor.requires_grad, tensor.is_leaf, tensor.is_neg(), tensor.is_conj(), tensor.is_inference()),
    )


def sharing(tensors: Iterable[torch.Tensor], storages: Iterable[int]) -> Hashable:
    """Return which of the tensors are one object, and which share their storage."""
    return _first_occurrences(map(id, tensors)), _first_occurrences(storages)


def structure_numbers(module: torch.nn.Module) -> Mapping[int, int]:
    """Number the modules with submodules by the classes and names in them: equal modules have equal numbers."""
    numbers: dict[Hashable, int] = {}
    number_of: dict[int, int] = {}

    def visit(module: torch.nn.Module) -> int:
        number = number_of.get(id(module))
        if number is None:
            children = tuple((name, child and visit(child)) for name, child in module.__dict__["_modules"].items())
            number = number_of[id(module)] = numbers.setdefault((type(module), children), len(numbers))
        return number

    visit(module)
    return {id(m): number_of[id(m)] for _, m in submodules(module) if any(m.__dict__["_modules"].values())}


def _first_occurrences(values: Iterable[int]) -> tuple[int, ...]:
    first: dict[int, int] = {}
    return tuple(first.setdefault(value, index) for index, value in enumerate(values))


def _never_equal(_: object) -> Hashable:
    return Identity(object())
