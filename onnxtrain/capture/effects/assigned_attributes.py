"""Assign the attributes of modules that forward assigns before it reads them: after each call, as forward would.

`self.seq_len = x.size(1)` and `self.pooling_mult = 1; …; self.pooling_mult *= 2` leave a value that the user's code, or
another method of the model, may read after the call. What the attribute held before does not matter to forward, so it
is not part of the key.

A tensor whose elements the graph fixes (`guards.known_values`) is assigned as well, as the rotary offsets that Qwen2-VL
keeps for generation. Forward may read what the attribute held before: that is an input of the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from onnxtrain.capture.effects.side_effects import IMMUTABLE
from onnxtrain.capture.guards.known_values import KnownValues
from onnxtrain.capture.key.attribute_accesses import Attribute
from onnxtrain.capture.key.snapshot import submodules
from onnxtrain.capture.structure import OutputStructure, flatten_output
from onnxtrain.graph.sizes import Size


@dataclass(frozen=True, eq=False)
class AssignedTensor:
    """A tensor that is the same in each call of the graph.

    Attributes:
        target: the path of a module, and the name of its attribute.
        value: the tensor; each call assigns a copy.
        before: what the attribute held before the captured call; None if forward does not read that.
    """

    target: tuple[str, str]
    value: torch.Tensor
    before: torch.Tensor | None

    @property
    def path(self) -> str:
        """The name of the attribute from the module that is captured."""
        return ".".join(filter(None, self.target))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AssignedTensor) or self.value.device != other.value.device:
            return False
        return (self.target, self.before is None, self.value.dtype) == (
            other.target,
            other.before is None,
            other.value.dtype,
        ) and torch.equal(self.value, other.value)

    def __hash__(self) -> int:
        return hash(self.target)


@dataclass(frozen=True)
class AssignedAttributes:
    """What to assign after each call.

    Attributes:
        targets: for each attribute, the path of its module and its name.
        values: a list of their values, which are immutable, or sizes.
        sizes: the sizes among them, as expressions over the sizes of the graph's inputs.
        tensors: further attributes, and the tensors that they get.
    """

    targets: tuple[tuple[str, str], ...]
    values: OutputStructure
    sizes: tuple[Size, ...] = ()
    tensors: tuple[AssignedTensor, ...] = ()

    def of(self, module: torch.nn.Module) -> frozenset[Attribute]:
        """Return the attributes, with the ids of the modules in this process."""
        return self.unread(module) | _attributes(module, (each.target for each in self.tensors))

    def unread(self, module: torch.nn.Module) -> frozenset[Attribute]:
        """Return those of the attributes that forward does not read before it assigns them."""
        unread = (each.target for each in self.tensors if each.before is None)
        return _attributes(module, (*self.targets, *unread))


def _attributes(module: torch.nn.Module, targets: Iterable[tuple[str, str]]) -> frozenset[Attribute]:
    return frozenset((id(module.get_submodule(path)), name) for path, name in targets)


def find_assigned_attributes(
    module: torch.nn.Module, set_first: Collection[Attribute]
) -> tuple[list[torch.SymInt], AssignedAttributes]:
    """Return the sizes among the assigned values, and the attributes, without their `sizes`.

    Args:
        module: the user's module, right after forward.
        set_first: the attributes that forward set before it read them.
    """
    assigned: list[tuple[tuple[str, str], Any]] = []
    for path, submodule in submodules(module):
        if type(submodule).__getattribute__ is not torch.nn.Module.__getattribute__:
            continue  # its own may read attributes unnoticed
        names = sorted(name for owner, name in set_first if owner == id(submodule))
        values = [(name, submodule.__dict__[name]) for name in names if name in submodule.__dict__]
        assigned += [((path, name), value) for name, value in values if isinstance(value, (*IMMUTABLE, torch.SymInt))]
    leaves, structure = flatten_output([value for _, value in assigned])
    return leaves, AssignedAttributes(tuple(target for target, _ in assigned), structure)


def tensor_attributes(module: torch.nn.Module) -> dict[Attribute, torch.Tensor]:
    """Return the attributes of a module and its submodules that are tensors, without parameters and buffers."""
    return {
        (id(inner), name): value
        for _, inner in submodules(module)
        for name, value in inner.__dict__.items()
        if isinstance(value, torch.Tensor)
    }


def find_assigned_tensors(
    module: torch.nn.Module,
    known: KnownValues,
    sets: Collection[Attribute],
    set_first: Collection[Attribute],
    before: Mapping[Attribute, torch.Tensor],
) -> tuple[AssignedTensor, ...]:
    """Return the known tensors that forward assigned to attributes that it set first, or that were tensors before.

    Args:
        module: the user's module, right after forward.
        known: the values of the trace.
        sets: the attributes that forward set.
        set_first: those of them that it did not read before.
        before: the attributes that were tensors before forward.
    """
    found: list[AssignedTensor] = []
    for path, inner in submodules(module):
        for name in sorted(name for owner, name in sets if owner == id(inner)):
            attribute, after = (id(inner), name), inner.__dict__.get(name)
            value = known.constant(after) if attribute in before or attribute in set_first else None
            if after is not None and value is not None and (value.dtype, value.device) == (after.dtype, after.device):
                found.append(AssignedTensor((path, name), value, None if attribute in set_first else before[attribute]))
    return tuple(found)
