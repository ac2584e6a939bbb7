"""Finds and replaces parts of an `onnx.GraphProto`, for functions of `register_graph_optimizer`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import onnx
from onnx import GraphProto, NodeProto, ValueInfoProto, helper, numpy_helper

# (op type, whether the node gives to its targets or takes from them,
#  [(number of the target in the pattern, number of the giver's output, number of the taker's input), ...])
PatternEntry: TypeAlias = tuple[str, bool, Sequence[tuple[int, int, int]]]


class GraphMatcher:
    """Finds nodes by what they are connected to.

    Args:
        graph: may be changed between calls, but not while results are looked at.
    """

    def __init__(self, graph: GraphProto) -> None:
        self._graph = graph

    def match_pattern(self, pattern: Sequence[PatternEntry]) -> list[list[NodeProto]]:
        """All matches, each the nodes in the order of the pattern.

        Args:
            pattern: the first entry has no targets; each later one names entries before it. Of several nodes that fit
                an entry the first one counts.
        """
        return [found for node in self._graph.node if (found := self._from(node, pattern)) is not None]

    def _from(self, first: NodeProto, pattern: Sequence[PatternEntry]) -> list[NodeProto] | None:
        if first.op_type != pattern[0][0]:
            return None
        found = [first]
        for op_type, gives, links in pattern[1:]:
            fitting = (
                node
                for node in self._graph.node
                if node.op_type == op_type
                and all(
                    _linked(node, found[target], out, into) if gives else _linked(found[target], node, out, into)
                    for target, out, into in links
                )
            )
            node = next(fitting, None)
            if node is None:
                return None
            found.append(node)
        return found

    def get_producer(self, arg: str, op_type: str, output_idx: int) -> NodeProto | None:
        """The node of this type that has the value as this output."""
        found: NodeProto | None = next(
            (
                n
                for n in self._graph.node
                if n.op_type == op_type and list(n.output[output_idx : output_idx + 1]) == [arg]
            ),
            None,
        )
        return found

    def get_consumer(self, arg: str, op_type: str, input_idx: int) -> NodeProto | None:
        """The first node of this type that has the value as this input."""
        found: NodeProto | None = next(
            (n for n in self._graph.node if n.op_type == op_type and list(n.input[input_idx : input_idx + 1]) == [arg]),
            None,
        )
        return found

    def get_constant_value(self, arg: str) -> Any:
        """The elements of a constant or initializer: a number where it has no dimensions; None for other values."""
        for tensor in self._graph.initializer:
            if tensor.name == arg:
                return _elements(tensor)
        node = self.get_producer(arg, "Constant", 0)
        if node is None:
            return None
        return next((_elements(a.t) for a in node.attribute if a.name == "value"), None)

    def get_type_and_shape(self, arg: str) -> tuple[int | None, list[Any] | None]:
        """The type of the elements, and the sizes, open ones by name; None for what is not known."""
        for info in (*self._graph.value_info, *self._graph.input, *self._graph.output):
            if info.name == arg:
                kind = info.type.tensor_type
                sizes = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in kind.shape.dim]
                return kind.elem_type, sizes if kind.HasField("shape") else None
        for tensor in self._graph.initializer:
            if tensor.name == arg:
                return tensor.data_type, list(tensor.dims)
        return None, None


def _linked(giver: NodeProto, taker: NodeProto, out: int, into: int) -> bool:
    return out < len(giver.output) and into < len(taker.input) and giver.output[out] == taker.input[into]


def _elements(tensor: onnx.TensorProto) -> Any:
    return numpy_helper.to_array(tensor).tolist()


def check_attribute_value(node: NodeProto, attr_name: str, expected_value: Any) -> bool:
    """Whether the node has the attribute with this value; texts may be given as str."""
    for attribute in node.attribute:
        if attribute.name == attr_name:
            found = helper.get_attribute_value(attribute)
            return bool((found.decode() if isinstance(found, bytes) else found) == expected_value)
    return False


def make_constant_node(name: str, data_type: int, dims: Sequence[int], vals: Sequence[Any]) -> NodeProto:
    """A Constant whose output is `name`."""
    tensor = helper.make_tensor(name, data_type, dims, vals)
    return helper.make_node("Constant", [], [name], name=f"Constant_{name}", value=tensor)


def update_graph(
    graph: GraphProto,
    nodes_to_remove: Iterable[NodeProto],
    nodes_to_add: Iterable[NodeProto],
    new_value_infos: Iterable[ValueInfoProto] = (),
) -> None:
    """Takes nodes out and puts others in; where among the nodes they stand does not matter."""
    for node in nodes_to_remove:
        graph.node.remove(node)
    graph.node.extend(nodes_to_add)
    graph.value_info.extend(new_value_infos)
