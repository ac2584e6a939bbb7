"""Outputs of a module that nobody reads: the option `keep_outputs` names those that are.

    ORTModule(model, keep_outputs=("loss",))       output.loss is a tensor; any use of output.logits raises

What a passing value only served to make is then not computed, and its rows may be skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from onnxtrain.capture.capture import Captured
from onnxtrain.capture.structure import Constant, Node, OutputStructure, Slot, Tree, leaves
from onnxtrain.errors import OptionError, OutputNotKeptError


class LeftOut:
    """Stands for an output that `keep_outputs` does not name.

    Raises:
        OutputNotKeptError: at any use.
    """

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        object.__setattr__(self, "_path", path)

    def __repr__(self) -> str:
        return f"<{self._path}: left out by keep_outputs>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # Python itself asks: to copy, to print, to compare
        _raise(self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _raise(next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, LeftOut)))


def _raise(left_out: Any, *_: Any) -> NoReturn:
    path = object.__getattribute__(left_out, "_path")
    raise OutputNotKeptError(
        f"the output {path} is not computed, because the option keep_outputs does not name it",
        todo=f"add {path!r} to keep_outputs, or leave the option out",
    )


for _name in ("iter", "len", "bool", "getitem", "setitem", "contains", "array", "float", "int", "index", "neg", "abs",
              "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "pow",
              "rpow", "mod", "matmul", "rmatmul", "lt", "le", "gt", "ge"):  # fmt: skip
    setattr(LeftOut, f"__{_name}__", _raise)


def keep_outputs(captured: Captured, names: Sequence[str] | None) -> Captured:
    """The capture without the tensors that `names` does not name.

    Args:
        captured: its graph is changed in place.
        names: as the output calls them: "loss", "0" for the first of a tuple, "hidden_states" for all below it; None
            keeps all.

    Raises:
        OptionError: the module has no such output.
    """
    if names is None:
        return captured
    paths = {path for path, leaf in leaves(captured.output.tree) if isinstance(leaf, Slot) and leaf.kind == "tensor"}
    unknown = [name for name in names if not any(_is_below(path, name) for path in paths)]
    if unknown:
        expected = ", ".join(sorted(path or "no name: the output is one tensor" for path in paths))
        raise OptionError("The module has no such output.", "the option keep_outputs", expected, ", ".join(unknown))
    places: dict[int, int] = {}
    tree = _without(captured.output.tree, "", names, places)
    graph = captured.model.graph
    outputs = list(graph.outputs)
    kept = tuple(places)
    graph.outputs.clear()
    graph.outputs.extend([*(outputs[i] for i in kept), *outputs[captured.results :]])
    fewer = captured.results - len(kept)
    return replace(
        captured,
        results=len(kept),
        mutations=tuple(replace(m, output=m.output - fewer) for m in captured.mutations),
        output=OutputStructure(tree, tuple(captured.output.names[i] for i in kept)),
        kept=kept,
        written_views=tuple(replace(v, result=places[v.result]) for v in captured.written_views if v.result in places),
    )


def _is_below(path: str, name: str) -> bool:
    """Whether `name` names the leaf at `path` or a container around it."""
    steps = path.replace("]", "").replace("[", ".").replace("'", "").strip(".").split(".")
    return steps[: len(name.split("."))] == name.split(".")


def _without(tree: Tree, path: str, names: Sequence[str], places: dict[int, int]) -> Tree:
    """The tree with constants in the place of what is left out. `places`: old to new numbers of tensors."""
    if isinstance(tree, Node):
        children = zip(tree.children, tree.steps, strict=True)
        return replace(tree, children=tuple(_without(child, path + step, names, places) for child, step in children))
    if not isinstance(tree, Slot) or tree.kind != "tensor":
        return tree
    if any(_is_below(path, name) for name in names):
        return Slot("tensor", places.setdefault(tree.index, len(places)))
    shown = path.strip(".")
    return Constant(LeftOut(shown), ("left out", shown))
