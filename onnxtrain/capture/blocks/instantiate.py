"""Replace the call nodes of an export by copies of the nodes of their templates.

x2 = block_call(0, [x0, w0], [x1, w1], [y0])[0]    ──>    the nodes that compute y0, from x1 and w1
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import TensorArgument
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from onnxtrain.capture.blocks.repeated_blocks import BLOCK_CALL, TEMPLATE, Copy
from onnxtrain.capture.export.checkpoint_regions import in_new_regions
from onnxtrain.capture.node_storage import set_storages


def instantiate(program: ExportedProgram, copies: Sequence[Copy]) -> bool:
    """Replace the call nodes of an export.

    Returns:
        Whether that was possible. If not, the export is unchanged, and still has call nodes.
    """
    if not copies:
        return True
    module = program.graph_module
    if any(_has_calls(inner) for inner in module.modules() if inner is not module):
        return False  # torch.export has put a call into a region
    rewrite = _Rewrite(module.graph, copies)
    if len(rewrite.copied) != len(copies):
        return False
    module.graph = rewrite.graph
    for spec in program.graph_signature.output_specs:
        if isinstance(spec.arg, TensorArgument):
            spec.arg = TensorArgument(name=rewrite.names[spec.arg.name])
    return True


def _has_calls(module: Any) -> bool:
    return isinstance(module, GraphModule) and any(
        node.target is BLOCK_CALL or TEMPLATE in node.meta for node in module.graph.nodes
    )


class _Rewrite:
    """A copy of a graph, in which each call node is replaced.

    Attributes:
        graph: the copy. Its nodes are named as if all blocks had been traced.
        names: the names of the nodes in it, by their names in the original.
        copied: the numbers of the replaced calls.
    """

    def __init__(self, graph: Graph, copies: Sequence[Copy]) -> None:
        self.graph = Graph(graph.owning_module)
        self.names: dict[str, str] = {}
        self.copied: set[int] = set()
        self._copies = copies
        self._values: dict[Node, Node] = {}  # for each node, that of the copied graph
        self._results: dict[Node, list[Node]] = {}  # of call nodes
        self._nodes_of: dict[int, list[Node]] = {}  # the nodes of each template
        for node in graph.nodes:
            self._visit(node)
        for node, value in self._values.items():
            self.names[node.name] = value.name

    def _visit(self, node: Node) -> None:
        template = node.meta.pop(TEMPLATE, None)
        if template is not None:
            self._nodes_of.setdefault(template, []).append(node)
        if node.target is BLOCK_CALL:
            self._results[node] = self._instantiate(node)
            self.copied.add(node.args[0])  # type: ignore[arg-type]  # an int
        elif node.target is operator.getitem and node.args[0] in self._results:
            self._values[node] = self._results[node.args[0]][node.args[1]]  # type: ignore[index]  # a node and an int
        else:
            self._values[node] = self._copy(node, self._values, dict(node.meta))

    def _copy(self, node: Node, values: Mapping[Node, Node], meta: dict[str, Any]) -> Node:
        args: Any = map_arg(node.args, values.__getitem__)
        kwargs: Any = map_arg(node.kwargs, values.__getitem__)
        copied = self.graph.create_node(node.op, node.target, args, kwargs, _name(node), node.type)
        copied.meta = meta
        return copied

    def _instantiate(self, call: Node) -> list[Node]:
        """Copy the nodes of a template; return the nodes of the results."""
        number, of_template, own, results = call.args
        copy = self._copies[number]  # type: ignore[index]  # an int
        nodes = self._nodes_of.get(id(copy.template), [])
        values = _Values(self._values)
        values.update((old, self._values[new]) for old, new in zip(of_template, own, strict=True))  # type: ignore[arg-type]
        paths = _Paths(copy, call.meta.get("nn_module_stack") or {})
        metas = [paths.renamed(node.meta) for node in nodes]
        for meta in metas:
            set_storages(meta, copy.storages)
        in_new_regions(metas, (copy.template.call.outer_region, copy.region))
        for node, meta in zip(nodes, metas, strict=True):
            values[node] = self._copy(node, values, meta)
        return [values[result] for result in results]  # type: ignore[union-attr,index]  # a list of nodes


class _Values(dict[Node, Node]):
    """The nodes of one copy. Any other node, which computes a size, is that of the whole graph."""

    def __init__(self, outer: Mapping[Node, Node]) -> None:
        super().__init__()
        self._outer = outer

    def __missing__(self, node: Node) -> Node:
        return self._outer[node]


class _Paths:
    """Renames the module paths in the metadata of copied nodes."""

    def __init__(self, copy: Copy, stack: Mapping[str, Any]) -> None:
        self._depth = len(stack) + copy.template.depth - copy.depth  # the export removes its own modules
        self._stack = stack
        self._renamed: dict[tuple[str, ...], dict[str, Any]] = {}

    def renamed(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Copy metadata, with the module stack of the copy."""
        stack: Mapping[str, tuple[str, str]] = meta.get("nn_module_stack") or {}
        key = tuple(stack)
        if key not in self._renamed:
            self._renamed[key] = {**self._stack, **self._inner(list(stack.items()))}
        return {**meta, "nn_module_stack": self._renamed[key]}

    def _inner(self, stack: Sequence[tuple[str, tuple[str, str]]]) -> dict[str, tuple[str, str]]:
        """Return the part of a template's stack inside the block, with the paths of the copy."""
        if len(stack) <= self._depth or not self._stack:
            return {}
        (_, (before, _)), after = stack[self._depth - 1], [*self._stack.values()][-1][0]
        return {
            after + key.removeprefix(before): (after + path.removeprefix(before), kind)
            for key, (path, kind) in stack[self._depth :]
        }


def _name(node: Node) -> str:
    """Return the name that a tracer proposes for a node: without the number that makes it unique."""
    return re.sub(r"(_\d+)+$", "", node.name) if node.op == "call_function" else node.name
