"""What a Python object is, as text that is the same in every process where the object would do the same.

Code is taken as it is loaded, so that a function exchanged at run time is another one. PyTorch, Python's own library,
the packages beneath PyTorch and onnxtrain itself are known by their versions; of all other classes and functions the
bytecode counts, with defaults, closures and class attributes. What cannot be told so raises: nothing is guessed.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import torch

import onnxtrain
from onnxtrain.capture.key.snapshot import Same
from onnxtrain.torch_compat.operators import OpOverload, OpOverloadPacket

# Packages that PyTorch and onnxtrain compute with: no forward is written in them.
BENEATH = ("sympy", "mpmath", "numpy", "networkx", "onnx", "onnx_ir", "ml_dtypes", "typing_extensions")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, types.EllipsisType)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_BUILT_IN = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, types.ClassMethodDescriptorType, OpOverload, OpOverloadPacket),
)
NOT_OF_A_CLASS = frozenset({
    "__doc__", "__module__", "__dict__", "__weakref__", "__annotations__", "__abstractmethods__", "_abc_impl",
    "__firstlineno__", "__static_attributes__", "__dataclass_fields__", "__dataclass_params__", "__match_args__",
    "__parameters__", "__orig_bases__", "__slotnames__",
})  # fmt: skip
_DEEPEST = 100
_LARGEST = 20_000


class NotStorableError(Exception):
    """Why a capture cannot be kept on disk."""


def _folders() -> tuple[str, ...]:
    packages = filter(None, map(importlib.util.find_spec, BENEATH))
    roots = filter(None, [torch.__file__, onnxtrain.__file__, *(spec.origin for spec in packages)])
    return tuple(root.removesuffix("__init__.py") for root in roots)


_FOLDERS = _folders()
_LIBRARY = tuple({f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "platstdlib")})
_PACKAGES = tuple({f"{sysconfig.get_path(kind)}/" for kind in ("purelib", "platlib")})


def is_known_by_version(file: str) -> bool:
    """Whether the code in this file is that of PyTorch, of a package beneath it, of Python or of onnxtrain."""
    if file.startswith((*_FOLDERS, "<frozen ")):
        return True
    if file.startswith(_PACKAGES):
        return False
    # What lies in a folder of packages within the library's own is no part of Python.
    return any(file.startswith(library) and "/site-packages/" not in file[len(library) - 1 :] for library in _LIBRARY)


@functools.cache
def versions() -> tuple[str, ...]:
    """The versions of all that is known by its version; of onnxtrain the sources, which change without one."""
    found = [sys.version, f"torch {torch.__version__} {torch.version.git_version}"]
    for name in (*BENEATH, "transformers"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} none")
    digest = hashlib.sha256()
    folder = Path(onnxtrain.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return (*found, f"onnxtrain {digest.hexdigest()}")


def digest(value: object) -> str:
    """A short name for a fingerprint."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]


class Fingerprints:
    """Fingerprints of objects around one module. An object that occurs again is named by its first place.

    Args:
        modules: the submodules, by id, with their paths.
    """

    def __init__(self, modules: Mapping[int, str]) -> None:
        self._modules = modules
        self._seen: dict[int, tuple[int, object]] = {}  # the object stays alive, so that its id is not given again
        self._classes: set[type] = set()

    def of(self, value: object, depth: int = 0) -> Hashable:
        """The fingerprint of any object.

        Raises:
            NotStorableError: it is one that another process could not have.
        """
        if isinstance(value, enum.Enum):
            return "enum", _name(type(value)), value.name
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            return type(value).__name__, repr(value)
        if isinstance(value, _NAMED):
            return "torch", str(value)
        if isinstance(value, Same):
            return self.of(value.value, depth)
        if id(value) in self._modules:
            return "module", self._modules[id(value)]
        if depth > _DEEPEST:
            raise NotStorableError(f"a {type(value).__name__} lies too deep in other objects")
        if id(value) in self._seen and not isinstance(value, tuple):
            return "again", self._seen[id(value)][0]
        self._seen[id(value)] = (len(self._seen), value)
        return self._of_kind(value, depth + 1)

    def _of_kind(self, value: object, depth: int) -> Hashable:
        if isinstance(value, type):
            return self.of_class(value, depth)
        for kind, describe in _KINDS.items():
            if isinstance(value, kind):
                return describe(self, value, depth)
        if type(value).__module__ in ("typing", "types") or isinstance(value, types.GenericAlias | types.UnionType):
            return "typing", _without_addresses(value)
        if isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):  # of functools.lru_cache
            return type(value).__name__, self.of(wrapped, depth)
        return self._object(value, depth)

    def of_class(self, kind: type, depth: int = 0) -> Hashable:
        """A class by its name; where it is not known by version, by what stands in it and in its bases too."""
        bases = (base for base in kind.__mro__ if not _is_known(base))
        return _name(kind), *((_name(base), *self._members(base, depth)) for base in bases)

    def _members(self, kind: type, depth: int) -> list[Hashable]:
        if kind in self._classes:
            return []
        self._classes.add(kind)
        found: list[Hashable] = []
        for name, value in sorted(vars(kind).items()):
            if name in NOT_OF_A_CLASS:
                continue
            found.append((name, self._part(value, depth, is_installed=is_in_package(file_of(kind)))))
        return found

    def _part(self, value: object, depth: int, *, is_installed: bool) -> Hashable:
        """What stands in a class or a closure.

        In those of an installed package an object that cannot be told counts by its class: the file that made it is
        compared, and what forward reads of a module's class is looked at by itself.
        """
        try:
            return self.of(value, depth + 1)
        except NotStorableError:
            if not is_installed:
                raise
            return "some", _name(type(value))

    def function(self, function: types.FunctionType, depth: int) -> Hashable:
        name = f"{function.__module__}.{function.__qualname__}"
        if is_known_by_version(function.__code__.co_filename):
            return "function", name, self._cells(function, depth)
        defaults = (function.__defaults__, function.__kwdefaults__)
        return "function", name, of_code(function.__code__), self.of(defaults, depth), self._cells(function, depth)

    def _cells(self, function: types.FunctionType, depth: int) -> Hashable:
        """A wrapper of a library holds the function that it wraps in its closure."""
        found: list[Hashable] = []
        is_installed = is_in_package(function.__code__.co_filename)
        for cell in function.__closure__ or ():
            try:
                found.append(self._part(cell.cell_contents, depth, is_installed=is_installed))
            except ValueError:  # not filled yet
                found.append("empty")
        return tuple(found)

    def _object(self, value: object, depth: int) -> Hashable:
        if isinstance(value, torch.Tensor | torch.nn.Module | torch.Generator) or not hasattr(value, "__dict__"):
            raise NotStorableError(f"forward may read a {_name(type(value))}, which only this process has")
        return "object", self.of_class(type(value), depth), self.of(vars(value), depth)

    def _several(self, value: Any, depth: int) -> Hashable:
        if len(value) > _LARGEST:
            raise NotStorableError(f"forward may read a {type(value).__name__} of {len(value)} elements")
        kind = _name(type(value))
        if isinstance(value, dict):
            parts: Any = [(self.of(k, depth), self.of(v, depth)) for k, v in value.items()]
        else:
            ordered = sorted(value, key=_order) if isinstance(value, set | frozenset) else value
            parts = [self.of(part, depth) for part in ordered]
        return kind, tuple(parts), self.of(getattr(value, "__dict__", None), depth)


_KINDS: Mapping[Any, Callable[[Fingerprints, Any, int], Hashable]] = {
    types.FunctionType: Fingerprints.function,
    types.MethodType: lambda f, v, depth: ("method", f.of(v.__func__, depth), f.of(v.__self__, depth)),
    functools.partial: lambda f, v, depth: ("partial", f.of((v.func, v.args, v.keywords), depth)),
    property: lambda f, v, depth: ("property", f.of((v.fget, v.fset), depth)),
    functools.cached_property: lambda f, v, depth: ("cached_property", f.of(v.func, depth)),
    staticmethod: lambda f, v, depth: ("staticmethod", f.of(v.__func__, depth)),
    classmethod: lambda f, v, depth: ("classmethod", f.of(v.__func__, depth)),
    _BUILT_IN: lambda f, v, depth: ("built in", type(v).__name__, _without_addresses(v)),
    types.ModuleType: lambda f, v, depth: ("Python module", v.__name__),
    contextvars.ContextVar: lambda f, v, depth: ("context variable", v.name, f.of(v.get(None), depth)),
    logging.Logger: lambda f, v, depth: ("logger", v.name),
    (list, tuple, dict, set, frozenset): Fingerprints._several,
    types.MappingProxyType: lambda f, v, depth: f._several(dict(v), depth),
}


def of_code(code: types.CodeType) -> str:
    """The hash of bytecode with all that is nested in it; its place in the file does not count."""
    found = hashlib.sha256()
    _feed(code, found.update)
    return found.hexdigest()[:32]


def _feed(code: types.CodeType, update: Callable[[bytes], object]) -> None:
    update(code.co_code)
    numbers = (code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    update(repr((numbers, names, code.co_exceptiontable)).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _feed(constant, update)
        elif isinstance(constant, frozenset):
            update(repr(sorted(map(repr, constant))).encode())
        else:
            update(repr(constant).encode())


def _is_known(kind: type) -> bool:
    file = file_of(kind)
    return is_known_by_version(file) if file else kind.__module__ in sys.builtin_module_names


def file_of(kind: type) -> str:
    """The file of a class's module; "" where it has none."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def is_in_package(file: str) -> bool:
    """Whether a file is part of an installed package, or of one that is known by its version."""
    return file.startswith(_PACKAGES) or is_known_by_version(file)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _order(value: object) -> str:
    """A place among the elements of a set that does not depend on where they lie in memory."""
    return _name(value) if isinstance(value, type) else f"{_name(type(value))} {_without_addresses(value)}"


def _without_addresses(value: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
