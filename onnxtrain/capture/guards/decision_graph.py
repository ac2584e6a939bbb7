"""The graph that computes what one decision of forward reads: what it contains, and whether it can be a guard."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from onnxtrain.capture.guards.sizes_from_inputs import read_sizes_from_inputs, slice_length
from onnxtrain.capture.guards.traced_graph import Buffer, TracedGraph
from onnxtrain.ops.python_function.node import TORCH_OP
from onnxtrain.torch_compat.operators import OpOverload, schema_of

MAX_DECISIONS = 32
MAX_OPERATORS = 96  # per decision, because the guard runs on every call; those of Longformer take 76
_DROPOUTS = {
    torch.ops.aten.dropout.default,
    torch.ops.aten.alpha_dropout.default,
    torch.ops.aten.feature_dropout.default,
    torch.ops.aten.feature_alpha_dropout.default,
}


@dataclass(frozen=True)
class DecisionGraph:
    """A graph of a decision.

    Attributes:
        graph: takes `lifted`, then the flat inputs of a call.
        lifted: its constants and buffers; None for a parameter, and for what it does not read.
        values: the tensors of `lifted`, and the parameters that the graph reads.
        obstacle: why it cannot be a guard; "" if it can.
        is_of_module: whether it depends on parameters or buffers, which change little from call to call, is a function
            of them and the inputs, and all values are known.
    """

    graph: torch.fx.GraphModule
    lifted: tuple[Any, ...]
    values: tuple[Any, ...]
    obstacle: str
    is_of_module: bool


def decision_graph(traced: TracedGraph, guards: int, *, is_number: bool) -> DecisionGraph:
    """Return the graph of a decision, without what it does not read.

    Args:
        traced: what was traced up to the decision; it is changed in place.
        guards: the number of earlier decisions that are guards.
        is_number: whether forward reads a number, else a truth value.
    """
    graph = traced.module
    read_sizes_from_inputs(graph.graph, traced.inputs)
    _remove_unread(graph.graph)
    _write_into_copies(graph.graph)
    graph.recompile()
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    others = [node for node in graph.graph.find_nodes(op="placeholder") if node not in traced.inputs]
    lifted = [traced.constants.get(node) if node.users else None for node in others]
    values = [traced.values.get(node) if node.users else None for node in others]
    reads_parameters = any(node.users and node not in traced.constants for node in others)
    reads_buffers = any(isinstance(constant, Buffer) for constant in lifted)
    impure = _impure(calls)
    obstacle = impure or _obstacle(calls, guards, reads_parameters=reads_parameters)
    if is_number and reads_buffers:  # such as a count of steps
        obstacle = obstacle or "a number that depends on the module's buffers"
    is_known = all(value is not None for node, value in zip(others, values, strict=True) if node.users)
    is_of_module = (reads_parameters or reads_buffers) and is_known and not impure
    return DecisionGraph(graph, tuple(lifted), tuple(values), obstacle, is_of_module)


def _write_into_copies(graph: torch.fx.Graph) -> None:
    """Let the operators that change an input in place, as those of forward before the test, change a copy of it."""
    changed = [w for node in graph.nodes if node.op == "call_function" for w in _written(node)]
    for placeholder in _memory_of(changed):
        if placeholder.op == "placeholder":
            with graph.inserting_after(placeholder):
                copy = graph.call_function(torch.ops.aten.clone.default, (placeholder,))
            copy.meta["val"] = placeholder.meta.get("val")
            placeholder.replace_all_uses_with(copy, delete_user_cb=partial(operator.is_not, copy))


def _written(node: torch.fx.Node) -> list[Any]:
    """Return the arguments that an operator changes in place."""
    if not isinstance(node.target, OpOverload):
        return []
    return [a for a, s in zip(node.args, schema_of(node.target).arguments, strict=False) if s.is_write]


def _memory_of(tensor: Any) -> set[torch.fx.Node]:
    """Return the node that allocated a tensor's memory, or the input whose memory it is; of a list, all of them."""
    if isinstance(tensor, list | tuple):
        return {memory for each in tensor for memory in _memory_of(each)}
    if not isinstance(tensor, torch.fx.Node):
        return set()
    if tensor.target is operator.getitem:  # of an operator's results
        return _memory_of(tensor.args[0])
    if not isinstance(tensor.target, OpOverload):
        return {tensor}
    schema = schema_of(tensor.target)
    aliased = [a for a, s in zip(tensor.args, schema.arguments, strict=False) if s.is_write or s.alias_info]
    return {memory for each in aliased for memory in _memory_of(each)} or {tensor}


def _remove_unread(graph: torch.fx.Graph) -> None:
    """Remove what the decision does not read: also a dropout, an assertion, and what changes other memory in place."""
    unread = list(graph.nodes)
    read: set[torch.fx.Node] = set()
    memory: set[torch.fx.Node] = set()

    def is_read(node: torch.fx.Node) -> bool:
        if node.op != "call_function":
            return True
        if not isinstance(node.target, OpOverload):
            return node.is_impure()
        return not memory.isdisjoint(_memory_of(_written(node)))

    while found := [node for node in unread if not read.isdisjoint(node.users) or is_read(node)]:
        read.update(found)
        memory.update(_memory_of([part for node in found for part in node.all_input_nodes]))
        unread = [node for node in unread if node not in read]
    for node in reversed(unread):
        graph.erase_node(node)


def _obstacle(calls: Sequence[torch.fx.Node], guards: int, *, reads_parameters: bool) -> str:
    """Say why a decision that is pure cannot become a guard; "" if it can."""
    if reads_parameters:
        return "a decision that depends on the module's parameters"
    if guards == MAX_DECISIONS:
        return f"more than {MAX_DECISIONS} decisions"
    operators = sum(isinstance(node.meta.get("val"), torch.Tensor) for node in calls)  # without arithmetic of sizes
    if operators > MAX_OPERATORS:
        return f"a decision that takes {operators} operators"
    return ""


def _impure(calls: Sequence[torch.fx.Node]) -> str:
    """Say which operator of a decision does more than to compute its results; "" if none does."""
    impure = next((node.target for node in calls if not _is_pure(node)), None)
    if impure is None:
        return ""
    if impure is TORCH_OP:
        return f"a decision by {impure}, which runs the user's Python"
    is_random = isinstance(impure, OpOverload) and torch.Tag.nondeterministic_seeded in impure.tags
    return f"a decision by {impure}, which {'samples random numbers' if is_random else 'changes a tensor in place'}"


def _samples(node: torch.fx.Node) -> bool:
    """Return whether an operator takes samples: a dropout does not, at probability 0 or outside of training."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if node.target in _DROPOUTS and len(node.args) == 3:
        _, p, is_training = node.args
        return bool(p != 0 and is_training is not False)
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        p = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(p != 0)
    return True


def _is_pure(node: torch.fx.Node) -> bool:
    target: Any = node.target
    if target is TORCH_OP:
        return False
    if not isinstance(target, OpOverload):
        return target is slice_length or getattr(target, "__module__", "") in ("_operator", "operator", "math", "torch")
    return not _samples(node) and all(map(_is_temporary, _written(node)))


def _is_temporary(written: Any) -> bool:
    """Return whether a tensor that is changed in place, or of which it is a view, was allocated inside the graph."""
    if not isinstance(written, torch.fx.Node) or not isinstance(written.target, OpOverload):
        return False
    schema = schema_of(written.target)
    aliased = [a for a, s in zip(written.args, schema.arguments, strict=False) if s.is_write or s.alias_info]
    return all(map(_is_temporary, aliased)) if aliased else not any(r.alias_info for r in schema.returns)
