"""Detach the values that forward computes under no_grad, because functionalization drops the no_grad regions.

    with no_grad(): y = f(x)                ──>    y = detach(f(x))
    with no_grad(): buffer.copy_(f(x))      ──>    buffer.copy_(detach(f(x)))
    with no_grad(): y = x.to(x.dtype)       ──>    y = x, which is the same object in eager too

In eager, autograd follows tensor objects: a tensor that is mutated where autograd does not see it (in a no_grad region,
or through `detach()`) keeps its gradient. In a functional graph, autograd follows values: the mutated value has no
gradient. A forward for which the two differ is refused.
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
from onnxtrain.torch_compat.patch_points import CREATE_NODE, SET_PROXY_SLOT

_DETACH = torch.ops.aten.detach.default  # a view: what is written to it is written to the tensor
_DETACH_COPY = torch.ops.aten.detach_copy.default
_GRAD_MODE, _IS_ARGUMENT = "grad mode", "is argument"  # keys in a node's metadata


@contextmanager
def recording_grad_mode() -> Iterator[None]:
    """Record at each call traced in this thread whether grad mode is on: an export loses some of its changes.

    Also record whether a call returned a tensor object that the trace already knew: an argument.
    """
    owner = threading.get_ident()

    def recording(original: Callable[..., Node]) -> Callable[..., Node]:
        def create_node(self: TracerBase, *args: Any, **kwargs: Any) -> Node:
            node = original(self, *args, **kwargs)
            if threading.get_ident() == owner:
                node.meta[_GRAD_MODE] = torch.is_grad_enabled()
            return node

        return create_node

    def recording_argument(original: Callable[..., None]) -> Callable[..., None]:
        def set_proxy_slot(obj: Any, tracer: Any, proxy: Any) -> None:
            if isinstance(obj, torch.Tensor) and obj in tracer.tensor_tracker and threading.get_ident() == owner:
                proxy.proxy.node.meta[_IS_ARGUMENT] = True
            original(obj, tracer, proxy)

        return set_proxy_slot

    with CREATE_NODE.wrapped(recording), SET_PROXY_SLOT.wrapped(recording_argument):
        yield


def detach_no_grad_values(program: ExportedProgram) -> None:
    """Detach the values that have no gradient because forward switched grad mode off.

    Raises:
        CaptureError: the gradients of the functional graph would differ from eager's.
    """
    module = program.graph_module
    calls = [n for part in module.modules() if isinstance(part, GraphModule) for n in _calls(part)]
    switched = [n for n in calls if is_grad_enabled(n) != torch.is_grad_enabled()]
    if switched and not torch.is_grad_enabled():
        raise _enable_grad_error(switched[0])
    if switched or any(map(mutated_arguments, calls)):
        _Detacher(module, calls, set(program.graph_signature.inputs_to_parameters)).run(module)


def _calls(module: GraphModule) -> list[Node]:
    """Return the traced calls of operators and functions, without those that torch.export added."""
    return [
        n for n in module.graph.nodes if n.op == "call_function" and _GRAD_MODE in n.meta and n.target is not getitem
    ]


def is_grad_enabled(node: Node) -> bool:
    """Return whether grad mode was on when a call was traced."""
    return bool(node.meta.get(_GRAD_MODE, True))


def _enable_grad_error(node: Node) -> CaptureError:
    return CaptureError(
        "torch.enable_grad() inside torch.no_grad() cannot be captured",
        where=source_location.of_node(node),
        todo="the module runs in PyTorch; leave the no_grad region instead of calling enable_grad() inside it",
    )


def mutated_arguments(node: Node) -> list[Node]:
    """Return the tensors that an operator mutates."""
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
        return []
    schema = schema_of(node.target).arguments
    arguments = [
        *zip(schema, node.args, strict=False),
        *((a, node.kwargs[a.name]) for a in schema if a.name in node.kwargs),
    ]
    mutated = [value for a, value in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [value for value in pytree.tree_leaves(mutated) if isinstance(value, Node)]


def _can_have_gradient(node: Node) -> bool:
    values = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()) for v in values)


def _is_factory(target: Any) -> bool:
    """Return whether an operator creates a tensor without reading elements, as `zeros_like` does."""
    if not isinstance(target, OpOverload):
        return False
    names = {argument.name for argument in schema_of(target).arguments}
    return {"dtype", "layout", "device", "pin_memory"} <= names and "non_blocking" not in names


class _Detacher:
    """Visit the nodes of forward in order, and detach values computed with grad mode off.

    torch.export puts the calls inside a grad mode switch into a graph of their own, called a region here.

    Args:
        module: forward.
        calls: the traced calls, including those in regions.
        parameters: names of the placeholders that are parameters.
    """

    def __init__(self, module: GraphModule, calls: Sequence[Node], parameters: Collection[str]) -> None:
        placeholders = module.graph.find_nodes(op="placeholder")
        self._parameters = set().union(*(storages_of(p) for p in placeholders if p.name in parameters))
        self._with_gradient = set().union(*(storages_of(p) for p in placeholders if _requires_grad(p)))
        self._detached: set[Node] = set()  # although their memory may belong to a tensor with a gradient
        readers = [module.graph.output_node(), *filter(is_grad_enabled, calls)]
        self._read_with_grad = set().union(*(storages_of(a) for reader in readers for a in reader.all_input_nodes))

    def run(self, module: GraphModule, arguments: Sequence[Any] = ()) -> list[Any]:
        """Visit forward or a region, and return its results.

        Args:
            module: the graph.
            arguments: the arguments that a region is called with.
        """
        placeholders = module.graph.find_nodes(op="placeholder")
        self._detached.update(p for p, a in zip(placeholders, arguments, strict=False) if a in self._detached)
        for node in list(module.graph.nodes):
            bodies = [getattr(module, str(a.target), None) if _is_attribute(a) else None for a in node.args]
            if any(isinstance(body, GraphModule) for body in bodies):
                self._visit_region(node, bodies)
            elif node.op == "call_function" and (mutated := mutated_arguments(node)):
                self._visit_mutation(node, mutated)
            elif node.op == "call_function" and not _is_result_of_region(node):
                self._visit_functional(node)
        module.recompile()
        results: list[Any] = pytree.tree_leaves(module.graph.output_node().args)
        return results

    def _visit_region(self, node: Node, bodies: Sequence[Any]) -> None:
        """Visit the call of a region; its results are detached inside."""
        index = next(i for i, body in enumerate(bodies) if isinstance(body, GraphModule))
        results = self.run(bodies[index], node.args[index + 1 :])
        for reader in node.users:
            if reader.target is getitem and results[reader.args[1]] in self._detached:  # type: ignore[index]  # an int
                self._detached.add(reader)

    def _visit_functional(self, node: Node) -> None:
        """Visit a call that mutates nothing: its results are new tensors, or views."""
        grad, storages = is_grad_enabled(node), storages_of(node)
        viewed = [a for a in node.all_input_nodes if not storages.isdisjoint(storages_of(a))]
        if viewed:
            loses_gradient = not _can_have_gradient(node) and self._may_have_gradient(node)  # view(torch.int32)
            if node.target is _DETACH or loses_gradient or any(a in self._detached for a in viewed):
                self._detached.add(node)
            elif not grad and _is_tensor(node) and _IS_ARGUMENT not in node.meta and self._may_have_gradient(node):
                self._detached.update((node, _insert_after(node, _DETACH)))
        elif not _can_have_gradient(node) or _is_factory(node.target):
            return
        elif grad:
            if any(a not in self._detached and self._may_have_gradient(a) for a in node.all_input_nodes):
                self._with_gradient |= storages_of(node, can_have_gradient=True)  # not those of topk's indices
        elif node.target is not getitem and not storages.isdisjoint(self._read_with_grad):
            for part in [node] if _is_tensor(node) else list(node.users):
                _insert_after(part, _DETACH_COPY)

    def _may_have_gradient(self, node: Node) -> bool:
        """Return whether a tensor in the node's memory has a gradient."""
        return not self._with_gradient.isdisjoint(storages_of(node))

    def _visit_mutation(self, node: Node, mutated: Sequence[Node]) -> None:
        if any(not self._parameters.isdisjoint(storages_of(target)) for target in mutated):
            return  # refused later, by a message that says what to do
        grad, sources = is_grad_enabled(node), [a for a in node.all_input_nodes if a not in mutated]
        with_gradient = [a for a in sources if a not in self._detached and self._may_have_gradient(a)]
        is_through_detach = any(target in self._detached for target in mutated)
        if grad and not is_through_detach:
            if with_gradient:
                self._with_gradient.update(*map(storages_of, mutated))
        elif any(map(self._may_have_gradient, mutated)) or (grad and with_gradient):
            raise CaptureError(
                "forward changes a tensor in place where autograd does not see it, and a gradient flows through it",
                where=source_location.of_node(node),
                got=f"{node.target} {'through detach()' if grad else 'under torch.no_grad()'}",
                todo="the module runs in PyTorch; change a copy: clone() the tensor first",
            )
        elif not grad:
            _detach_arguments(node, [a for a in sources if _can_have_gradient(a)])
        if is_through_detach:
            self._detached.add(node)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _requires_grad(placeholder: Node) -> bool:
    value = placeholder.meta.get("val")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_attribute(argument: Any) -> bool:
    return isinstance(argument, Node) and argument.op == "get_attr"


def _is_result_of_region(node: Node) -> bool:
    source = node.args[0] if node.target is getitem else None
    return isinstance(source, Node) and isinstance(source.target, HigherOrderOperator)


def _insert_after(node: Node, target: Any) -> Node:
    """Insert `target(node)`, and let all users of `node` read it instead."""
    with node.graph.inserting_after(node):
        inserted = node.graph.call_function(target, (node,))
    inserted.meta = dict(node.meta)
    node.replace_all_uses_with(inserted, delete_user_cb=partial(is_not, inserted))
    return inserted


def _detach_arguments(node: Node, arguments: Sequence[Node]) -> None:
    """Detach these arguments of a call, for this call only."""
    detached: dict[Node, Node] = {}
    for argument in arguments:
        with node.graph.inserting_before(node):
            detached[argument] = node.graph.call_function(_DETACH_COPY, (argument,))
        detached[argument].meta = dict(argument.meta)
    node.args = map_arg(node.args, lambda a: detached.get(a, a))
    node.kwargs = map_arg(node.kwargs, lambda a: detached.get(a, a))
