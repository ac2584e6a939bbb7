"""Choose the copies of repeated blocks that a graph can do without until it is planned.

    h.0   h.1   h.2   h.3 … h.44   h.45   h.46   h.47         the calls of a trace
    h.0   h.1   h.2                h.45   h.46   h.47         the graph that is differentiated, optimized and planned

`plan.omitted_blocks` inserts the others between h.2 and h.45, as copies of h.2 in forward and in backward, if the plan
treats h.2 and h.45 in the same way. Blocks of several kinds that take turns repeat in groups.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from onnxtrain.capture.blocks.repeated_blocks import BLOCK_CALL, TEMPLATE, Copy
from onnxtrain.capture.blocks.traced_call import is_size
from onnxtrain.capture.source_location import module_path

_MAX_KINDS = 8  # in a group
_KEPT = 4  # groups of copies: the first, the one after the omitted, and two more, which may be optimized with the end
_MIN_OMITTED = 4


@dataclass(frozen=True)
class Group:
    """Consecutive blocks, one of each kind that takes turns.

    Attributes:
        paths: the module paths of the blocks.
        parameters: the names of the parameters that they read, in an order that is the same for all groups.
    """

    paths: tuple[str, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class OmittedBlocks:
    """Groups of blocks that a graph does not contain; their parameters are inputs that nothing reads.

    Attributes:
        present: four groups that are adjacent in the graph. The omitted ones are between the second and the third.
        omitted: in the order of their calls.
    """

    present: tuple[Group, Group, Group, Group]
    omitted: tuple[Group, ...]


@dataclass(frozen=True)
class Omission:
    """The calls of one stack that are omitted.

    Attributes:
        replaced: for each omitted call node, the node whose results are those of the graph without it.
        blocks: what is omitted.
    """

    replaced: Mapping[Node, Node]
    blocks: OmittedBlocks


def omissions(graph: Graph, copies: Sequence[Copy], parameters: Mapping[Node, str]) -> list[Omission]:
    """Choose the call nodes that can be omitted.

    Args:
        graph: the export, with the call nodes of all copies.
        copies: the copies, by the number that their call nodes take.
        parameters: the names of the parameters that forward reads, by the nodes that stand for them.
    """
    calls = _Calls(graph, copies, parameters)
    return [omission for run in calls.runs() for omission in [calls.omission(run)] if omission is not None]


class _Calls:
    """The call nodes of one graph."""

    def __init__(self, graph: Graph, copies: Sequence[Copy], parameters: Mapping[Node, str]) -> None:
        self._graph, self._copies, self._parameters = graph, copies, parameters
        self._path_of: dict[int, str] = {}  # of the block that each template was traced for
        for node in graph.nodes:
            template = node.meta.get(TEMPLATE)
            if template is not None and template not in self._path_of:
                self._path_of[template] = self._path_of_template(node)

    def runs(self) -> Iterator[list[Node]]:
        """Yield the call nodes between which there is nothing but the selection of their results."""
        run: list[Node] = []
        for node in self._graph.nodes:
            if node.target is BLOCK_CALL:
                run.append(node)
            elif not (node.target is operator.getitem and node.args[0] in run) and run and not is_size(node):
                yield run
                run = []
        yield run

    def omission(self, run: Sequence[Node]) -> Omission | None:
        """Choose the calls to omit from a run; None if there are none."""
        templates = [id(self._copy(call).template) for call in run]
        for kinds in range(1, _MAX_KINDS + 1):
            count = len(run) // kinds
            if count < _KEPT + _MIN_OMITTED:
                return None
            own = run[: count * kinds]
            if templates[: len(own) - kinds] == templates[kinds : len(own)]:
                break
        else:
            return None
        groups = [own[start : start + kinds] for start in range(0, len(own), kinds)]
        omitted = groups[1 : 1 - _KEPT]
        inside = {call for group in groups for call in group}
        if not self._are_chained(groups) or not all(_is_read_only_by(inside, group) for group in omitted):
            return None
        names = [self._names(group) for group in groups]
        first = self._names_of_templates(groups[0])
        if first is None or any(group is None or len(group.parameters) != len(first.parameters) for group in names):
            return None
        of_copies = [group for group in names if group is not None]
        last = len(groups) - _KEPT + 1
        present = first, of_copies[0], of_copies[last], of_copies[last + 1]
        replaced = {call: kept for group in omitted for call, kept in zip(group, groups[0], strict=True)}
        return Omission(replaced, OmittedBlocks(present, tuple(of_copies[1:last])))

    def _copy(self, call: Node) -> Copy:
        return self._copies[call.args[0]]  # type: ignore[index]  # an int

    def _are_chained(self, groups: Sequence[Sequence[Node]]) -> bool:
        """Return whether each group reads the same of the group before it, and of the rest of the graph."""
        reads = [self._reads(group, before) for group, before in zip(groups[1:], groups, strict=False)]
        return None not in reads and all(read == reads[0] for read in reads)

    def _reads(self, group: Sequence[Node], before: Sequence[Node]) -> list[Any] | None:
        """Return what each block of a group reads; None if it is a result of an earlier group than `before`."""
        position = {call: index for index, call in enumerate((*before, *group))}
        reads: list[Any] = []
        for call in group:
            for slot in _slots(call):
                if isinstance(slot, str):
                    reads.append("parameter")
                elif slot.target is operator.getitem and slot.args[0].target is BLOCK_CALL:
                    if slot.args[0] not in position:
                        return None
                    reads.append((position[slot.args[0]], slot.args[1]))
                else:
                    reads.append(slot)
        return reads

    def _names(self, group: Sequence[Node]) -> Group | None:
        """Return the paths and parameters of a group of copies; None if a parameter is not a plain one of its own."""
        paths = [_path_of_call(call) for call in group]
        slots = [slot for call in group for slot in _slots(call)]
        if None in paths or any(slot in self._parameters for slot in slots):
            return None
        return _group(map(str, paths), (slot for slot in slots if isinstance(slot, str)))

    def _names_of_templates(self, group: Sequence[Node]) -> Group | None:
        """Return those of the blocks that the copies in a group were traced as."""
        paths = [self._path_of.get(id(self._copy(call).template), "") for call in group]
        names = [
            self._parameters.get(traced)
            for call in group
            for traced, own in zip(call.args[1], _slots(call), strict=True)  # type: ignore[arg-type]  # a list
            if isinstance(own, str)
        ]
        if not all(paths) or None in names:
            return None
        return _group(paths, map(str, names))

    def _path_of_template(self, node: Node) -> str:
        """Return the module path of the block that a node was traced in; "" if it has none."""
        stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        copy = next((copy for copy in self._copies if id(copy.template) == node.meta[TEMPLATE]), None)
        call = next((n for n in self._graph.nodes if n.target is BLOCK_CALL and self._copy(n) is copy), None)
        if copy is None or call is None:
            return ""
        depth = len(call.meta.get("nn_module_stack") or {}) + copy.template.depth - copy.depth
        return stack[depth - 1] if 0 < depth <= len(stack) else ""


def _group(paths: Iterable[str], parameters: Iterable[str]) -> Group:
    """Make a group of names in the export, whose root holds the user's module."""
    return Group(tuple(map(module_path, paths)), tuple(name.removeprefix("module.") for name in parameters))


def _slots(call: Node) -> Sequence[Any]:
    return call.args[2]  # type: ignore[return-value]  # nodes and names


def _path_of_call(call: Node) -> str | None:
    stack = [*(call.meta.get("nn_module_stack") or {}).values()]
    return stack[-1][0] if stack else None


def _is_read_only_by(calls: set[Node], group: Sequence[Node]) -> bool:
    return all(user in calls for call in group for result in call.users for user in result.users)
