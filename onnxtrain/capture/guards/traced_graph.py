"""The graph of a decision: that of a finished export, or a copy of what a running trace has recorded so far."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from onnxtrain.torch_compat.tracing import traced_node


@dataclass(frozen=True)
class Buffer:
    """A buffer that a decision reads: the attribute `name` of `owner`, and `path` from the exported module."""

    owner: torch.nn.Module
    name: str
    path: str

    def value(self) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.owner, self.name)
        return tensor


@dataclass(frozen=True)
class TracedState:
    """A parameter or buffer in a trace: its node, and the module's tensor. `buffer` is None for a parameter."""

    node: Node
    value: torch.Tensor
    buffer: Buffer | None


PLAIN = (torch.Tensor, torch.nn.Parameter)  # types of tensors that the graph of a decision can read


@dataclass(frozen=True)
class TracedGraph:
    """A graph that returns the tensors and numbers that a decision reads.

    Attributes:
        module: the graph. Its last placeholders are `inputs`.
        inputs: the placeholders of the flat inputs of a call.
        constants: of its other placeholders, those that are constants or buffers; the rest are parameters.
        values: the tensors of its other placeholders, as far as they are known, before forward changes any.
    """

    module: GraphModule
    inputs: Sequence[Node]
    constants: Mapping[Node, Any] = field(default_factory=dict)
    values: Mapping[Node, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of_program(cls, program: ExportedProgram, exported: torch.nn.Module) -> TracedGraph:
        """Return the graph of an export of the module `exported`."""
        placeholders = program.graph.find_nodes(op="placeholder")
        specs = dict(zip(placeholders, program.graph_signature.input_specs, strict=True))
        lifted = {node: _lifted(spec, program, exported) for node, spec in specs.items()}
        return cls(
            program.graph_module,
            [node for node, spec in specs.items() if spec.kind == InputKind.USER_INPUT],
            *_constants_and_values({node: each for node, each in lifted.items() if each is not None}),
        )

    @classmethod
    def of_running_trace(
        cls, inputs: Sequence[Node | None], read: Sequence[Any], state: Sequence[TracedState]
    ) -> TracedGraph | None:
        """Return a copy of what the trace of this thread has recorded; None if it cannot run as a graph of its own.

        Args:
            inputs: the nodes of the flat inputs of forward, as `traced_nodes` returned them before forward ran.
            read: traced tensors, and symbols of data-dependent numbers.
            state: the parameters and buffers, likewise.
        """
        mode = get_proxy_mode()
        if mode is None:
            return None
        tracer: Any = mode.tracer
        graph: Graph = tracer.graph
        found = [_computing(r) if isinstance(r, torch.Tensor) else _introducing(graph, r) for r in read]
        outputs = [each for each in found if each is not None]
        placeholders = list(graph.find_nodes(op="placeholder"))
        others = len(placeholders) - len(inputs)
        if len(outputs) < len(read) or placeholders[others:] != list(inputs):
            return None
        copy, copied = Graph(), dict[Node, Node]()
        copy.graph_copy(graph, copied)
        copy.output([part_of(copy, copied[node], path) for node, path in outputs])
        constants = _with_constants_as_placeholders(copy, tracer.root)
        if constants is None:
            return None
        lifted: dict[Node, _Lifted] = {node: (tensor, tensor) for node, tensor in constants.items()}
        for each in state:
            if each.node.op == "placeholder":
                lifted[copied[each.node]] = each.buffer, each.value
        module = GraphModule(tracer.root, copy)
        return cls(module, [copied[node] for node in placeholders[others:]], *_constants_and_values(lifted))


def traced_nodes(tensors: Sequence[torch.Tensor]) -> list[Node | None]:
    """Return the nodes of traced tensors in the trace of this thread; None for those that it does not trace.

    A tensor may get another node later, from an operator that returns its argument, as `x.to(x.dtype)` does.
    """
    return [*map(traced_node, tensors)]


_Lifted: TypeAlias = tuple[Any, torch.Tensor]  # a constant or Buffer, None for a parameter; and its tensor


def _constants_and_values(lifted: Mapping[Node, _Lifted]) -> tuple[dict[Node, Any], dict[Node, torch.Tensor]]:
    constants = {node: constant for node, (constant, _) in lifted.items() if constant is not None}
    return constants, {node: value for node, (_, value) in lifted.items()}


def _lifted(spec: InputSpec, program: ExportedProgram, exported: torch.nn.Module) -> _Lifted | None:
    """Return what a placeholder stands for; None for the shard of a tensor, and for all that are no tensors."""
    path = str(spec.target)
    if spec.kind == InputKind.CONSTANT_TENSOR:
        return program.constants[path], program.constants[path]
    if spec.kind not in (InputKind.BUFFER, InputKind.PARAMETER):
        return None
    owner, _, name = path.rpartition(".")
    buffer = Buffer(exported.get_submodule(owner), name, path)
    value = buffer.value()
    if type(value) not in PLAIN:
        return None
    return (buffer if spec.kind == InputKind.BUFFER else None), value


def _computing(tensor: torch.Tensor) -> tuple[Node, Sequence[Any]] | None:
    """Return the node that computes a tensor, with the empty path; None if another trace does."""
    node = traced_node(tensor)
    return None if node is None else (node, ())


def _with_constants_as_placeholders(graph: Graph, root: torch.nn.Module) -> dict[Node, torch.Tensor] | None:
    """Make the constants of a trace the first placeholders of its graph; return them, None if one has no elements."""
    constants: dict[Node, torch.Tensor] = {}
    first = next(iter(graph.nodes))
    for node in graph.find_nodes(op="get_attr"):
        value = getattr(root, str(node.target), None)
        if type(value) is not torch.Tensor:
            return None
        with graph.inserting_before(first):
            placeholder = graph.placeholder(f"constant_{len(constants)}")
        placeholder.meta.update(node.meta)
        node.replace_all_uses_with(placeholder)
        graph.erase_node(node)
        constants[placeholder] = value
    return constants


def _introducing(graph: Graph, symbol: Any) -> tuple[Node, Sequence[Any]] | None:
    """Return the node that introduces a symbol, and the path of its number in the node's result."""
    found: Iterable[tuple[Node, Any]] = ((node, node.meta.get("unbacked_bindings") or {}) for node in graph.nodes)
    return next(((node, bindings[symbol]) for node, bindings in found if symbol in bindings), None)


def part_of(graph: Graph, node: Node, path: Sequence[Any]) -> Node:
    """Return what is at a path of a result, as PyTorch records it: `.size()`, then `[0]`."""
    for key in path:
        if hasattr(key, "name"):
            node = graph.call_method(key.name, (node,))
        else:
            node = graph.call_function(operator.getitem, (node, key.idx))
    return node
