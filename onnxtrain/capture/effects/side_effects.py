"""Find Python side effects of forward, which a graph would not repeat.

torch.export undoes assignments to a module's attributes, so attributes are compared as soon as forward has run. Some
forwards change an attribute in the first call only (`if self.config.problem_type is None: …`): the change is kept, as
the user's call would have made it, and the module is captured again. A forward that changes attributes in every call
(`self.calls += 1`) is not captured: all changes are undone, and the call runs in PyTorch, which makes them. Globals
that forward assigns are treated in the same way.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from onnxtrain.capture.key.surroundings import Surroundings
from onnxtrain.errors import CaptureError

# PyTorch's own bookkeeping, which the capture replaces during the export.
_MODULE_STATE = frozenset({"_parameters", "_buffers", "_modules"})
# Recurrent layers cache their parameters here; the capture replaces the parameters, and with them these caches.
_DERIVED = frozenset({"_flat_weights", "_flat_weight_refs"})
_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
_DEPTH = 4  # levels of nested objects and containers that are watched


_Copy = tuple[str, Any, Any]  # path, container, copy of its contents


class SideEffectError(CaptureError):
    """Forward changed the module's Python state while it was captured."""


@dataclass(frozen=True)
class _Change:
    """A change of `holder[key]` from `before` to `after`; `text` describes it to the user."""

    holder: Any
    key: Any
    before: Any
    after: Any
    text: str


class _Globals(MutableMapping[str, Any]):
    """Some of the globals of a Python module."""

    def __init__(self, scope: dict[str, Any], names: Collection[str]) -> None:
        self._scope = scope
        self._names = sorted(names)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self._scope)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        return self._scope[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._scope[name] = value

    def __delitem__(self, name: str) -> None:
        del self._scope[name]

    def copy(self) -> dict[str, Any]:
        return dict(self)


class SideEffects:
    """Watch the attributes of all submodules, the containers and plain objects in them, and globals.

    `begin` and `check` run right before and after forward, inside the export, so that objects that the export itself
    replaces (an LSTM's list of weights) do not count. `undo` restores the state at the time this object was created.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._globals = [(name, _Globals(scope, names)) for scope, name, names in Surroundings(module, None).writes]
        self._changes: list[_Change] = []
        self._first = self._snapshot()
        self._before = self._first

    def begin(self) -> None:
        """Copy the state: forward is about to run."""
        self._before = self._snapshot()

    def _snapshot(self) -> list[_Copy]:
        copies: list[_Copy] = []
        seen: set[int] = set()
        for name, submodule in self._module.named_modules():
            self._copy(submodule.__dict__, name, copies, seen, _DEPTH)
        copies += [(f"global {name}", names, names.copy()) for name, names in self._globals]
        return copies

    def _copy(self, holder: Any, path: str, copies: list[_Copy], seen: set[int], depth: int) -> None:
        """Append copies of a container and the containers in it to `copies`."""
        if id(holder) in seen or depth == 0:
            return
        seen.add(id(holder))
        copies.append((path, holder, holder.copy()))
        items = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, value in list(items):
            if key in _MODULE_STATE or key in _DERIVED or isinstance(value, (torch.nn.Module, torch.Tensor, type)):
                continue
            inner = f"{path}.{key}" if path else str(key)
            if type(value) in (list, dict, set):
                self._copy(value, inner, copies, seen, depth - 1)
            elif type(value).__module__ != "builtins" and type(getattr(value, "__dict__", None)) is dict:
                self._copy(value.__dict__, inner, copies, seen, depth - 1)

    def check(self) -> None:
        """Compare the state with the copy.

        Raises:
            SideEffectError: forward changed it.
        """
        self._changes = [change for path, holder, before in self._before for change in _changes(path, holder, before)]
        if self._changes:
            raise SideEffectError(
                f"forward changes Python state, which a graph would not repeat: {self._changes[0].text}",
                where=type(self._module).__name__,
                todo="keep the state in a registered buffer, and change the buffer in place",
            )

    def settle(self) -> None:
        """Keep the changes of forward if all assign immutable values to attributes or globals; else undo all."""
        can_keep = all(
            isinstance(change.after, _IMMUTABLE) and isinstance(change.holder, dict | _Globals)
            for change in self._changes
        )
        self.undo()
        if can_keep:
            for change in self._changes:
                change.holder[change.key] = change.after

    def undo(self) -> None:
        """Restore the state at the time this object was created."""
        for _, holder, before in self._first:
            if not any(_changes("", holder, before)):
                continue
            if isinstance(holder, list):
                holder[:] = before
            elif isinstance(holder, set):
                holder.clear()
                holder.update(before)
            else:
                for key in holder.keys() - before.keys():
                    del holder[key]
                holder.update({k: v for k, v in before.items() if k not in _MODULE_STATE})


def _changes(path: str, holder: Any, before: Any) -> list[_Change]:
    """Return the items that are neither the same object as before nor an equal immutable value."""
    if isinstance(holder, dict | _Globals):
        ignored = _MODULE_STATE | _DERIVED
        keys = [key for key in (*before, *(k for k in holder if k not in before)) if key not in ignored]
        items = [(key, before.get(key), holder.get(key)) for key in keys]
        return [
            _Change(holder, key, old, new, f"{_join(path, key)}: {_show(old)} → {_show(new)}")
            for key, old, new in items
            if (key in before) != (key in holder) or not _is_unchanged(old, new)
        ]
    is_unchanged = len(holder) == len(before) and (
        {id(v) for v in holder} == {id(v) for v in before}
        if isinstance(holder, set)
        else all(_is_unchanged(a, b) for a, b in zip(before, holder, strict=True))
    )
    return [] if is_unchanged else [_Change(holder, None, before, list(holder), f"the content of {path}")]


def _is_unchanged(before: Any, after: Any) -> bool:
    if before is after:
        return True
    return isinstance(before, _IMMUTABLE) and type(before) is type(after) and bool(before == after)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _show(value: Any) -> str:
    return repr(value) if isinstance(value, _IMMUTABLE) else f"a {type(value).__name__}"
