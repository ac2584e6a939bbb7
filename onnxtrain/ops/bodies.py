"""Expand ops into their bodies of standard ops.

    inline_bodies     GeluGrad(dy, x)  ->  Mul, Erf, Exp, ...                        for stock onnxruntime
    as_functions      GeluGrad(dy, x)  ->  GeluGrad(dy, x) and its function          for files that people open

Both return copies. The second is in `local_functions.py`.
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

_MAX_DEPTH = 16  # of bodies within bodies; more means that a body contains its own op
IR_VERSION = 10  # the first that supports overloads of functions


def keep_nothing(node: ir.Node) -> bool:
    return False


def body_of(node: ir.Node) -> Body | None:
    """Return the builder of the node's body; None if the op is standard or has no body."""
    body = definition_of(node).body
    return None if body is STANDARD or isinstance(body, NoBody) else body


def inline_bodies(model: ir.Model | ir.Graph, *, keep: Keep = keep_nothing) -> ir.Model:
    """Return a copy in which nodes are replaced by their bodies, until only standard ops are left.

    Args:
        model: a model, or a graph, of which a model is made. It is not modified.
        keep: which nodes are not replaced.

    Raises:
        GraphError: a node that is not kept has no body (PythonOp, ATen, collectives).
    """
    source = model if isinstance(model, ir.Model) else ir.Model(model, ir_version=IR_VERSION)
    graph = source.graph
    for _ in range(_MAX_DEPTH):
        _refuse_subgraphs(graph, keep)
        if not any(_expands(node, keep) for node in graph):
            break
        graph = _expand(graph, keep)
    else:
        recursive = {traversal.describe(node) for node in graph if _expands(node, keep)}
        raise GraphError(
            "bodies of ops contain the ops themselves",
            expected=f"only standard ops after {_MAX_DEPTH} expansions",
            got=", ".join(sorted(recursive)),
        )
    _refuse_no_body(graph, keep)
    is_expanded = graph is not source.graph
    if not is_expanded:
        graph = traversal.clone(graph)[0]
    traversal.remove_unused(graph, lambda node: keep(node) or has_effects(node))
    traversal.name_uniquely(graph)
    import_opsets(graph)
    # A graph reserves the names that its values had when they were added; one more copy drops outdated names.
    return traversal.with_graph(source, traversal.clone(graph)[0] if is_expanded else graph)


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
        "the graph has ops without a form in standard ONNX ops",
        where=traversal.origin(lacking[0]),
        got="; ".join(dict.fromkeys(reasons)),
        todo="run the graph on the torch executor, or replace these operators in the model",
    )


def _refuse_subgraphs(graph: ir.Graph, keep: Keep) -> None:
    for inner in graph.subgraphs():
        for node in inner:
            if _expands(node, keep):
                raise GraphError(
                    f"{traversal.describe(node)} is in a subgraph (loop or branch), where bodies are not inlined",
                    where=traversal.origin(node),
                    expected="only standard ops in subgraphs",
                )


def _expand(graph: ir.Graph, keep: Keep) -> ir.Graph:
    """Return a copy in which nodes with bodies are replaced, one level deep."""
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
    """Append the body of `node` with `values` of its inputs, and add its outputs to `values`."""
    last_node = next(reversed(op.graph), None)
    with op.at(node.metadata_props):
        outputs = build_body(op, node, [None if v is None else values[v] for v in node.inputs])
    _name_body_nodes(op.graph, last_node, node)
    for declared, value in zip(node.outputs, outputs, strict=True):
        if value is None:
            continue
        values[declared] = value
        if value.producer() is not None and value.name is not None and value.name.startswith(f"{node.name}/"):
            value.name = declared.name


def _name_body_nodes(graph: ir.Graph, last_node: ir.Node | None, node: ir.Node) -> None:
    """Name the nodes after `last_node`, which are the body of `node`, and their outputs after `node`."""
    body_nodes: list[ir.Node] = []
    for body_node in reversed(graph):
        if body_node is last_node:
            break
        body_nodes.append(body_node)
    for number, body_node in enumerate(reversed(body_nodes)):
        body_node.name = f"{node.name}/{body_node.op_type}_{number}"
        for value in body_node.outputs:
            value.name = body_node.name if len(body_node.outputs) == 1 else f"{body_node.name}.{value.index()}"


def build_body(op: Builder, node: ir.Node, inputs: Sequence[ir.Value | None]) -> list[ir.Value | None]:
    """Append the body of `node` for these inputs; return its outputs, None for an unused one that is not built.

    Raises:
        GraphError: the number or a type of the outputs differs from the definition's.
    """
    definition = definition_of(node)
    body = body_of(node)
    assert body is not None
    call = _node_with_inputs(definition, node, inputs)
    try:
        result = body(op, definition.view(call))
        outputs: list[ir.Value | None] = [result] if isinstance(result, ir.Value) else list(result)
        _check_outputs(node, call, outputs)
    finally:
        for index in range(len(call.inputs)):  # it is not in the graph: remove it from the uses of its inputs
            call.replace_input_with(index, None)
    return outputs


def _node_with_inputs(definition: OpDef, node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Node:
    """Return a copy of the node with other inputs, typed by its definition, in no graph."""
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
    label = f"the body of {traversal.describe(node)}"
    if len(outputs) != len(call.outputs):
        raise GraphError(
            f"{label} has a wrong number of outputs", expected=f"{len(call.outputs)}, as defined", got=len(outputs)
        )
    for declared, value, original in zip(call.outputs, outputs, node.outputs, strict=True):
        if value is None:
            if traversal.is_used(original):
                raise GraphError(f"{label} does not build the output {original.name}, which is used", got="None")
        elif not compatible(type_of(declared), type_of(value)):
            raise GraphError(
                f"{label} has an output of a wrong type",
                expected=format_type(type_of(declared)),
                got=format_type(type_of(value)),
            )


def close(graph: ir.Graph, outputs: Sequence[ir.Value], names: Sequence[str | None]) -> None:
    """Make these values the graph's outputs, with these names.

    An input, an initializer or a value that is an output already is passed through an Identity, because ONNX requires
    each output to be a different node's output.
    """
    used_names = {v.name for v in (*graph.inputs, *graph.initializers.values())}
    for value, name in zip(outputs, names, strict=True):
        if value.producer() is None or value.graph is not graph or value.is_graph_output():
            node = ir.Node(ONNX, "Identity", [value])
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.append(node)
            value = node.outputs[0]
        while name in used_names:  # the name of an input or of another output
            name = f"{name}_copy"
        used_names.add(name)
        value.name = name
        graph.outputs.append(value)


def has_effects(node: ir.Node) -> bool:
    """Return whether the node does something besides computing its outputs; a host sync does not count."""
    return bool(definition_of(node).effects & ~Effects.HOST_SYNC)


def import_opsets(graph: ir.Graph) -> None:
    """Import the opsets of the domains of the graph's nodes, and no others."""
    versions = {ONNX: OPSET, **graph.opset_imports}
    domains = dict.fromkeys(node.domain for node in graph.all_nodes())
    graph.opset_imports.clear()
    graph.opset_imports.update({domain: versions.get(domain, 1) for domain in (ONNX, *domains)})
