"""The usual call: one that is plainly like the last, recognised without its key and the module's state.

Those take 20 us of a step of 170 (a small MLP, whose forward is 40 us). Here PyTorch's guards, in C++, compare the
version of every dict that forward may read with what it was: CPython gives a dict another version on each change. A
call that is recognised would have found the same entry; one that is not may still find it, on the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from onnxtrain.capture.guards import Guards
from onnxtrain.capture.key import switches_beside_global_state
from onnxtrain.capture.snapshot import Snapshot, quick_check
from onnxtrain.capture.structure import Constant, Node, Slot, Structure, Tree

UsualCall: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
_PLAIN = (bool, int, str)


class Missed:
    """What a usual call gives where only the long way can tell."""


def usual_call(
    snapshot: Snapshot,
    guards: Guards,
    structure: Structure,
    tensors: Sequence[torch.Tensor],
    run: Callable[..., Any],
) -> UsualCall | None:
    """A function from (args, kwargs) to what `run` gives for the tensors; to `Missed` where only the long way can tell.

    Args:
        snapshot: the module as it is now.
        guards: the entry's.
        structure: of the call that is recognised.
        tensors: its tensors.
        run: takes the module's tensors and those of the call.

    The environment is that of now.

    None where this version of PyTorch has no such guards, or the call is too unusual.
    """
    state = snapshot.named_tensors()
    untouched = _untouched(snapshot)
    facts = quick_check(snapshot.different_tensors(), tensors)
    if not tensors or untouched is None or facts is None or not all(t.is_contiguous() for t in tensors):
        return None
    writer = _Arguments()
    if not writer.call(structure) or structure.shared:
        return None
    found = ", ".join(f"x{i}" for i in range(len(tensors)))
    own = {f"p{i}": tensor for i, tensor in enumerate(state)}
    lines = [
        *writer.lines,
        "if not untouched(owners) or any(empty): return Missed",
        *(f"{line[: line.rindex(': return ')]}: return Missed" for line in snapshot.always),
        "if not state() or switches() != before: return Missed",
        f"if not facts(*parts, {found}): return Missed",
        *(f"if not x{i}.is_contiguous(): return Missed" for i in range(len(tensors))),
        f"tensors = ({found},)",
        *([f"if len({{*map(storage, tensors)}}) != {len(tensors)}: return Missed"] if len(tensors) > 1 else []),
        "if not guards.check(tensors): return Missed",
    ]
    body = ["try:", *(f"    {line}" for line in lines), "except (LookupError, AttributeError, TypeError):"]
    body += ["    return Missed", f"return run({', '.join([*own, found])})"]
    names = {
        **snapshot.values, **writer.values, "untouched": untouched.check, "owners": _all_of(snapshot),
        "empty": tuple(snapshot.empty), "state": torch._C._dynamo.guards.GlobalStateGuard().check,
        "switches": switches_beside_global_state, "before": switches_beside_global_state(), "facts": facts,
        "parts": tuple(snapshot.different_tensors()), "guards": guards,
        "storage": torch.Tensor.untyped_storage, "Missed": Missed, "run": _taken, **own,
    }  # fmt: skip
    source = "def usual(args, kwargs):\n" + "\n".join(f"    {line}" for line in body)
    exec(compile(source, "<onnxtrain usual call>", "exec"), names)
    usual: UsualCall = names["usual"]
    if usual(*structure.unflatten(list(tensors))) is Missed:
        return None
    names["run"] = run
    return usual


def _taken(*tensors: torch.Tensor) -> None:
    """The call was recognised."""


# The module's state


def _all_of(snapshot: Snapshot) -> tuple[object, ...]:
    return (*snapshot.owners, *snapshot.tables)


def _untouched(snapshot: Snapshot) -> Any:
    """A tree of guards that holds while no owner has another class and no dict was touched. None: there are none."""
    try:
        from torch._dynamo.guards import GuardManagerType  # noqa: PLC0415  # torch.export has imported it

        kind = GuardManagerType.GUARD_MANAGER
        root = torch._C._dynamo.guards.RootGuardManager()
        for i, owner in enumerate(snapshot.owners):
            guard = root.tuple_getitem_manager(i, f"owners[{i}]", owner, kind)
            guard.add_type_match_guard(id(type(owner)), ["class"], None)
            own = guard.get_generic_dict_manager(f"owners[{i}].__dict__", vars(owner), kind)
            own.add_dict_version_guard(vars(owner), ["version"], None)
        for i, table in enumerate(snapshot.tables, len(snapshot.owners)):
            guard = root.tuple_getitem_manager(i, f"tables[{i}]", table, kind)
            guard.add_dict_version_guard(table, ["version"], None)
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None
    return root


# The arguments


class _Arguments:
    """Writes the lines that take the tensors of a call out of its arguments, and compare the rest."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.values: dict[str, Any] = {}
        self._taken: set[int] = set()
        self._count = 0

    def call(self, structure: Structure) -> bool:
        """False where there is something else in the call than tensors, plain constants, tuples, lists and dicts."""
        tree = structure.tree
        assert isinstance(tree, Node)
        args, kwargs = tree.children
        assert isinstance(args, Node)
        assert isinstance(kwargs, Node)
        assert isinstance(kwargs.key, tuple)
        names = tuple(name for _, name in kwargs.key)
        self.lines.append(f"if len(args) != {len(args.children)} or (*kwargs,) != {names!r}: return Missed")
        return self._children(args, "args") and self._children(kwargs, "kwargs")

    def _children(self, node: Node, source: str) -> bool:
        keys: Sequence[Any] = range(len(node.children))
        if node.type is dict:
            assert isinstance(node.key, tuple)
            keys = [value for kind, value in node.key if kind is str]
            if len(keys) != len(node.key):
                return False
        return all(self._child(child, f"{source}[{key!r}]") for key, child in zip(keys, node.children, strict=True))

    def _child(self, tree: Tree, source: str) -> bool:
        match tree:
            case Slot(kind="tensor", index=index) if index not in self._taken:
                self._taken.add(index)
                self.lines.append(f"x{index} = {source}")
                return True
            case Constant(value=None):
                self.lines.append(f"if {source} is not None: return Missed")
                return True
            case Constant(value=value) if type(value) in _PLAIN:
                kind = type(value).__name__
                self.lines.append(f"if (v := {source}).__class__ is not {kind} or v != {value!r}: return Missed")
                return True
            case Node(type=kind) if kind in (tuple, list, dict):
                return self._container(tree, source)
        return False

    def _container(self, node: Node, source: str) -> bool:
        name = f"n{self._count}"
        self._count += 1
        self.lines.append(f"if ({name} := {source}).__class__ is not {node.type.__name__}: return Missed")
        if node.type is dict:  # forward may go through its keys in their order
            assert isinstance(node.key, tuple)
            keys = [key[1] for key in node.key if isinstance(key, tuple)]
            self.lines.append(f"if [*{name}] != {keys!r}: return Missed")
        else:
            self.lines.append(f"if len({name}) != {len(node.children)}: return Missed")
        return self._children(node, name)
