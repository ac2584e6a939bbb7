"""Find Python side effects of forward, which a graph would not repeat.

torch.export undoes assignments to a module's attributes, so attributes are compared as soon as forward has run. Some
forwards change an attribute in the first call only (`if self.config.problem_type is None: …`): the change is kept, as
the user's call would have made it, and the module is captured again. A forward that changes attributes in each call
(`self.calls += 1`) is not captured: all changes are undone, and the call runs in PyTorch, which makes them. Globals
that forward assigns are treated alike.
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
_OWN = frozenset({"_parameters", "_buffers", "_modules"})
# What recurrent layers keep of their parameters; it changes when the capture exchanges those.
_DERIVED = frozenset({"_flat_weights", "_flat_weight_refs"})
_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
_DEPTH = 4  # levels of nested plain objects and containers that are watched


_Copy = tuple[str, Any, Any]  # path, container, what it held


class SideEffectError(CaptureError):
    """Forward changed the module's Python state while it was captured."""


@dataclass(frozen=True)
class _Change:
    """`holder[key]` was `before`."""

    holder: Any
    key: Any
    before: Any
    after: Any
    words: str


class _Names(MutableMapping[str, Any]):
    """Some names of a module's globals."""

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

    `begin` and `check` enclose forward inside the export, so that what the export itself replaces (an LSTM's list of
    weights) does not count. `undo` restores the state when the watch was created.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._globals = [(name, _Names(scope, names)) for scope, name, names in Surroundings(module, None).writes]
        self._changes: list[_Change] = []
        self._first = self._now()
        self._before = self._first

    def begin(self) -> None:
        """Copy the state: forward is about to run."""
        self._before = self._now()

    def _now(self) -> list[_Copy]:
        found: list[_Copy] = []
        seen: set[int] = set()
        for name, submodule in self._module.named_modules():
            self._copy(submodule.__dict__, name, found, seen, _DEPTH)
        found += [(f"global {name}", names, names.copy()) for name, names in self._globals]
        return found

    def _copy(self, holder: Any, path: str, found: list[_Copy], seen: set[int], depth: int) -> None:
        """Copy a container and the containers in it."""
        if id(holder) in seen or depth == 0:
            return
        seen.add(id(holder))
        found.append((path, holder, holder.copy()))
        items = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, value in list(items):
            if key in _OWN or key in _DERIVED or isinstance(value, (torch.nn.Module, torch.Tensor, type)):
                continue
            inner = f"{path}.{key}" if path else str(key)
            if type(value) in (list, dict, set):
                self._copy(value, inner, found, seen, depth - 1)
            elif type(value).__module__ != "builtins" and type(getattr(value, "__dict__", None)) is dict:
                self._copy(value.__dict__, inner, found, seen, depth - 1)

    def check(self) -> None:
        """Compare the state with the copy.

        Raises:
            SideEffectError: forward changed it.
        """
        self._changes = [change for path, holder, before in self._before for change in _changes(path, holder, before)]
        if self._changes:
            raise SideEffectError(
                f"forward changes Python state, which a graph would not repeat: {self._changes[0].words}",
                where=type(self._module).__name__,
                todo="keep what changes in a registered buffer, and change it in place",
            )

    def settle(self) -> None:
        """Keep the changes of forward if all are plain values of attributes or globals; else undo all of them."""
        plain = all(isinstance(c.after, _PLAIN) and isinstance(c.holder, dict | _Names) for c in self._changes)
        self.undo()
        if plain:
            for change in self._changes:
                change.holder[change.key] = change.after

    def undo(self) -> None:
        """Restore the state when the watch was created."""
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
                holder.update({k: v for k, v in before.items() if k not in _OWN})


def _changes(path: str, holder: Any, before: Any) -> list[_Change]:
    """The items that are neither the same object as before nor an equal plain value."""
    if isinstance(holder, dict | _Names):
        keys = [k for k in (*before, *(k for k in holder if k not in before)) if k not in _OWN and k not in _DERIVED]
        found = [(k, before.get(k), holder.get(k)) for k in keys]
        return [
            _Change(holder, k, old, new, f"{_join(path, k)}: {_show(old)} → {_show(new)}")
            for k, old, new in found
            if (k in before) != (k in holder) or not _same(old, new)
        ]
    same = len(holder) == len(before) and (
        {id(v) for v in holder} == {id(v) for v in before}
        if isinstance(holder, set)
        else all(_same(a, b) for a, b in zip(before, holder, strict=True))
    )
    return [] if same else [_Change(holder, None, before, list(holder), f"the content of {path}")]


def _same(before: Any, now: Any) -> bool:
    return before is now or (isinstance(before, _PLAIN) and type(before) is type(now) and bool(before == now))


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _show(value: Any) -> str:
    return repr(value) if isinstance(value, _PLAIN) else f"a {type(value).__name__}"
