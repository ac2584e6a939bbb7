"""Python side effects of forward: a graph would not repeat them.

A changed attribute is noticed by comparing the modules' attributes before and after the capture. Some forwards change
one once and then leave it (`if self.config.problem_type is None: …`): after a first capture the change is kept, as the
user's call would have made it, and the module is captured again. A forward that goes on changing attributes
(`self.calls += 1`) is not captured, and all changes are undone: the call then runs in PyTorch and makes them itself.
"""

from __future__ import annotations

from typing import Any

import torch

from onnxtrain.capture.key import ModuleState
from onnxtrain.errors import CaptureError

_OWN = frozenset({"_parameters", "_buffers", "_modules"})


class SideEffectError(CaptureError):
    """Forward changed the module's attributes while it was captured."""


class SideEffects:
    """Watches a module while it is captured."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._before = ModuleState.take(module)
        self._holders: list[tuple[Any, Any]] = []
        seen: set[int] = set()
        for submodule in module.modules():
            self._watch(submodule.__dict__, seen)

    def _watch(self, attributes: dict[str, Any], seen: set[int]) -> None:
        """Copies a dict of attributes, and one level of the containers and plain objects in it."""
        if id(attributes) in seen:
            return
        seen.add(id(attributes))
        self._holders.append((attributes, dict(attributes)))
        for name, value in attributes.items():
            if name in _OWN or id(value) in seen or isinstance(value, (torch.nn.Module, torch.Tensor, type)):
                continue
            if type(value) in (list, dict, set):
                seen.add(id(value))
                self._holders.append((value, value.copy()))
            elif type(value).__module__ != "builtins" and isinstance(getattr(value, "__dict__", None), dict):
                self._watch(value.__dict__, seen)

    def check(self) -> None:
        """Raises SideEffectError where forward changed the module's attributes."""
        changed = self._before.difference(self._module)
        if changed:
            raise SideEffectError(
                f"forward changes the module's Python state, which a graph would not repeat: {changed}",
                where=type(self._module).__name__,
                todo="keep what changes in a registered buffer, and change it in place",
            )

    def undo(self) -> None:
        """Puts everything back."""
        for holder, content in self._holders:
            if _same_items(holder, content):
                continue
            holder.clear()
            if isinstance(holder, list):
                holder.extend(content)
            else:
                holder.update(content)

    def undo_tensors(self) -> None:
        """Puts back what now holds a tensor of the capture; keeps other changes."""
        for holder, content in self._holders:
            if isinstance(holder, dict) and any(_is_new_tensor(holder[k], content.get(k)) for k in holder):
                holder.clear()
                holder.update(content)
            elif not isinstance(holder, dict) and any(isinstance(v, torch.Tensor) for v in holder):
                if not _same_items(holder, content):
                    self.undo()
                    return


def _is_new_tensor(now: Any, before: Any) -> bool:
    return isinstance(now, torch.Tensor) and now is not before


def _same_items(holder: Any, content: Any) -> bool:
    """Whether a container holds the very objects that it held."""
    if len(holder) != len(content):
        return False
    if isinstance(holder, dict):
        return all(k in holder and holder[k] is v for k, v in content.items())
    if isinstance(holder, set):
        return {id(v) for v in holder} == {id(v) for v in content}
    return all(a is b for a, b in zip(holder, content, strict=True))
