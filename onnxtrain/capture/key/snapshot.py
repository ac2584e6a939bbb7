"""A snapshot of a module's state: facts that are compared by value, and a generated check that compares by identity.

Both come from one walk over the submodules. The facts decide whether the state has changed, and give the text of
messages. The generated check runs on every step: a value that is the same immutable object has not changed.
"""

from __future__ import annotations

import enum
import itertools
import logging
import operator
import threading
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType, MemberDescriptorType, ModuleType, NoneType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.modules import module as torch_module

from onnxtrain.capture.four_bit_weights import quantization_state, state_tensors
from onnxtrain.capture.key.repeated_checks import with_loops
from onnxtrain.capture.key.tensor_checks import TENSOR_FACT_NAMES, PythonCheck, cpp_check, state_tensor_facts
from onnxtrain.capture.sharded.layout import is_sharded
from onnxtrain.capture.structure import Identity, constant_key
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat.tensors import version_of

Reads: TypeAlias = Collection[tuple[int, str]]  # id of a module, name of an attribute; "*": all names

# The generated statements raise these if a value is missing or of another class. PyTorch's check does not take None.
READ_ERRORS = "(LookupError, AttributeError, TypeError, ValueError)"
_CHANGED, _UNCERTAIN, _STATEMENT = "changed", "uncertain", "statement"

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TABLES = (*_HOOKS, "_modules", "_parameters", "_buffers")
_ITERABLE = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)  # forward iterates over their submodules
_BOOKKEEPING = frozenset(torch.nn.Module().__dict__) - {"training"}
_COMMON_ATTRIBUTES = frozenset(dir(torch.nn.Module)) - {"forward"}
SINGLETON_TYPES = (NoneType, bool, EllipsisType)
VALUE_TYPES = (
    *(*SINGLETON_TYPES, int, float, complex, str, bytes, range, slice, type, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
OPAQUE_TYPES = (torch.Tensor, torch.nn.Module, torch.Generator, ModuleType, logging.Logger, threading.Thread)
CONTAINER_TYPES = (list, dict, set, frozenset, tuple)
MAX_OBJECT_DEPTH = 2  # a config, and the configs in it
MAX_DEPTH = 6
MAX_ELEMENTS = 1000  # larger containers (vocabularies) are compared by identity and length


@dataclass(frozen=True, slots=True)
class Fact:
    """A property of the state: `key` is compared, `text` appears in messages."""

    key: Hashable
    text: str = field(compare=False)


class Snapshot:
    """The state of a module that forward can read, at one moment.

    Attributes:
        module, names, reads: see `onnxtrain.capture.key.key.ModuleState`.
        facts: by name and owner, for example ("p", "encoder.dropout") and ("shape", "encoder.weight").
        values: the values of the global names in `source()` and `statements()`.
        tensors: the tensors of the state, by the id of the module and the name in it.
    """

    def __init__(self, module: torch.nn.Module, names: Sequence[str], reads: Reads | None) -> None:
        self.module = module
        self.names = tuple(names)
        self.reads = reads
        self.facts: dict[tuple[str, str], Fact] = {}
        self.values: dict[str, Any] = {"is_": operator.is_}
        self.tensors: dict[tuple[int, str], torch.Tensor] = {}
        self._lines: list[tuple[str, str]] = []  # a statement or condition, and its verdict
        self._starts: list[int] = []  # the index in `_lines` of the first one of each module
        self._variables: dict[tuple[int, str], str] = {}  # of tensors, as in `tensors`
        self._first_of_tensor: dict[int, tuple[str, str]] = {}  # its first variable and name, by its id
        self._first_of_object: dict[int, str] = {}
        self._classes: set[type] = set()
        self._class_attributes: set[tuple[type, str]] = set()
        self._reads_of: dict[int, set[str]] = {}
        for owner, name in reads or ():
            self._reads_of.setdefault(owner, set()).add(name)
        self._named = [_owner_and_name(module, name) for name in self.names]
        self._global_hooks()
        for path, submodule in submodules(module):
            self._starts.append(len(self._lines))
            _ModuleVisitor(self, submodule, path or "the module").visit()
        self._starts.append(len(self._lines))

    def first_change(self, later: Snapshot) -> tuple[str, str] | None:
        """Return the name and owner of the first fact that differs in a later snapshot; None if none does.

        A tensor that became tied is not a change: the graph takes it twice, and autograd adds the two gradients.
        """
        for key in dict.fromkeys((*self.facts, *later.facts)):
            if self.facts.get(key) != later.facts.get(key) and (key[0] != _TIED or key in self.facts):
                return key
        return None

    def source(self) -> str:
        """Generate a function `check(module)` that returns the tensors of `names` if the state is unchanged.

        It returns None if the state has changed, and False if only the facts can tell.

        Raises:
            CaptureError: the module does not have a tensor of `names`.
        """
        body = [f"if module is not {self.bind(self.module)}: return None", *self.statements("None", "False")]
        body = ["try:", *(f"    {line}" for line in body), f"except {READ_ERRORS}: return None"]
        body.append(f"return [{', '.join(self.variables())}]")
        return "def check(module):\n" + "\n".join(f"    {line}" for line in body) + "\n"

    def variables(self) -> list[str]:
        """Return the variables to which `statements()` assign the tensors of `names`.

        Raises:
            CaptureError: the module does not have a tensor of `names`.
        """
        self._refuse_missing()
        return [self._variables[key] for key in self._named]

    def named_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of `names`.

        Raises:
            CaptureError: the module does not have a tensor of `names`.
        """
        self._refuse_missing()
        return [self.tensors[key] for key in self._named]

    def _refuse_missing(self) -> None:
        for name, key in zip(self.names, self._named, strict=True):
            if key not in self.tensors:
                raise CaptureError(
                    "the module does not have a tensor that forward reads",
                    expected="a parameter, buffer or tensor attribute of the module or one of its submodules",
                    got=name,
                    todo="the module runs in PyTorch; register the tensor as a buffer",
                )

    def statements(self, changed: str, uncertain: str) -> list[str]:
        """Generate statements that return `changed` if the state has changed, and `uncertain` if only facts can tell.

        They read attributes in ordinary Python. If one is missing or of another class, they raise one of `READ_ERRORS`.
        """
        suffixes = {_CHANGED: f": return {changed}", _UNCERTAIN: f": return {uncertain}", _STATEMENT: ""}
        lines = [text + suffixes[verdict] for text, verdict in self._lines]
        modules = [lines[start:end] for start, end in itertools.pairwise(self._starts)]
        statements = lines[: self._starts[0]] + with_loops(modules, self.values, self.bind) + lines[self._starts[-1] :]
        if self.tensors:
            tensors = ", ".join(variable for variable, _ in self._first_of_tensor.values())
            distinct = self.distinct_tensors()
            self.values["python_check"] = PythonCheck(state_tensor_facts, distinct)
            self.values["cpp_check"] = cpp_check(distinct) or (lambda *tensors: False)
            statements.append(f"if not cpp_check({tensors}) and not python_check({tensors}): return {changed}")
        return statements

    def bind(self, value: object) -> str:
        """Return a global name for `value` in the source."""
        name = f"c{len(self.values)}"
        self.values[name] = value
        return name

    def add_statement(self, statement: str) -> None:
        self._lines.append((statement, _STATEMENT))

    def changed_if(self, *conditions: str) -> None:
        """Let the check find a change if one of these conditions holds."""
        if conditions:
            self._lines.append((f"if {' or '.join(conditions)}", _CHANGED))

    def uncertain_if(self, *conditions: str) -> None:
        """Let the check leave it to the facts if one of these conditions holds."""
        if conditions:
            self._lines.append((f"if {' or '.join(conditions)}", _UNCERTAIN))

    def reads_of(self, module: torch.nn.Module) -> Collection[str] | None:
        """Return the attributes of this module that forward reads; None for all."""
        if self.reads is None or type(module).__getattribute__ is not object.__getattribute__:
            return None
        reads = self._reads_of.get(id(module), ())
        return None if "*" in reads else reads

    def reads_beyond_instance(self, module: torch.nn.Module) -> list[str]:
        """Return the attributes that forward reads, and that the module has in its class only or not at all."""
        attributes = module.__dict__
        tables = (attributes, attributes["_parameters"], attributes["_buffers"], attributes["_modules"])
        reads = self._reads_of.get(id(module), set()) - _COMMON_ATTRIBUTES - {"*"}
        return sorted(name for name in reads if not any(name in table for table in tables))

    def distinct_tensors(self) -> list[torch.Tensor]:
        """Return each tensor once, even if it has several names: PyTorch's check takes no tensor twice."""
        return list({id(tensor): tensor for tensor in self.tensors.values()}.values())

    def is_named(self, module: torch.nn.Module, name: str) -> bool:
        """Return whether one of `names` is this attribute of this module."""
        return (id(module), name) in self._named

    # Tensors

    def add_outside_tensor(self, name: str, expression: str, value: torch.Tensor) -> None:
        """Add a tensor that no module holds itself; `expression` reads it in the source."""
        self.add_tensor(_owner_and_name(self.module, name), expression, value, name)

    def add_tensor(self, key: tuple[int, str], expression: str, value: torch.Tensor, path: str) -> str:
        """Add a tensor of a module and its facts except its values; return its variable in the source."""
        variable = f"t{len(self.tensors)}"
        self._variables[key] = variable
        self.tensors[key] = value
        self.add_statement(f"{variable} = {expression}")
        for name, fact in zip(TENSOR_FACT_NAMES, state_tensor_facts(value), strict=True):
            self.add_fact(name, path, fact, fact.__name__ if isinstance(fact, type) else None)
        first = self._first_of_tensor.setdefault(id(value), (variable, path))
        if first[0] != variable:
            self.add_fact(_TIED, path, first[1])
            self.changed_if(f"{variable} is not {first[0]}")
        return variable

    def add_quantization_state(
        self, module: torch.nn.Module, name: str, variable: str, weight: torch.Tensor, path: str
    ) -> None:
        """Add the quantization state of a weight, which is `variable` in the source, if it has one."""
        state = quantization_state(weight)
        if state is None:
            return
        self.add_value("quantization", path, state, 0, 0)
        self.uncertain_if(f"{variable}.quant_state is not {self.bind(state)}")
        for suffix, tensor in state_tensors(weight).items():
            if self.is_named(module, f"{name}.{suffix}"):
                key = id(module), f"{name}.{suffix}"
                self.add_tensor(key, f"{variable}.{suffix}", tensor, f"{path}.{suffix}")

    def add_sharding(self, variable: str, tensor: torch.Tensor, path: str) -> None:
        """Add the mesh and the placements of a DTensor, which is `variable` in the source."""
        if not is_sharded(tensor):
            return
        for name in ("device_mesh", "placements"):
            value = getattr(tensor, name)
            self.add_fact(name, path, value)
            self.uncertain_if(f"(v := {variable}.{name}) is not {self.bind(value)} and v != {self.bind(value)}")

    def add_fact(self, name: str, owner: str, key: Hashable, text: str | None = None) -> None:
        self.facts[name, owner] = Fact(key, str(key) if text is None else text)

    def add_constants(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add the versions of tensors whose values a graph embeds: each in-place change increments a version."""
        counted = [tensor for tensor in tensors if not tensor.is_inference()]
        for index, tensor in enumerate(counted):
            self.add_fact("changes", f"constant {index}", version_of(tensor))
        if counted:
            versions = self.bind(version_of)
            saved = self.bind([version_of(tensor) for tensor in counted])
            self.changed_if(f"[*map({versions}, {self.bind(counted)})] != {saved}")

    # Values of attributes

    def add_attribute(self, attributes: str, name: str, value: object, owner: str) -> None:
        """Add an entry of a module's `__dict__`, which is `attributes` in the source."""
        self.add_value(name, owner, value, 0, 0)
        self.check_value(f"{attributes}[{name!r}]", value)

    def check_value(self, expression: str, value: object) -> None:
        """Check that an expression gives this value: the same object, or the same number or string."""
        bound = repr(value) if isinstance(value, SINGLETON_TYPES) else self.bind(value)
        if isinstance(value, SINGLETON_TYPES):
            self.changed_if(f"{expression} is not {bound}")
        elif type(value) in (int, float, str) and value == value and value != 0:
            kind = type(value).__name__
            self.changed_if(f"(v := {expression}) is not {bound} and (v.__class__ is not {kind} or v != {bound})")
        else:
            self.uncertain_if(f"{expression} is not {bound}")

    def add_class_attribute(self, kind: type, name: str, owner: str) -> None:
        """Add an attribute that forward reads from the class of a module: a constant, a method, a property."""
        value = getattr(kind, name)
        if getattr(kind, name) is not value:
            return  # each access of a class method makes another object: its replacement is not detected
        self.add_value(name, owner, value, 0, 0)
        if name != "forward" and (kind, name) not in self._class_attributes:  # `forward` is checked for every class
            self._class_attributes.add((kind, name))
            self.uncertain_if(f"{self.bind(kind)}.{name} is not {self.bind(value)}")

    def add_value(self, name: str, owner: str, value: object, depth: int, objects: int) -> None:
        """Add facts of a value and its contents, and checks of what can change in place.

        Args:
            name: the name of the fact.
            owner: the owner of the fact.
            value: the value.
            depth: the number of containers and objects around it.
            objects: the number of objects among them.
        """
        if isinstance(value, VALUE_TYPES):
            self.add_fact(name, owner, constant_key(value), repr(value))
            return
        if isinstance(value, torch.Tensor) and f"{owner}.{name}".removeprefix("the module.") in self.names:
            return
        if isinstance(value, np.ndarray):
            self.add_array(name, owner, value)
            return
        contents = children(value, objects) if depth < MAX_DEPTH else None
        if contents is None or len(contents) > MAX_ELEMENTS:
            length = len(value) if isinstance(value, CONTAINER_TYPES) else None
            self.add_fact(name, owner, (Identity(value), length), f"{type(value).__name__} at {id(value):#x}")
            if length is not None and not isinstance(value, tuple):
                self.changed_if(f"len({self.bind(value)}) != {length}")
            return
        title = f"{name} of {owner}"
        first = self._first_of_object.setdefault(id(value), title)
        if first != title and not isinstance(value, tuple):
            self.add_fact(name, owner, ("the same as", first), f"the {first}")
            return
        kind = type(value)
        self.add_fact(name, owner, (kind, len(contents)), f"{kind.__name__} of {len(contents)}")
        self.check_contents(value, contents)
        if isinstance(value, CONTAINER_TYPES) and getattr(value, "__dict__", None):  # a subclass with attributes
            self.add_value(f"{name}.__dict__", owner, vars(value), depth + 1, objects + 1)
        for step, child in contents.items():
            self.add_value(name + step, owner, child, depth + 1, objects + (not isinstance(value, CONTAINER_TYPES)))

    def add_array(self, name: str, owner: str, value: np.ndarray) -> None:
        """Add the elements of a numpy array, of which a graph embeds copies: no version counts its changes."""
        elements = value.tobytes()
        text = f"ndarray {list(value.shape)} with the hash {hash(elements):x}"
        self.add_fact(name, owner, (Identity(value), elements), text)
        self.changed_if(f"{self.bind(value)}.tobytes() != {self.bind(elements)}")

    def check_contents(self, value: object, contents: Mapping[str, object]) -> None:
        """Check that a container or an object contains the same objects."""
        if isinstance(value, (tuple, frozenset)):
            return
        bound = self.bind(value)
        if isinstance(value, set):
            self.uncertain_if(f"{bound} != {self.bind(set(value))}")
        elif isinstance(value, list):
            saved = self.bind(tuple(contents.values()))
            self.uncertain_if(f"len({bound}) != {len(contents)}", f"not all(map(is_, {bound}, {saved}))")
        elif isinstance(value, dict):
            self._check_dict(bound, value)
        else:
            if hasattr(value, "__dict__"):
                self._check_dict(f"{bound}.__dict__", vars(value))
            absent = self.bind(_ABSENT)
            self.uncertain_if(*(
                f"getattr({bound}, {name!r}, {absent}) is not {self.bind(getattr(value, name, _ABSENT))}"
                for name in slots(value)
            ))  # fmt: skip

    def _check_dict(self, expression: str, value: Mapping[Any, object]) -> None:
        keys, saved = self.bind(tuple(value)), self.bind(tuple(value.values()))
        self.uncertain_if(
            f"len({expression}) != {len(value)}",
            f"not all(map(is_, {expression}.values(), {saved}))",
            f"not all(map(is_, {expression}, {keys}))",
        )

    # Hooks

    def _global_hooks(self) -> None:
        tables = [getattr(torch_module, f"_global{name}") for name in _HOOKS]
        if not any(tables):
            self.changed_if(f"any({self.bind(tables)})")
        for name, table in zip(_HOOKS, tables, strict=True):
            if table:
                self.add_hooks(self.bind(table), name, "all modules", table)

    def add_hooks(self, expression: str, attribute: str, owner: str, hooks: Mapping[int, object]) -> None:
        """Add a table of hooks that is not empty; `expression` reads it in the source."""
        name = attribute.strip("_").replace("_", " ")
        self.add_fact(name, owner, tuple((i, Identity(hook)) for i, hook in hooks.items()), f"{len(hooks)}")
        self.changed_if(f"{expression} != {self.bind(dict(hooks))}")


class _ModuleVisitor:
    """Adds one submodule to a snapshot."""

    def __init__(self, snapshot: Snapshot, module: torch.nn.Module, path: str) -> None:
        self._snapshot = snapshot
        self._module = module
        self._path = path

    def visit(self) -> None:
        snapshot, module, path = self._snapshot, self._module, self._path
        attributes = module.__dict__
        kind = type(module)
        bound = snapshot.bind(module)
        snapshot.add_fact("class", path, Identity(kind), kind.__qualname__)
        bound_class = snapshot.bind(kind)
        snapshot.changed_if(f"{bound}.__class__ is not {bound_class}")
        if isinstance(module, torch.jit.ScriptModule):  # refused, and its attributes are not Python's
            return
        if kind not in snapshot._classes:
            snapshot._classes.add(kind)
            snapshot.add_fact("forward", f"class {kind.__qualname__}", Identity(kind.forward), "a function")
            snapshot.add_fact("__call__", f"class {kind.__qualname__}", Identity(kind.__call__), "a function")
            snapshot.changed_if(
                f"{bound_class}.forward is not {snapshot.bind(kind.forward)}",
                f"{bound_class}.__call__ is not {snapshot.bind(kind.__call__)}",
            )
        snapshot.add_statement(f"d = {bound}.__dict__")
        snapshot.changed_if(*(f'd["{name}"]' for name in _TABLES if not attributes[name]))
        for name in _HOOKS:
            if attributes[name]:
                snapshot.add_hooks(f"d[{name!r}]", name, path, attributes[name])
        self._add_submodules(attributes["_modules"])
        for table in ("_parameters", "_buffers"):
            self._add_tensors(table, attributes[table])
        self._add_attributes(attributes)

    def _add_submodules(self, children: Mapping[str, torch.nn.Module | None]) -> None:
        snapshot = self._snapshot
        if not children:
            return
        names = list(children)
        snapshot.add_fact("names of submodules", self._path, tuple(names), ", ".join(names))
        for name, child in children.items():
            snapshot.add_fact(f"submodule {name}", self._path, Identity(child), type(child).__name__)
        snapshot.add_statement('m = d["_modules"]')
        snapshot.changed_if(
            f"len(m) != {len(names)}",
            *(f"m[{name!r}] is not {snapshot.bind(child)}" for name, child in children.items()),
        )
        if isinstance(self._module, _ITERABLE) and len(names) > 1:
            snapshot.changed_if(f"[*m] != {snapshot.bind(names)}")

    def _add_tensors(self, table: str, tensors: Mapping[str, torch.Tensor | None]) -> None:
        snapshot = self._snapshot
        if not tensors:
            return
        snapshot.add_statement(f'p = d["{table}"]')
        snapshot.changed_if(f"len(p) != {len(tensors)}")
        for name in tensors:
            tensor = tensors[name]
            path = self._path_of(name)
            if tensor is None:
                snapshot.add_fact("tensor", path, None)
                snapshot.changed_if(f"p[{name!r}] is not None")
            else:
                variable = snapshot.add_tensor((id(self._module), name), f"p[{name!r}]", tensor, path)
                snapshot.add_quantization_state(self._module, name, variable, tensor, path)
                snapshot.add_sharding(variable, tensor, path)

    def _add_attributes(self, attributes: Mapping[str, object]) -> None:
        snapshot, module = self._snapshot, self._module
        reads = snapshot.reads_of(module)
        if reads is None:
            snapshot.changed_if(f"len(d) != {len(attributes)}")
        for name, value in attributes.items():
            if name in _BOOKKEEPING or not (reads is None or name in reads):
                continue
            if isinstance(value, torch.Tensor) and snapshot.is_named(module, name):
                snapshot.add_tensor((id(module), name), f"d[{name!r}]", value, self._path_of(name))
            else:
                snapshot.add_attribute("d", name, value, self._path)
        for name in snapshot.reads_beyond_instance(module):
            snapshot.uncertain_if(f"{name!r} in d")  # the instance may get an attribute of the same value
            if hasattr(type(module), name):
                snapshot.add_class_attribute(type(module), name, self._path)

    def _path_of(self, name: str) -> str:
        return name if self._path == "the module" else f"{self._path}.{name}"


_TIED = "the tensor it is tied to"


def children(value: object, objects: int) -> dict[str, object] | None:
    """Return the contents of a container or a plain object, by path step; None for values compared by identity."""
    if isinstance(value, (list, tuple)):
        return {f"[{i}]": child for i, child in enumerate(value)}
    if isinstance(value, dict):  # different objects may have the same repr
        texts = (repr(key) if isinstance(key, (str, int)) else f"{i}: {key!r}" for i, key in enumerate(value))
        return {f"[{text}]": child for text, child in zip(texts, value.values(), strict=True)}
    if isinstance(value, (set, frozenset)):
        return {f"[{i}: {text}]": None for i, text in enumerate(sorted(map(repr, value)))}
    if callable(value) or isinstance(value, OPAQUE_TYPES) or objects >= MAX_OBJECT_DEPTH:
        return None
    in_slots = slots(value)
    if not in_slots and not hasattr(value, "__dict__"):
        return None
    attributes = {**getattr(value, "__dict__", {}), **{n: getattr(value, n) for n in in_slots if hasattr(value, n)}}
    return {f".{name}": child for name, child in attributes.items()}


def slots(value: object) -> tuple[str, ...]:
    """Return the names of the attributes that an object keeps in slots."""
    return tuple(
        name
        for base in type(value).__mro__
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType) and "__slots__" in vars(base) and name != "__dict__"
    )


_ABSENT = object()


def submodules(
    module: torch.nn.Module, path: str = "", visited: set[int] | None = None
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield each submodule once, with its first path; not the parts of a TorchScript module."""
    visited = set() if visited is None else visited
    if id(module) in visited:
        return
    visited.add(id(module))
    yield path, module
    if isinstance(module, torch.jit.ScriptModule):
        return
    for name, child in module.__dict__["_modules"].items():
        if child is not None:
            yield from submodules(child, f"{path}.{name}" if path else name, visited)


def _owner_and_name(module: torch.nn.Module, name: str) -> tuple[int, str]:
    """Return the id of the submodule that holds a tensor of this qualified name, and the tensor's name in it.

    That name contains dots if a parameter holds the tensor.
    """
    steps = name.split(".")
    while len(steps) > 1 and (child := module.__dict__["_modules"].get(steps[0])) is not None:
        module = child
        del steps[0]
    return id(module), ".".join(steps)
