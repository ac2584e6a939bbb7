"""The arguments and results of a user's function, with slots for the parts that differ from call to call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from onnxtrain.torch_compat.tensors import is_fake

Sizes: TypeAlias = Sequence[Any]  # ints, or symbolic ints on fake tensors


@dataclass(frozen=True, slots=True)
class Slot:
    """Represents an argument that differs from call to call, or an output.

    A "number" is a float computed from sizes: it is passed as a 0-dimensional tensor.
    """

    kind: Literal["tensor", "size", "number"]
    index: int


def slots(template: Any) -> Iterator[Slot]:
    """Yield the slots of a template, in order."""
    match template:
        case Slot():
            yield template
        case list() | tuple():
            for part in template:
                yield from slots(part)
        case dict():
            for part in template.values():
                yield from slots(part)


def fill_slots(template: Any, tensors: Sequence[Any], sizes: Sizes) -> Any:
    """Return the template with the tensors and sizes in its slots."""
    match template:
        case Slot(kind="tensor", index=index):
            return tensors[index]
        case Slot(kind="size", index=index):
            return sizes[index]
        case Slot(kind="number", index=index):
            # On FakeTensors its value does not matter: no size can depend on it.
            return 1.0 if is_fake(tensors[index]) else tensors[index].item()
    if next(slots(template), None) is None:
        return template
    return rebuilt(template, [fill_slots(part, tensors, sizes) for part in parts(template)])


def parts(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container)


def rebuilt(container: Any, content: Sequence[Any]) -> Any:
    """Return a list, tuple, named tuple or dict like `container` with other content."""
    if isinstance(container, dict):
        return type(container)(zip(container, content, strict=True))
    return type(container)(*content) if hasattr(container, "_fields") else type(container)(content)


def collect(template: Any, value: Any, tensors: list[torch.Tensor]) -> tuple[object, object] | None:
    """Append the tensors of a value at the slots of the template; return (expected, got) if their structures differ."""
    if isinstance(template, Slot):
        if not isinstance(value, torch.Tensor):
            return "a tensor", value
        tensors.append(value)
        return None
    if isinstance(template, SizeResult):
        return None if isinstance(value, (int, torch.SymInt)) else ("a size", value)
    if isinstance(template, (list, tuple, dict)):
        if type(value) is not type(template) or len(value) != len(template):
            return f"a {type(template).__name__} of {len(template)}", value
        if isinstance(template, dict) and list(value) != list(template):
            return f"the keys {list(template)}", list(value)
        for inner, part in zip(parts(template), parts(value), strict=True):
            mismatch = collect(inner, part, tensors)
            if mismatch:
                return mismatch
        return None
    return None if type(template) is type(value) and template == value else (template, value)


@dataclass(frozen=True, slots=True)
class SizeResult:
    """Represents a result that is a size: the graph computes it from the inputs' sizes."""
