"""Assign the attributes of modules that forward assigns before it reads them: after each call, as forward would.

`self.seq_len = x.size(1)` and `self.pooling_mult = 1; …; self.pooling_mult *= 2` leave a value that the user's code, or
another method of the model, may read after the call. What the attribute held before does not matter to forward, so it
is not part of the key. The same holds for a tensor that forward computes, as the state of RecurrentGemma's layers, and
for a new list, as the caches of Wan's autoencoder.

Where forward reads an attribute first, a tensor whose elements the graph fixes (`guards.known_values`) is still
assigned, as the rotary offsets that Qwen2-VL keeps for generation. The tensor that the attribute held before is an
input of the graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from onnxtrain.capture.effects.side_effects import IMMUTABLE
from onnxtrain.capture.guards.known_values import KnownValues
from onnxtrain.capture.key.attribute_accesses import Attribute
from onnxtrain.capture.key.snapshot import submodules
from onnxtrain.capture.structure import OutputStructure, flatten_output
from onnxtrain.graph.sizes import Size
from onnxtrain.torch_compat.fake_tensors import FakeTensor


@dataclass(frozen=True, eq=False)
class AssignedTensor:
    """A tensor that is the same in each call of the graph.

    Attributes:
        target: the path of a module, and the name of its attribute.
        value: the tensor; each call assigns a copy.
        before: what the attribute held before the captured call.
    """

    target: tuple[str, str]
    value: torch.Tensor
    before: torch.Tensor

    @property
    def path(self) -> str:
        """The name of the attribute from the module that is captured."""
        return ".".join(filter(None, self.target))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AssignedTensor) or self.value.device != other.value.device:
            return False
        same_kind = (self.target, self.value.dtype) == (other.target, other.value.dtype)
        return same_kind and torch.equal(self.value, other.value)

    def __hash__(self) -> int:
        return hash(self.target)


@dataclass(frozen=True)
class AssignedAttributes:
    """What to assign after each call.

    Attributes:
        targets: for each attribute, the path of its module and its name.
        values: a list of their values, which are immutable, sizes or tensors, or lists and tuples of those.
        sizes: the sizes among them, as expressions over the sizes of the graph's inputs.
        results: the indices of the tensors among them in the graph's results.
        tensors: further attributes, which forward reads first, and the tensors that they get.
    """

    targets: tuple[tuple[str, str], ...]
    values: OutputStructure
    sizes: tuple[Size, ...] = ()
    results: tuple[int, ...] = ()
    tensors: tuple[AssignedTensor, ...] = ()

    def of(self, module: torch.nn.Module) -> frozenset[Attribute]:
        """Return the attributes, with the ids of the modules in this process."""
        return self.unread(module) | _attributes(module, (each.target for each in self.tensors))

    def unread(self, module: torch.nn.Module) -> frozenset[Attribute]:
        """Return those of the attributes that forward does not read before it assigns them."""
        return _attributes(module, self.targets)

    @contextmanager
    def kept(self, module: torch.nn.Module) -> Iterator[Callable[[], list[torch.Tensor]]]:
        """Restore the attributes on exit; yield a function that returns the tensors that forward assigns to them."""
        targets = (*self.targets, *(each.target for each in self.tensors))
        holders = [(module.get_submodule(path).__dict__, name) for path, name in targets]
        before = [attributes.get(name, _ABSENT) for attributes, name in holders]

        def tensors() -> list[torch.Tensor]:
            leaves, _ = flatten_output([attributes.get(name) for attributes, name in holders[: len(self.targets)]])
            return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        try:
            yield tensors
        finally:
            for (attributes, name), value in zip(holders, before, strict=True):
                attributes[name] = value
                if value is _ABSENT:
                    del attributes[name]


_ABSENT = object()


def _attributes(module: torch.nn.Module, targets: Iterable[tuple[str, str]]) -> frozenset[Attribute]:
    return frozenset((id(module.get_submodule(path)), name) for path, name in targets)


def find_assigned_attributes(
    module: torch.nn.Module, set_first: Collection[Attribute]
) -> tuple[list[torch.Tensor], list[torch.SymInt], AssignedAttributes]:
    """Return the tensors and the sizes among the assigned values; and the attributes, without `sizes` and `results`.

    Args:
        module: the user's module, right after forward.
        set_first: the attributes that forward set before it read them.
    """
    assigned: list[tuple[tuple[str, str], Any]] = []
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for path, submodule in submodules(module):
        if type(submodule).__getattribute__ is not torch.nn.Module.__getattribute__:
            continue  # its own may read attributes unnoticed
        names = sorted(name for owner, name in set_first if owner == id(submodule))
        attributes = submodule.__dict__
        assigned += [
            ((path, name), attributes[name])
            for name in names
            if name in attributes and _is_assignable(name, attributes, own)
        ]
    leaves, structure = flatten_output([value for _, value in assigned])
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tensors, leaves[len(tensors) :], AssignedAttributes(tuple(target for target, _ in assigned), structure)


def tensor_attributes(module: torch.nn.Module) -> dict[Attribute, torch.Tensor]:
    """Return the attributes of a module and its submodules that are tensors, without parameters and buffers."""
    return {
        (id(inner), name): value
        for _, inner in submodules(module)
        for name, value in inner.__dict__.items()
        if isinstance(value, torch.Tensor)
    }


def find_reassigned_tensors(
    module: torch.nn.Module,
    known: KnownValues,
    sets_after_read: Collection[Attribute],
    before: Mapping[Attribute, torch.Tensor],
) -> tuple[AssignedTensor, ...]:
    """Return the known tensors that forward assigned to attributes that it reads first, and that were tensors before.

    Args:
        module: the user's module, right after forward.
        known: the values of the trace.
        sets_after_read: the attributes that forward set, and may have read before.
        before: the attributes that were tensors before forward.
    """
    found: list[AssignedTensor] = []
    for path, inner in submodules(module):
        for name in sorted(name for owner, name in sets_after_read if owner == id(inner)):
            attribute, after = (id(inner), name), inner.__dict__.get(name)
            value = known.constant(after) if attribute in before else None
            if after is not None and value is not None and (value.dtype, value.device) == (after.dtype, after.device):
                found.append(AssignedTensor((path, name), value, before[attribute]))
    return tuple(found)


def _is_assignable(name: str, attributes: dict[str, Any], own: Collection[int]) -> bool:
    """Return whether each call can assign such a value to an attribute; `own`: ids of the module's own tensors."""
    value = attributes[name]
    # A list that something else holds as well would have to be the same object after each call.
    if type(value) is list and any(holder is not attributes for holder in gc.get_referrers(value)):
        return False
    leaves = value if type(value) in (list, tuple) else [value]
    return all(_is_leaf(leaf) and id(leaf) not in own for leaf in leaves)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (*IMMUTABLE, torch.SymInt)) or type(value) is FakeTensor


def results_of(tensors: Sequence[torch.Tensor], results: list[torch.Tensor]) -> tuple[int, ...]:
    """Return the indices of the assigned tensors in the results of forward, to which those are added that it lacks."""
    positions = {id(result): index for index, result in enumerate(results)}
    for tensor in tensors:
        if id(tensor) not in positions:
            positions[id(tensor)] = len(results)
            results.append(tensor)
    return tuple(positions[id(tensor)] for tensor in tensors)
