"""A module as it is now: facts that are compared by value, and the source of a function that compares by identity.

Both come from one walk over the submodules. The facts decide, and give the words of messages. The function runs on
every step: a value that is the same object and cannot be changed in place needs no other look.
"""

from __future__ import annotations

import enum
import functools
import logging
import operator
import sys
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import EllipsisType, MemberDescriptorType, ModuleType, NoneType
from typing import Any, TypeAlias

import torch
from torch.nn.modules import module as torch_module

from onnxtrain.capture.four_bit_weights import quantization_state, state_tensors
from onnxtrain.capture.source_location import PACKAGE, PYTORCH
from onnxtrain.capture.structure import PLAIN_TENSORS, constant_key
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat.patch_points import MODULE_GETATTRIBUTE
from onnxtrain.torch_compat.tensors import TENSOR_GUARDS, negated_view, version_of

Reads: TypeAlias = Collection[tuple[int, str]]  # id of a module, name of an attribute; the name "*" stands for all

_TensorGuards: Any = TENSOR_GUARDS.get()

# What `Snapshot.statements` raise where something is of another kind or gone. PyTorch's check takes no None.
CHANGED_KIND = "(LookupError, AttributeError, TypeError, ValueError)"
_DIFFERS, _MAY_DIFFER, _RUNS = "differs", "may differ", "runs"

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TABLES = (*_HOOKS, "_modules", "_parameters", "_buffers")
_ORDERED = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)  # forward goes through their submodules
_BOOKKEEPING = frozenset(torch.nn.Module().__dict__) - {"training"}
_OF_EVERY_MODULE = frozenset(dir(torch.nn.Module)) - {"forward"}
SINGLETONS = (NoneType, bool, EllipsisType)
VALUES = (
    *(*SINGLETONS, int, float, complex, str, bytes, range, slice, type, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
OPAQUE = (torch.Tensor, torch.nn.Module, torch.Generator, ModuleType, logging.Logger, threading.Thread)
CONTAINERS = (list, dict, set, frozenset, tuple)
DEEPEST_OBJECT = 2  # a config, and the configs in it
DEEPEST = 6
LARGEST = 1000  # larger containers (vocabularies) are compared by identity and length


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that is so: `key` is compared, `text` is read."""

    key: Hashable
    text: str = field(compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """Equal only for the same object, which stays alive."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Snapshot:
    """What forward can read from a module, now.

    Attributes:
        module, names, reads: see `onnxtrain.capture.key.key.ModuleState.take`.
        facts: by what and where, for example ("p", "encoder.dropout") and ("shape", "encoder.weight").
        values: what the names in `source()` and `statements()` stand for.
        tensors: all that were found, by module and name.
    """

    def __init__(self, module: torch.nn.Module, names: Sequence[str], reads: Reads | None) -> None:
        self.module = module
        self.names = tuple(names)
        self.reads = reads
        self.facts: dict[tuple[str, str], Fact] = {}
        self.values: dict[str, Any] = {"is_": operator.is_}
        self.tensors: dict[tuple[int, str], torch.Tensor] = {}
        self._lines: list[tuple[str, str]] = []  # a statement or a condition, and what it means where that holds
        self._variables: dict[tuple[int, str], str] = {}  # of tensors
        self._first_of_tensor: dict[int, tuple[str, str]] = {}  # by id: variable and name
        self._first_of_object: dict[int, str] = {}
        self._classes: set[type] = set()
        self._of_classes: set[tuple[type, str]] = set()
        self._read_of: dict[int, set[str]] = {}
        for owner, name in reads or ():
            self._read_of.setdefault(owner, set()).add(name)
        self._wanted = [_place(module, name) for name in self.names]
        self._global_hooks()
        for path, submodule in submodules(module):
            _Visit(self, submodule, path or "the module").all()

    def changed(self, now: Snapshot) -> tuple[str, str] | None:
        """What and where is another fact in a later snapshot; None where there is nothing.

        A tensor that became tied is not: the graph takes it twice, and autograd adds its gradients.
        """
        for place in dict.fromkeys((*self.facts, *now.facts)):
            if self.facts.get(place) != now.facts.get(place) and (place[0] != _TIED or place in self.facts):
                return place
        return None

    def source(self) -> str:
        """A function `check(module)`: the tensors of `names`; None if the state is another; False if it may be.

        Raises:
            CaptureError: the module does not have a tensor of `names`.
        """
        body = [f"if module is not {self.bind(self.module)}: return None", *self.statements("None", "False")]
        body = ["try:", *(f"    {line}" for line in body), f"except {CHANGED_KIND}: return None"]
        body.append(f"return [{', '.join(self.variables())}]")
        return "def check(module):\n" + "\n".join(f"    {line}" for line in body) + "\n"

    def variables(self) -> list[str]:
        """The variables in which `statements()` leave the tensors of `names`.

        Raises:
            CaptureError: the module does not have a tensor of `names`.
        """
        self._refuse_missing()
        return [self._variables[place] for place in self._wanted]

    def named_tensors(self) -> list[torch.Tensor]:
        """The tensors of `names`.

        Raises:
            CaptureError: the module does not have a tensor of `names`.
        """
        self._refuse_missing()
        return [self.tensors[place] for place in self._wanted]

    def _refuse_missing(self) -> None:
        for name, place in zip(self.names, self._wanted, strict=True):
            if place not in self.tensors:
                raise CaptureError(
                    "a tensor that forward reads is not a parameter, buffer or attribute of the module", got=name
                )

    def statements(self, other: str, unsure: str) -> list[str]:
        """Python that returns `other` if the module's state is another, and `unsure` where only facts can tell.

        It reads the attributes themselves, as any Python program may. Where one is missing, or is of another kind, it
        raises one of `CHANGED_KIND`.
        """
        verdicts = {_DIFFERS: f": return {other}", _MAY_DIFFER: f": return {unsure}", _RUNS: ""}
        found = [text + verdicts[verdict] for text, verdict in self._lines]
        if self.tensors:
            tensors = ", ".join(variable for variable, _ in self._first_of_tensor.values())
            facts = [_tensor_facts(tensor) for tensor in self.different_tensors()]
            self.values["exact"] = _ExactTensors(facts)
            self.values["quick"] = quick_check(self.different_tensors()) or (lambda *tensors: False)
            found.append(f"if not quick({tensors}) and not exact({tensors}): return {other}")
        return found

    def bind(self, value: object) -> str:
        """A name for `value` in the source."""
        name = f"c{len(self.values)}"
        self.values[name] = value
        return name

    def emit(self, line: str) -> None:
        self._lines.append((line, _RUNS))

    def differs(self, *conditions: str) -> None:
        """Where one of these holds, the state is another."""
        if conditions:
            self._lines.append((f"if {' or '.join(conditions)}", _DIFFERS))

    def may_differ(self, *conditions: str) -> None:
        """Where one of these holds, only facts can tell."""
        if conditions:
            self._lines.append((f"if {' or '.join(conditions)}", _MAY_DIFFER))

    def read_of(self, module: torch.nn.Module) -> Collection[str] | None:
        """The attributes that forward reads of this module; None for all."""
        if self.reads is None or type(module).__getattribute__ is not object.__getattribute__:
            return None
        read = self._read_of.get(id(module), ())
        return None if "*" in read else read

    def missed(self, module: torch.nn.Module) -> list[str]:
        """The attributes that forward looks for in the module, and finds only in its class or not at all."""
        own = module.__dict__
        parts = (own, own["_parameters"], own["_buffers"], own["_modules"])
        read = self._read_of.get(id(module), set()) - _OF_EVERY_MODULE - {"*"}
        return sorted(name for name in read if not any(name in part for part in parts))

    def different_tensors(self) -> list[torch.Tensor]:
        """Each tensor once, though it has several names: PyTorch's check takes no tensor twice."""
        return list({id(tensor): tensor for tensor in self.tensors.values()}.values())

    def is_named(self, module: torch.nn.Module, name: str) -> bool:
        return (id(module), name) in self._wanted

    def is_wanted(self, name: str) -> bool:
        """Whether `name` is one of `names`."""
        return name in self.names

    # Tensors

    def outside_tensor(self, name: str, place: str, value: torch.Tensor) -> None:
        """One that no module holds itself, and where the source finds it."""
        self.tensor(_place(self.module, name), place, value, name)

    def tensor(self, at: tuple[int, str], place: str, value: torch.Tensor, where: str) -> str:
        """A tensor of a module, by id and name: what is known of it but its elements. Gives its name in the source."""
        variable = f"t{len(self.tensors)}"
        self._variables[at] = variable
        self.tensors[at] = value
        self.emit(f"{variable} = {place}")
        for what, fact in zip(_TENSOR_FACTS, _tensor_facts(value), strict=True):
            self.fact(what, where, fact, fact.__name__ if isinstance(fact, type) else None)
        first = self._first_of_tensor.setdefault(id(value), (variable, where))
        if first[0] != variable:
            self.fact(_TIED, where, first[1])
            self.differs(f"{variable} is not {first[0]}")
        return variable

    def quantized(self, owner: torch.nn.Module, name: str, variable: str, value: torch.Tensor, where: str) -> None:
        """What a quantized weight, `variable` in the source, is quantized with."""
        state = quantization_state(value)
        if state is None:
            return
        self.value("quantization", where, state, 0, 0)
        self.may_differ(f"{variable}.quant_state is not {self.bind(state)}")
        for way, tensor in state_tensors(value).items():
            if self.is_named(owner, f"{name}.{way}"):
                self.tensor((id(owner), f"{name}.{way}"), f"{variable}.{way}", tensor, f"{where}.{way}")

    def fact(self, what: str, where: str, key: Hashable, text: str | None = None) -> None:
        self.facts[what, where] = Fact(key, str(key) if text is None else text)

    def constants(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors whose elements a graph holds. Without a gradient each change in place counts up their versions."""
        counted = [tensor for tensor in tensors if not tensor.is_inference()]
        for number, tensor in enumerate(counted):
            self.fact("changes", f"constant {number}", version_of(tensor))
        if counted:
            versions = self.bind(version_of)
            saved = self.bind([version_of(tensor) for tensor in counted])
            self.differs(f"[*map({versions}, {self.bind(counted)})] != {saved}")

    # Values of attributes

    def attribute(self, container: str, name: str, value: object, where: str) -> None:
        """An entry of a module's `__dict__`."""
        self.value(name, where, value, 0, 0)
        self.compare(f"{container}[{name!r}]", value)

    def compare(self, place: str, value: object) -> None:
        """Checks that an expression gives this value: the same object, or the same number or string."""
        bound = repr(value) if isinstance(value, SINGLETONS) else self.bind(value)
        if isinstance(value, SINGLETONS):
            self.differs(f"{place} is not {bound}")
        elif type(value) in (int, float, str) and value == value and value != 0:
            kind = type(value).__name__
            self.differs(f"(v := {place}) is not {bound} and (v.__class__ is not {kind} or v != {bound})")
        else:
            self.may_differ(f"{place} is not {bound}")

    def of_class(self, kind: type, name: str, where: str) -> None:
        """What forward finds in the class of a module: a constant, a method, a property."""
        value = getattr(kind, name)
        if getattr(kind, name) is not value:
            return  # a class method is another object on each look: who exchanges one is not noticed
        self.value(name, where, value, 0, 0)
        if name != "forward" and (kind, name) not in self._of_classes:  # that of every class is looked at anyhow
            self._of_classes.add((kind, name))
            self.may_differ(f"{self.bind(kind)}.{name} is not {self.bind(value)}")

    def value(self, name: str, where: str, value: object, depth: int, objects: int) -> None:
        """Facts of a value and of what is in it, and checks of what can be changed in place."""
        if isinstance(value, VALUES):
            self.fact(name, where, constant_key(value), repr(value))
            return
        if isinstance(value, torch.Tensor) and self.is_wanted(f"{where}.{name}".removeprefix("the module.")):
            return
        parts = children(value, objects) if depth < DEEPEST else None
        if parts is None or len(parts) > LARGEST:
            length = len(value) if isinstance(value, CONTAINERS) else None
            self.fact(name, where, (Same(value), length), f"{type(value).__name__} at {id(value):#x}")
            if length is not None and not isinstance(value, tuple):
                self.differs(f"len({self.bind(value)}) != {length}")
            return
        here = f"{name} of {where}"
        first = self._first_of_object.setdefault(id(value), here)
        if first != here and not isinstance(value, tuple):
            self.fact(name, where, ("the same as", first), f"the {first}")
            return
        kind = type(value)
        self.fact(name, where, (kind, len(parts)), f"{kind.__name__} of {len(parts)}")
        self.watch(value, parts)
        if isinstance(value, CONTAINERS) and getattr(value, "__dict__", None):  # a subclass with attributes of its own
            self.value(f"{name}.__dict__", where, vars(value), depth + 1, objects + 1)
        for step, child in parts.items():
            self.value(name + step, where, child, depth + 1, objects + (not isinstance(value, CONTAINERS)))

    def watch(self, value: object, parts: Mapping[str, object]) -> None:
        """Checks that the same objects are in a container, or in an object."""
        if isinstance(value, (tuple, frozenset)):
            return
        bound = self.bind(value)
        if isinstance(value, set):
            self.may_differ(f"{bound} != {self.bind(set(value))}")
        elif isinstance(value, list):
            saved = self.bind(tuple(parts.values()))
            self.may_differ(f"len({bound}) != {len(parts)}", f"not all(map(is_, {bound}, {saved}))")
        elif isinstance(value, dict):
            self._watch_dict(bound, value)
        else:
            if hasattr(value, "__dict__"):
                self._watch_dict(f"{bound}.__dict__", vars(value))
            absent = self.bind(_ABSENT)
            self.may_differ(*(
                f"getattr({bound}, {name!r}, {absent}) is not {self.bind(getattr(value, name, _ABSENT))}"
                for name in slots(value)
            ))  # fmt: skip

    def _watch_dict(self, place: str, value: Mapping[Any, object]) -> None:
        keys, saved = self.bind(tuple(value)), self.bind(tuple(value.values()))
        self.may_differ(
            f"len({place}) != {len(value)}",
            f"not all(map(is_, {place}.values(), {saved}))",
            f"not all(map(is_, {place}, {keys}))",
        )

    # Hooks

    def _global_hooks(self) -> None:
        tables = [getattr(torch_module, f"_global{name}") for name in _HOOKS]
        if not any(tables):
            self.differs(f"any({self.bind(tables)})")
        for name, table in zip(_HOOKS, tables, strict=True):
            if table:
                self.hooks(self.bind(table), name, "all modules", table)

    def hooks(self, source: str, name: str, where: str, hooks: Mapping[int, object]) -> None:
        """A table of hooks that is not empty, and where the source finds it."""
        words = name.strip("_").replace("_", " ")
        self.fact(words, where, tuple((i, Same(hook)) for i, hook in hooks.items()), f"{len(hooks)}")
        self.differs(f"{source} != {self.bind(dict(hooks))}")


class _Visit:
    """One submodule."""

    def __init__(self, snapshot: Snapshot, module: torch.nn.Module, path: str) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError("a TorchScript module cannot be captured", where=path)
        self._of = snapshot
        self._module = module
        self._path = path

    def all(self) -> None:
        snapshot, module, path = self._of, self._module, self._path
        own = module.__dict__
        kind = type(module)
        bound = snapshot.bind(module)
        snapshot.fact("class", path, Same(kind), kind.__qualname__)
        bound_class = snapshot.bind(kind)
        snapshot.differs(f"{bound}.__class__ is not {bound_class}")
        if kind not in snapshot._classes:
            snapshot._classes.add(kind)
            snapshot.fact("forward", f"class {kind.__qualname__}", Same(kind.forward), "a function")
            snapshot.fact("__call__", f"class {kind.__qualname__}", Same(kind.__call__), "a function")
            snapshot.differs(
                f"{bound_class}.forward is not {snapshot.bind(kind.forward)}",
                f"{bound_class}.__call__ is not {snapshot.bind(kind.__call__)}",
            )
        snapshot.emit(f"d = {bound}.__dict__")
        snapshot.differs(*(f'd["{name}"]' for name in _TABLES if not own[name]))
        for name in _HOOKS:
            if own[name]:
                snapshot.hooks(f"d[{name!r}]", name, path, own[name])
        self._children(own["_modules"])
        for table in ("_parameters", "_buffers"):
            self._tensors(table, own[table])
        self._attributes(own)

    def _children(self, children: Mapping[str, torch.nn.Module | None]) -> None:
        snapshot = self._of
        if not children:
            return
        names = list(children)
        snapshot.fact("names of submodules", self._path, tuple(names), ", ".join(names))
        for name, child in children.items():
            snapshot.fact(f"submodule {name}", self._path, Same(child), type(child).__name__)
        snapshot.emit('m = d["_modules"]')
        snapshot.differs(
            f"len(m) != {len(names)}",
            *(f"m[{name!r}] is not {snapshot.bind(child)}" for name, child in children.items()),
        )
        if isinstance(self._module, _ORDERED) and len(names) > 1:
            snapshot.differs(f"[*m] != {snapshot.bind(names)}")

    def _tensors(self, table: str, tensors: Mapping[str, torch.Tensor | None]) -> None:
        snapshot = self._of
        if not tensors:
            return
        snapshot.emit(f'p = d["{table}"]')
        snapshot.differs(f"len(p) != {len(tensors)}")
        for name in tensors:
            value = tensors[name]
            where = name if self._path == "the module" else f"{self._path}.{name}"
            if value is None:
                snapshot.fact("tensor", where, None)
                snapshot.differs(f"p[{name!r}] is not None")
            else:
                variable = snapshot.tensor((id(self._module), name), f"p[{name!r}]", value, where)
                snapshot.quantized(self._module, name, variable, value, where)

    def _attributes(self, own: Mapping[str, object]) -> None:
        snapshot, module, path = self._of, self._module, self._path
        read = snapshot.read_of(module)
        if read is None:
            snapshot.differs(f"len(d) != {len(own)}")
        for name, value in own.items():
            if name in _BOOKKEEPING or not (read is None or name in read):
                continue
            if isinstance(value, torch.Tensor) and snapshot.is_named(module, name):
                where = name if path == "the module" else f"{path}.{name}"
                snapshot.tensor((id(module), name), f"d[{name!r}]", value, where)
            else:
                snapshot.attribute("d", name, value, path)
        for name in snapshot.missed(module):
            snapshot.may_differ(f"{name!r} in d")  # the same value may come to stand in the module itself
            if hasattr(type(module), name):
                snapshot.of_class(type(module), name, path)


_TIED = "the tensor it is tied to"
_TENSOR_FACTS = ("type", "requires_grad", "dtype", "shape", "device")


def _tensor_facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    kind = type(tensor)
    kind = torch.Tensor if kind in PLAIN_TENSORS else kind
    return kind, tensor.requires_grad, tensor.dtype, tensor.shape, tensor.device


def quick_check(
    tensors: Sequence[torch.Tensor], of_any_size: Sequence[torch.Tensor] = ()
) -> Callable[..., bool] | None:
    """PyTorch's own check, in C++: all facts, and the exact class. None where this version does not have it so."""
    return _quick_check(tensors, of_any_size) if sees_each_fact() else None


def _quick_check(tensors: Sequence[torch.Tensor], of_any_size: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    if _TensorGuards is None:
        return None
    sizes = [*(list(tensor.shape) for tensor in tensors), *([None] * tensor.dim() for tensor in of_any_size)]
    tensors = [*tensors, *of_any_size]
    any_strides: list[list[None]] = [[None] * tensor.dim() for tensor in tensors]
    try:
        guards = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=any_strides)
    except (TypeError, RuntimeError, ValueError):
        return None
    check: Callable[..., bool] = guards.check
    return check


@functools.cache
def sees_each_fact() -> bool:
    """Whether PyTorch's check, as this version has it, notices another value of each fact."""
    if negated_view is None:
        return False
    with torch.inference_mode(False), torch.no_grad():
        plain = torch.zeros(2, 3, dtype=torch.float32, device="cpu")
        others = [
            *(plain.double(), plain.to("meta"), plain.clone().requires_grad_(), plain.as_subclass(_Subclass)),
            *(plain[0], negated_view(plain), plain.to_sparse(), torch.nn.Parameter(plain, requires_grad=False)),
        ]
        with torch.inference_mode():
            others.append(plain.clone())
        resized = plain.new_zeros(3, 3)
    of_size, of_any_size = _quick_check([plain], ()), _quick_check((), [plain])
    if of_size is None or of_any_size is None:
        return False
    seen = [check(plain) and not any(map(check, others)) for check in (of_size, of_any_size)]
    return all(seen) and of_any_size(resized) and not of_size(resized)


class _Subclass(torch.Tensor):
    pass


class _ExactTensors:
    """Whether tensors have these facts."""

    def __init__(self, facts: list[tuple[Any, ...]]) -> None:
        self._facts = facts

    def __call__(self, *tensors: torch.Tensor) -> bool:
        return [*map(_tensor_facts, tensors)] == self._facts


def children(value: object, objects: int) -> dict[str, object] | None:
    """What is in a container or a plain object, by the step to it. None for what is compared by identity."""
    if isinstance(value, (list, tuple)):
        return {f"[{i}]": child for i, child in enumerate(value)}
    if isinstance(value, dict):  # two keys that are objects may have one text
        texts = (repr(key) if isinstance(key, (str, int)) else f"{i}: {key!r}" for i, key in enumerate(value))
        return {f"[{text}]": child for text, child in zip(texts, value.values(), strict=True)}
    if isinstance(value, (set, frozenset)):
        return {f"[{i}: {text}]": None for i, text in enumerate(sorted(map(repr, value)))}
    if callable(value) or isinstance(value, OPAQUE) or objects >= DEEPEST_OBJECT:
        return None
    in_slots = slots(value)
    if not in_slots and not hasattr(value, "__dict__"):
        return None
    attributes = {**getattr(value, "__dict__", {}), **{n: getattr(value, n) for n in in_slots if hasattr(value, n)}}
    return {f".{name}": child for name, child in attributes.items()}


def slots(value: object) -> tuple[str, ...]:
    """The attributes that an object keeps outside of a `__dict__`."""
    return tuple(
        name
        for base in type(value).__mro__
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType) and "__slots__" in vars(base) and name != "__dict__"
    )


_ABSENT = object()


def submodules(
    module: torch.nn.Module, path: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each submodule once, with the first path to it."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    for name, child in module.__dict__["_modules"].items():
        if child is not None:
            yield from submodules(child, f"{path}.{name}" if path else name, seen)


def _place(module: torch.nn.Module, name: str) -> tuple[int, str]:
    """The submodule that holds a tensor of this qualified name, and its name there (dots: what a parameter holds)."""
    steps = name.split(".")
    while len(steps) > 1 and (child := module.__dict__["_modules"].get(steps[0])) is not None:
        module = child
        del steps[0]
    return id(module), ".".join(steps)


@contextmanager
def attribute_reads() -> Iterator[set[tuple[int, str]]]:
    """Collects which attributes of modules are read in this thread: what forward does not read cannot change it."""
    owner = threading.get_ident()
    found: set[tuple[int, str]] = set()
    original = MODULE_GETATTRIBUTE.original

    def read(self: torch.nn.Module, name: str) -> Any:
        if threading.get_ident() == owner:
            if name != "__dict__":
                found.add((id(self), name))
            elif _is_forward(sys._getframe(1).f_code.co_filename):
                found.add((id(self), "*"))
        return original(self, name)

    with MODULE_GETATTRIBUTE.wrapped(lambda original: read):
        yield found


def _is_forward(file: str) -> bool:
    """Whether this may be code of a forward: PyTorch's export, nn.Module and we look into every `__dict__`."""
    if file.startswith(PYTORCH):
        return file.startswith(f"{PYTORCH}nn/") and file != torch_module.__file__
    return not file.startswith(PACKAGE)
