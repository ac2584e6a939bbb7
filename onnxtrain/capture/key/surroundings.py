"""What forward reads from outside its module: globals, closures, default arguments, attributes of classes and objects.

The code that forward may run is followed from function to function through the objects that it can reach by the names
in it. User code is followed as far as it goes. In installed packages only the globals of what the module itself runs
are watched, and PyTorch, Python's library and onnxtrain not at all.
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

import torch

from onnxtrain.capture import source_location
from onnxtrain.capture.key.executed_code import with_nested
from onnxtrain.capture.key.fingerprint import NOT_OF_A_CLASS, file_of, is_in_package, is_known_by_version
from onnxtrain.capture.key.snapshot import (
    CONTAINERS,
    DEEPEST,
    DEEPEST_OBJECT,
    LARGEST,
    OPAQUE,
    SINGLETONS,
    VALUES,
    Same,
    Snapshot,
    children,
    slots,
    submodules,
)
from onnxtrain.capture.structure import PLAIN_TENSORS
from onnxtrain.errors import CaptureError

_MOST_PLACES = 5000  # where more can be reached, the rest is not watched
_KNOWN, _INSTALLED, _USER = "known", "installed", "user"


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where forward finds a value.

    Attributes:
        what, where: in words; the key of its fact.
        path: the name of the value in a graph.
        source: Python that reads it; `holder` and `key` stand for the two below.
        holder: a dict, a list, a cell or another object.
        key: of an item or an attribute.
        value: what is there.
        is_watched: whether the holder's check covers it, so that it needs none of its own.
        is_covered: whether the snapshot of the module has its facts.
        is_whole: whether what is in the value is watched, too.
    """

    what: str
    where: str
    path: str
    source: str
    holder: Any
    key: Any
    value: object
    is_watched: bool = False
    is_covered: bool = False
    is_whole: bool = True


_ITEM, _CELL, _ATTRIBUTE = "{holder}[{key}]", "{holder}.cell_contents", "{holder}.{key}"


class Surroundings:
    """All that the code of a module's forward can reach.

    Attributes:
        places: where the values are, each once.
        absent: dicts, with names that would hide what forward finds elsewhere now.
        codes: the user's code that forward may run.
        writes: globals of Python modules, their names, and what this code assigns to there.
    """

    def __init__(self, module: torch.nn.Module, reads: Collection[tuple[int, str]] | None) -> None:
        """Args: see `ModuleState.take`; `reads` is None where it is not known.

        Raises:
            CaptureError: an object of the user's cannot be looked at.
        """
        try:
            walk = _walk(module, reads)
        except Exception as error:  # objects of users may raise anything
            raise CaptureError(
                f"what forward reads from outside of {type(module).__name__} cannot be found: "
                f"{type(error).__name__}: {error}",
                where=source_location.of_error(error),
                todo="the module runs in PyTorch; this is a bug of onnxtrain: please report it with the module",
            ) from error
        self.places, self.absent, self.codes = walk.places, walk.absent, walk.codes
        self.writes = [*walk.writes.values()]

    def tensor_names(self) -> dict[Hashable, str]:
        """The names of the tensors, by `memory_of` them."""
        found: dict[Hashable, str] = {}
        for place in self.places:
            if isinstance(place.value, torch.Tensor) and (memory := memory_of(place.value)) is not None:
                found.setdefault(memory, place.path)
        return found

    def line(self, name: str) -> str | None:
        """The first line of the user's code that names an attribute or a global."""
        for code, _ in self.codes.values():
            line = code.co_firstlineno
            for instruction in dis.get_instructions(code):
                line = instruction.positions.lineno or line if instruction.positions else line
                if instruction.argval == name:
                    return source_location.of_code(code, line)
        return None

    def watch(self, snapshot: Snapshot) -> None:
        """Adds the facts of all places to a snapshot, and checks of them."""
        together: dict[int, list[Place]] = {}
        for place in self.places:
            if isinstance(place.value, torch.Tensor) and snapshot.is_wanted(place.path):
                snapshot.outside_tensor(place.path, _source(snapshot, place), place.value)
                continue
            if place.is_covered:
                continue
            _fact(snapshot, place)
            if place.is_watched:
                continue
            if place.source is _ITEM and not _is_plain(place.value):
                together.setdefault(id(place.holder), []).append(place)
            else:
                snapshot.compare(_source(snapshot, place), place.value)
        if together:
            _compare_items(snapshot, [*together.values()])
        for holder, names in filter(operator.itemgetter(1), self.absent):
            bound = snapshot.bind(holder)
            if len(names) < 4:
                snapshot.may_differ(*(f"{name!r} in {bound}" for name in sorted(names)))
            else:
                snapshot.may_differ(f"not {bound}.keys().isdisjoint({snapshot.bind(names)})")


def memory_of(tensor: torch.Tensor) -> Hashable:
    """The same for tensors that are the same memory in the same way; None for those that a graph cannot take."""
    if type(tensor) not in PLAIN_TENSORS or tensor.layout != torch.strided or tensor.is_neg() or tensor.is_nested:
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _source(snapshot: Snapshot, place: Place) -> str:
    key = place.key
    if place.source is _ITEM:
        key = repr(key) if isinstance(key, str | int) else snapshot.bind(key)
    return place.source.format(holder=snapshot.bind(place.holder), key=key)


def _is_plain(value: object) -> bool:
    """Whether another object may have the same value: `1.5` read twice may be two objects."""
    return isinstance(value, SINGLETONS) or type(value) in (int, float, str)


def _fact(snapshot: Snapshot, place: Place) -> None:
    value = place.value
    if place.is_whole and _is_container(value):
        parts = children(value, 0)
        assert parts is not None
        snapshot.fact(
            place.what, place.where, (Same(type(value)), len(parts)), f"{type(value).__name__} of {len(parts)}"
        )
        snapshot.watch(value, parts)
    elif place.is_whole and _is_followed(value):
        snapshot.fact(place.what, place.where, Same(type(value)), type(value).__qualname__)
    elif isinstance(value, VALUES):
        snapshot.value(place.what, place.where, value, 0, 0)
    elif place.is_whole and isinstance(value, CONTAINERS) and len(value) > LARGEST:
        snapshot.value(place.what, place.where, value, DEEPEST, 0)
    else:
        snapshot.fact(place.what, place.where, Same(value), f"{type(value).__name__} at {id(value):#x}")


def _compare_items(snapshot: Snapshot, together: Sequence[Sequence[Place]]) -> None:
    """One check of the items of several dicts: by identity, in C."""
    items: list[str] = []
    for places in together:
        if len(places) == 1:
            items.append(_source(snapshot, places[0]))
            continue
        getter = snapshot.bind(operator.itemgetter(*(place.key for place in places)))
        items.append(f"*{getter}({snapshot.bind(places[0].holder)})")
    saved = snapshot.bind(tuple(place.value for places in together for place in places))
    snapshot.may_differ(f"not all(map(is_, ({', '.join(items)},), {saved}))")


# The walk

_Scope: TypeAlias = dict[str, Any]


def _walk(module: torch.nn.Module, reads: Collection[tuple[int, str]] | None) -> _Walk:
    names = {"forward"}
    while True:  # code that is reached has further names, by which more is reached
        walk = _Walk(module, reads, frozenset(names))
        if walk.names == names:
            return walk
        names = walk.names


class _Walk:
    """One walk over what can be reached by `by`; `names` are the names in the code that was found."""

    def __init__(self, module: torch.nn.Module, reads: Collection[tuple[int, str]] | None, by: Collection[str]) -> None:
        self.names: set[str] = set(by)
        self.places: list[Place] = []
        self.absent: list[tuple[Mapping[str, Any], frozenset[str]]] = []
        self.codes: dict[int, tuple[CodeType, _Scope]] = {}
        self.writes: dict[int, tuple[_Scope, str, set[str]]] = {}
        self._by = frozenset(by)
        self._reads: dict[int, set[str]] | None = None if reads is None else {}
        for owner, name in reads or ():
            assert self._reads is not None
            self._reads.setdefault(owner, set()).add(name)
        self._seen: dict[int, object] = {}  # the objects stay alive, so that no id is given again
        self._placed: set[tuple[int, Any]] = set()
        self._builtins: dict[int, tuple[_Scope, set[str]]] = {}  # by scope, names that are not in it
        self._methods: dict[type, set[str]] = {}  # names that were looked for in classes of modules
        self._extended: set[type] = set()  # classes that are looked at for new attributes
        own = list(submodules(module))
        self._seen.update((id(submodule), submodule) for _, submodule in own)
        for path, submodule in own:
            self._module(submodule, path)
        self.absent += [(scope, frozenset(names)) for scope, names in self._builtins.values()]

    # Places

    def _place(self, place: Place, covered: int = 0) -> None:
        """Notes a place and goes on from its value. `covered`: how many objects deep the module's snapshot looks."""
        at = (id(place.holder), place.key if isinstance(place.key, str | int) else id(place.key))
        if at in self._placed or len(self.places) >= _MOST_PLACES:
            return
        self._placed.add(at)
        self.places.append(place)
        if place.is_whole or isinstance(place.value, FunctionType | type):
            self._value(place.value, place.path, covered)

    def _item(self, holder: Any, key: Any, what: str, where: str, *, covered: int = 0, is_whole: bool = True) -> None:
        path = f"{where}.{what}"
        place = Place(what, where, path, _ITEM, holder, key, holder[key], is_covered=covered > 0, is_whole=is_whole)
        self._place(place, covered)

    # Modules

    def _module(self, module: torch.nn.Module, path: str) -> None:
        """One of the module's own, whose attributes the snapshot watches."""
        own = module.__dict__
        read = self._read(module)
        for name in sorted(own.keys() & read - _TABLES):
            if not isinstance(own[name], _HELD):
                self._value(own[name], f"{path}.{name}" if path else name, DEEPEST_OBJECT)
        self._own_code(module, read)

    def _read(self, module: torch.nn.Module) -> Set[str]:
        own = {name for name in module.__dict__ if name not in _TABLES}
        if self._reads is None:
            return own & self._by | {"forward"}
        read = self._reads.get(id(module), set())
        return own | {"forward"} if "*" in read else read | {"forward"}

    def _own_code(self, module: torch.nn.Module, read: Collection[str]) -> None:
        """What the module runs: its class, and of an installed package's class the methods that were read."""
        kind = type(module)
        self._value(kind, _name(kind))
        followed = self._methods.setdefault(kind, set())
        for name in set(read) - followed:
            for base in kind.__mro__:
                found = vars(base).get(name)
                while isinstance(found, FunctionType) and _origin(found.__code__.co_filename) == _INSTALLED:
                    self._globals(found.__code__, found.__globals__, is_whole=False)
                    found = getattr(found, "__wrapped__", None)  # of a decorator
        followed.update(read)

    def _other_module(self, module: torch.nn.Module, path: str) -> None:
        """A module that forward calls, and that is no submodule: a teacher in a list."""
        own = module.__dict__
        for name in sorted(self._read(module)):
            if name in own:
                self._item(own, name, name, path)
        for table in ("_parameters", "_buffers", "_modules"):
            for name, value in own[table].items():
                if value is not None:
                    self._item(own[table], name, name, path)
        self._own_code(module, self._read(module))

    # Values

    def _value(self, value: Any, path: str, covered: int = 0) -> None:
        """Goes on from a value to what forward can find in it."""
        if isinstance(value, VALUES) and not isinstance(value, type):
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, type):
            if not issubclass(value, torch.autograd.Function):  # runs as Python at each call, and reads what is there
                self._class(value)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, ModuleType):
            self._python_module(value)
        elif isinstance(value, torch.nn.Module):
            self._other_module(value, path)
        elif parts := _parts(value):
            for name in parts:
                found, at = getattr(value, name), f"{path}.{name}"
                self._place(Place(name, path, at, _ATTRIBUTE, value, name, found, is_watched=True))  # none can be set
        elif _is_container(value):
            self._container(value, path, covered)
        elif _is_followed(value):
            self._object(value, path, 0 if callable(value) else covered)

    def _container(self, value: Any, path: str, covered: int) -> None:
        steps = children(value, 0)
        if isinstance(value, set | frozenset) or steps is None:
            return
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key, (step, child) in zip(keys, steps.items(), strict=True):
            place = Place(step, path, path + step, _ITEM, value, key, child, is_watched=True, is_covered=covered > 0)
            self._place(place, covered)

    def _object(self, value: Any, path: str, covered: int) -> None:
        kind = type(value)
        self._value(kind, _name(kind))
        own = getattr(value, "__dict__", {})
        wanted = self._by if _finds_attributes_plainly(kind) and not covered else own.keys() | self._by
        covered = max(covered - 1, 0)
        for name in sorted(wanted & own.keys()):
            self._item(own, name, name, path, covered=covered)
        for name in sorted(wanted.intersection(slots(value))):
            if hasattr(value, name):
                found, at = getattr(value, name), f"{path}.{name}"
                self._place(Place(name, path, at, _ATTRIBUTE, value, name, found, is_covered=covered > 0), covered)
        hidden = {name for name in wanted - own.keys() if any(name in vars(base) for base in kind.__mro__)}
        if hidden and not covered and hasattr(value, "__dict__"):
            self.absent.append((own, frozenset(hidden)))

    def _class(self, kind: type) -> None:
        """The user's part of a class. What a base has under a name of the class only `super()` finds."""
        hidden: set[str] = set()
        for base in kind.__mro__:
            if _origin_of_class(base) == _USER:
                self._members(base, hidden)
            if "super" not in self._by:
                hidden.update(vars(base))

    def _members(self, kind: type, hidden: Collection[str]) -> None:
        own = vars(kind)
        for name in sorted(own.keys() - hidden - NOT_OF_A_CLASS):
            is_named = name in self._by or _is_implicit(kind, name)
            if is_named and not isinstance(own[name], MemberDescriptorType):
                self._item(own, name, name, f"class {_name(kind)}")
        inherited = {name for base in kind.__mro__[1:] for name in vars(base)}
        if (fresh := (self._by & inherited) - own.keys()) and kind not in self._extended:
            self._extended.add(kind)
            self.absent.append((own, frozenset(fresh)))

    def _python_module(self, module: ModuleType) -> None:
        origin = _origin(getattr(module, "__file__", None) or "<frozen ")
        if origin != _KNOWN:
            scope = vars(module)
            for name in sorted(self._by & scope.keys()):
                self._global(scope, name, is_whole=origin == _USER)

    # Code

    def _function(self, function: FunctionType) -> None:
        code = function.__code__
        if isinstance(wrapped := getattr(function, "__wrapped__", None), FunctionType):
            self._value(wrapped, _name(wrapped))
        if _origin(code.co_filename) != _USER:
            for cell in function.__closure__ or ():  # a wrapper of PyTorch holds the user's function there
                if isinstance(content := _content(cell), FunctionType | MethodType):
                    self._value(content, code.co_qualname)
            return
        name = _name(function)
        self._place(Place("code", name, f"code of {name}", _ATTRIBUTE, function, "__code__", code, is_whole=False))
        for kind in ("__defaults__", "__kwdefaults__"):
            value = getattr(function, kind)
            place = Place(kind.strip("_"), name, f"{kind.strip('_')} of {name}", _ATTRIBUTE, function, kind, value)
            self._place(place)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if (content := _content(cell)) is not _EMPTY:
                path = f"closure of {name}.{variable}"
                self._place(Place(f"{variable} in the closure", name, path, _CELL, cell, "", content))
        self._globals(code, function.__globals__, is_whole=True)

    def _globals(self, code: CodeType, scope: _Scope, *, is_whole: bool) -> None:
        """The globals that code reads. Where they are whole, it is the user's, whose names lead further."""
        if id(code) in self.codes:
            return
        self.codes[id(code)] = (code, scope)
        named = _named(code)
        if is_whole:
            self.names |= named.names
            if named.written:
                _, _, names = self.writes.setdefault(id(scope), (scope, str(scope.get("__name__")), set()))
                names |= named.written
            self._builtins.setdefault(id(scope), (scope, set()))[1].update(named.globals - scope.keys())
        for name in sorted(named.globals & scope.keys()):
            self._global(scope, name, is_whole=is_whole)
        package = str(scope.get("__package__") or "")
        for name in sorted(named.imported):
            for full in {name, f"{package}.{name}", f"{package.rpartition('.')[0]}.{name}"}:
                if isinstance(module := sys.modules.get(full), ModuleType):
                    self._value(module, full)

    def _global(self, scope: _Scope, name: str, *, is_whole: bool) -> None:
        module = str(scope.get("__name__"))
        if is_whole or not isinstance(scope[name], ModuleType):
            self._item(scope, name, name, f"global {module}", is_whole=is_whole)


_TABLES = frozenset(torch.nn.Module().__dict__) - {"training"}
_HELD = (
    *(k for k in VALUES if k is not type),
    torch.Tensor,
    torch.nn.Module,
)  # as attributes of modules they lead no further
_EMPTY = object()


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _parts(value: Any) -> Sequence[str]:
    """The attributes of a function, method or descriptor, that is no plain function, by which it leads further."""
    for kind, names in _PARTS.items():
        if isinstance(value, kind):
            return names
    # What `prepare` puts in the place of a forward.
    return ("previous_forward",) if hasattr(type(value), "previous_forward") else ()


_PARTS: Mapping[Any, Sequence[str]] = {
    MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    property: ("fget",),
    (staticmethod, classmethod): ("__func__",),
    functools.cached_property: ("func",),
    type(functools.lru_cache(lambda: None)): ("__wrapped__",),
}


def _is_container(value: object) -> bool:
    """Whether it is watched what is in a value. A dict that makes its values when it is asked is an object."""
    if isinstance(value, dict) and type(value).values not in (dict.values, OrderedDict.values):
        return False
    return isinstance(value, CONTAINERS) and len(value) <= LARGEST


def _is_followed(value: object) -> bool:
    """Whether an object's attributes are watched."""
    kind = type(value)
    if isinstance(value, (*OPAQUE, *CONTAINERS, type, FunctionType, CodeType)) or _parts(value):
        return False
    if kind.__module__.partition(".")[0] in ("torch", "onnxtrain"):
        return False
    return hasattr(value, "__dict__") or bool(slots(value))


def _finds_attributes_plainly(kind: type) -> bool:
    return "__getattribute__" not in {name for base in kind.__mro__[:-1] for name in vars(base)} and not hasattr(
        kind, "__getattr__"
    )


def _is_implicit(kind: type, name: str) -> bool:
    """Whether Python calls a method without its name being in the code. Forward makes no modules."""
    if not (name.startswith("__") and name.endswith("__") and isinstance(vars(kind)[name], FunctionType)):
        return False
    return not issubclass(kind, torch.nn.Module) or name == "__call__"


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


@functools.lru_cache(maxsize=4096)
def _origin(file: str) -> str:
    if file.startswith(("<frozen ", "<onnxtrain")) or is_known_by_version(file):
        return _KNOWN
    return _INSTALLED if file.startswith("<eval_with_key>") or is_in_package(file) else _USER


def _origin_of_class(kind: type) -> str:
    if kind.__module__ in sys.builtin_module_names:
        return _KNOWN
    return _origin(file_of(kind))


@dataclass(frozen=True, slots=True)
class _Named:
    """What code names, with all code in it.

    Attributes:
        names: attributes and globals that it reads, and the strings that may be some.
        globals: those that it reads.
        written: globals that it assigns to.
        imported: Python modules that it imports.
    """

    names: frozenset[str]
    globals: frozenset[str]
    written: frozenset[str]
    imported: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _named(code: CodeType) -> _Named:
    names: set[str] = set()
    found: dict[str, set[str]] = {"LOAD_GLOBAL": set(), "STORE_GLOBAL": set(), "IMPORT_NAME": set()}
    for each in with_nested(code):
        names.update(c for c in each.co_consts if isinstance(c, str) and c.isidentifier())
        for instruction in dis.get_instructions(each):
            if instruction.opcode not in dis.hasname:
                continue
            kind = _SAME_KIND.get(instruction.opname, instruction.opname)
            if kind in found:
                found[kind].add(instruction.argval)
            if not kind.startswith(("STORE_", "DELETE_")):
                names.add(instruction.argval)
    return _Named(frozenset(names), *map(frozenset, found.values()))


_SAME_KIND = {
    "LOAD_NAME": "LOAD_GLOBAL",
    "LOAD_FROM_DICT_OR_GLOBALS": "LOAD_GLOBAL",
    "DELETE_GLOBAL": "STORE_GLOBAL",
}
