"""Makes an export functional where that is plain, without tracing it once more (`run_decompositions` takes seconds).

    wrap_with_set_grad_enabled(False, body, x)  ──>  the calls of body; what leaves it is marked with `detach` already
    rows = zeros[1:];  rows.copy_(x)            ──>  new = copy(rows, x);  zeros = slice_scatter(zeros, new, 1:)

What is written has to be a tensor that forward itself made, as it is or through slices. Which values share memory is
asked of the fake tensors. Whatever is less plain is left to PyTorch.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch.export.exported_program import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from onnxtrain.capture.convert import is_convertible, is_grad_switch
from onnxtrain.capture.patches import replaced
from onnxtrain.ops import FROM_TORCH

aten = torch.ops.aten

# For a view, what writes it back into the whole; both take the same arguments after their tensors.
_WRITTEN_BACK: dict[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}


def make_convertible(program: ExportedProgram) -> bool:
    """Whether `program` can be converted without functionalization; rewrites its graph so, where that is plain."""
    if is_convertible(program):
        return True
    module = program.graph_module
    before = module.graph
    try:
        rewritten = _Rewrite(before).graph
    except _NotPlainError:
        return False
    with replaced(GraphModule, "recompile", lambda module: None):  # only the graph is read
        module.graph = rewritten
    if is_convertible(program):
        return True
    module.graph = before
    return False


class _NotPlainError(Exception):
    """Something that is left to PyTorch's functionalization."""


class _Rewrite:
    """A functional copy of a graph.

    Raises:
        _NotPlainError: a call writes to something that forward did not make, or what it writes is read through another
            view later; or there is a region that is no `torch.no_grad()`.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = Graph(graph.owning_module)
        self._now: dict[Node, Node] = {}  # for each node, its value as it is now
        self._same: dict[Node, Node] = {}  # for a result that is another node's tensor, that node
        self._sharing: dict[int, list[Node]] = defaultdict(list)  # for each storage, the nodes whose tensors lie there
        self._old: set[Node] = set()  # those of them whose value was written over through another
        self._regions: dict[Node, Any] = {}  # for each region, its results
        self._has_writes = any(_writes(node.target) for node in graph.nodes)
        for node in graph.nodes:
            self._visit(node)

    def _visit(self, node: Node) -> None:
        if node.op == "get_attr":
            return  # the body of a region
        if is_grad_switch(node) and not node.args[0]:
            self._inline(node)
        elif node.target is operator.getitem and node.args[0] in self._regions:
            self._same[node] = self._regions[node.args[0]][node.args[1]]  # type: ignore[index]  # a Node and an int
        elif _writes(node.target):
            self._write(node)
        else:
            self._now[node] = self.graph.node_copy(node, self._value)
            for storage in _storages(node):
                self._sharing[storage].append(node)

    def _itself(self, node: Node) -> Node:
        while node in self._same:
            node = self._same[node]
        return node

    def _value(self, node: Node) -> Node:
        node = self._itself(node)
        if node in self._old or node not in self._now:
            raise _NotPlainError
        return self._now[node]

    def _inline(self, node: Node) -> None:
        """Visits the calls of a region. It changes nothing, and nothing is changed around it."""
        body = getattr(self.graph.owning_module, str(node.args[1].target)).graph  # type: ignore[union-attr]  # a Node
        if self._has_writes or any(n.op == "get_attr" or _writes(n.target) for n in body.nodes):
            raise _NotPlainError
        arguments = iter(node.args[2:])
        for inner in body.nodes:
            if inner.op == "placeholder":
                self._same[inner] = next(arguments)  # type: ignore[assignment]  # regions take nodes
            elif inner.op == "output":
                self._regions[node] = inner.args[0]
            else:
                self._visit(inner)

    def _write(self, node: Node) -> None:
        """Puts what is written in the place of what was there, for all that is read from here on."""
        if not isinstance(node.args[0], Node):
            raise _NotPlainError
        self._same[node] = written = self._itself(node.args[0])
        storages = _storages(written)
        if len(storages) != 1:
            raise _NotPlainError
        made, *others = self._sharing[storages[0]]
        value = self._call(_functional(node), node.args, node.kwargs, written, node)
        self._now[written] = value
        path = {written}
        while written is not made:
            view, written = written, self._itself(written.all_input_nodes[0])
            if view.target not in _WRITTEN_BACK:
                raise _NotPlainError
            arguments = (written, view, *view.args[1:])
            value = self._call(_WRITTEN_BACK[view.target], arguments, view.kwargs, written, node)
            self._now[written] = value
            path.add(written)
        if made.op != "call_function" or not isinstance(made.meta.get("val"), torch.Tensor):
            raise _NotPlainError
        self._old.update(other for other in others if other not in path)

    def _call(self, target: Any, args: Any, kwargs: Any, like: Node, origin: Node) -> Node:
        """A call whose result has the type of `like`, at the place in the user's code that `origin` has."""
        call = self.graph.call_function(target, map_arg(args, self._value), map_arg(kwargs, self._value))
        call.meta = {**origin.meta, "val": like.meta["val"]}
        return call


def _writes(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _storages(node: Node) -> list[int]:
    """The storages of a node's tensors.

    Raises:
        _NotPlainError: it stands inside of `torch.vmap` or `torch.func`, whose tensors have none.
    """
    found = pytree.tree_leaves(node.meta.get("val"))
    tensors = [v for v in found if isinstance(v, torch.Tensor) and v.layout is torch.strided]
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors):
        raise _NotPlainError
    return [t.untyped_storage()._cdata for t in tensors]


def _functional(node: Node) -> Any:
    """The operator that gives what an in-place one writes to its first argument.

    Raises:
        _NotPlainError: there is none that has a definition, or it gives another type.
    """
    target: Any = node.target
    writes = [a.alias_info is not None and a.alias_info.is_write for a in target._schema.arguments]
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    found: Any = getattr(packet, target._overloadname, None)
    if not name.endswith("_") or str(found) not in FROM_TORCH or writes != [True] + [False] * (len(writes) - 1):
        raise _NotPlainError
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise _NotPlainError
    given: Any = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs = given
    mode = args[0].fake_mode
    with mode, mode.shape_env.suppress_guards(), mode.shape_env.ignore_fresh_unbacked_symbols():
        if found(*args, **kwargs).dtype != args[0].dtype:
            raise _NotPlainError
    return found
