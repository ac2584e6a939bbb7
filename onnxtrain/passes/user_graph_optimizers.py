"""Users' functions on the joint graph, as `onnx.GraphProto`: ORTModule's `register_graph_optimizer`.

    @register_graph_optimizer(target_modules="Bert|Roberta", devices="cuda", priority=1)
    def fuse_something(graph: onnx.GraphProto) -> None: ...

They run after differentiation and our own passes. Nodes and values that they do not change keep their identity, and
with it the metadata that a protobuf cannot hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import traversal
from onnxtrain.graph.values import set_type
from onnxtrain.ops import definition_of, lookup

GraphFunction = Callable[[onnx.GraphProto], None]
_ALL = "all"


@dataclass(frozen=True)
class _Registered:
    function: GraphFunction
    modules: frozenset[str]
    devices: frozenset[str]
    priority: int

    def serves(self, module: str, device: str) -> bool:
        return bool({_ALL, module} & self.modules) and bool({_ALL, device} & self.devices)


_REGISTERED: list[_Registered] = []


def register_graph_optimizer(
    target_modules: str = _ALL, devices: str = _ALL, priority: int = 0
) -> Callable[[GraphFunction], GraphFunction]:
    """Register a function that changes the joint graph of forward and backward in place.

    Args:
        target_modules: class names of the wrapped modules for which it runs, joined by "|".
        devices: device types for which it runs, joined by "|".
        priority: functions of higher priority run first.
    """

    def register(function: GraphFunction) -> GraphFunction:
        names, kinds = frozenset(target_modules.split("|")), frozenset(devices.split("|"))
        _REGISTERED.append(_Registered(function, names, kinds, priority))
        return function

    return register


def functions_for(module: str, device: str) -> list[GraphFunction]:
    """Return the functions that run for a module's class on a device type, in order."""
    serving = [each for each in _REGISTERED if each.serves(module, device)]
    return [each.function for each in sorted(serving, key=lambda each: -each.priority)]


@dataclass(frozen=True)
class Rewritten:
    """The changes by users' functions.

    Attributes:
        added: the new nodes.
        replaced: values that another node now computes.
    """

    added: frozenset[ir.Node]
    replaced: dict[ir.Value, ir.Value]


def rewrite(graph: ir.Graph, functions: Sequence[GraphFunction]) -> Rewritten:
    """Run the functions on `graph`, in place.

    Raises:
        GraphError: a function changed the graph's inputs or outputs, or left a node that reads a value which no
            node computes, whose operator has no definition, or that is part of a cycle.
    """
    traversal.name_uniquely(graph)
    before: onnx.GraphProto = ir.to_proto(graph)
    after = onnx.GraphProto()
    after.CopyFrom(before)
    for function in functions:
        function(after)
        _check_contract(before, after, function)
    return _Merge(graph, before, after).run()


def _check_contract(before: onnx.GraphProto, after: onnx.GraphProto, function: GraphFunction) -> None:
    for kind in ("input", "output"):
        expected, got = ([each.name for each in getattr(g, kind)] for g in (before, after))
        if expected != got:
            raise GraphError(
                f"a function of register_graph_optimizer changed the graph's {kind}s",
                where=f"{function.__module__}.{function.__qualname__}",
                expected=", ".join(expected),
                got=", ".join(got),
            )


def _is_constant(node: onnx.NodeProto) -> bool:
    return (node.domain, node.op_type) == ("", "Constant") and node.attribute[0].name == "value"


def _tensor_of(constant: onnx.NodeProto) -> onnx.TensorProto:
    """Return the tensor of a Constant, under the name of the node's output.

    Our graphs hold constants as initializers.
    """
    tensor = onnx.TensorProto()
    tensor.CopyFrom(constant.attribute[0].t)
    tensor.name = constant.output[0]
    return tensor


class _Merge:
    """Carries the differences of two protobufs over to the graph that the first was made of."""

    def __init__(self, graph: ir.Graph, before: onnx.GraphProto, after: onnx.GraphProto) -> None:
        self._graph = graph
        self._after = after
        self._old = {str(node.name): node for node in graph}
        old_nodes = {node.name: node for node in before.node}
        kept = {node.name for node in after.node if old_nodes.get(node.name) == node}
        new = [node for node in after.node if node.name not in kept]
        self._new_protos = [node for node in new if not _is_constant(node)]
        self._constants = [_tensor_of(node) for node in new if _is_constant(node)]
        self._removed = [node for name, node in self._old.items() if name not in kept]
        self._values = {str(v.name): v for v in (*graph.inputs, *graph.initializers.values())}
        self._values |= {str(v.name): v for node in graph for v in node.outputs}

    def run(self) -> Rewritten:
        self._add_initializers()
        former = {str(v.name): v for node in self._removed for v in node.outputs}
        for name, value in former.items():
            value.name = f"{name}.former"
            del self._values[name]
        for proto in self._new_protos:
            self._values |= {name: ir.Value(name=name) for name in proto.output if name}
        added = [self._node(proto) for proto in self._new_protos]
        replaced = {value: self._values[name] for name, value in former.items() if name in self._values}
        for old, new in replaced.items():
            new.type, new.shape = old.type, old.shape
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        self._remove()
        self._graph.extend(added)
        traversal.sort(self._graph)
        self._infer(set(added))
        return Rewritten(frozenset(added), replaced)

    def _add_initializers(self) -> None:
        for proto in (*self._after.initializer, *self._constants):
            if proto.name not in self._values:
                tensor = ir.from_proto(proto)
                value = ir.Value(name=proto.name, const_value=tensor)
                value.type, value.shape = ir.TensorType(tensor.dtype), tensor.shape
                self._graph.register_initializer(value)
                self._values[proto.name] = value

    def _node(self, proto: onnx.NodeProto) -> ir.Node:
        if missing := [name for name in proto.input if name and name not in self._values]:
            self._fail(proto, f"reads {', '.join(missing)}, which nothing computes")
        node = ir.Node(
            proto.domain,
            proto.op_type,
            [self._values[name] if name else None for name in proto.input],
            [ir.from_proto(attribute) for attribute in proto.attribute],
            outputs=[self._values[name] if name else ir.Value() for name in proto.output],
            name=proto.name or None,
        )
        lookup(node.domain, node.op_type)
        former = self._old.get(proto.name)
        if former is not None:
            node.meta.update(former.meta)
            node.metadata_props.update(former.metadata_props)
        return node

    def _fail(self, proto: onnx.NodeProto, problem: str) -> None:
        raise GraphError(
            f"a node that a function of register_graph_optimizer left {problem}",
            where=f"{proto.domain or 'ai.onnx'}::{proto.op_type} {proto.name!r}",
        )

    def _remove(self) -> None:
        """Remove the deleted nodes that are no longer read, until none is left."""
        for node in reversed(self._removed):
            if any(map(traversal.is_used, node.outputs)):
                reader = next((user for v in node.outputs for user in traversal.users(v)), None)
                raise GraphError(
                    "a function of register_graph_optimizer removed a node whose result is still read",
                    where=traversal.describe(node),
                    got="the graph's output" if reader is None else traversal.describe(reader),
                )
            self._graph.remove(node, safe=True)

    def _infer(self, added: set[ir.Node]) -> None:
        """Return the types of new values, by their operators' definitions."""
        for node in self._graph:
            if node in added and any(value.type is None for value in node.outputs):
                for value, inferred in zip(node.outputs, definition_of(node).output_types(node), strict=False):
                    set_type(value, inferred)
