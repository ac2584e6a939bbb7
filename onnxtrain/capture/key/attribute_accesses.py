"""Record which attributes of modules forward reads and sets."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
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
            elif _may_be_forward(sys._getframe(1).f_code.co_filename):
                reads.add((id(module_of_user(self)), ALL))
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
