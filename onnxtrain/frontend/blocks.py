"""Find the repeated blocks of a model, each of which can be a graph of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from onnxtrain.capture.refusals import uncapturable_hooks

_LISTS = (torch.nn.ModuleList, torch.nn.Sequential)


def blocks_of(model: torch.nn.Module, path: str = "") -> dict[str, torch.nn.Module]:
    """Return the outermost repeated modules, by path: two or more of one class in a list."""
    blocks: dict[str, torch.nn.Module] = {}
    for name, child in model.named_children():
        child_path = f"{path}.{name}" if path else name
        members = dict(child.named_children())
        if isinstance(child, _LISTS) and len(members) > 1 and _are_blocks(list(members.values())):
            blocks |= {f"{child_path}.{index}": member for index, member in members.items()}
        else:
            blocks |= blocks_of(child, child_path)
    return blocks


def reason_of_hooks(blocks: Mapping[str, torch.nn.Module]) -> str | None:
    """Return why a model runs block by block, if a block or a submodule of one has hooks that a graph would not run."""
    hooked = (path for path, block in blocks.items() for m in block.modules() if any(uncapturable_hooks(m)))
    first = next(hooked, None)
    return None if first is None else f"blocks have hooks, which run around the graph of their block ({first})"


def _are_blocks(members: list[torch.nn.Module]) -> bool:
    """Return whether the modules are of one class and have several layers each.

    A graph of a single layer saves no time.
    """
    return len({type(m) for m in members}) == 1 and all(_is_block(m) for m in members)


def _is_block(module: torch.nn.Module) -> bool:
    layers = [m for m in module.modules() if m is not module and any(True for _ in m.parameters(recurse=False))]
    return len(layers) > 1
