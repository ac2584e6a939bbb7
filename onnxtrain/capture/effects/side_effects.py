"""Find Python side effects of forward, which a graph would not repeat.

torch.export undoes assignments to a module's attributes, so state is compared as soon as forward has run, and restored
before the export continues.

* Some forwards assign to attributes in the first call only (`if self.config.problem_type is None: …`). The values are
  assigned, as the user's call would have done, and the module is captured again. If the second graph is the same, the
  call runs as a graph; if not (`if not self.ready: self.ready = True; self.scale.copy_(…)`), it runs in PyTorch.
* A forward that assigns in every call (`self.calls += 1`) always runs in PyTorch, which does so.
* `assigned_attributes.py` repeats the assignments to attributes of modules that forward does not read before.
* A call in which forward adds, replaces or removes submodules or parameters runs in PyTorch, which initializes them.
  The next call is captured. So is that after a call in which forward replaces None by an object
  (`if self.table is None: self.table = [...]`): PyTorch makes it.
* A hook that forward registers belongs to the assignments of the first call if a capture may run it with forward, as
  that of transformers which collects hidden states; otherwise that call runs in PyTorch, too.

Globals that forward assigns are treated as attributes are. They and what else is assigned are part of the key as what
forward reads is: a graph runs only where they have the values already (`global mode; mode = "a" if len(x) > 3 …`).
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from onnxtrain.capture.key.attribute_accesses import Attribute
from onnxtrain.capture.key.surroundings import Surroundings
from onnxtrain.capture.refusals import runs_with_forward
from onnxtrain.errors import CaptureError

# PyTorch's own bookkeeping. `assigned_buffers.py` decides how forward may change buffers.
_TABLES = ("_modules", "_parameters", "_buffers")
# Recurrent layers cache their parameters here; the capture replaces the parameters, and with them these caches.
_DERIVED = ("_flat_weights", "_flat_weight_refs")
_IGNORED = frozenset({*_TABLES, *_DERIVED})
# The tables of hooks, which `key.snapshot` compares.
_HOOKS = frozenset(name for name, table in torch.nn.Module().__dict__.items() if type(table) is OrderedDict)
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, Counter, deque)
IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
_DEPTH = 4  # levels of nested objects and containers that are watched
_REMOVED = object()  # the value of a removed key


_Copy = tuple[str, Any, Any]  # path, container, copy of its contents


class SideEffectError(CaptureError):
    """Forward changes Python state, which a graph would not repeat."""


class AssignmentError(SideEffectError):
    """Forward assigns immutable values only, which `SideEffects.settle` assigns as well.

    Attributes:
        outcome: the capture of this call (`capture.Captured`), or the error if it cannot be captured.
    """

    outcome: Any = None


class FirstCallError(SideEffectError):
    """Forward changes the module so that later calls need another graph. This call runs in PyTorch."""


@dataclass(frozen=True)
class _Change:
    """A change of `holder[key]` to `after`; `text` describes it to the user."""

    holder: Any
    key: Any
    before: Any
    after: Any
    text: str

    @property
    def is_assignment(self) -> bool:
        """Whether it assigns an immutable value to an attribute, an item of a dict or a global, or a hook."""
        if isinstance(self.holder, _Hooks):
            return self.after is not _REMOVED and (isinstance(self.after, IMMUTABLE) or runs_with_forward(self.after))
        return isinstance(self.holder, dict | _Globals) and isinstance(self.after, IMMUTABLE)

    @property
    def is_of_first_call(self) -> bool:
        """Whether it is one that PyTorch makes in a call, after which later calls find it."""
        if isinstance(self.holder, _Table):
            return not self.holder.are_buffers
        if isinstance(self.holder, _Hooks):
            return not self.is_assignment
        was_empty = self.before is None or self.before is _REMOVED
        is_object = self.after is not _REMOVED and not isinstance(self.after, IMMUTABLE)
        return was_empty and is_object and isinstance(self.holder, dict)


@dataclass(frozen=True)
class _Table:
    """The submodules, parameters or buffers that are registered in a module."""

    items: dict[str, Any]
    are_buffers: bool

    def changes(self, path: str, before: dict[str, Any]) -> list[_Change]:
        keys = dict.fromkeys((*before, *self.items))
        values = [(key, before.get(key, _REMOVED), self.items.get(key, _REMOVED)) for key in keys]
        return [
            _Change(self, key, old, new, f"{_join(path, key)}: {_show(old)} → {_show(new)}")
            for key, old, new in values
            if old is not new
        ]


@dataclass(frozen=True)
class _Hooks:
    """A table of hooks of a module, or of properties of its hooks."""

    items: OrderedDict[Any, Any]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def changes(self, path: str, before: dict[Any, Any]) -> list[_Change]:
        keys = dict.fromkeys((*before, *self.items))
        values = [(key, before.get(key, _REMOVED), self.items.get(key, _REMOVED)) for key in keys]
        where = path or "the module itself"
        return [
            _Change(self, key, old, new, f"a hook of {where}: {_show(old)} → {_show(new)}")
            for key, old, new in values
            if old is not new
        ]


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

    Attributes:
        surroundings: what forward can reach outside of the module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.surroundings = Surroundings(module, None)
        self._globals = [(name, _Globals(scope, names)) for scope, name, names in self.surroundings.writes]
        self._first = self._snapshot()
        self._before = self._first
        self._changes: list[_Change] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Restore on exit the state at entry.

        It is entered right before forward runs, inside the export, so that objects that the export itself replaces (an
        LSTM's list of weights) do not count.
        """
        self._changes = []
        self._before = self._snapshot()
        try:
            yield
        finally:
            _restore(self._before)

    def _snapshot(self) -> list[_Copy]:
        copies: list[_Copy] = []
        visited: set[int] = set()
        for name, submodule in self._module.named_modules():
            self._copy(submodule.__dict__, name, copies, visited, _DEPTH)
            for table in _TABLES:
                items = submodule.__dict__[table]
                if isinstance(items, dict):  # TorchScript's are views of its own tables, which do not change
                    copies.append((name, _Table(items, are_buffers=table == "_buffers"), dict(items)))
            copies += [(name, _Hooks(table), dict(table)) for table in _hook_tables(submodule)]
        copies += [(f"global {name}", names, names.copy()) for name, names in self._globals]
        return copies

    def _copy(self, holder: Any, path: str, copies: list[_Copy], visited: set[int], depth: int) -> None:
        """Append copies of a container and the containers in it to `copies`."""
        if id(holder) in visited or depth == 0:
            return
        visited.add(id(holder))
        copies.append((path, holder, holder.copy()))
        items = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, value in list(items):
            if key in _IGNORED or isinstance(value, (torch.nn.Module, torch.Tensor, type)):
                continue
            if key in _HOOKS and type(value) is OrderedDict:
                continue
            inner = f"{path}.{key}" if path else str(key)
            if type(value) in _CONTAINERS:
                self._copy(value, inner, copies, visited, depth - 1)
            elif type(value).__module__ != "builtins" and type(getattr(value, "__dict__", None)) is dict:
                self._copy(value.__dict__, inner, copies, visited, depth - 1)

    def check(self, assigned: Collection[Attribute], set_first: Collection[Attribute]) -> None:
        """Compare the state with that at entry of `watching`.

        Args:
            assigned: attributes that each call of the graph assigns.
            set_first: attributes that forward set before it read them, as it does in each call.

        Raises:
            FirstCallError: forward added, replaced or removed a submodule, a parameter or a hook, or put an object
                in place of None or of nothing, as in a cache.
            SideEffectError: forward changed something else that `settle` cannot assign.
        """
        tables = {id(m): id(m.__dict__) for m in self._module.modules()}
        names, set_in_each_call = (
            {(tables[owner], name) for owner, name in attributes if owner in tables}
            for attributes in (assigned, set_first)
        )
        changes = [
            change
            for path, holder, before in self._before
            for change in _changes(path, holder, before)
            if (id(change.holder), change.key) not in names
        ]
        for change in changes:
            if change.is_of_first_call and (id(change.holder), change.key) not in set_in_each_call:
                raise self._first_call_error(change)
        changes = [change for change in changes if not isinstance(change.holder, _Table)]
        if not all(change.is_assignment for change in changes):
            raise SideEffectError(*self._problem(changes))
        self._changes = changes

    def refuse_assignments(self, outcome: Any) -> None:
        """Refuse the capture of a forward that assigned values, which the graph would not.

        Args:
            outcome: the capture, or the error if it failed.

        Raises:
            AssignmentError: holds `outcome`.
        """
        if self._changes:
            error = AssignmentError(*self._problem(self._changes))
            error.outcome = outcome
            raise error

    def first_call_error(self) -> FirstCallError:
        """Return the error for a forward that computes something else once `settle` has made its assignments."""
        return self._first_call_error(self._changes[0])

    def _first_call_error(self, change: _Change) -> FirstCallError:
        return FirstCallError(
            "forward changes the module in this call, and later calls are another graph",
            where=type(self._module).__name__,
            got=change.text,
            todo="this call runs in PyTorch, and the next one is captured",
        )

    def _problem(self, changes: Sequence[_Change]) -> tuple[Any, ...]:
        problem = f"forward changes Python state, which a graph would not repeat: {changes[0].text}"
        todo = "keep the state in a registered buffer, and change the buffer in place"
        return problem, type(self._module).__name__, None, None, todo

    def settle(self) -> None:
        """Assign what forward assigned."""
        for change in self._changes:
            change.holder[change.key] = change.after

    def undo(self) -> None:
        """Restore the state at the time this object was created."""
        _restore(self._first)


def _hook_tables(module: torch.nn.Module) -> Iterator[OrderedDict[Any, Any]]:
    """The hooks of a module. Forward of a model of transformers registers those that collect hidden states."""
    for name in _HOOKS:
        table = module.__dict__.get(name)
        if type(table) is OrderedDict:
            yield table


@contextmanager
def attributes_kept(module: torch.nn.Module) -> Iterator[None]:
    """Restore on exit the objects in the attributes of all submodules.

    torch.export assigns a copy of each list, dict and tuple to its attribute. Another module or the user's code may
    have the original, and change it later: the copy would keep the old contents.
    """
    before = [(submodule.__dict__, submodule.__dict__.copy()) for submodule in module.modules()]
    try:
        yield
    finally:
        for attributes, originals in before:
            attributes.update({n: value for n, value in originals.items() if attributes.get(n) is not value})


def _restore(copies: Sequence[_Copy]) -> None:
    for _, holder, before in copies:
        if not _changes("", holder, before):
            continue
        if isinstance(holder, list):
            holder[:] = before
        elif isinstance(holder, deque):
            holder.clear()
            holder.extend(before)
        elif isinstance(holder, set):
            holder.clear()
            holder.update(before)
        elif isinstance(holder, _Table | _Hooks):
            holder.items.clear()
            holder.items.update(before)
        else:
            for key in holder.keys() - before.keys():
                del holder[key]
            holder.update({k: v for k, v in before.items() if k not in _TABLES})


def _changes(path: str, holder: Any, before: Any) -> list[_Change]:
    """Return the items that are neither the same object as before nor an equal immutable value."""
    if isinstance(holder, _Table | _Hooks):
        return holder.changes(path, before)
    if isinstance(holder, dict | _Globals):
        keys = [key for key in (*before, *(k for k in holder if k not in before)) if key not in _IGNORED]
        items = [(key, before.get(key, _REMOVED), holder.get(key, _REMOVED)) for key in keys]
        return [
            _Change(holder, key, old, new, f"{_join(path, key)}: {_show(old)} → {_show(new)}")
            for key, old, new in items
            if not _is_unchanged(old, new)
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
    return isinstance(before, IMMUTABLE) and type(before) is type(after) and bool(before == after)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _show(value: Any) -> str:
    if value is _REMOVED:
        return "absent"
    return repr(value) if isinstance(value, IMMUTABLE) else f"a {type(value).__name__}"
