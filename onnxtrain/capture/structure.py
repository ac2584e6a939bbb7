"""Flatten the arguments and the output of a module into a list of tensors and a structure, and rebuild them.

A structure holds the containers, the positions of the tensors and the values of all other leaves: two calls with equal
structures can run the same captured graph. Supported containers are Python's own, dataclasses, the caches of
transformers, and every class registered with `torch.utils._pytree` (transformers registers its outputs there). This
file registers nothing itself: a registration would change how other libraries treat the user's classes.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import operator
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, EllipsisType, FunctionType, NoneType
from typing import Any, TypeAlias, TypeGuard

import torch

from onnxtrain.capture.sharded.layout import dtensor_class, is_sharded
from onnxtrain.capture.sharded.value import as_container
from onnxtrain.errors import ORTModuleIOError
from onnxtrain.torch_compat import pytree
from onnxtrain.torch_compat.collectives import completed
from onnxtrain.torch_compat.tensors import storage_id

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_CONSTANTS = (
    *(NoneType, bool, int, float, complex, str, bytes, EllipsisType, enum.Enum, slice, range, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, FunctionType, BuiltinFunctionType),
)
_STORAGE = torch.Tensor.untyped_storage
_STRINGS = frozenset({str})
_BUILTIN_CONTAINERS = frozenset({dict, list, tuple})
_COMPARED_BY_VALUE = frozenset({NoneType, bool, int, str})  # == is exact for values of one type
_MAX_CACHED = 4096  # structures; bounds memory when a constant changes on every call


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """The position of a leaf in one of the flat lists: "tensor" or "size" (a symbolic int that forward returns)."""

    kind: str
    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """A leaf that is neither a tensor nor a size. Equal to another only if the type and every bit are the same."""

    value: Any = dataclasses.field(compare=False)
    key: Hashable


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A container: `build` makes it from its children, `key` holds their names (dict keys, fields)."""

    type: type
    key: Hashable
    children: tuple[Tree, ...]
    steps: tuple[str, ...] = dataclasses.field(compare=False)
    build: Callable[[list[Any]], Any] = dataclasses.field(compare=False)


Tree: TypeAlias = Slot | Constant | Node


class Structure:
    """The structure of a call `module(*args, **kwargs)`: hashable, and equal for all calls that fit one capture.

    Attributes:
        tree: the containers, constants and positions of tensors.
        names: a unique identifier for each flat tensor ("input_ids", "args_0", "batch_mask").
        shared: the groups of flat tensors, as indices, that share a storage.
    """

    __slots__ = ("_hash", "_rebuild", "names", "shared", "tree")

    def __init__(self, tree: Tree, names: tuple[str, ...], shared: tuple[tuple[int, ...], ...]) -> None:
        self.tree = tree
        self.names = names
        self.shared = shared
        self._hash = hash((tree, shared))
        self._rebuild: _Rebuild | None = None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Structure) and self.shared == other.shared and self.tree == other.tree

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Structure({', '.join(self.names)})"

    def unflatten(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rebuild the call's args and kwargs from these tensors (or other leaves), in fresh containers."""
        if self._rebuild is None:
            self._rebuild = _compile_rebuild(self.tree)
        args, kwargs = self._rebuild(tensors, ())
        return args, kwargs

    def changed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[Any]) -> str:
        """Describe how forward changed these arguments, which `unflatten` made from `tensors`; "" if it did not."""
        flat = _Flattener("input")
        tree = flat.tree((tuple(args), dict(kwargs)), "")
        difference = _difference(self.tree, tree, "")
        for path, old, new in zip(flat.paths, tensors, flat.tensors, strict=False):
            if old is not new and not difference:
                difference = f"{_readable(path)}: another tensor"
        return difference

    def constants(self) -> dict[str, Any]:
        """Return each constant by its path."""
        return {path: leaf.value for path, leaf in leaves(self.tree) if isinstance(leaf, Constant)}

    def classes(self) -> set[type]:
        """Return the classes of its containers, except Python's own."""
        return {node.type for node in _nodes(self.tree) if node.type not in _BUILTIN_CONTAINERS}

    def difference(self, other: Structure) -> str:
        """Describe the first difference between this structure and `other`; "" if they are equal."""
        if self == other:
            return ""
        return (
            _difference(self.tree, other.tree, "")
            or f"inputs that share memory: {self._sharing()} → {other._sharing()}"
        )

    def _sharing(self) -> str:
        return "; ".join(" and ".join(self.names[i] for i in group) for group in self.shared) or "none"


class OutputStructure:
    """The structure of a module's output: containers of tensors, sizes and constants.

    Attributes:
        tree: the containers, constants and positions of leaves.
        names: a unique identifier for each tensor ("logits", "hidden_states_0", "output").
    """

    __slots__ = ("_rebuild", "names", "tree", "unflatten")

    def __init__(self, tree: Tree, names: tuple[str, ...]) -> None:
        self.tree = tree
        self.names = names
        # An attribute and not a method, because it runs on every step.
        self.unflatten: _Rebuild = _compile_rebuild(tree)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutputStructure) and self.tree == other.tree

    def __hash__(self) -> int:
        return hash(self.tree)


_Rebuild: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], Any]
_STRUCTURE_OF_KEY: dict[Any, Structure] = {}
_UNIQUE_STRUCTURES: dict[Structure, Structure] = {}


def flatten_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], Structure]:
    """Flatten a call into its tensors, each object once, and its structure.

    Structures differ if the order of kwargs does, which forward may read.

    Raises:
        ORTModuleIOError: a leaf is neither a tensor nor a constant; names its path and type.
    """
    if kwargs:
        values: list[Any] = [*args, *kwargs.values()]
        key: Any = (len(args), *kwargs)
    else:
        values = [*args]
        key = len(args)
    if not PLAIN_TENSORS.issuperset(map(type, values)):
        arguments, values, key_parts = values, [], [key]
        if not _scan(arguments, values, key_parts):
            return _flatten_any_call(args, kwargs)
        key = tuple(key_parts)
    if len(values) > 1 and len({*map(_STORAGE, values)}) != len(values):
        return _flatten_any_call(args, kwargs)
    structure = _STRUCTURE_OF_KEY.get(key)
    if structure is None:
        _, structure = _flatten_any_call(args, kwargs)
        _cache(_STRUCTURE_OF_KEY, key, structure)
    return values, structure


def _scan(values: Iterable[Any], tensors: list[torch.Tensor], key: list[Any]) -> bool:
    """Collect the tensors of common containers, and a key that distinguishes structures; False for other values."""
    for value in values:
        kind = type(value)
        if kind in PLAIN_TENSORS:
            tensors.append(value)
            key.append(torch.Tensor)
        elif kind in _COMPARED_BY_VALUE:
            key += (kind, value)
        elif kind is float:
            key += (kind, repr(value))
        elif kind is dict:
            if not _STRINGS.issuperset(map(type, value)):
                return False
            key += (kind, tuple(value))
            if not _scan(value.values(), tensors, key):
                return False
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            if not _scan(value, tensors, key):
                return False
        else:
            return False
    return True


def _cache(table: dict[Any, Any], key: Any, value: Any) -> None:
    if len(table) >= _MAX_CACHED:
        table.clear()
    table[key] = value


def _flatten_any_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], Structure]:
    flat = _Flattener("input")
    tree = flat.tree((tuple(args), dict(kwargs)), "")
    structure = Structure(tree, _names(flat.paths), _shared(flat.tensors))
    unique = _UNIQUE_STRUCTURES.get(structure)  # one object for equal structures: later comparisons end at `is`
    if unique is None:
        _cache(_UNIQUE_STRUCTURES, structure, structure)
        unique = structure
    return flat.tensors, unique


def input_names(forward: Callable[..., Any], structure: Structure) -> list[str]:
    """Name each tensor of a call after the parameter of forward that receives it."""
    positional = [
        name
        for name, parameter in inspect.signature(forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    names: list[str] = []
    for name in structure.names:
        match = re.match(r"args_(\d+)", name)
        if match and int(match[1]) < len(positional):
            name = positional[int(match[1])] + name[match.end() :]
        names.append(name if name not in names else f"{name}_{len(names)}")
    return names


def flatten_output(output: Any) -> tuple[list[Any], OutputStructure]:
    """Flatten a module's output into its tensors, each object once, then its symbolic sizes; and its structure.

    Raises:
        ORTModuleIOError: a leaf is not a tensor, size or constant; names its path and type.
    """
    flat = _Flattener("output")
    tree = flat.tree(output, "")
    return [*flat.tensors, *flat.sizes], OutputStructure(tree, _names(flat.paths))


# Flattening


class _Flattener:
    """Builds a tree and collects its leaves. `kind`: "input" or "output", for messages."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.tensors: list[Any] = []
        self.paths: list[str] = []  # of the tensors
        self.sizes: list[torch.SymInt] = []
        self._slots: dict[int, Slot] = {}  # by the id of the tensor
        self._ancestors: set[int] = set()  # ids of the enclosing containers: one that contains itself has no tree

    def tree(self, value: Any, path: str) -> Tree:
        if isinstance(value, torch.Tensor) and not is_sharded(value):
            slot = self._slots.get(id(value))
            if slot is None:
                slot = self._slots[id(value)] = Slot("tensor", len(self.tensors))
                self.tensors.append(completed(value))
                self.paths.append(path)
            return slot
        if isinstance(value, torch.SymInt) and self.kind == "output":
            self.sizes.append(value)
            return Slot("size", len(self.sizes) - 1)
        container = _open_container(value)
        if container is None:
            if isinstance(value, _CONSTANTS):
                return Constant(value, constant_key(value))
            raise self._unsupported(value, path)
        children, steps, key, build = container
        if id(value) in self._ancestors:
            raise ORTModuleIOError(
                f"an {self.kind} contains itself",
                where=self._location(path),
                expected="containers without cycles",
                todo="the module runs in PyTorch; break the cycle",
            )
        self._ancestors.add(id(value))
        trees = tuple(self.tree(child, path + step) for child, step in zip(children, steps, strict=True))
        self._ancestors.discard(id(value))
        return Node(dtensor_class() if is_sharded(value) else type(value), key, trees, tuple(steps), build)

    def _unsupported(self, value: Any, path: str) -> ORTModuleIOError:
        return ORTModuleIOError(
            f"an {self.kind} is of a type that a graph does not support",
            where=self._location(path),
            expected="tensors, Python constants, and dicts, lists, tuples, named tuples and dataclasses of them",
            got=f"{type(value).__module__}.{type(value).__qualname__}",
            todo="pass tensors, or register the class with torch.utils._pytree.register_pytree_node",
        )

    def _location(self, path: str) -> str:
        return f"{self.kind} {_readable(path) or 'as a whole'}"


_Container: TypeAlias = tuple[Iterable[Any], Sequence[str], Hashable, Callable[[list[Any]], Any]]


def _open_container(value: Any) -> _Container | None:
    """Return the children of a container, their path steps, its key and its builder; None for any other value."""
    kind = type(value)
    if is_sharded(value):  # a DTensor, or its stand-in in a capture
        return as_container(value)
    if kind is dict:
        keys = tuple(value)
        return (
            list(value.values()),
            [_step(key) for key in keys],
            tuple(map(constant_key, keys)),
            lambda children: dict(zip(keys, children, strict=True)),
        )
    if kind is list or kind is tuple or kind is torch.Size:
        return value, [f"[{i}]" for i in range(len(value))], len(value), kind
    registered = pytree.registered_containers.get(kind)
    if registered is not None:
        return _open_registered(value, registered)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return (
            list(value),
            [f".{field}" for field in value._fields],
            value._fields,
            lambda children: kind(*children),
        )
    if isinstance(value, tuple) and hasattr(kind, "n_sequence_fields"):  # torch.return_types, as of torch.max
        return list(value), [f"[{i}]" for i in range(len(value))], len(value), kind
    if dataclasses.is_dataclass(kind):
        return _open_dataclass(value)
    if _is_cache(value):
        return _open_object(value)
    return None


def _open_registered(value: Any, registered: Any) -> _Container:
    children, context = registered.flatten_fn(value)
    are_names = isinstance(context, (list, tuple)) and len(context) == len(children)
    steps = [_step(name) for name in (context if are_names else range(len(children)))]
    keys: Sequence[Any] = ()
    if isinstance(value, OrderedDict) and list(registered.unflatten_fn(children, context)) != list(value):
        keys = list(value)  # a ModelOutput has its fields in the order of assignment

    def build(items: Sequence[Any]) -> Any:
        container = registered.unflatten_fn(items, context)
        for key in keys:
            container.move_to_end(key)
        return container

    return children, steps, freeze(context), build


def _open_dataclass(value: Any) -> _Container:
    kind = type(value)
    fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    extra = set(getattr(value, "__dict__", ())) - {field.name for field in dataclasses.fields(value)}
    if extra or isinstance(value, (dict, list, tuple, set)):
        raise ORTModuleIOError(
            f"a {kind.__qualname__} has contents that are not fields of the dataclass, and a graph would lose them",
            expected="fields only",
            got=", ".join(sorted(extra)) or "the items of a container",
            todo="the module runs in PyTorch; declare the contents as fields",
        )

    return (
        [getattr(value, name) for name in fields],
        [f".{name}" for name in fields],
        tuple(fields),
        dataclass_builder(kind, fields),
    )


def dataclass_builder(kind: type, fields: Sequence[str]) -> Callable[[list[Any]], Any]:
    """Return a function that makes an object of a dataclass from the values of these fields."""

    def build(children: list[Any]) -> Any:
        instance: Any = object.__new__(kind)  # as copy.copy does: __post_init__ ran when the user made the object
        for name, child in zip(fields, children, strict=True):
            object.__setattr__(instance, name, child)
        return instance

    return build


def _is_cache(value: Any) -> bool:
    """Return whether `value` is a key-value cache of transformers, or a layer of one."""
    module = sys.modules.get("transformers.cache_utils")
    if module is None:
        return False
    kinds = [getattr(module, name, None) for name in ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin")]
    return isinstance(value, tuple(kind for kind in kinds if isinstance(kind, type)))


def _open_object(value: Any) -> _Container:
    kind = type(value)
    names = tuple(vars(value))

    def build(children: list[Any]) -> Any:
        instance = object.__new__(kind)
        vars(instance).update(zip(names, children, strict=True))
        return instance

    return list(vars(value).values()), [f".{name}" for name in names], names, build


def constant_key(value: Any) -> Hashable:
    """Return a key that is equal for identical constants only.

    The keys of True, 1 and 1.0 differ, and so do those of 0.0 and -0.0; that of NaN equals itself.
    """
    kind = type(value)
    if kind in _COMPARED_BY_VALUE:
        return (kind, value)
    if isinstance(value, (float, complex)):
        return (kind, repr(value))
    if isinstance(value, slice):
        return (kind, *map(constant_key, (value.start, value.stop, value.step)))
    if kind is tuple:
        return (kind, *map(constant_key, value))
    try:
        hash(value)
    except TypeError:
        return Identity(value)
    return (kind, value)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Identity:
    """A key that is equal for the same object only, which it keeps alive."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class SameObjects:
    """Objects that are compared one by one as `Identity` does, without an object for each. It keeps them alive."""

    def __init__(self, values: Iterable[object]) -> None:
        self._values = tuple(values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameObjects) or len(self._values) != len(other._values):
            return False
        return all(map(operator.is_, self._values, other._values))

    def __hash__(self) -> int:
        return hash(tuple(map(id, self._values)))


def freeze(context: Any) -> Hashable:
    """Turn the context of a registered container into a key."""
    if isinstance(context, (list, tuple)):
        return (type(context), *map(freeze, context))
    if isinstance(context, dict):
        return (dict, *((freeze(key), freeze(value)) for key, value in context.items()))
    return constant_key(context)


def _shared(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    groups: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        try:
            storage = storage_id(tensor)
        except (NotImplementedError, RuntimeError):  # a tensor subclass without a storage
            continue
        groups.setdefault(storage, []).append(index)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


# Rebuilding


def _compile_rebuild(tree: Tree) -> _Rebuild:
    """Compile a Python function that makes the containers: an output is rebuilt on every step."""
    constants: dict[str, Any] = {}

    def bind(value: Any) -> str:
        name = f"c{len(constants)}"
        constants[name] = value
        return name

    def expression(part: Tree) -> str:
        if isinstance(part, Slot):
            return f"{part.kind}s[{part.index}]"
        if isinstance(part, Constant):
            return bind(part.value)
        children = ", ".join(map(expression, part.children))
        if part.type is list:
            return f"[{children}]"
        if part.type is tuple:
            return f"({children}{',' if len(part.children) == 1 else ''})"
        return f"{bind(part.build)}([{children}])"

    code = compile(f"lambda tensors, sizes: {expression(tree)}", "<onnxtrain containers>", "eval")
    rebuild: _Rebuild = eval(code, constants)
    return rebuild


# Paths and messages


def _step(key: Any) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def _readable(path: str) -> str:
    """Name a path as the user would: `[1].x` of a call is `x`, `[0][2]` is `args[2]`."""
    if path.startswith("[1]."):
        return path[4:]
    if path.startswith("[0]["):
        return f"args{path[3:]}"
    return path.lstrip(".")


def _names(paths: Iterable[str]) -> tuple[str, ...]:
    names: list[str] = []
    for path in paths:
        letters = "".join(c if c.isalnum() else "_" for c in _readable(path).replace("]", ""))
        name = letters.strip("_") or "output"
        name = name if name.isidentifier() else f"t_{name}"
        unique = name
        count = 1
        while unique in names:
            count += 1
            unique = f"{name}_{count}"
        names.append(unique)
    return tuple(names)


def leaves(tree: Tree, path: str = "") -> Iterable[tuple[str, Slot | Constant]]:
    if isinstance(tree, Node):
        for child, step in zip(tree.children, tree.steps, strict=True):
            yield from leaves(child, path + step)
    else:
        yield _readable(path), tree


def _nodes(tree: Tree) -> Iterable[Node]:
    if isinstance(tree, Node):
        yield tree
        for child in tree.children:
            yield from _nodes(child)


def _describe(tree: Tree) -> str:
    if isinstance(tree, Slot):
        return "a tensor"
    if isinstance(tree, Constant):
        return repr(tree.value)
    return f"{tree.type.__name__}({', '.join(p.lstrip('.') for p in tree.steps)})"


def _difference(old: Tree, new: Tree, path: str) -> str:
    if old == new:
        return ""
    if _same_node(old, new) and isinstance(old, Node) and isinstance(new, Node):
        for before, after, step in zip(old.children, new.children, old.steps, strict=True):
            difference = _difference(before, after, path + step)
            if difference:
                return difference
    if isinstance(old, Slot) and isinstance(new, Slot):
        return f"{_readable(path)}: different inputs from before are the same tensor"
    where = _readable(path) if path not in ("", "[0]", "[1]") else {"[0]": "args", "[1]": "kwargs"}.get(path, "inputs")
    return f"{where}: {_describe(old)} → {_describe(new)}"


def _same_node(old: Tree, new: Tree) -> TypeGuard[Node]:
    return isinstance(old, Node) and isinstance(new, Node) and old.type is new.type and old.key == new.key
