"""Graphs in standard ops only: each op of ours replaced by its body, or its body made a model-local function.

    inline_bodies     GeluGrad(dy, x)  ->  Mul, Erf, Exp, ...                        for stock onnxruntime
    as_functions      GeluGrad(dy, x)  ->  GeluGrad(dy, x) and its function          for files that people open

Both give copies. The second is in `functions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import traversal
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.traversal import ValueMap
from onnxtrain.graph.values import ONNX, type_of
from onnxtrain.graph.verify import compatible, format_type
from onnxtrain.ops.definition import OPSET, STANDARD, Body, Effects, NoBody, OpDef
from onnxtrain.ops.registry import builder, definition_of

Keep = Callable[[ir.Node], bool]

_DEEPEST = 16  # bodies within bodies; more means that a body leads back to its own op
IR_VERSION = 10  # the first with overloads of functions


def nothing(node: ir.Node) -> bool:
    """Keeps no node."""
    return False


def body_of(node: ir.Node) -> Body | None:
    """The builder of the node's body; None where the op is standard or has none."""
    body = definition_of(node).body
    return None if body is STANDARD or isinstance(body, NoBody) else body


def inline_bodies(model: ir.Model | ir.Graph, *, keep: Keep = nothing) -> ir.Model:
    """A copy in which every node with a body is replaced by its body, until only standard ops are left.

    Args:
        model: a model, or a graph, which becomes one. It stays as it is.
        keep: nodes that stay, whether they have a body or not.

    Raises:
        GraphError: a node that is not kept has no body (PythonOp, ATen, collectives).
    """
    source = model if isinstance(model, ir.Model) else ir.Model(model, ir_version=IR_VERSION)
    graph = traversal.clone(source.graph)[0]
    for _ in range(_DEEPEST):
        _refuse_subgraphs(graph, keep)
        if not any(_expands(node, keep) for node in graph):
            break
        graph = _expand(graph, keep)
    else:
        left = {traversal.describe(node) for node in graph if _expands(node, keep)}
        raise GraphError("these bodies lead back to their own ops", got=", ".join(sorted(left)))
    _refuse_no_body(graph, keep)
    traversal.remove_unused(graph, lambda node: keep(node) or has_effects(node))
    traversal.name_uniquely(graph)
    import_opsets(graph)
    # A graph knows only the names that its values had when they came in as taken, so this is one more copy.
    return traversal.with_graph(source, traversal.clone(graph)[0])


def _expands(node: ir.Node, keep: Keep) -> bool:
    return not keep(node) and body_of(node) is not None


def _refuse_no_body(graph: ir.Graph, keep: Keep) -> None:
    lacking = [node for node in graph.all_nodes() if not keep(node) and isinstance(definition_of(node).body, NoBody)]
    if not lacking:
        return
    reasons = []
    for node in lacking:
        body = definition_of(node).body
        assert isinstance(body, NoBody)
        reasons.append(f"{traversal.describe(node)} ({body.reason})")
    raise GraphError(
        "the graph holds ops that cannot be written in standard ONNX ops",
        where=traversal.origin(lacking[0]),
        got="; ".join(dict.fromkeys(reasons)),
        todo="run the graph on the torch executor, or change the model so that it does without them",
    )


def _refuse_subgraphs(graph: ir.Graph, keep: Keep) -> None:
    for inner in graph.subgraphs():
        for node in inner:
            if _expands(node, keep):
                raise GraphError(
                    f"{traversal.describe(node)} stands inside a subgraph, where bodies are not inlined",
                    where=traversal.origin(node),
                )


def _expand(graph: ir.Graph, keep: Keep) -> ir.Graph:
    """A copy in which the nodes with bodies are replaced, one level deep."""
    values: dict[ir.Value, ir.Value] = {}
    result = traversal.clone_head(graph, values)
    op = builder(result)
    for node in graph:
        if _expands(node, keep):
            _inline(op, node, values)
        else:
            result.append(traversal.clone_node(node, values))
    close(result, [values[v] for v in graph.outputs], [v.name for v in graph.outputs])
    return result


def _inline(op: Builder, node: ir.Node, values: ValueMap) -> None:
    """Appends the body of `node`, reading the copies of its inputs, and maps its outputs."""
    before = next(reversed(op.graph), None)
    with op.at(node.metadata_props):
        outputs = build_body(op, node, [None if v is None else values[v] for v in node.inputs])
    _name_inside(op.graph, before, node)
    for declared, value in zip(node.outputs, outputs, strict=True):
        if value is None:
            continue
        values[declared] = value
        if value.producer() is not None and value.name is not None and value.name.startswith(f"{node.name}/"):
            value.name = declared.name


def _name_inside(graph: ir.Graph, before: ir.Node | None, node: ir.Node) -> None:
    """Names the nodes after `before` and their outputs by the node whose body they are."""
    added: list[ir.Node] = []
    for new in reversed(graph):
        if new is before:
            break
        added.append(new)
    for number, new in enumerate(reversed(added)):
        new.name = f"{node.name}/{new.op_type}_{number}"
        for value in new.outputs:
            value.name = new.name if len(new.outputs) == 1 else f"{new.name}.{value.index()}"


def build_body(op: Builder, node: ir.Node, inputs: Sequence[ir.Value | None]) -> list[ir.Value | None]:
    """Appends the body of `node` for these inputs; its outputs, None for one that is not used and not built.

    Raises:
        GraphError: the body gives another number of outputs, or an output of another type, than the definition says.
    """
    definition = definition_of(node)
    body = body_of(node)
    assert body is not None
    call = _called(definition, node, inputs)
    try:
        result = body(op, definition.view(call))
        outputs: list[ir.Value | None] = [result] if isinstance(result, ir.Value) else list(result)
        _check_outputs(node, call, outputs)
    finally:
        for index in range(len(call.inputs)):  # the call itself is no part of the graph: take it off its inputs' users
            call.replace_input_with(index, None)
    return outputs


def _called(definition: OpDef, node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Node:
    """The node with other inputs, typed by its definition, in no graph."""
    call = ir.Node(
        node.domain,
        node.op_type,
        inputs,
        list(node.attributes.values()),
        num_outputs=len(node.outputs),
        name=node.name,
        metadata_props=dict(node.metadata_props),
    )
    call.meta.update(node.meta)
    for value, original in zip(call.outputs, node.outputs, strict=True):
        value.name = original.name
        value.meta.update(original.meta)
        value.type, value.shape = original.type, original.shape
    for value, (dtype, shape) in zip(call.outputs, definition.output_types(call), strict=False):
        value.type, value.shape = ir.TensorType(dtype), ir.Shape(list(shape))
    return call


def _check_outputs(node: ir.Node, call: ir.Node, outputs: Sequence[ir.Value | None]) -> None:
    where = f"the body of {traversal.describe(node)}"
    if len(outputs) != len(call.outputs):
        raise GraphError(f"{where} has another number of outputs", expected=len(call.outputs), got=len(outputs))
    for declared, value, original in zip(call.outputs, outputs, node.outputs, strict=True):
        if value is None:
            if traversal.is_used(original):
                raise GraphError(f"{where} does not build its output {original.name}, which is used")
        elif not compatible(type_of(declared), type_of(value)):
            raise GraphError(
                f"{where} has an output of another type",
                expected=format_type(type_of(declared)),
                got=format_type(type_of(value)),
            )


def close(graph: ir.Graph, outputs: Sequence[ir.Value], names: Sequence[str | None]) -> None:
    """Makes these values the graph's outputs under these names.

    An input, an initializer or a value that is an output already goes through an Identity: ONNX wants outputs to be
    made by nodes, each by its own.
    """
    taken = {v.name for v in (*graph.inputs, *graph.initializers.values())}
    for value, name in zip(outputs, names, strict=True):
        if value.producer() is None or value.graph is not graph or value.is_graph_output():
            node = ir.Node(ONNX, "Identity", [value])
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.append(node)
            value = node.outputs[0]
        while name in taken:  # an output that was an input, or another output, had its name
            name = f"{name}_copy"
        taken.add(name)
        value.name = name
        graph.outputs.append(value)


def has_effects(node: ir.Node) -> bool:
    """Whether the node does something besides computing its outputs; to wait for sizes is no such thing."""
    return bool(definition_of(node).effects & ~Effects.HOST_SYNC)


def import_opsets(graph: ir.Graph) -> None:
    """Lets the graph import the domains of its nodes and no others."""
    known = {ONNX: OPSET, **graph.opset_imports}
    domains = dict.fromkeys(node.domain for node in graph.all_nodes())
    graph.opset_imports.clear()
    graph.opset_imports.update({domain: known.get(domain, 1) for domain in (ONNX, *domains)})
