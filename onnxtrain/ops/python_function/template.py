"""The arguments and results of a user's function, with slots for what each call brings anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from onnxtrain.torch_compat.tensors import is_fake

Sizes: TypeAlias = Sequence[Any]  # ints, or symbolic ints on fake tensors


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for an argument that each call brings anew, or for an output.

    A "number" is a float made from sizes: it comes as a 0-dimensional tensor.
    """

    kind: Literal["tensor", "size", "number"]
    index: int


def slots(template: Any) -> Iterator[Slot]:
    """The slots in a template, in order."""
    match template:
        case Slot():
            yield template
        case list() | tuple():
            for part in template:
                yield from slots(part)
        case dict():
            for part in template.values():
                yield from slots(part)


def filled(template: Any, tensors: Sequence[Any], sizes: Sizes) -> Any:
    match template:
        case Slot(kind="tensor", index=index):
            return tensors[index]
        case Slot(kind="size", index=index):
            return sizes[index]
        case Slot(kind="number", index=index):
            # On fake tensors its value does not matter: no size can follow from it.
            return 1.0 if is_fake(tensors[index]) else tensors[index].item()
    if next(slots(template), None) is None:
        return template
    return rebuilt(template, [filled(part, tensors, sizes) for part in parts(template)])


def parts(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container)


def rebuilt(container: Any, content: Sequence[Any]) -> Any:
    """A list, tuple, named tuple or dict like `container` with other content."""
    if isinstance(container, dict):
        return type(container)(zip(container, content, strict=True))
    return type(container)(*content) if hasattr(container, "_fields") else type(container)(content)


def collect(template: Any, value: Any, found: list[torch.Tensor]) -> tuple[object, object] | None:
    """Appends the tensors that stand in a value where the template has slots; gives what does not agree."""
    if isinstance(template, Slot):
        if not isinstance(value, torch.Tensor):
            return "a tensor", value
        found.append(value)
        return None
    if isinstance(template, SizeResult):
        return None if isinstance(value, (int, torch.SymInt)) else ("a size", value)
    if isinstance(template, (list, tuple, dict)):
        if type(value) is not type(template) or len(value) != len(template):
            return f"a {type(template).__name__} of {len(template)}", value
        if isinstance(template, dict) and list(value) != list(template):
            return f"the keys {list(template)}", list(value)
        for inner, part in zip(parts(template), parts(value), strict=True):
            wrong = collect(inner, part, found)
            if wrong:
                return wrong
        return None
    return None if type(template) is type(value) and template == value else (template, value)


@dataclass(frozen=True, slots=True)
class SizeResult:
    """Stands in a template for a result that is a size: the graph computes it from the inputs' sizes."""
