"""The usual call: one that is plainly like the last, recognised without the key of the call.

A key costs as much as the forward of a small MLP. Here one generated function compares the environment, the module's
state and the arguments in place. It reads attributes, items and switches as any program may, and relies on nothing
that a version of Python or PyTorch may change in silence. A call that is recognised would have found the same entry;
one that is not may still find it, on the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from onnxtrain.capture.guards.guards import Guards
from onnxtrain.capture.key.key import environment, sees_each_change, tensor_facts
from onnxtrain.capture.key.snapshot import CHANGED_KIND, Snapshot, quick_check
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

    The environment is that of now. None where the call is too unusual, or the check does not work on this Python.
    """
    if not tensors or structure.shared or not all(t.is_contiguous() for t in tensors) or not sees_each_change():
        return None
    writer = _Arguments()
    if not writer.call(structure):
        return None
    inputs = ", ".join(f"x{i}" for i in range(len(tensors)))
    lines = [
        *writer.lines,
        "if environment() != before: return Missed",
        f"if not facts({inputs}): return Missed",
        *(f"if not x{i}.is_contiguous(): return Missed" for i in range(len(tensors))),
        f"tensors = ({inputs},)",
        *([f"if len({{*map(storage, tensors)}}) != {len(tensors)}: return Missed"] if len(tensors) > 1 else []),
        "if not guards.check(tensors): return Missed",
        *snapshot.statements("Missed", "Missed"),
    ]
    body = ["try:", *(f"    {line}" for line in lines), f"except {CHANGED_KIND}:"]
    body += ["    return Missed", f"return run({', '.join([*snapshot.variables(), inputs])})"]
    names = {
        **snapshot.values, "environment": environment, "before": environment(), "guards": guards,
        "facts": quick_check((), tensors) or _ExactInputs(tensors),
        "storage": torch.Tensor.untyped_storage, "Missed": Missed, "run": _taken,
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


class _ExactInputs:
    """Whether inputs have the facts that a key holds."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._facts = [*map(tensor_facts, tensors)]

    def __call__(self, *tensors: torch.Tensor) -> bool:
        return [*map(tensor_facts, tensors)] == self._facts


# The arguments


class _Arguments:
    """Writes the lines that take the tensors of a call out of its arguments, and compare the rest."""

    def __init__(self) -> None:
        self.lines: list[str] = []
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
