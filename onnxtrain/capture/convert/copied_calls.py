"""Copy the ONNX nodes of a call, for the same call in another block: that takes half of the time of its conversion.

h.1   y = gelu(x, approximate="tanh")    converted to ONNX nodes
h.2   y = gelu(x, approximate="tanh")    a copy of them, with other inputs

A call is converted, not copied, if it reads a tensor from outside of its block that is not an input of the graph:
another op may produce that tensor, and some conversions look at the producers of their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
from torch.fx import Node

from onnxtrain.capture.node_storage import COPY_OF
from onnxtrain.graph import traversal
from onnxtrain.graph.traversal import clone_node
from onnxtrain.graph.values import type_of
from onnxtrain.torch_compat import pytree


class CopiedCalls:
    """The converted calls of one graph.

    Args:
        graph: the ONNX graph.
        values: for each converted node, its value in the graph, or a Python constant.
    """

    def __init__(self, graph: ir.Graph, values: Mapping[Node, Any]) -> None:
        self._graph = graph
        self._values = values
        self._nodes: dict[Node, Sequence[ir.Node]] = {}

    def record(self, call: Node, nodes: Sequence[ir.Node], origin: Mapping[str, str]) -> None:
        """Record the nodes that a call was converted to, if copies of them are what its copies are converted to.

        They are not if other calls share them, if their metadata is their own, or if they read what is computed before
        the call's arguments, as attention reads the heads that a model repeats for it: a copy would read those of the
        first block.
        """
        shared = {v for table in ("size_values", "shape_values") for v in self._graph.meta.get(table, {}).values()}
        outputs = {value for node in nodes for value in node.outputs}
        arguments = {value for node in call.all_input_nodes for value in _leaves(self._values.get(node))}
        reads = {value for node in nodes for value in traversal.reads(node)}
        others = reads - arguments - outputs - shared
        if (
            shared.isdisjoint(outputs)
            and all(value.producer() is None and value.const_value is not None for value in others)
            and all(node.metadata_props == origin for node in nodes)
        ):
            self._nodes[call] = nodes

    def copy(self, call: Node, origin: Callable[[Node], Mapping[str, str]]) -> Any:
        """Append copies of the nodes of the call that `call` is a copy of.

        Returns:
            The value of `call`; None if it has to be converted.
        """
        original = call.meta.get(COPY_OF)
        nodes = self._nodes.get(original) if original is not None else None
        if original is None or nodes is None or not _is_same_call(call, original):
            return None
        values: dict[ir.Value, ir.Value] = {}
        if not self._match((original.args, original.kwargs), (call.args, call.kwargs), values):
            return None
        properties = origin(call)
        for node in nodes:
            copied = clone_node(node, values)
            copied.metadata_props.clear()
            copied.metadata_props.update(properties)
            for value in copied.outputs:
                value.name = None
            self._graph.append(copied)
        result = self._values[original]
        if isinstance(result, ir.Value):  # of most calls; a map over a pytree makes seven objects that refer in a cycle
            return values.get(result, result)
        return pytree.tree_map(lambda v: values.get(v, v) if isinstance(v, ir.Value) else v, result)

    def _match(self, original: Any, own: Any, values: dict[ir.Value, ir.Value]) -> bool:
        """Match the arguments of two calls, and add the values of the other block to `values`."""
        if isinstance(original, Node):
            return isinstance(own, Node) and (original is own or self._match_nodes(original, own, values))
        if isinstance(original, (tuple, list)):
            return (
                type(own) is type(original)
                and len(own) == len(original)
                and all(self._match(a, b, values) for a, b in zip(original, own, strict=True))
            )
        if isinstance(original, dict):
            return isinstance(own, dict) and self._match([*original.items()], [*own.items()], values)
        return original is own

    def _match_nodes(self, original: Node, own: Node, values: dict[ir.Value, ir.Value]) -> bool:
        are_inputs = original.op == own.op == "placeholder"
        if not are_inputs and own.meta.get(COPY_OF) is not original:
            return False
        pairs = [_leaves(self._values.get(node)) for node in (original, own)]
        if len(pairs[0]) != len(pairs[1]):
            return False
        for old, new in zip(*pairs, strict=True):
            if not isinstance(old, ir.Value) or not isinstance(new, ir.Value):
                if old is not new:
                    return False
            elif type_of(old) != type_of(new):
                return False
            else:
                values[old] = new
        return True


def _leaves(value: Any) -> Sequence[Any]:
    return (value,) if isinstance(value, ir.Value) else pytree.tree_leaves(value)


def _is_same_call(call: Node, original: Node) -> bool:
    return call.target is original.target and call.meta.get("val") is original.meta.get("val")
