"""Assign the attributes of modules that forward assigns before it reads them: after each call, as forward would.

`self.seq_len = x.size(1)` and `self.pooling_mult = 1; …; self.pooling_mult *= 2` leave a value that the user's code, or
another method of the model, may read after the call. What the attribute held before does not matter to forward, so it
is not part of the key. The same holds for a tensor that forward computes, as the state of RecurrentGemma's layers, and
for a new list, as the caches of Wan's autoencoder.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from onnxtrain.capture.effects.side_effects import IMMUTABLE
from onnxtrain.capture.key.attribute_accesses import Attribute
from onnxtrain.capture.key.snapshot import submodules
from onnxtrain.capture.structure import OutputStructure, flatten_output
from onnxtrain.graph.sizes import Size
from onnxtrain.torch_compat.fake_tensors import FakeTensor


@dataclass(frozen=True)
class AssignedAttributes:
    """What to assign after each call.

    Attributes:
        targets: for each attribute, the path of its module and its name.
        values: a list of their values, which are immutable, sizes or tensors, or lists and tuples of those.
        sizes: the sizes among them, as expressions over the sizes of the graph's inputs.
        results: the indices of the tensors among them in the graph's results.
    """

    targets: tuple[tuple[str, str], ...]
    values: OutputStructure
    sizes: tuple[Size, ...] = ()
    results: tuple[int, ...] = ()

    def of(self, module: torch.nn.Module) -> frozenset[Attribute]:
        """Return the attributes, with the ids of the modules in this process."""
        return frozenset((id(module.get_submodule(path)), name) for path, name in self.targets)

    @contextmanager
    def kept(self, module: torch.nn.Module) -> Iterator[Callable[[], list[torch.Tensor]]]:
        """Restore the attributes on exit; yield a function that returns the tensors that forward assigns to them."""
        holders = [(module.get_submodule(path).__dict__, name) for path, name in self.targets]
        before = [attributes.get(name, _ABSENT) for attributes, name in holders]

        def tensors() -> list[torch.Tensor]:
            leaves, _ = flatten_output([attributes.get(name) for attributes, name in holders])
            return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        try:
            yield tensors
        finally:
            for (attributes, name), value in zip(holders, before, strict=True):
                attributes[name] = value
                if value is _ABSENT:
                    del attributes[name]


_ABSENT = object()


def find_assigned_attributes(
    module: torch.nn.Module, set_first: Collection[Attribute]
) -> tuple[list[torch.Tensor], list[torch.SymInt], AssignedAttributes]:
    """Return the tensors and the sizes among the assigned values; and the attributes, without `sizes` and `results`.

    Args:
        module: the user's module, right after forward.
        set_first: the attributes that forward set before it read them.
    """
    assigned: list[tuple[tuple[str, str], Any]] = []
    for path, submodule in submodules(module):
        if type(submodule).__getattribute__ is not torch.nn.Module.__getattribute__:
            continue  # its own may read attributes unnoticed
        names = sorted(name for owner, name in set_first if owner == id(submodule))
        attributes = submodule.__dict__
        assigned += [
            ((path, name), attributes[name])
            for name in names
            if name in attributes and _is_assignable(name, attributes)
        ]
    leaves, structure = flatten_output([value for _, value in assigned])
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tensors, leaves[len(tensors) :], AssignedAttributes(tuple(target for target, _ in assigned), structure)


def _is_assignable(name: str, attributes: dict[str, Any]) -> bool:
    """Return whether each call can assign such a value to an attribute."""
    if type(attributes[name]) is tuple:
        return all(map(_is_leaf, attributes[name]))
    if type(attributes[name]) is list:
        # One that something else holds as well would have to be the same object after each call.
        is_new = all(holder is attributes for holder in gc.get_referrers(attributes[name]))
        return is_new and all(map(_is_leaf, attributes[name]))
    return _is_leaf(attributes[name])


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
