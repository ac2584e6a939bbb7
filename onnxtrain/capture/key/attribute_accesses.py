"""Record which attributes of modules forward reads and sets."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch.nn.modules import module as torch_module

from onnxtrain.capture.source_location import PACKAGE, PYTORCH
from onnxtrain.torch_compat.patch_points import MODULE_GETATTRIBUTE, MODULE_SETATTR
from onnxtrain.torch_compat.tracing import module_of_user

Attribute: TypeAlias = tuple[int, str]  # id of a module, name of an attribute; "*": all names
ALL = "*"


class AttributeAccesses:
    """The attributes that one or more runs of forward read and set.

    Attributes:
        reads: those that forward read or set in this run so far, or in earlier runs.
        sets: those that forward set in this run so far.
    """

    def __init__(self) -> None:
        self.reads: set[Attribute] = set()
        self.sets: set[Attribute] = set()
        self._reads_before_block: set[Attribute] = set()  # in this run; `reads` has those of the block
        self._set_first: set[Attribute] = set()  # in this run, before they were read
        self._read_first: set[Attribute] = set()  # in an earlier run

    @contextmanager
    def of_one_run(self) -> Iterator[None]:
        """Forward runs once in this block."""
        earlier = self.reads.copy()
        self.reads.clear()
        self._set_first, self.sets = set(), set()
        try:
            yield
        finally:
            self._read_first |= self.reads - self._set_first
            self.reads |= earlier

    @contextmanager
    def of_block(self) -> Iterator[set[Attribute]]:
        """The running forward calls a submodule in this block; yield what it reads or sets, complete at the end."""
        before, read_or_set = self._reads_before_block, set[Attribute]()
        self._reads_before_block = before | self.reads
        self.reads.clear()
        try:
            yield read_or_set
        finally:
            read_or_set |= self.reads
            self.reads |= self._reads_before_block
            self._reads_before_block = before

    def record_assignment(self, attribute: Attribute) -> None:
        """Record that forward sets an attribute."""
        if attribute not in self.reads and attribute not in self._reads_before_block:
            self._set_first.add(attribute)
        self.reads.add(attribute)
        self.sets.add(attribute)

    def set_first(self) -> set[Attribute]:
        """Return the attributes that this run sets before it reads them, if no earlier run read them first.

        Their values before the call do not matter.
        """
        read = (self.reads - self._set_first) | self._read_first
        all_read = {owner for owner, name in read if name == ALL}
        return {a for a in self._set_first - read if a[0] not in all_read}


class ReadTable(dict[str, Any]):
    """The `__dict__` of a module for its class's `__getattr__`, which runs each time forward reads a submodule.

    It reports the attributes that are read by name, as diffusers' does; any other use counts as reading all of them.

    Args:
        original: gets the changes.
        record: takes the name of an attribute, or ALL.
    """

    def __init__(self, original: dict[str, Any], record: Callable[[str], None]) -> None:
        super().__init__(original)
        self._original, self._record = original, record

    def __contains__(self, name: object) -> bool:
        self._record(name if isinstance(name, str) else ALL)
        return name in self._original

    def __getitem__(self, name: str) -> Any:
        self._record(name)
        return self._original[name]

    def get(self, name: str, default: Any = None) -> Any:
        self._record(name)
        return self._original.get(name, default)


def _using_all(name: str) -> Callable[..., Any]:
    def method(self: ReadTable, *args: Any, **kwargs: Any) -> Any:
        self._record(ALL)
        return getattr(self._original, name)(*args, **kwargs)

    return method


for _name in (
    "__delitem__", "__eq__", "__ge__", "__gt__", "__ior__", "__iter__", "__le__", "__len__", "__lt__", "__ne__",
    "__or__", "__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "copy", "items", "keys", "pop", "popitem",
    "setdefault", "update", "values",
):  # fmt: skip
    setattr(ReadTable, _name, _using_all(_name))


@contextmanager
def attribute_reads(accesses: AttributeAccesses | None = None) -> Iterator[set[Attribute]]:
    """Collect the attributes of modules that this thread reads or sets: forward depends on no other.

    Args:
        accesses: also records which of them are set before they are read.
    """
    owner = threading.get_ident()
    accesses = accesses or AttributeAccesses()
    reads = accesses.reads
    original_get, original_set = MODULE_GETATTRIBUTE.original, MODULE_SETATTR.original

    def read(self: torch.nn.Module, name: str) -> Any:
        if threading.get_ident() == owner:
            if name != "__dict__":
                reads.add((id(module_of_user(self)), name))
            elif _may_be_forward((code := sys._getframe(1).f_code).co_filename):
                own = id(module_of_user(self))
                if code.co_name == "__getattr__":
                    return ReadTable(original_get(self, name), lambda key: reads.add((own, key)))
                reads.add((own, ALL))
        return original_get(self, name)

    def write(self: torch.nn.Module, name: str, value: Any) -> None:
        if threading.get_ident() == owner and _may_be_forward(sys._getframe(1).f_code.co_filename):
            accesses.record_assignment((id(module_of_user(self)), name))
        original_set(self, name, value)

    with MODULE_GETATTRIBUTE.wrapped(lambda original: read), MODULE_SETATTR.wrapped(lambda original: write):
        yield reads


def _may_be_forward(file: str) -> bool:
    """Return whether a file may contain code of a forward.

    Torch.export, nn.Module and onnxtrain read every `__dict__`.
    """
    if file.startswith(PYTORCH):
        return file.startswith(f"{PYTORCH}nn/") and file != torch_module.__file__
    return not file.startswith(PACKAGE)
