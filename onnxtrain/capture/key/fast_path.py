"""The fast path: recognize a call that is like the last one without computing its key.

Computing a key takes as long as the forward of a small MLP. Instead, one generated function compares the environment,
the module's state and the arguments. It reads attributes, items and switches in ordinary Python, and relies on nothing
that a version of Python or PyTorch may change silently. A call that it recognizes would find the same entry by its key;
one that it does not may still find it on the slow path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from onnxtrain.capture.guards.guards import Guards
from onnxtrain.capture.key.key import detects_every_change, environment, tensor_facts
from onnxtrain.capture.key.snapshot import READ_ERRORS, Snapshot
from onnxtrain.capture.key.tensor_checks import PythonCheck, cpp_check
from onnxtrain.capture.structure import Constant, Node, Slot, Structure, Tree

FastPath: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
_CONSTANT_TYPES = (bool, int, str, float)


class Missed:
    """The result of a fast path for a call that it does not recognize; the slow path decides."""


def compile_fast_path(
    snapshot: Snapshot,
    guards: Guards,
    structure: Structure,
    tensors: Sequence[torch.Tensor],
    run: Callable[..., Any],
) -> FastPath | None:
    """Compile a function from (args, kwargs) to the result of `run`, or to `Missed` for calls unlike this one.

    Args:
        snapshot: the state of the module now.
        guards: the guards of the entry.
        structure: the structure of the call to recognize.
        tensors: the tensors of that call.
        run: takes the module's tensors and those of the call.

    Returns:
        The function, for the environment of now; None if it does not support such a call, or if the generated check
        does not work on this version of Python or PyTorch.
    """
    if not tensors or structure.shared or not all(t.is_contiguous() for t in tensors) or not detects_every_change():
        return None
    arguments = _ArgumentChecks()
    if not arguments.add_call(structure):
        return None
    inputs = ", ".join(f"x{i}" for i in range(len(tensors)))
    lines = [
        *arguments.lines,
        "if environment() != expected_environment: return Missed",
        f"if not inputs_check({inputs}): return Missed",
        *(f"if not x{i}.is_contiguous(): return Missed" for i in range(len(tensors))),
        f"tensors = ({inputs},)",
        *([f"if len({{*map(storage, tensors)}}) != {len(tensors)}: return Missed"] if len(tensors) > 1 else []),
        "if not guards.check(tensors): return Missed",
        *snapshot.statements("Missed", "Missed"),
    ]
    body = ["try:", *(f"    {line}" for line in lines), f"except {READ_ERRORS}:"]
    body += ["    return Missed", f"return run({', '.join([*snapshot.variables(), inputs])})"]
    scope = {
        **snapshot.values, "environment": environment, "expected_environment": environment(), "guards": guards,
        "inputs_check": cpp_check((), tensors) or PythonCheck(tensor_facts, tensors),
        "storage": torch.Tensor.untyped_storage, "Missed": Missed, "run": _recognized,
    }  # fmt: skip
    source = "def fast_path(args, kwargs):\n" + "\n".join(f"    {line}" for line in body)
    exec(compile(source, "<onnxtrain fast path>", "exec"), scope)
    fast_path: FastPath = scope["fast_path"]
    if fast_path(*structure.unflatten(list(tensors))) is Missed:
        return None
    scope["run"] = run
    return fast_path


def _recognized(*tensors: torch.Tensor) -> None:
    """Replace `run` in the trial call."""


# The arguments


class _ArgumentChecks:
    """Generates the lines that assign the tensors of a call to variables and compare its other arguments."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._assigned: set[int] = set()  # indices of tensors
        self._containers = 0

    def add_call(self, structure: Structure) -> bool:
        """Add a call; return False if it has arguments besides tensors, constants, tuples, lists and dicts."""
        tree = structure.tree
        assert isinstance(tree, Node)
        args, kwargs = tree.children
        assert isinstance(args, Node)
        assert isinstance(kwargs, Node)
        assert isinstance(kwargs.key, tuple)
        names = tuple(name for _, name in kwargs.key)
        self.lines.append(f"if len(args) != {len(args.children)} or (*kwargs,) != {names!r}: return Missed")
        return self._add_children(args, "args") and self._add_children(kwargs, "kwargs")

    def _add_children(self, node: Node, source: str) -> bool:
        keys: Sequence[Any] = range(len(node.children))
        if node.type is dict:
            assert isinstance(node.key, tuple)
            keys = [value for kind, value in node.key if kind is str]
            if len(keys) != len(node.key):
                return False
        return all(self._add(child, f"{source}[{key!r}]") for key, child in zip(keys, node.children, strict=True))

    def _add(self, tree: Tree, source: str) -> bool:
        match tree:
            case Slot(kind="tensor", index=index):
                is_first = index not in self._assigned
                self._assigned.add(index)
                self.lines.append(f"x{index} = {source}" if is_first else f"if {source} is not x{index}: return Missed")
                return True
            case Constant(value=None):
                self.lines.append(f"if {source} is not None: return Missed")
                return True
            case Constant(value=value) if type(value) in _CONSTANT_TYPES:
                kind = type(value).__name__
                # As in constant_key: 0.0 and -0.0 differ, and NaN equals itself.
                read, expected = ("repr(v)", repr(value)) if type(value) is float else ("v", value)
                self.lines.append(
                    f"if (v := {source}).__class__ is not {kind} or {read} != {expected!r}: return Missed"
                )
                return True
            case Node(type=kind) if kind in (tuple, list, dict):
                return self._add_container(tree, source)
        return False

    def _add_container(self, node: Node, source: str) -> bool:
        name = f"n{self._containers}"
        self._containers += 1
        self.lines.append(f"if ({name} := {source}).__class__ is not {node.type.__name__}: return Missed")
        if node.type is dict:  # forward may depend on the order of its keys
            assert isinstance(node.key, tuple)
            keys = [key[1] for key in node.key if isinstance(key, tuple)]
            self.lines.append(f"if [*{name}] != {keys!r}: return Missed")
        else:
            self.lines.append(f"if len({name}) != {len(node.children)}: return Missed")
        return self._add_children(node, name)
