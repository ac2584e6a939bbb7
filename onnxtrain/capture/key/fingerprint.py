"""Fingerprints of Python objects: equal in all processes in which the object would behave the same.

The fingerprint of a function is that of its loaded bytecode, so that a function replaced at run time has another one.
PyTorch, Python's library, the packages below PyTorch and onnxtrain itself are identified by their versions; all other
classes and functions by their bytecode, defaults, closures and class attributes. An object without a reliable
fingerprint raises an error.
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
from onnxtrain.capture.structure import Identity
from onnxtrain.torch_compat.operators import OpOverload, OpOverloadPacket

# Packages that PyTorch and onnxtrain compute with, and that contain no module's forward.
CORE_PACKAGES = ("sympy", "mpmath", "numpy", "networkx", "onnx", "onnx_ir", "ml_dtypes", "typing_extensions")
_VALUE_TYPES = (type(None), bool, int, float, complex, str, bytes, range, slice, types.EllipsisType)
_TORCH_VALUE_TYPES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_BUILT_IN_TYPES = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, types.ClassMethodDescriptorType, OpOverload, OpOverloadPacket),
)
CLASS_BOOKKEEPING = frozenset({
    "__doc__", "__module__", "__dict__", "__weakref__", "__annotations__", "__abstractmethods__", "_abc_impl",
    "__firstlineno__", "__static_attributes__", "__dataclass_fields__", "__dataclass_params__", "__match_args__",
    "__parameters__", "__orig_bases__", "__slotnames__",
})  # fmt: skip
_MAX_DEPTH = 100
_MAX_ELEMENTS = 20_000


class NotStorableError(Exception):
    """The reason why a capture cannot be stored on disk."""


def _folders() -> tuple[str, ...]:
    packages = filter(None, map(importlib.util.find_spec, CORE_PACKAGES))
    roots = filter(None, [torch.__file__, onnxtrain.__file__, *(spec.origin for spec in packages)])
    return tuple(root.removesuffix("__init__.py") for root in roots)


_FOLDERS = _folders()
_LIBRARY = tuple({f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "platstdlib")})
_PACKAGES = tuple({f"{sysconfig.get_path(kind)}/" for kind in ("purelib", "platlib")})


def is_known_by_version(file: str) -> bool:
    """Return whether a file is part of PyTorch, of a package below it, of Python or of onnxtrain."""
    if file.startswith((*_FOLDERS, "<frozen ")):
        return True
    if file.startswith(_PACKAGES):
        return False
    # A folder of installed packages inside the library's own is not part of Python.
    return any(file.startswith(library) and "/site-packages/" not in file[len(library) - 1 :] for library in _LIBRARY)


@functools.cache
def versions() -> tuple[str, ...]:
    """Return the versions of everything that `is_known_by_version`, and a hash of onnxtrain's own sources."""
    identifiers = [sys.version, f"torch {torch.__version__} {torch.version.git_version}"]
    for name in (*CORE_PACKAGES, "transformers"):
        try:
            identifiers.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            identifiers.append(f"{name} none")
    digest = hashlib.sha256()
    folder = Path(onnxtrain.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return (*identifiers, f"onnxtrain {digest.hexdigest()}")


def digest(value: object) -> str:
    """Return a short hash of a fingerprint."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]


class Fingerprints:
    """Makes the fingerprints of objects around one module; an object that occurs again is a reference to the first.

    Args:
        modules: the paths of the submodules, by id.
    """

    def __init__(self, modules: Mapping[int, str]) -> None:
        self._modules = modules
        self._objects: dict[int, tuple[int, object]] = {}  # keeps the objects alive, so that no id is reused
        self._classes: set[type] = set()

    def fingerprint(self, value: object, depth: int = 0) -> Hashable:
        """Return the fingerprint of any object.

        Raises:
            NotStorableError: the object exists in this process only.
        """
        if isinstance(value, enum.Enum):
            return "enum", _name(type(value)), value.name
        if isinstance(value, _VALUE_TYPES) and type(value) in _VALUE_TYPES:
            return type(value).__name__, repr(value)
        if isinstance(value, _TORCH_VALUE_TYPES):
            return "torch", str(value)
        if isinstance(value, Identity):
            return self.fingerprint(value.value, depth)
        if id(value) in self._modules:
            return "module", self._modules[id(value)]
        if depth > _MAX_DEPTH:
            raise NotStorableError(f"a {type(value).__name__} is nested in more than {_MAX_DEPTH} objects")
        if id(value) in self._objects and not isinstance(value, tuple):
            return "again", self._objects[id(value)][0]
        self._objects[id(value)] = (len(self._objects), value)
        return self._of_kind(value, depth + 1)

    def _of_kind(self, value: object, depth: int) -> Hashable:
        if isinstance(value, type):
            return self.fingerprint_class(value, depth)
        for kind, fingerprint in _FINGERPRINT_OF_TYPE.items():
            if isinstance(value, kind):
                return fingerprint(self, value, depth)
        if type(value).__module__ in ("typing", "types") or isinstance(value, types.GenericAlias | types.UnionType):
            return "typing", _without_addresses(value)
        if isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):  # of functools.lru_cache
            return type(value).__name__, self.fingerprint(wrapped, depth)
        return self._object(value, depth)

    def fingerprint_class(self, kind: type, depth: int = 0) -> Hashable:
        """Return the name of a class and, unless it is known by version, the members of it and its bases."""
        bases = (base for base in kind.__mro__ if not _is_known(base))
        return _name(kind), *((_name(base), *self._members(base, depth)) for base in bases)

    def _members(self, kind: type, depth: int) -> list[Hashable]:
        if kind in self._classes:
            return []
        self._classes.add(kind)
        is_installed = is_in_package(file_of(kind))
        return [
            (name, self._member(value, depth, is_installed=is_installed))
            for name, value in sorted(vars(kind).items())
            if name not in CLASS_BOOKKEEPING
        ]

    def _member(self, value: object, depth: int, *, is_installed: bool) -> Hashable:
        """Return the fingerprint of a value in a class or a closure.

        In those of an installed package, an object without a fingerprint is represented by its class: the file that
        made it is compared, and the attributes that forward reads from a module's class are checked separately.
        """
        try:
            return self.fingerprint(value, depth + 1)
        except NotStorableError:
            if not is_installed:
                raise
            return "any", _name(type(value))

    def function(self, function: types.FunctionType, depth: int) -> Hashable:
        name = f"{function.__module__}.{function.__qualname__}"
        if is_known_by_version(function.__code__.co_filename):
            return "function", name, self._cells(function, depth)
        defaults = (function.__defaults__, function.__kwdefaults__)
        return (
            "function",
            name,
            fingerprint_code(function.__code__),
            self.fingerprint(defaults, depth),
            self._cells(function, depth),
        )

    def _cells(self, function: types.FunctionType, depth: int) -> Hashable:
        """Return the fingerprints of a closure: a library's wrapper holds the wrapped function there."""
        contents: list[Hashable] = []
        is_installed = is_in_package(function.__code__.co_filename)
        for cell in function.__closure__ or ():
            try:
                contents.append(self._member(cell.cell_contents, depth, is_installed=is_installed))
            except ValueError:  # not filled yet
                contents.append("empty")
        return tuple(contents)

    def _object(self, value: object, depth: int) -> Hashable:
        if isinstance(value, torch.Tensor | torch.nn.Module | torch.Generator) or not hasattr(value, "__dict__"):
            raise NotStorableError(f"forward may read a {_name(type(value))}, which exists in this process only")
        return "object", self.fingerprint_class(type(value), depth), self.fingerprint(vars(value), depth)

    def _container(self, value: Any, depth: int) -> Hashable:
        if len(value) > _MAX_ELEMENTS:
            raise NotStorableError(
                f"forward may read a {type(value).__name__} of {len(value)} elements, more than {_MAX_ELEMENTS}"
            )
        kind = _name(type(value))
        if isinstance(value, dict):
            parts: Any = [(self.fingerprint(k, depth), self.fingerprint(v, depth)) for k, v in value.items()]
        else:
            ordered = sorted(value, key=_sort_key) if isinstance(value, set | frozenset) else value
            parts = [self.fingerprint(part, depth) for part in ordered]
        return kind, tuple(parts), self.fingerprint(getattr(value, "__dict__", None), depth)


_FINGERPRINT_OF_TYPE: Mapping[Any, Callable[[Fingerprints, Any, int], Hashable]] = {
    types.FunctionType: Fingerprints.function,
    types.MethodType: lambda f, v, depth: (
        "method",
        f.fingerprint(v.__func__, depth),
        f.fingerprint(v.__self__, depth),
    ),
    functools.partial: lambda f, v, depth: ("partial", f.fingerprint((v.func, v.args, v.keywords), depth)),
    property: lambda f, v, depth: ("property", f.fingerprint((v.fget, v.fset), depth)),
    functools.cached_property: lambda f, v, depth: ("cached_property", f.fingerprint(v.func, depth)),
    staticmethod: lambda f, v, depth: ("staticmethod", f.fingerprint(v.__func__, depth)),
    classmethod: lambda f, v, depth: ("classmethod", f.fingerprint(v.__func__, depth)),
    _BUILT_IN_TYPES: lambda f, v, depth: ("built in", type(v).__name__, _without_addresses(v)),
    types.ModuleType: lambda f, v, depth: ("Python module", v.__name__),
    contextvars.ContextVar: lambda f, v, depth: ("context variable", v.name, f.fingerprint(v.get(None), depth)),
    logging.Logger: lambda f, v, depth: ("logger", v.name),
    (list, tuple, dict, set, frozenset): Fingerprints._container,
    types.MappingProxyType: lambda f, v, depth: f._container(dict(v), depth),
}


def fingerprint_code(code: types.CodeType) -> str:
    """Return the hash of a code object and the code nested in it, without line numbers."""
    hasher = hashlib.sha256()
    _hash_code(code, hasher.update)
    return hasher.hexdigest()[:32]


def _hash_code(code: types.CodeType, update: Callable[[bytes], object]) -> None:
    update(code.co_code)
    counts = (code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    update(repr((counts, names, code.co_exceptiontable)).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _hash_code(constant, update)
        elif isinstance(constant, frozenset):
            update(repr(sorted(map(repr, constant))).encode())
        else:
            update(repr(constant).encode())


def _is_known(kind: type) -> bool:
    file = file_of(kind)
    return is_known_by_version(file) if file else kind.__module__ in sys.builtin_module_names


def file_of(kind: type) -> str:
    """Return the file of a class's module; "" if it has none."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def is_in_package(file: str) -> bool:
    """Return whether a file is part of an installed package, or of one that is identified by its version."""
    return file.startswith(_PACKAGES) or is_known_by_version(file)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _sort_key(value: object) -> str:
    """Return a sort key for the elements of a set that does not depend on their addresses."""
    return _name(value) if isinstance(value, type) else f"{_name(type(value))} {_without_addresses(value)}"


def _without_addresses(value: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
