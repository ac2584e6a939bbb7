"""Assign the attributes of modules that forward assigns before it reads them: after each call, as forward would.

`self.seq_len = x.size(1)` and `self.pooling_mult = 1; …; self.pooling_mult *= 2` leave a value that the user's code, or
another method of the model, may read after the call. What the attribute held before does not matter to forward, so it
is not part of the key.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from onnxtrain.capture.effects.side_effects import IMMUTABLE
from onnxtrain.capture.key.attribute_accesses import Attribute
from onnxtrain.capture.key.snapshot import submodules
from onnxtrain.capture.structure import OutputStructure, flatten_output
from onnxtrain.graph.sizes import Size


@dataclass(frozen=True)
class AssignedAttributes:
    """What to assign after each call.

    Attributes:
        targets: for each attribute, the path of its module and its name.
        values: a list of their values, which are immutable, or sizes.
        sizes: the sizes among them, as expressions over the sizes of the graph's inputs.
    """

    targets: tuple[tuple[str, str], ...]
    values: OutputStructure
    sizes: tuple[Size, ...] = ()

    def of(self, module: torch.nn.Module) -> frozenset[Attribute]:
        """Return the attributes, with the ids of the modules in this process."""
        return frozenset((id(module.get_submodule(path)), name) for path, name in self.targets)


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
