"""The structure of an output as JSON. A container is made again only where its class is one that outputs may have."""

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
    """The structure of an output.

    Raises:
        NotStorableError: it holds an object that is not plain.
    """
    return {"names": output.names, "tree": _tree_to_json(output.tree)}


def output_from_json(parts: Any) -> OutputStructure:
    """The structure.

    Raises:
        ValueError: a class is not there, or is none of a container.
    """
    return OutputStructure(_tree_from_json(parts["tree"]), tuple(map(str, parts["names"])))


def _tree_to_json(tree: Tree) -> Any:
    match tree:
        case Slot(kind=kind, index=index):
            return ["slot", kind, index]
        case Constant(value=value):
            return ["constant", plain_to_json(value)]
    name = f"{tree.type.__module__}:{tree.type.__qualname__}"
    found = ["node", name, plain_to_json(_key(tree)), list(tree.steps), [*map(_tree_to_json, tree.children)]]
    _tree_from_json(found)  # what cannot be read is not written
    return found


def _tree_from_json(parts: Any) -> Tree:
    match parts:
        case ["slot", ("tensor" | "size") as kind, int(index)]:
            return Slot(kind, index)
        case ["constant", value]:
            plain = plain_from_json(value)
            return Constant(plain, constant_key(plain))
        case ["node", name, key, steps, children]:
            trees = tuple(map(_tree_from_json, children))
            kind = _class(name)
            frozen, build = _builder(kind, plain_from_json(key), len(trees))
            return Node(kind, frozen, trees, tuple(map(str, steps)), build)
    raise ValueError("the structure of the output cannot be read")


def _class(name: str) -> type:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for step in path.split("."):
        found = getattr(found, step, None)
    if not isinstance(found, type):
        raise ValueError(f"there is no class {name}")
    return found


def _builder(kind: type, key: Any, count: int) -> tuple[Hashable, Callable[[list[Any]], Any]]:
    """The key of a container of this class in a tree, and what makes one from its children."""
    if kind is dict:
        return tuple(map(constant_key, key)), lambda children: dict(zip(key, children, strict=True))
    if kind in (list, tuple, torch.Size):
        return count, kind
    registered = pytree.registered_containers.get(kind)
    if registered is not None:
        return freeze(key), lambda items: registered.unflatten_fn(items, key)
    if issubclass(kind, tuple) and key == getattr(kind, "_fields", None):
        return key, lambda children: kind(*children)
    if issubclass(kind, tuple) and kind.__module__ == "torch.return_types":
        return count, kind
    if dataclasses.is_dataclass(kind) and {field.name for field in dataclasses.fields(kind)} >= set(key):
        return tuple(key), dataclass_builder(kind, key)
    raise ValueError(f"{kind.__qualname__} is no container of an output")


def _key(node: Node) -> Any:
    """What was made the key of a container."""
    if node.type is dict and isinstance(node.key, tuple):
        return tuple(map(_thawed, node.key))
    if node.type in pytree.registered_containers and node.type not in (list, tuple):
        return _thawed(node.key)
    return node.key


def _thawed(key: Any) -> Any:
    """The plain value of which `constant_key` or `freeze` made a key."""
    match key:
        case (kind, value) if kind in (NoneType, bool, int, str):
            return value
        case (kind, *parts) if kind in (list, tuple):
            return kind(map(_thawed, parts))
        case (kind, *parts) if kind is dict:
            return {_thawed(name): _thawed(value) for name, value in parts}
    raise NotStorableError("an output is a container that is made with more than plain values")


# Plain values


def plain_to_json(value: Any) -> Any:
    """A plain value, with its type; floats to the last bit.

    Raises:
        NotStorableError: it is not plain.
    """
    match value:
        case None | bool() | str():
            return value
        case float():
            return ["float", value.hex()]
        case int():
            return ["int", str(int(value))]
        case list() | tuple() if type(value) in (list, tuple):
            return [type(value).__name__, *map(plain_to_json, value)]
        case dict() if type(value) is dict:
            return ["dict", *([plain_to_json(k), plain_to_json(v)] for k, v in value.items())]
        case torch.device():
            return ["device", str(value)]
    if _TORCH.get(str(value)) is value:
        return ["torch", str(value)]
    raise NotStorableError(f"an output holds a {type(value).__qualname__}")


def plain_from_json(parts: Any) -> Any:
    """The value.

    Raises:
        ValueError: it is none.
    """
    match parts:
        case None | bool() | str():
            return parts
        case ["float", text]:
            return float.fromhex(text)
        case ["int", text]:
            return int(text)
        case ["list", *values]:
            return [*map(plain_from_json, values)]
        case ["tuple", *values]:
            return tuple(map(plain_from_json, values))
        case ["dict", *pairs]:
            return {plain_from_json(k): plain_from_json(v) for k, v in pairs}
        case ["device", text]:
            return torch.device(text)
        case ["torch", name] if name in _TORCH:
            return _TORCH[name]
    raise ValueError("a plain value cannot be read")
