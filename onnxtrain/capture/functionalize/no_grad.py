"""What forward computes without gradient: functionalization forgets that it did.

    with no_grad(): y = f(x)                ──>    y = detach(f(x))
    with no_grad(): buffer.copy_(f(x))      ──>    buffer.copy_(detach(f(x)))

Autograd goes by objects: a tensor that is changed in place where autograd does not look (in a no_grad region, through
`detach()`) keeps its gradient. A functional graph goes by values: there the changed one has the gradient of the change,
which is none. Such a forward is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import getitem, is_not
from typing import Any

import torch
from torch.export.exported_program import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.proxy import TracerBase

from onnxtrain.capture import source_location
from onnxtrain.capture.node_storage import storages_of
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat import pytree
from onnxtrain.torch_compat.operators import HigherOrderOperator, OpOverload, schema_of
from onnxtrain.torch_compat.patch_points import CREATE_NODE

_DETACH = torch.ops.aten.detach.default  # a view: what is written to it is written to the tensor
_DETACH_COPY = torch.ops.aten.detach_copy.default
_MODE = "gradients are on"


@contextmanager
def grad_mode_noted() -> Iterator[None]:
    """Notes at each call that is traced in this thread whether gradients are on: an export loses some switches."""
    owner = threading.get_ident()

    def noting(original: Callable[..., Node]) -> Callable[..., Node]:
        def create_node(self: TracerBase, *args: Any, **kwargs: Any) -> Node:
            node = original(self, *args, **kwargs)
            if threading.get_ident() == owner:
                node.meta[_MODE] = torch.is_grad_enabled()
            return node

        return create_node

    with CREATE_NODE.wrapped(noting):
        yield


def keep_gradients_out(program: ExportedProgram) -> None:
    """Marks with `detach` what has no gradient because forward switched gradients off.

    Raises:
        CaptureError: a functional graph would have other gradients than eager.
    """
    module = program.graph_module
    calls = [n for part in module.modules() if isinstance(part, GraphModule) for n in _calls(part)]
    switched = [n for n in calls if _gradients_are_on(n) != torch.is_grad_enabled()]
    if switched and not torch.is_grad_enabled():
        raise _switched_on(switched[0])
    if switched or any(map(written_arguments, calls)):
        _Walk(module, calls, set(program.graph_signature.inputs_to_parameters)).graph(module)


def _calls(module: GraphModule) -> list[Node]:
    """The calls of operators and functions: those that torch.export added were not traced."""
    return [n for n in module.graph.nodes if n.op == "call_function" and _MODE in n.meta and n.target is not getitem]


def _gradients_are_on(node: Node) -> bool:
    return bool(node.meta.get(_MODE, True))


def _switched_on(node: Node) -> CaptureError:
    return CaptureError(
        "torch.enable_grad() inside torch.no_grad() cannot be captured",
        where=source_location.of_node(node),
        todo="the module runs in PyTorch; leave the no_grad region first",
    )


def written_arguments(node: Node) -> list[Node]:
    """The tensors that an operator changes in place."""
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
        return []
    schema = schema_of(node.target).arguments
    given = [
        *zip(schema, node.args, strict=False),
        *((a, node.kwargs[a.name]) for a in schema if a.name in node.kwargs),
    ]
    written = [value for argument, value in given if argument.alias_info is not None and argument.alias_info.is_write]
    return [value for value in pytree.tree_leaves(written) if isinstance(value, Node)]


def _can_have_gradient(node: Node) -> bool:
    values = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()) for v in values)


def _makes_tensors(target: Any) -> bool:
    """Whether an operator is of the kind of `zeros_like`, which reads no element."""
    if not isinstance(target, OpOverload):
        return False
    names = {argument.name for argument in schema_of(target).arguments}
    return {"dtype", "layout", "device", "pin_memory"} <= names and "non_blocking" not in names


class _Walk:
    """Goes through forward in its order, and through the regions in which torch.export puts switches."""

    def __init__(self, module: GraphModule, calls: Sequence[Node], parameters: Collection[str]) -> None:
        places = module.graph.find_nodes(op="placeholder")
        self._parameters = set().union(*(storages_of(p) for p in places if p.name in parameters))
        self._with_gradient = set().union(*(storages_of(p) for p in places if _needs_gradient(p)))
        self._detached: set[Node] = set()  # though what lies in their memory may have a gradient
        readers = [module.graph.output_node(), *filter(_gradients_are_on, calls)]
        self._leaving = set().union(*(storages_of(a) for reader in readers for a in reader.all_input_nodes))

    def graph(self, module: GraphModule, given: Sequence[Any] = ()) -> list[Any]:
        """One graph; `given` are the arguments of a region. Gives its results."""
        places = module.graph.find_nodes(op="placeholder")
        self._detached.update(p for p, a in zip(places, given, strict=False) if a in self._detached)
        for node in list(module.graph.nodes):
            bodies = [getattr(module, str(a.target), None) if _is_attribute(a) else None for a in node.args]
            if any(isinstance(body, GraphModule) for body in bodies):
                self._region(node, bodies)
            elif node.op == "call_function" and (written := written_arguments(node)):
                self._write(node, written)
            elif node.op == "call_function" and not _is_result_of_region(node):
                self._value(node)
        module.recompile()
        results: list[Any] = pytree.tree_leaves(module.graph.output_node().args)
        return results

    def _region(self, node: Node, bodies: Sequence[Any]) -> None:
        """A call of a part of forward. What leaves it is marked inside."""
        index = next(i for i, body in enumerate(bodies) if isinstance(body, GraphModule))
        results = self.graph(bodies[index], node.args[index + 1 :])
        for reader in node.users:
            if reader.target is getitem and results[reader.args[1]] in self._detached:  # type: ignore[index]  # an int
                self._detached.add(reader)

    def _value(self, node: Node) -> None:
        """A call that changes nothing: its results are new tensors, or views."""
        grad, storages = _gradients_are_on(node), storages_of(node)
        viewed = [a for a in node.all_input_nodes if not storages.isdisjoint(storages_of(a))]
        if viewed:
            if node.target is _DETACH or any(a in self._detached for a in viewed):
                self._detached.add(node)
            elif not grad and _is_tensor(node) and self._may_have_gradient(node):
                self._detached.update((node, _marked(node, _DETACH)))
        elif not _can_have_gradient(node) or _makes_tensors(node.target):
            return
        elif grad:
            if any(a not in self._detached and self._may_have_gradient(a) for a in node.all_input_nodes):
                self._with_gradient |= storages
        elif node.target is not getitem and not storages.isdisjoint(self._leaving):
            for part in [node] if _is_tensor(node) else list(node.users):
                _marked(part, _DETACH_COPY)

    def _may_have_gradient(self, node: Node) -> bool:
        """Whether something in the node's memory has a gradient."""
        return not self._with_gradient.isdisjoint(storages_of(node))

    def _write(self, node: Node, written: Sequence[Node]) -> None:
        if any(not self._parameters.isdisjoint(storages_of(target)) for target in written):
            return  # refused later, with what is to be done about it
        grad, sources = _gradients_are_on(node), [a for a in node.all_input_nodes if a not in written]
        with_gradient = [a for a in sources if a not in self._detached and self._may_have_gradient(a)]
        hidden = any(target in self._detached for target in written)
        if grad and not hidden:
            if with_gradient:
                self._with_gradient.update(*map(storages_of, written))
        elif any(map(self._may_have_gradient, written)) or (grad and with_gradient):
            raise CaptureError(
                "forward changes a tensor in place where autograd does not see it, and a gradient flows through it",
                where=source_location.of_node(node),
                got=f"{node.target} {'through detach()' if grad else 'under torch.no_grad()'}",
                todo="the module runs in PyTorch; change a copy: clone() it first",
            )
        elif not grad:
            _read_detached(node, [a for a in sources if _can_have_gradient(a)])
        if hidden:
            self._detached.add(node)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _needs_gradient(place: Node) -> bool:
    value = place.meta.get("val")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_attribute(argument: Any) -> bool:
    return isinstance(argument, Node) and argument.op == "get_attr"


def _is_result_of_region(node: Node) -> bool:
    source = node.args[0] if node.target is getitem else None
    return isinstance(source, Node) and isinstance(source.target, HigherOrderOperator)


def _marked(node: Node, mark: Any) -> Node:
    """Lets everyone read `mark(node)`."""
    with node.graph.inserting_after(node):
        marked = node.graph.call_function(mark, (node,))
    marked.meta = dict(node.meta)
    node.replace_all_uses_with(marked, delete_user_cb=partial(is_not, marked))
    return marked


def _read_detached(node: Node, arguments: Sequence[Node]) -> None:
    """Lets a call read these arguments without their gradients."""
    marks: dict[Node, Node] = {}
    for argument in arguments:
        with node.graph.inserting_before(node):
            marks[argument] = node.graph.call_function(_DETACH_COPY, (argument,))
        marks[argument].meta = dict(argument.meta)
    node.args = map_arg(node.args, lambda a: marks.get(a, a))
    node.kwargs = map_arg(node.kwargs, lambda a: marks.get(a, a))
