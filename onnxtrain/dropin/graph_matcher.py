"""Find and replace subgraphs of an `onnx.GraphProto`, for functions of `register_graph_optimizer`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import onnx
from onnx import GraphProto, NodeProto, ValueInfoProto, helper, numpy_helper

# (op type, whether the node produces inputs of its targets or consumes their outputs,
#  [(index of the target in the pattern, output index of the producer, input index of the consumer), ...])
PatternEntry: TypeAlias = tuple[str, bool, Sequence[tuple[int, int, int]]]


class GraphMatcher:
    """Find nodes by their connections.

    Args:
        graph: may be modified between calls, but not while the matches are in use.
    """

    def __init__(self, graph: GraphProto) -> None:
        self._graph = graph

    def match_pattern(self, pattern: Sequence[PatternEntry]) -> list[list[NodeProto]]:
        """Return all matches; each is a list of nodes in the order of the pattern.

        Args:
            pattern: the first entry has no targets; the targets of a later one are earlier entries. If several nodes
                match an entry, the first one is used.
        """
        return [match for node in self._graph.node if (match := self._match_from(node, pattern)) is not None]

    def _match_from(self, first: NodeProto, pattern: Sequence[PatternEntry]) -> list[NodeProto] | None:
        if first.op_type != pattern[0][0]:
            return None
        match = [first]
        for op_type, is_producer, links in pattern[1:]:
            candidates = (
                node
                for node in self._graph.node
                if node.op_type == op_type
                and all(
                    _is_link(node, match[target], output, input_)
                    if is_producer
                    else _is_link(match[target], node, output, input_)
                    for target, output, input_ in links
                )
            )
            node = next(candidates, None)
            if node is None:
                return None
            match.append(node)
        return match

    def get_producer(self, arg: str, op_type: str, output_idx: int) -> NodeProto | None:
        """Return the node of this type whose output at this index is the value; None if there is none."""
        producer: NodeProto | None = next(
            (
                n
                for n in self._graph.node
                if n.op_type == op_type and list(n.output[output_idx : output_idx + 1]) == [arg]
            ),
            None,
        )
        return producer

    def get_consumer(self, arg: str, op_type: str, input_idx: int) -> NodeProto | None:
        """Return the first node of this type whose input at this index is the value; None if there is none."""
        consumer: NodeProto | None = next(
            (n for n in self._graph.node if n.op_type == op_type and list(n.input[input_idx : input_idx + 1]) == [arg]),
            None,
        )
        return consumer

    def get_constant_value(self, arg: str) -> Any:
        """Return the elements of a constant or initializer, as nested lists or a Python scalar.

        None for other values.
        """
        for tensor in self._graph.initializer:
            if tensor.name == arg:
                return _elements(tensor)
        node = self.get_producer(arg, "Constant", 0)
        if node is None:
            return None
        return next((_elements(a.t) for a in node.attribute if a.name == "value"), None)

    def get_type_and_shape(self, arg: str) -> tuple[int | None, list[Any] | None]:
        """Return the dtype and the shape, with dynamic dimensions by name; None for what is unknown."""
        for info in (*self._graph.value_info, *self._graph.input, *self._graph.output):
            if info.name == arg:
                kind = info.type.tensor_type
                sizes = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in kind.shape.dim]
                return kind.elem_type, sizes if kind.HasField("shape") else None
        for tensor in self._graph.initializer:
            if tensor.name == arg:
                return tensor.data_type, list(tensor.dims)
        return None, None


def _is_link(producer: NodeProto, consumer: NodeProto, output: int, input_: int) -> bool:
    if output >= len(producer.output) or input_ >= len(consumer.input):
        return False
    return bool(producer.output[output] == consumer.input[input_])


def _elements(tensor: onnx.TensorProto) -> Any:
    return numpy_helper.to_array(tensor).tolist()


def check_attribute_value(node: NodeProto, attr_name: str, expected_value: Any) -> bool:
    """Return whether the node has the attribute with this value. A string attribute is compared as str."""
    for attribute in node.attribute:
        if attribute.name == attr_name:
            value = helper.get_attribute_value(attribute)
            return bool((value.decode() if isinstance(value, bytes) else value) == expected_value)
    return False


def make_constant_node(name: str, data_type: int, dims: Sequence[int], vals: Sequence[Any]) -> NodeProto:
    """Make a Constant node whose output is `name`."""
    tensor = helper.make_tensor(name, data_type, dims, vals)
    return helper.make_node("Constant", [], [name], name=f"Constant_{name}", value=tensor)


def update_graph(
    graph: GraphProto,
    nodes_to_remove: Iterable[NodeProto],
    nodes_to_add: Iterable[NodeProto],
    new_value_infos: Iterable[ValueInfoProto] = (),
) -> None:
    """Remove nodes and append others. The nodes need not be in topological order."""
    for node in nodes_to_remove:
        graph.node.remove(node)
    graph.node.extend(nodes_to_add)
    graph.value_info.extend(new_value_infos)
