"""Replace the call nodes of an export by copies of the nodes of their templates, and add the hidden parameters.

x2 = block_call(0, [x0, w0], [x1, "w1"], [y0])[0]    ──>    the nodes that compute y0, from x1 and the placeholder w1

Calls that are omitted (`omitted_blocks`) get no nodes.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from onnxtrain.capture.blocks.hidden_parameters import HiddenParameters
from onnxtrain.capture.blocks.omitted_blocks import OmittedBlocks, omissions
from onnxtrain.capture.blocks.parameter_table import REVEALED
from onnxtrain.capture.blocks.repeated_blocks import BLOCK_CALL, TEMPLATE, Copy
from onnxtrain.capture.export.checkpoint_regions import in_new_regions
from onnxtrain.capture.export.fake_tensors import Fakes
from onnxtrain.capture.node_storage import COPY_OF, StoragesOfCopy, set_storages
from onnxtrain.torch_compat.dispatch import function_modes_disabled
from onnxtrain.torch_compat.fake_tensors import fake_mode_of
from onnxtrain.torch_compat.tensors import storage_id


def instantiate(
    program: ExportedProgram, copies: Sequence[Copy], hidden: HiddenParameters, may_omit: bool = False
) -> tuple[OmittedBlocks, ...] | None:
    """Replace the call nodes of an export, and add the parameters that it did not see.

    Args:
        program: the export.
        copies: the copies, by the number that their call nodes take.
        hidden: the parameters that the export did not see.
        may_omit: whether calls may be omitted.

    Returns:
        The blocks that are omitted. None if the calls cannot be replaced: the export is unchanged, and still has them.
    """
    if not copies and not hidden.parameters:
        return ()
    module = program.graph_module
    if any(_has_calls(inner) for inner in module.modules() if inner is not module):
        return None  # torch.export has put a call into a region
    omitted = omissions(module.graph, copies, _parameter_names(program)) if may_omit else []
    rewrite = _Rewrite(program, copies, hidden, {call: kept for o in omitted for call, kept in o.replaced.items()})
    if len(rewrite.copied) != len(copies):
        return None
    module.graph = rewrite.graph
    for spec in program.graph_signature.output_specs:
        if isinstance(spec.arg, TensorArgument):
            spec.arg = TensorArgument(name=rewrite.names[spec.arg.name])
    program.graph_signature.input_specs[:] = rewrite.input_specs
    program.state_dict.update(hidden.parameters)
    return tuple(omission.blocks for omission in omitted)


def _parameter_names(program: ExportedProgram) -> Mapping[Node, str]:
    """Return the names of the parameters that forward reads, by the nodes that stand for them."""
    nodes = program.graph_module.graph.nodes
    specs = zip((node for node in nodes if node.op == "placeholder"), program.graph_signature.input_specs, strict=True)
    names = {node: str(spec.target) for node, spec in specs if spec.kind == InputKind.PARAMETER}
    return names | {node: str(node.args[0]) for node in nodes if node.target is REVEALED}


def _has_calls(module: Any) -> bool:
    return isinstance(module, GraphModule) and any(
        node.target in (BLOCK_CALL, REVEALED) or TEMPLATE in node.meta for node in module.graph.nodes
    )


class _Rewrite:
    """A copy of a graph, in which each call node is replaced.

    Attributes:
        graph: the copy. Its nodes are named as if all blocks had been traced.
        input_specs: those of its placeholders.
        names: the names of the nodes in it, by their names in the original.
        copied: the numbers of the replaced calls.
    """

    def __init__(
        self,
        program: ExportedProgram,
        copies: Sequence[Copy],
        hidden: HiddenParameters,
        omitted: Mapping[Node, Node],
    ) -> None:
        graph = program.graph_module.graph
        self.graph = Graph(graph.owning_module)
        self.input_specs: list[InputSpec] = []
        self.names: dict[str, str] = {}
        self.copied: set[int] = set()
        self._copies = copies
        self._omitted = omitted
        self._values: dict[Node, Node] = {}  # for each node, that of the copied graph
        self._results: dict[Node, list[Node]] = {}  # of call nodes
        self._nodes_of: dict[int, list[Node]] = {}  # the nodes of each template
        self._parameters: dict[str, Node] = {}  # the placeholders of hidden parameters
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self._add_placeholders(dict(zip(placeholders, program.graph_signature.input_specs, strict=True)), hidden)
        for node in graph.nodes:
            if node.op != "placeholder":
                self._visit(node)
        for node, value in self._values.items():
            self.names[node.name] = value.name

    def _add_placeholders(self, specs: Mapping[Node, InputSpec], hidden: HiddenParameters) -> None:
        """Copy the placeholders, and add those of hidden parameters; parameters come first, in the export's order."""
        if hidden.parameters:
            seen = {str(spec.target): node for node, spec in specs.items() if spec.kind == InputKind.PARAMETER}
            fakes = Fakes(fake_mode_of([node.meta["val"] for node in specs]))
            with function_modes_disabled():  # each call of a tensor's method would ask them
                for name in hidden.order:
                    if name in seen:
                        self._copy_placeholder(seen[name], specs)
                    else:
                        self._add_parameter(name, hidden.parameters[name], fakes)
        for node in specs:
            if node not in self._values:
                self._copy_placeholder(node, specs)

    def _copy_placeholder(self, node: Node, specs: Mapping[Node, InputSpec]) -> None:
        self._values[node] = self._copy(node, self._values, dict(node.meta))
        self.input_specs.append(specs[node])

    def _add_parameter(self, name: str, parameter: torch.nn.Parameter, fakes: Fakes) -> None:
        node = self.graph.placeholder("p_" + re.sub(r"\W", "_", name).lower())
        value = fakes.new(parameter.shape, parameter.dtype, parameter.device, parameter.stride())
        node.meta["val"] = value.requires_grad_(parameter.requires_grad)
        set_storages(node.meta, StoragesOfCopy({storage_id(value): storage_id(parameter)}))
        self._parameters[name] = node
        self.input_specs.append(InputSpec(InputKind.PARAMETER, TensorArgument(name=node.name), name))

    def _visit(self, node: Node) -> None:
        template = node.meta.pop(TEMPLATE, None)
        if template is not None:
            self._nodes_of.setdefault(template, []).append(node)
        if node.target is REVEALED:
            self._reveal(node)
        elif node.target is BLOCK_CALL:
            kept = self._omitted.get(node)
            self._results[node] = self._instantiate(node) if kept is None else self._results[kept]
            self.copied.add(node.args[0])  # type: ignore[arg-type]  # an int
        elif node.target is operator.getitem and node.args[0] in self._results:
            self._values[node] = self._results[node.args[0]][node.args[1]]  # type: ignore[index]  # a node and an int
        else:
            self._values[node] = self._copy(node, self._values, dict(node.meta))

    def _reveal(self, node: Node) -> None:
        """Let the placeholder of a revealed parameter have the fake tensor that other nodes are views of."""
        placeholder = self._parameters[node.args[0]]  # type: ignore[index]  # a name
        requires_grad = placeholder.meta["val"].requires_grad
        placeholder.meta = {"val": node.meta["val"].requires_grad_(requires_grad)}
        self._values[node] = placeholder

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
        inputs = [self._parameters[slot] if isinstance(slot, str) else self._values[slot] for slot in own]  # type: ignore[union-attr,index]
        values.update(zip(of_template, inputs, strict=True))  # type: ignore[arg-type]
        paths = _Paths(copy, call.meta.get("nn_module_stack") or {})
        metas = [paths.renamed(node.meta) for node in nodes]
        for meta in metas:
            set_storages(meta, copy.storages)
        in_new_regions(metas, (copy.template.call.outer_region, copy.region))
        for node, meta in zip(nodes, metas, strict=True):
            meta[COPY_OF] = self._values[node]
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
