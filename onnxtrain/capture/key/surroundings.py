"""The state outside a module that its forward can read: globals, closures, defaults, attributes of classes and objects.

The walk follows the code that forward may run from function to function, through the objects that the names in it can
reach. It follows all user code. In installed packages it takes only the globals of functions that the module itself
runs; in PyTorch, Python's library and onnxtrain it takes nothing.
"""

from __future__ import annotations

import dis
import functools
import operator
import sys
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch

from onnxtrain.capture import source_location
from onnxtrain.capture.key.executed_code import with_nested
from onnxtrain.capture.key.fingerprint import CLASS_BOOKKEEPING, file_of, is_in_package, is_known_by_version
from onnxtrain.capture.key.snapshot import (
    CONTAINER_TYPES,
    MAX_DEPTH,
    MAX_ELEMENTS,
    MAX_OBJECT_DEPTH,
    OPAQUE_TYPES,
    SINGLETON_TYPES,
    VALUE_TYPES,
    Snapshot,
    children,
    slots,
    submodules,
)
from onnxtrain.capture.structure import PLAIN_TENSORS, Identity
from onnxtrain.errors import CaptureError

_MAX_REFERENCES = 5000  # any further ones are not checked
_VERSIONED, _INSTALLED, _USER = "versioned", "installed", "user"


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A reference through which forward can reach a value.

    Attributes:
        name, owner: the key of its fact.
        path: the name of the value as a graph input.
        template: a Python expression that reads the value from `{holder}` and `{key}`.
        holder: a dict, a list, a cell or another object.
        key: the key of an item, or the name of an attribute.
        value: the value now.
        is_checked_with_holder: whether the check of the holder's contents includes it.
        is_in_snapshot: whether the snapshot of the module has its facts.
        includes_contents: whether the contents of the value are checked, too.
    """

    name: str
    owner: str
    path: str
    template: str
    holder: Any
    key: Any
    value: object
    is_checked_with_holder: bool = False
    is_in_snapshot: bool = False
    includes_contents: bool = True

    def read(self) -> object:
        """Return the value that the reference leads to now; None if it leads nowhere."""
        try:
            if self.template is _ITEM:
                return self.holder[self.key]
            return self.holder.cell_contents if self.template is _CELL else getattr(self.holder, self.key)
        except (LookupError, AttributeError, ValueError):
            return None


_ITEM, _CELL, _ATTRIBUTE = "{holder}[{key}]", "{holder}.cell_contents", "{holder}.{key}"


class Surroundings:
    """Everything that the code of a module's forward can reach outside of the module.

    Attributes:
        references: each once.
        absent: dicts, and names that would shadow what forward finds elsewhere if the dict got them.
        codes: the user's code that forward may run, with its globals, by id.
        writes: the globals that this code assigns: their dict, the name of the Python module, the names.
    """

    def __init__(self, module: torch.nn.Module, reads: Collection[tuple[int, str]] | None) -> None:
        """Args: see `ModuleState`; `reads` is None if unknown.

        Raises:
            CaptureError: an object of the user's cannot be inspected.
        """
        try:
            walk = _walk(module, reads)
        except Exception as error:  # the user's objects may raise anything
            raise CaptureError(
                f"onnxtrain failed to find what forward of {type(module).__name__} reads from outside the module: "
                f"{type(error).__name__}: {error}",
                where=source_location.of_error(error),
                todo="the module runs in PyTorch; this is a bug of onnxtrain: please report it with the module",
            ) from error
        self.references, self.absent, self.codes = walk.references, walk.absent, walk.codes
        self.writes = [*walk.writes.values()]

    def tensor_names(self) -> dict[Hashable, str]:
        """Return the path of each tensor, by its `memory_key`."""
        names: dict[Hashable, str] = {}
        for reference in self.references:
            if isinstance(reference.value, torch.Tensor) and (key := memory_key(reference.value)) is not None:
                names.setdefault(key, reference.path)
        return names

    def source_location(self, name: str) -> str | None:
        """Return the first location in the user's code that contains the name of an attribute or a global."""
        for code, _ in self.codes.values():
            line = code.co_firstlineno
            for instruction in dis.get_instructions(code):
                line = instruction.positions.lineno or line if instruction.positions else line
                if instruction.argval == name:
                    return source_location.of_code(code, line)
        return None

    def add_to(self, snapshot: Snapshot) -> None:
        """Add the facts and checks of all references to a snapshot."""
        items: dict[int, list[Reference]] = {}  # by the id of the holder
        for reference in self.references:
            if isinstance(reference.value, torch.Tensor) and reference.path in snapshot.names:
                snapshot.add_outside_tensor(reference.path, _expression(snapshot, reference), reference.value)
                continue
            if reference.is_in_snapshot:
                continue
            _add_fact(snapshot, reference)
            if reference.is_checked_with_holder:
                continue
            if reference.template is _ITEM and not _is_compared_by_value(reference.value):
                items.setdefault(id(reference.holder), []).append(reference)
            else:
                snapshot.check_value(_expression(snapshot, reference), reference.value)
        if items:
            _check_items(snapshot, [*items.values()])
        for holder, names in filter(operator.itemgetter(1), self.absent):
            bound = snapshot.bind(holder)
            if len(names) < 4:
                snapshot.uncertain_if(*(f"{name!r} in {bound}" for name in sorted(names)))
            else:
                snapshot.uncertain_if(f"not {bound}.keys().isdisjoint({snapshot.bind(names)})")


def memory_key(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors with the same memory, dtype and layout; None for unsupported tensors."""
    if type(tensor) not in PLAIN_TENSORS or tensor.layout != torch.strided or tensor.is_neg() or tensor.is_nested:
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _expression(snapshot: Snapshot, reference: Reference) -> str:
    key = reference.key
    if reference.template is _ITEM:
        key = repr(key) if isinstance(key, str | int) else snapshot.bind(key)
    return reference.template.format(holder=snapshot.bind(reference.holder), key=key)


def _is_compared_by_value(value: object) -> bool:
    """Return whether a value is compared by value, because an equal value may be another object, as of `1.5`."""
    return isinstance(value, SINGLETON_TYPES) or type(value) in (int, float, str)


def _add_fact(snapshot: Snapshot, reference: Reference) -> None:
    name, owner, value = reference.name, reference.owner, reference.value
    kind = type(value)
    if reference.includes_contents and _is_container(value):
        contents = children(value, 0)
        assert contents is not None
        snapshot.add_fact(name, owner, (Identity(kind), len(contents)), f"{kind.__name__} of {len(contents)}")
        snapshot.check_contents(value, contents)
    elif reference.includes_contents and _is_followed(value):
        snapshot.add_fact(name, owner, Identity(kind), kind.__qualname__)
    elif isinstance(value, VALUE_TYPES):
        snapshot.add_value(name, owner, value, 0, 0)
    elif reference.includes_contents and isinstance(value, CONTAINER_TYPES) and len(value) > MAX_ELEMENTS:
        snapshot.add_value(name, owner, value, MAX_DEPTH, 0)
    elif isinstance(value, np.ndarray):
        snapshot.add_array(name, owner, value)
    else:
        snapshot.add_fact(name, owner, Identity(value), f"{kind.__name__} at {id(value):#x}")


def _check_items(snapshot: Snapshot, by_holder: Sequence[Sequence[Reference]]) -> None:
    """Check the items of several dicts by identity, in one expression that runs in C."""
    items: list[str] = []
    for references in by_holder:
        if len(references) == 1:
            items.append(_expression(snapshot, references[0]))
            continue
        getter = snapshot.bind(operator.itemgetter(*(reference.key for reference in references)))
        items.append(f"*{getter}({snapshot.bind(references[0].holder)})")
    saved = snapshot.bind(tuple(reference.value for references in by_holder for reference in references))
    snapshot.uncertain_if(f"not all(map(is_, ({', '.join(items)},), {saved}))")


# The walk

_Scope: TypeAlias = dict[str, Any]


def _walk(module: torch.nn.Module, reads: Collection[tuple[int, str]] | None) -> _Walk:
    names = {"forward"}
    while True:  # the code that a walk reaches contains further names, which the next walk follows
        walk = _Walk(module, reads, frozenset(names))
        if walk.names == names:
            return walk
        names = walk.names


class _Walk:
    """One walk that follows `followed` names; `names` adds to them those in the code that it reached."""

    def __init__(
        self, module: torch.nn.Module, reads: Collection[tuple[int, str]] | None, followed: Collection[str]
    ) -> None:
        self.names: set[str] = set(followed)
        self.references: list[Reference] = []
        self.absent: list[tuple[Mapping[str, Any], frozenset[str]]] = []
        self.codes: dict[int, tuple[CodeType, _Scope]] = {}
        self.writes: dict[int, tuple[_Scope, str, set[str]]] = {}
        self._followed = frozenset(followed)
        self._reads: dict[int, set[str]] | None = None if reads is None else {}
        for owner, name in reads or ():
            assert self._reads is not None
            self._reads.setdefault(owner, set()).add(name)
        self._visited: dict[int, object] = {}  # keeps the objects alive, so that no id is reused
        self._reference_keys: set[tuple[int, Any]] = set()
        self._builtins: dict[int, tuple[_Scope, set[str]]] = {}  # by scope, the names that are not in it
        self._methods: dict[type, set[str]] = {}  # the names that were looked up in classes of modules
        self._extensible: set[type] = set()  # classes that are checked for new attributes
        modules = list(submodules(module))
        self._visited.update((id(submodule), submodule) for _, submodule in modules)
        for path, submodule in modules:
            self._visit_submodule(submodule, path)
        self.absent += [(scope, frozenset(names)) for scope, names in self._builtins.values()]

    # References

    def _add(self, reference: Reference, covered: int = 0) -> None:
        """Add a reference and visit its value; `covered`: how many objects deep the module's snapshot goes from it."""
        key = reference.key if isinstance(reference.key, str | int) else id(reference.key)
        if (id(reference.holder), key) in self._reference_keys or len(self.references) >= _MAX_REFERENCES:
            return
        self._reference_keys.add((id(reference.holder), key))
        self.references.append(reference)
        if reference.includes_contents or isinstance(reference.value, FunctionType | type):
            self._visit(reference.value, reference.path, covered)

    def _add_item(
        self, holder: Any, name: str, owner: str, *, covered: int = 0, includes_contents: bool = True
    ) -> None:
        """Add the item `name` of a dict."""
        reference = Reference(
            *(name, owner, f"{owner}.{name}", _ITEM, holder, name, holder[name]),
            is_in_snapshot=covered > 0,
            includes_contents=includes_contents,
        )
        self._add(reference, covered)

    # Modules

    def _visit_submodule(self, module: torch.nn.Module, path: str) -> None:
        """Visit the attributes of a submodule that lead further; the snapshot has the attributes themselves."""
        attributes = module.__dict__
        reads = self._reads_of(module)
        for name in sorted(attributes.keys() & reads - _TABLES):
            if not isinstance(attributes[name], _LEAVES_OF_MODULES):
                self._visit(attributes[name], f"{path}.{name}" if path else name, MAX_OBJECT_DEPTH)
        self._visit_code(module, reads)

    def _reads_of(self, module: torch.nn.Module) -> Set[str]:
        attributes = {name for name in module.__dict__ if name not in _TABLES}
        if self._reads is None:
            return attributes & self._followed | {"forward"}
        reads = self._reads.get(id(module), set())
        return attributes | {"forward"} if "*" in reads else reads | {"forward"}

    def _visit_code(self, module: torch.nn.Module, reads: Collection[str]) -> None:
        """Visit the class of a module and, if that is of an installed package, the methods that forward reads."""
        kind = type(module)
        self._visit(kind, _name(kind))
        visited = self._methods.setdefault(kind, set())
        for name in set(reads) - visited:
            for base in kind.__mro__:
                method = vars(base).get(name)
                while isinstance(method, FunctionType) and _origin(method.__code__.co_filename) == _INSTALLED:
                    self._visit_globals(method.__code__, method.__globals__, is_user_code=False)
                    method = getattr(method, "__wrapped__", None)  # of a decorator
        visited.update(reads)

    def _visit_outside_module(self, module: torch.nn.Module, path: str) -> None:
        """Visit a module that forward calls and that is not a submodule, such as a teacher in a list."""
        attributes = module.__dict__
        for name in sorted(self._reads_of(module)):
            if name in attributes:
                self._add_item(attributes, name, path)
        for table in ("_parameters", "_buffers", "_modules"):
            for name, value in attributes[table].items():
                if value is not None:
                    self._add_item(attributes[table], name, path)
        self._visit_code(module, self._reads_of(module))

    # Values

    def _visit(self, value: Any, path: str, covered: int = 0) -> None:
        """Add the references that forward can follow from a value."""
        if isinstance(value, VALUE_TYPES) and not isinstance(value, type):
            return
        if id(value) in self._visited:
            return
        self._visited[id(value)] = value
        if isinstance(value, type):
            if not issubclass(value, torch.autograd.Function):  # its methods run as Python in each call
                self._visit_class(value)
        elif isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, ModuleType):
            self._visit_python_module(value)
        elif isinstance(value, torch.nn.Module):
            self._visit_outside_module(value, path)
        elif attributes := _wrapped_attributes(value):  # they are read-only: their holder's check includes them
            for name in attributes:
                source = (name, path, f"{path}.{name}", _ATTRIBUTE, value, name)
                self._add(Reference(*source, getattr(value, name), is_checked_with_holder=True))
        elif _is_container(value):
            self._visit_container(value, path, covered)
        elif _is_followed(value):
            self._visit_object(value, path, 0 if callable(value) else covered)

    def _visit_container(self, value: Any, path: str, covered: int) -> None:
        contents = children(value, 0)
        if isinstance(value, set | frozenset) or contents is None:
            return
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key, (step, child) in zip(keys, contents.items(), strict=True):
            source = (step, path, path + step, _ITEM, value, key)
            self._add(Reference(*source, child, is_checked_with_holder=True, is_in_snapshot=covered > 0), covered)

    def _visit_object(self, value: Any, path: str, covered: int) -> None:
        kind = type(value)
        self._visit(kind, _name(kind))
        attributes = getattr(value, "__dict__", {})
        has_plain_attributes = _has_plain_attributes(kind) and not covered
        names = self._followed if has_plain_attributes else attributes.keys() | self._followed
        covered = max(covered - 1, 0)
        for name in sorted(names & attributes.keys()):
            self._add_item(attributes, name, path, covered=covered)
        for name in sorted(names.intersection(slots(value))):
            if hasattr(value, name):
                source = (name, path, f"{path}.{name}", _ATTRIBUTE, value, name)
                self._add(Reference(*source, getattr(value, name), is_in_snapshot=covered > 0), covered)
        inherited = {name for name in names - attributes.keys() if any(name in vars(base) for base in kind.__mro__)}
        if inherited and not covered and hasattr(value, "__dict__"):
            self.absent.append((attributes, frozenset(inherited)))

    def _visit_class(self, kind: type) -> None:
        """Visit the user's classes among the bases. A name that a subclass shadows is reached by `super()` only."""
        shadowed: set[str] = set()
        for base in kind.__mro__:
            if _origin_of_class(base) == _USER:
                self._visit_members(base, shadowed)
            if "super" not in self._followed:
                shadowed.update(vars(base))

    def _visit_members(self, kind: type, shadowed: Collection[str]) -> None:
        members = vars(kind)
        for name in sorted(members.keys() - shadowed - CLASS_BOOKKEEPING):
            is_followed = name in self._followed or _is_implicit(kind, name)
            if is_followed and not isinstance(members[name], MemberDescriptorType):
                self._add_item(members, name, f"class {_name(kind)}")
        inherited = {name for base in kind.__mro__[1:] for name in vars(base)}
        if (absent := (self._followed & inherited) - members.keys()) and kind not in self._extensible:
            self._extensible.add(kind)
            self.absent.append((members, frozenset(absent)))

    def _visit_python_module(self, module: ModuleType) -> None:
        origin = _origin(getattr(module, "__file__", None) or "<frozen ")
        if origin != _VERSIONED:
            scope = vars(module)
            for name in sorted(self._followed & scope.keys()):
                self._add_global(scope, name, is_user_code=origin == _USER)

    # Code

    def _visit_function(self, function: FunctionType) -> None:
        code = function.__code__
        if isinstance(wrapped := getattr(function, "__wrapped__", None), FunctionType):
            self._visit(wrapped, _name(wrapped))
        if _origin(code.co_filename) != _USER:
            for cell in function.__closure__ or ():  # a wrapper of PyTorch holds the user's function there
                if isinstance(content := _content(cell), FunctionType | MethodType):
                    self._visit(content, code.co_qualname)
            return
        name = _name(function)
        path = f"code of {name}"
        self._add(Reference("code", name, path, _ATTRIBUTE, function, "__code__", code, includes_contents=False))
        for attribute in ("__defaults__", "__kwdefaults__"):
            title, value = attribute.strip("_"), getattr(function, attribute)
            self._add(Reference(title, name, f"{title} of {name}", _ATTRIBUTE, function, attribute, value))
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if (content := _content(cell)) is not _EMPTY:
                path = f"closure of {name}.{variable}"
                self._add(Reference(f"{variable} in the closure", name, path, _CELL, cell, "", content))
        self._visit_globals(code, function.__globals__, is_user_code=True)

    def _visit_globals(self, code: CodeType, scope: _Scope, *, is_user_code: bool) -> None:
        """Add the globals that code reads. In user code, also follow the contents of globals and further names.

        User code may also assign globals: a graph, which does not, is only for the values that they have already.
        """
        if id(code) in self.codes:
            return
        self.codes[id(code)] = (code, scope)
        used = _names_in(code)
        if is_user_code:
            self.names |= used.names
            if used.written:
                _, _, names = self.writes.setdefault(id(scope), (scope, str(scope.get("__name__")), set()))
                names |= used.written
            self._builtins.setdefault(id(scope), (scope, set()))[1].update(used.globals - scope.keys())
        assigned = used.written if is_user_code else frozenset()
        for name in sorted((used.globals | assigned) & scope.keys()):
            self._add_global(scope, name, is_user_code=is_user_code)
        package = str(scope.get("__package__") or "")
        for name in sorted(used.imported):
            for full_name in {name, f"{package}.{name}", f"{package.rpartition('.')[0]}.{name}"}:
                if isinstance(module := sys.modules.get(full_name), ModuleType):
                    self._visit(module, full_name)

    def _add_global(self, scope: _Scope, name: str, *, is_user_code: bool) -> None:
        module = str(scope.get("__name__"))
        if is_user_code or not isinstance(scope[name], ModuleType):
            self._add_item(scope, name, f"global {module}", includes_contents=is_user_code)


_TABLES = frozenset(torch.nn.Module().__dict__) - {"training"}
# Attributes of modules of these types lead no further.
_LEAVES_OF_MODULES = (*(kind for kind in VALUE_TYPES if kind is not type), torch.Tensor, torch.nn.Module)
_EMPTY = object()


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _wrapped_attributes(value: Any) -> Sequence[str]:
    """Return the attributes in which a method, partial function or descriptor holds what it wraps."""
    for kind, names in _WRAPPED_ATTRIBUTES.items():
        if isinstance(value, kind):
            return names
    # `prepare` replaces a forward by an object with this attribute.
    return ("previous_forward",) if hasattr(type(value), "previous_forward") else ()


_WRAPPED_ATTRIBUTES: Mapping[Any, Sequence[str]] = {
    MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    property: ("fget",),
    (staticmethod, classmethod): ("__func__",),
    functools.cached_property: ("func",),
    type(functools.lru_cache(lambda: None)): ("__wrapped__",),
}


def _is_container(value: object) -> bool:
    """Return whether `value` is a container whose contents are checked.

    A dict that computes its values is an object.
    """
    if isinstance(value, dict) and type(value).values not in (dict.values, OrderedDict.values):
        return False
    return isinstance(value, CONTAINER_TYPES) and len(value) <= MAX_ELEMENTS


def _is_followed(value: object) -> bool:
    """Return whether an object's attributes are checked."""
    kind = type(value)
    if isinstance(value, (*OPAQUE_TYPES, *CONTAINER_TYPES, type, FunctionType, CodeType)):
        return False
    if _wrapped_attributes(value):
        return False
    if kind.__module__.partition(".")[0] in ("torch", "onnxtrain"):
        return False
    return hasattr(value, "__dict__") or bool(slots(value))


def _has_plain_attributes(kind: type) -> bool:
    """Return whether a class looks attributes up as `object` does."""
    overridden = {name for base in kind.__mro__[:-1] for name in vars(base)}
    return "__getattribute__" not in overridden and not hasattr(kind, "__getattr__")


def _is_implicit(kind: type, name: str) -> bool:
    """Return whether Python calls a method although its name is not in the code.

    Of modules, forward only runs `__call__`.
    """
    if not (name.startswith("__") and name.endswith("__") and isinstance(vars(kind)[name], FunctionType)):
        return False
    return not issubclass(kind, torch.nn.Module) or name == "__call__"


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


@functools.lru_cache(maxsize=4096)
def _origin(file: str) -> str:
    if file.startswith(("<frozen ", "<onnxtrain")) or is_known_by_version(file):
        return _VERSIONED
    return _INSTALLED if file.startswith("<eval_with_key>") or is_in_package(file) else _USER


def _origin_of_class(kind: type) -> str:
    if kind.__module__ in sys.builtin_module_names:
        return _VERSIONED
    return _origin(file_of(kind))


@dataclass(frozen=True, slots=True)
class _CodeNames:
    """The names that a code object and the code nested in it use.

    Attributes:
        names: attributes and globals that it reads, and strings that may be names of some.
        globals: the globals that it reads.
        written: the globals that it assigns.
        imported: the Python modules that it imports.
    """

    names: frozenset[str]
    globals: frozenset[str]
    written: frozenset[str]
    imported: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> _CodeNames:
    names: set[str] = set()
    by_operation: dict[str, set[str]] = {"LOAD_GLOBAL": set(), "STORE_GLOBAL": set(), "IMPORT_NAME": set()}
    for nested in with_nested(code):
        names.update(c for c in nested.co_consts if isinstance(c, str) and c.isidentifier())
        for instruction in dis.get_instructions(nested):
            if instruction.opcode not in dis.hasname:
                continue
            operation = _SAME_OPERATION.get(instruction.opname, instruction.opname)
            if operation in by_operation:
                by_operation[operation].add(instruction.argval)
            if not operation.startswith(("STORE_", "DELETE_")):
                names.add(instruction.argval)
    return _CodeNames(frozenset(names), *map(frozenset, by_operation.values()))


_SAME_OPERATION = {
    "LOAD_NAME": "LOAD_GLOBAL",
    "LOAD_FROM_DICT_OR_GLOBALS": "LOAD_GLOBAL",
    "DELETE_GLOBAL": "STORE_GLOBAL",
}
