"""Convert the structure of an output to JSON and back. Only classes that an output may have are instantiated."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Hashable
from types import NoneType
from typing import Any

import torch

from onnxtrain.capture.key.fingerprint import NotStorableError
from onnxtrain.capture.structure import (
    Constant,
    Node,
    OutputStructure,
    Slot,
    Tree,
    constant_key,
    dataclass_builder,
    freeze,
)
from onnxtrain.torch_compat import pytree

# Dtypes, layouts and memory formats by their names: `torch.float32`.
_TORCH = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format)
}


def output_to_json(output: OutputStructure) -> Any:
    """Convert the structure of an output to JSON.

    Raises:
        NotStorableError: the structure holds an object that JSON cannot represent.
    """
    return {"names": output.names, "tree": _tree_to_json(output.tree)}


def output_from_json(parts: Any) -> OutputStructure:
    """Convert JSON to the structure of an output.

    Raises:
        ValueError: the JSON is malformed, or names a class that does not exist or is not a container of an output.
    """
    return OutputStructure(_tree_from_json(parts["tree"]), tuple(map(str, parts["names"])))


def _tree_to_json(tree: Tree) -> Any:
    match tree:
        case Slot(kind=kind, index=index):
            return ["slot", kind, index]
        case Constant(value=value):
            return ["constant", value_to_json(value)]
    name = f"{tree.type.__module__}:{tree.type.__qualname__}"
    node = ["node", name, value_to_json(_original_key(tree)), list(tree.steps), [*map(_tree_to_json, tree.children)]]
    _tree_from_json(node)  # raises if it could not be loaded
    return node


def _tree_from_json(parts: Any) -> Tree:
    match parts:
        case ["slot", ("tensor" | "size") as kind, int(index)]:
            return Slot(kind, index)
        case ["constant", value]:
            constant = value_from_json(value)
            return Constant(constant, constant_key(constant))
        case ["node", name, key, steps, children]:
            trees = tuple(map(_tree_from_json, children))
            container = _class(name)
            frozen_key, build = _builder(container, value_from_json(key), len(trees))
            return Node(container, frozen_key, trees, tuple(map(str, steps)), build)
    raise ValueError(f"expected a slot, constant or node in the structure of an output, got {parts}")


def _class(name: str) -> type:
    module, _, path = name.partition(":")
    target: Any = sys.modules.get(module)
    for step in path.split("."):
        target = getattr(target, step, None)
    if not isinstance(target, type):
        raise ValueError(f"the class {name} does not exist")
    return target


def _builder(container: type, key: Any, count: int) -> tuple[Hashable, Callable[[list[Any]], Any]]:
    """Return the key of a container of this class in a tree, and a function that builds one from its children."""
    if container is dict:
        return tuple(map(constant_key, key)), lambda children: dict(zip(key, children, strict=True))
    if container in (list, tuple, torch.Size):
        return count, container
    registered = pytree.registered_containers.get(container)
    if registered is not None:
        return freeze(key), lambda items: registered.unflatten_fn(items, key)
    if issubclass(container, tuple) and key == getattr(container, "_fields", None):
        return key, lambda children: container(*children)
    if issubclass(container, tuple) and container.__module__ == "torch.return_types":
        return count, container
    if dataclasses.is_dataclass(container) and {field.name for field in dataclasses.fields(container)} >= set(key):
        return tuple(key), dataclass_builder(container, key)
    raise ValueError(f"{container.__qualname__} is not a container that an output may have")


def _original_key(node: Node) -> Any:
    """Return the key of a container before it was made hashable."""
    if node.type is dict and isinstance(node.key, tuple):
        return tuple(map(_thaw, node.key))
    if node.type in pytree.registered_containers and node.type not in (list, tuple):
        return _thaw(node.key)
    return node.key


def _thaw(key: Any) -> Any:
    """Return the value that `constant_key` or `freeze` made hashable."""
    match key:
        case (kind, value) if kind in (NoneType, bool, int, str):
            return value
        case (kind, *parts) if kind in (list, tuple):
            return kind(map(_thaw, parts))
        case (kind, *parts) if kind is dict:
            return {_thaw(name): _thaw(value) for name, value in parts}
    raise NotStorableError("an output is a container that depends on objects that are not plain Python values")


# Values


def value_to_json(value: Any) -> Any:
    """Convert a plain Python value or a torch constant to JSON with its type; floats keep every bit.

    Raises:
        NotStorableError: the value is of another type.
    """
    match value:
        case None | bool() | str():
            return value
        case float():
            return ["float", value.hex()]
        case int():
            return ["int", str(int(value))]
        case list() | tuple() if type(value) in (list, tuple):
            return [type(value).__name__, *map(value_to_json, value)]
        case dict() if type(value) is dict:
            return ["dict", *([value_to_json(k), value_to_json(v)] for k, v in value.items())]
        case torch.device():
            return ["device", str(value)]
    if _TORCH.get(str(value)) is value:
        return ["torch", str(value)]
    raise NotStorableError(f"an output holds a {type(value).__qualname__}")


def value_from_json(parts: Any) -> Any:
    """Convert JSON to a value.

    Raises:
        ValueError: the JSON is malformed.
    """
    match parts:
        case None | bool() | str():
            return parts
        case ["float", text]:
            return float.fromhex(text)
        case ["int", text]:
            return int(text)
        case ["list", *values]:
            return [*map(value_from_json, values)]
        case ["tuple", *values]:
            return tuple(map(value_from_json, values))
        case ["dict", *pairs]:
            return {value_from_json(k): value_from_json(v) for k, v in pairs}
        case ["device", text]:
            return torch.device(text)
        case ["torch", name] if name in _TORCH:
            return _TORCH[name]
    raise ValueError(f"expected a value with its type, got {parts}")
