"""The option `keep_outputs`: drop the outputs that it does not name from a captured graph.

    ORTModule(model, keep_outputs=("loss",))       output.loss is a tensor; any use of output.logits raises

Nodes that only a dropped output needs become dead, and rows that only it reads may be skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from onnxtrain.capture.capture import Captured
from onnxtrain.capture.structure import Constant, Node, OutputStructure, Slot, Tree, leaves
from onnxtrain.errors import OptionError, OutputNotKeptError


class DroppedOutput:
    """The placeholder of an output that `keep_outputs` does not name.

    Raises:
        OutputNotKeptError: at any use.
    """

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        object.__setattr__(self, "_path", path)

    def __repr__(self) -> str:
        return f"<{self._path}: dropped, because keep_outputs does not name it>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # Python itself asks, to copy, print or compare
        _raise(self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _raise(next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, DroppedOutput)))


def _raise(output: Any, *_: Any) -> NoReturn:
    path = object.__getattribute__(output, "_path")
    raise OutputNotKeptError(
        f"the output {path} is not computed, because the option keep_outputs does not name it",
        todo=f"add {path!r} to keep_outputs, or remove the option",
    )


for _name in ("iter", "len", "bool", "getitem", "setitem", "contains", "array", "float", "int", "index", "neg", "abs",
              "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "pow",
              "rpow", "mod", "matmul", "rmatmul", "lt", "le", "gt", "ge"):  # fmt: skip
    setattr(DroppedOutput, f"__{_name}__", _raise)


def keep_outputs(captured: Captured, names: Sequence[str] | None) -> Captured:
    """Drop the output tensors that `names` does not name; return the new capture.

    Args:
        captured: its graph is changed in place.
        names: paths in the output: "loss", "0" for the first element of a tuple, "hidden_states" for all tensors in
            it; None keeps all.

    Raises:
        OptionError: the module has no such output.
    """
    if names is None:
        return captured
    paths = {path for path, leaf in leaves(captured.output.tree) if isinstance(leaf, Slot) and leaf.kind == "tensor"}
    unknown = [name for name in names if not any(_is_below(path, name) for path in paths)]
    if unknown:
        expected = ", ".join(sorted(path or "no name, because the output is a single tensor" for path in paths))
        raise OptionError(
            "keep_outputs names an output that the module does not have",
            where="the option keep_outputs",
            expected=expected,
            got=", ".join(unknown),
        )
    new_indices: dict[int, int] = {}
    tree = _drop(captured.output.tree, "", names, new_indices)
    graph = captured.model.graph
    outputs = list(graph.outputs)
    for index in captured.assigned.results:
        new_indices.setdefault(index, len(new_indices))
    kept = (*new_indices, *(each.result for each in captured.assumed))
    graph.outputs.clear()
    graph.outputs.extend([*(outputs[i] for i in kept), *outputs[captured.result_count :]])
    dropped = captured.result_count - len(kept)
    return replace(
        captured,
        result_count=len(kept),
        mutations=tuple(replace(m, output=m.output - dropped) for m in captured.mutations),
        output=OutputStructure(tree, tuple(captured.output.names[i] for i in kept)),
        assumed=tuple(replace(each, result=kept.index(each.result)) for each in captured.assumed),
        assigned=replace(captured.assigned, results=tuple(new_indices[i] for i in captured.assigned.results)),
        kept_results=kept,
        written_views=tuple(
            replace(v, result=new_indices[v.result]) for v in captured.written_views if v.result in new_indices
        ),
    )


def _is_below(path: str, name: str) -> bool:
    """Return whether `name` names the leaf at `path` or a container around it."""
    steps = path.replace("]", "").replace("[", ".").replace("'", "").strip(".").split(".")
    return steps[: len(name.split("."))] == name.split(".")


def _drop(tree: Tree, path: str, names: Sequence[str], new_indices: dict[int, int]) -> Tree:
    """Replace the tensors to drop by placeholders; add the old and new index of each other tensor to `new_indices`."""
    if isinstance(tree, Node):
        children = zip(tree.children, tree.steps, strict=True)
        return replace(tree, children=tuple(_drop(child, path + step, names, new_indices) for child, step in children))
    if not isinstance(tree, Slot) or tree.kind != "tensor":
        return tree
    if any(_is_below(path, name) for name in names):
        return Slot("tensor", new_indices.setdefault(tree.index, len(new_indices)))
    name = path.strip(".")
    return Constant(DroppedOutput(name), ("dropped output", name))
