"""Insert the repeated blocks that a capture omitted into a planned graph.

    h.2   h.45         the graph was differentiated, optimized and planned without the blocks between these two
    h.2   h.3 … h.44   h.45

A new block is a copy of the nodes of h.2, with its own parameters, in forward and in backward. That is right if the
plan treats h.2 and h.45 in the same way: then the nodes of h.45 are those of h.2 with the parameters of h.45, and read
the same of the blocks before and after them, and of the rest of the graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxtrain.autodiff import Joint
from onnxtrain.capture.blocks.omitted_blocks import OmittedBlocks
from onnxtrain.errors import OmittedBlocksError
from onnxtrain.graph import traversal
from onnxtrain.graph.signatures import attributes_key, types_key
from onnxtrain.options import Options
from onnxtrain.passes.user_graph_optimizers import functions_for
from onnxtrain.plan.recompute import RECOMPUTED
from onnxtrain.system.ranks import world_size

_BEFORE, _LAST, _NEXT, _AFTER = range(4)  # the groups that are present; the omitted ones are between _LAST and _NEXT
_NAMES_OF_FORWARD = ("gradient_of", RECOMPUTED)  # metadata of nodes in backward
_OF_ONE_BLOCK = ("module", "checkpoint", *_NAMES_OF_FORWARD)

Gradients = dict[str | None, ir.Value | None]  # by the name of an input


def may_omit_blocks(options: Options, module_name: str) -> bool:
    """Return whether a capture may omit blocks: nothing may read the graphs before they are inserted.

    Args:
        options: see `onnxtrain.options`.
        module_name: the name of the module's class.
    """
    reads_graphs = options.save_graphs is not None or options.cache_dir is not None or bool(options.statistics)
    chooses_by_size = options.memory_budget_bytes is not None or options.recompute not in ("cheap", "none")
    is_rewritten = any(functions_for(module_name, device) for device in ("cpu", "cuda"))
    return not (reads_graphs or chooses_by_size or is_rewritten or world_size() > 1)


def counts_with(omitted: Sequence[OmittedBlocks]) -> Callable[[ir.Value], int]:
    """Return a function that counts a value and its copies in these blocks."""
    copied = {path: 1 + len(blocks.omitted) for blocks in omitted for path in blocks.present[_LAST].paths}

    def count_of(value: ir.Value) -> int:
        node = value.producer()
        path = None if node is None else _enclosing(node, copied)
        return 1 if path is None else copied[path]

    return count_of


def described(omitted: Iterable[OmittedBlocks]) -> list[str]:
    """Return the report's lines on blocks that were inserted."""
    lines: list[str] = []
    for blocks in omitted:
        first, last = (", ".join(blocks.omitted[index].paths) for index in (0, -1))
        lines.append(f"{first} … {last} are copies of {', '.join(blocks.present[_LAST].paths)}")
    return lines


def with_omitted_blocks(joint: Joint, omitted: Sequence[OmittedBlocks]) -> tuple[Joint, Mapping[str, Sequence[str]]]:
    """Insert the omitted blocks into a joint graph, in place.

    Returns:
        The joint graph, and the names of the copies of each value that was copied.

    Raises:
        OmittedBlocksError: the plan treats the blocks beside them differently. The graph may be changed.
    """
    copies: dict[str, list[str]] = defaultdict(list)
    graph, forward = joint.model.graph, set(joint.forward_nodes)
    gradients: Gradients = {v.name: g for v, g in zip(graph.inputs, joint.gradients, strict=False)}
    for blocks in omitted:
        for (_, name), copy in _Insertion(graph, blocks, forward, gradients).insert().items():
            copies[name].append(copy)
    if not omitted:
        return joint, copies
    ordered = tuple(gradients.values())
    results = graph.outputs[: joint.outputs]
    graph.outputs.clear()
    graph.outputs.extend([*results, *(g for g in ordered if g is not None)])
    return replace(joint, forward_nodes=frozenset(forward), gradients=ordered), copies


def insert_omitted_blocks(graph: ir.Graph, omitted: Iterable[OmittedBlocks]) -> None:
    """Insert the omitted blocks into a forward graph, in place.

    Raises:
        OmittedBlocksError: as in `with_omitted_blocks`.
    """
    for blocks in omitted:
        _Insertion(graph, blocks, set(graph), {}).insert()


@dataclass(frozen=True)
class _Place:
    """Where a value is computed: output `index` of node `number` of a group, in forward or backward."""

    group: int
    is_forward: bool
    number: int
    index: int

    def moved(self, groups: int) -> _Place:
        return replace(self, group=self.group + groups)


class _Insertion:
    """The insertion of the blocks of one stack.

    Args:
        graph: the graph; changed in place.
        blocks: what is omitted.
        forward: the nodes of forward; the new ones are added.
        gradients: the gradients of the graph's inputs; those of the new blocks' parameters are set.
    """

    def __init__(self, graph: ir.Graph, blocks: OmittedBlocks, forward: set[ir.Node], gradients: Gradients) -> None:
        self._graph, self._blocks, self._forward, self._gradients = graph, blocks, forward, gradients
        self._inputs = {v.name: v for v in graph.inputs}
        self._slot_of = {
            (group, self._inputs[name]): slot
            for group, names in enumerate(blocks.present)
            for slot, name in enumerate(names.parameters)
        }
        self._nodes: dict[tuple[int, bool], list[ir.Node]] = {
            (group, is_forward): [] for group in range(len(blocks.present)) for is_forward in (True, False)
        }
        group_of = {path: group for group, names in enumerate(blocks.present) for path in names.paths}
        self._order: dict[ir.Node, int] = {}
        for position, node in enumerate(graph):
            self._order[node] = position
            path = _enclosing(node, group_of)
            if path is not None:
                self._nodes[group_of[path], node in forward].append(node)
        self._places = {
            value: _Place(group, is_forward, number, index)
            for (group, is_forward), nodes in self._nodes.items()
            for number, node in enumerate(nodes)
            for index, value in enumerate(node.outputs)
        }
        self._shared: set[ir.Value] = set()  # values that blocks read, and copies read, too
        self._moving: set[ir.Value] = set()  # values of which each block reads another one

    def insert(self) -> Mapping[tuple[int, str], str]:
        """Insert the blocks.

        Returns:
            The names of copies, by the number of their group and the original's name.
        """
        for is_forward in (True, False):
            self._compare(is_forward)
        self._check_readers()
        copies = _Copies(self._graph, self._blocks)
        values: list[dict[ir.Value, ir.Value]] = [{} for _ in self._blocks.omitted]
        for is_forward, numbers in ((True, range(len(values))), (False, reversed(range(len(values))))):
            own = self._nodes[_LAST, is_forward]
            nodes = [node for number in numbers for node in self._copied(own, number, values, copies)]
            if not nodes:
                continue
            if is_forward:
                self._graph.insert_after(own[-1], nodes)
                self._forward.update(nodes)
            else:
                self._graph.insert_before(own[0], nodes)
        self._connect(_NEXT, -1, values[-1])
        self._connect(_LAST, 1, values[0])
        for number, group in enumerate(self._blocks.omitted):
            for name, last in zip(group.parameters, self._blocks.present[_LAST].parameters, strict=True):
                gradient = self._gradients.get(last)
                if gradient is not None:
                    self._gradients[name] = values[number][gradient]
        return copies.names

    # Comparing the groups

    def _compare(self, is_forward: bool) -> None:
        """Check that the nodes of all groups are the same, and that those of two read the same."""
        groups = [self._nodes[group, is_forward] for group in range(len(self._blocks.present))]
        keys = [[_key(node) for node in nodes] for nodes in groups]
        for group in (_BEFORE, _NEXT, _AFTER):
            if keys[group] != keys[_LAST]:
                raise self._differs(group, keys[group], keys[_LAST])
        if not groups[_LAST]:
            return
        first, then = (_LAST, _NEXT) if is_forward else (_NEXT, _LAST)
        if self._order[groups[first][-1]] > self._order[groups[then][0]]:
            raise self._error("their nodes are not apart", groups[then][0])
        for node, following in zip(groups[_LAST], groups[_NEXT], strict=True):
            for one, other in zip(node.inputs, following.inputs, strict=True):
                self._compare_reads(one, other, following)

    def _compare_reads(self, one: ir.Value | None, other: ir.Value | None, node: ir.Node) -> None:
        """Check that `other`, which a node of _NEXT reads, is to it what `one` is to the same node of _LAST."""
        if one is None or other is None:
            if one is not other:
                raise self._error("a block lacks an input", node)
        elif one is other:
            self._shared.add(one)
        elif _is_same_constant(one, other):
            return
        elif (slot := self._slot_of.get((_LAST, one))) is not None:
            if self._slot_of.get((_NEXT, other)) != slot:
                raise self._error("a block reads a parameter of another", node)
        else:
            place = self._places.get(one)
            if place is None or not _is_readable(place) or self._places.get(other) != place.moved(1):
                raise self._error(f"it reads {other.name!r}, the block before it {one.name!r}", node)
            self._moving.update((one, other))

    def _check_readers(self) -> None:
        """Check that nothing but the groups beside them reads what differs between blocks, but for gradients."""
        for value in self._shared:
            place = self._places.get(value)
            if value in self._moving or (place is not None and place.group in (_LAST, _NEXT)):
                raise self._error(f"blocks share {value.name!r}, and have one each", value.producer())
        parameters = self._blocks.present
        for one, other in zip(parameters[_LAST].parameters, parameters[_NEXT].parameters, strict=True):
            gradients = [self._gradients.get(name) for name in (one, other)]
            places = [None if g is None else self._places.get(g, g) for g in gradients]
            if places[0] is not places[1] and not (
                isinstance(places[0], _Place) and places[0].group == _LAST and places[0].moved(1) == places[1]
            ):
                raise self._error(f"the gradients of {one} and {other} differ", None)
        own = {self._gradients.get(name) for group in parameters for name in group.parameters}
        group_of = {node: group for (group, _), nodes in self._nodes.items() for node in nodes}
        for (group, is_forward), nodes in self._nodes.items():
            for value in (v for node in nodes for v in node.outputs if group in (_LAST, _NEXT)):
                if value.is_graph_output() and not is_forward and value not in own:
                    raise self._error(f"{value.name!r} is a gradient of another tensor", value.producer())
                for user in traversal.users(value):
                    if abs(group_of.get(user, _AFTER + 2) - group) > 1:
                        raise self._error(f"another node reads {value.name!r}", user)

    def _differs(self, group: int, keys: Sequence[Hashable], expected: Sequence[Hashable]) -> OmittedBlocksError:
        paths = [", ".join(self._blocks.present[number].paths) for number in (_LAST, group)]
        return self._error(f"{paths[0]} has {len(expected)} nodes, {paths[1]} {len(keys)}, or other ones", None)

    def _error(self, problem: str, node: ir.Node | None) -> OmittedBlocksError:
        first, last = self._blocks.omitted[0].paths[0], self._blocks.omitted[-1].paths[-1]
        return OmittedBlocksError(
            f"the blocks beside {first} … {last} are planned differently: {problem}",
            where=None if node is None else traversal.describe(node),
            todo="the module is captured again, with all blocks",
        )

    # Copying

    def _copied(
        self, nodes: Sequence[ir.Node], number: int, values: Sequence[dict[ir.Value, ir.Value]], copies: _Copies
    ) -> list[ir.Node]:
        """Return the nodes of omitted group `number`, copies of these nodes of _LAST; add its values to `values`."""
        group, own = self._blocks.omitted[number], values[number]
        for name, last in zip(group.parameters, self._blocks.present[_LAST].parameters, strict=True):
            own[self._inputs[last]] = self._inputs[name]
        for value in dict.fromkeys(v for node in nodes for v in node.inputs if v is not None):
            place = self._places.get(value)
            if place is None or place.group == _LAST or value in self._shared:
                continue
            neighbour = number + place.group - _LAST
            at_last = self._value(place.moved(_LAST - place.group))
            if neighbour < 0:
                own[value] = at_last
            elif neighbour < len(values):
                own[value] = values[neighbour][at_last]
        return [copies.copy(node, number, own) for node in nodes]

    def _value(self, place: _Place) -> ir.Value:
        return self._nodes[place.group, place.is_forward][place.number].outputs[place.index]

    def _connect(self, group: int, offset: int, values: dict[ir.Value, ir.Value]) -> None:
        """Let the nodes of a group read a new block where they read the group `offset` after them."""
        for is_forward in (True, False):
            for node in self._nodes[group, is_forward]:
                for index, value in enumerate(node.inputs):
                    place = None if value is None or value in self._shared else self._places.get(value)
                    if place is not None and place.group == group + offset:
                        at_last = self._value(place.moved(_LAST - place.group))
                        node.replace_input_with(index, values[at_last])


class _Copies:
    """Copies nodes under new names.

    Args:
        graph: the graph that gets the copies.
        blocks: what is omitted.

    Attributes:
        names: the names of copies, by the number of their group and the original's name.
    """

    def __init__(self, graph: ir.Graph, blocks: OmittedBlocks) -> None:
        self._used_names = {str(v.name) for node in graph for v in node.outputs}.union(str(node.name) for node in graph)
        self._blocks = blocks
        self.names: dict[tuple[int, str], str] = {}

    def copy(self, node: ir.Node, number: int, values: dict[ir.Value, ir.Value]) -> ir.Node:
        """Return a copy of a node of _LAST for omitted group `number`; see `traversal.clone_node` for `values`."""
        copied = traversal.clone_node(node, values)
        copied.name = self._rename(str(node.name), number)
        for value in copied.outputs:
            value.name = self._rename(str(value.name), number)
        properties = copied.metadata_props
        for key in _NAMES_OF_FORWARD:
            if key in properties:
                properties[key] = self.names.get((number, properties[key]), properties[key])
        paths = zip(self._blocks.present[_LAST].paths, self._blocks.omitted[number].paths, strict=True)
        for path, own in paths:
            if _is_inside(properties["module"], path):
                properties["module"] = own + properties["module"].removeprefix(path)
                break
        return copied

    def _rename(self, name: str, number: int) -> str:
        key = number, name
        if key not in self.names:
            self.names[key] = traversal.unique(f"{name}_{number + 2}", self._used_names)
        return self.names[key]


def _is_inside(path: str, of_block: str) -> bool:
    return path == of_block or path.startswith(f"{of_block}.")


def _enclosing(node: ir.Node, group_of: Mapping[str, int]) -> str | None:
    """Return the path of the block that a node belongs to; None if it belongs to none of these."""
    path = node.metadata_props.get("module", "")
    while path and path not in group_of:
        path = path.rpartition(".")[0]
    return path or None


def _is_readable(place: _Place) -> bool:
    """Return whether a node of _LAST may read a value: in forward of the block before, in backward of the next one."""
    return place.group == _LAST or place.group == (_BEFORE if place.is_forward else _NEXT)


def _is_same_constant(one: ir.Value, other: ir.Value) -> bool:
    tensors = one.const_value, other.const_value
    if tensors[0] is None or tensors[1] is None or one.producer() or other.producer():
        return False
    return tensors[0].dtype == tensors[1].dtype and tensors[0].tobytes() == tensors[1].tobytes()


def _key(node: ir.Node) -> Hashable:
    """Return a key that is equal for the same nodes of two blocks, and to nothing if that is too expensive to find."""
    attributes = attributes_key(node)
    if attributes is None:
        return object()
    properties = {key: value for key, value in node.metadata_props.items() if key not in _OF_ONE_BLOCK}
    return node.op_identifier(), attributes, types_key(node), *sorted(properties.items())
