"""Walk, copy and edit graphs: the operations that all passes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from copy import copy as shallow_copy

import onnx_ir as ir

from onnxtrain.errors import GraphError

ValueMap = MutableMapping[ir.Value, ir.Value]

# Metadata in which the builder caches values of a graph: it must not be copied to another graph.
_BUILDER_CACHES = frozenset({"size_values", "shape_values", "size_sources"})


def describe(node: ir.Node) -> str:
    """Return the op and name of a node, for messages."""
    return f"{node.domain or 'ai.onnx'}::{node.op_type} {node.name!r}"


def origin(node: ir.Node) -> str | None:
    """Return the module path and source location that a node comes from, or None if neither is known."""
    parts = [node.metadata_props[key] for key in ("module", "line") if node.metadata_props.get(key)]
    return ", ".join(parts) or None


_GRAPHS = frozenset({ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS})


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """Yield the graphs in a node's attributes (If, Loop, Scan)."""
    for attribute in node.attributes.values():
        if attribute.type not in _GRAPHS or attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        else:
            yield from attribute.as_graphs()


def has_subgraphs(node: ir.Node) -> bool:
    """Return whether the node has graphs in its attributes."""
    for attribute in node.attributes.data.values():  # `data`, `is` and no `any`: four times as fast
        kind = attribute.type
        if kind is ir.AttributeType.GRAPH or kind is ir.AttributeType.GRAPHS:
            return True
    return False


def all_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the nodes of a graph, each before those of its subgraphs; `graph.all_nodes()` takes four times as long."""
    for node in graph:
        yield node
        if has_subgraphs(node):
            for inner in subgraphs(node):
                yield from all_nodes(inner)


def count_nodes(graph: ir.Graph) -> int:
    """Return the number of nodes in a graph, with those of subgraphs."""
    return len(graph) + sum(count_nodes(inner) for node in graph if has_subgraphs(node) for inner in subgraphs(node))


def captured_values(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the values of outer graphs that the node's subgraphs read."""
    for graph in subgraphs(node):
        own = {*graph.inputs, *graph.initializers.values()}
        for inner in graph:
            yield from (v for v in (*inner.inputs, *captured_values(inner)) if v is not None and v not in own)
            own.update(inner.outputs)
        yield from (v for v in graph.outputs if v not in own)


def reads(node: ir.Node) -> Iterator[ir.Value]:
    """Yield all values that a node reads: its inputs and those its subgraphs capture."""
    yield from (value for value in node.inputs if value is not None)
    yield from captured_values(node)


def users(value: ir.Value) -> list[ir.Node]:
    """Return the distinct nodes that have the value as an input."""
    return list(dict.fromkeys(use.node for use in value.uses()))


def is_used(value: ir.Value) -> bool:
    """Return whether the value has users or is a graph output."""
    return bool(value.uses()) or value.is_graph_output()


# Order


def first_out_of_order(graph: ir.Graph) -> tuple[ir.Node, ir.Value] | None:
    """Return the first node that reads a value before it is produced, with that value; None if the order is valid."""
    ready: set[ir.Value | None] = {None, *graph.inputs, *graph.initializers.values()}
    for node in graph:
        read = tuple(reads(node)) if has_subgraphs(node) else node.inputs
        if not ready.issuperset(read):
            return next((node, value) for value in read if value is not None and value not in ready)
        ready.update(node.outputs)
    return None


def is_sorted(graph: ir.Graph) -> bool:
    """Return whether every value is produced before it is read."""
    return first_out_of_order(graph) is None


def sort(graph: ir.Graph) -> None:
    """Sort the nodes topologically; a sorted graph is left unchanged. Raises GraphError on a cycle."""
    if is_sorted(graph):
        return
    try:
        graph.sort()
    except ValueError as error:
        raise GraphError("the graph has a cycle", where=graph.name) from error


# Editing


def remove_unused(graph: ir.Graph, keeps: Callable[[ir.Node], bool]) -> int:
    """Remove nodes that no output depends on, except those that `keeps` selects (side effects); return their number.

    Unused initializers are removed too. Graph inputs remain: they are part of the caller's contract.
    """
    removed = []
    for node in reversed(graph):
        if not keeps(node) and not any(map(is_used, node.outputs)):
            detach(node)
            removed.append(node)
    graph.remove(removed)
    for name, value in list(graph.initializers.items()):
        if not is_used(value) and not value.is_graph_input():
            del graph.initializers[name]
    return len(removed)


def detach(node: ir.Node) -> None:
    """Take the inputs from a node that is to be removed, so that it is no longer a user of other nodes.

    `graph.remove(node, safe=True)` does so too, but looks through all outputs of the graph for each node.
    """
    for index in range(len(node.inputs)):
        node.replace_input_with(index, None)


def replace(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Replace all uses of `old` by `new`: in nodes, their subgraphs and the graph's outputs.

    The name of a graph output is part of the caller's contract: `new` takes it over. If `new` must keep a name of its
    own (an input, an initializer, another output), an Identity produces the output.
    """
    if old is new:
        return
    if not old.is_graph_output():
        old.replace_all_uses_with(new)
        return
    name = old.name
    producer = new.producer()
    if producer is None or new.is_graph_output():
        node = ir.Node("", "Identity", [new])
        node.outputs[0].type, node.outputs[0].shape = old.type, old.shape
        _insert_after(graph, producer, node)
        for user, index in list(old.uses()):
            user.replace_input_with(index, new)
        new = node.outputs[0]
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name = None
    new.name = name


def _insert_after(graph: ir.Graph, producer: ir.Node | None, node: ir.Node) -> None:
    if producer is not None:
        graph.insert_after(producer, node)
    elif len(graph):
        graph.insert_before(graph[0], node)
    else:
        graph.append(node)


def name_uniquely(graph: ir.Graph) -> None:
    """Rename values and nodes whose name is missing or taken; inputs, initializers and outputs keep theirs."""
    values: set[str] = {v.name for v in (*graph.inputs, *graph.initializers.values()) if v.name}
    fixed = set(graph.outputs)
    values |= {v.name for v in fixed if v.name}
    nodes: set[str] = set()
    for node in all_nodes(graph):
        node.name = unique(node.name or node.op_type, nodes)
        for value in node.outputs:
            if value not in fixed:
                value.name = unique(value.name or node.name, values)


def unique(name: str, used_names: set[str]) -> str:
    """Return the name, with a number if it is used, and add it to the used names."""
    candidate, number = name, 1
    while candidate in used_names:
        number += 1
        candidate = f"{name}_{number}"
    used_names.add(candidate)
    return candidate


# Copies


def clone_value(value: ir.Value) -> ir.Value:
    """Return a copy of the value, with its type and metadata, that belongs to no graph."""
    shape = value.shape
    copy = ir.Value(  # at once: setting the properties of a made value takes four times as long
        name=value.name,
        shape=shape if shape is None or shape.frozen else shape.copy(),
        type=value.type,
        doc_string=value.doc_string,
        const_value=value.const_value,
        metadata_props=dict(value.metadata_props) if _has_properties(value) else None,
    )
    if _has_meta(value):
        copy.meta.update(value.meta)
    return copy


def _has_meta(holder: ir.Node | ir.Value) -> bool:
    """Return whether a node or value has metadata. Reading `meta` would create it: three objects for each value."""
    return getattr(holder, "_metadata", holder) is not None and bool(holder.meta)


def _has_properties(value: ir.Value) -> bool:
    """Return whether a value has properties. Reading `metadata_props` would create a dict, which stays."""
    return getattr(value, "_metadata_props", value) is not None and bool(value.metadata_props)


def clone_node(node: ir.Node, values: ValueMap) -> ir.Node:
    """Return a copy of the node that reads `values[x]` in place of each input x, and add its outputs to `values`.

    A value missing from `values` belongs to an outer graph and is kept.
    """
    outputs = [clone_value(value) for value in node.outputs]
    copy = ir.Node(
        node.domain,
        node.op_type,
        [None if v is None else values.get(v, v) for v in node.inputs],
        [_clone_attribute(a, values) for a in node.attributes.data.values()],
        overload=node.overload,
        outputs=outputs,
        version=node.version,
        name=node.name,
        doc_string=node.doc_string,
        metadata_props=dict(node.metadata_props),
    )
    if _has_meta(node):
        copy.meta.update(node.meta)
    values.update(zip(node.outputs, outputs, strict=True))
    return copy


def _clone_attribute(attribute: ir.Attr, values: ValueMap) -> ir.Attr:
    if attribute.type in _GRAPHS and not attribute.is_ref():
        if attribute.type == ir.AttributeType.GRAPH:
            return ir.AttrGraph(attribute.name, _clone_into(attribute.as_graph(), values))
        if attribute.type == ir.AttributeType.GRAPHS:
            return ir.AttrGraphs(attribute.name, [_clone_into(g, values) for g in attribute.as_graphs()])
    return attribute


def clone_head(graph: ir.Graph, values: ValueMap) -> ir.Graph:
    """Return a graph with copies of the inputs and initializers, but without nodes and outputs."""
    for value in (*graph.inputs, *graph.initializers.values()):
        if value not in values:
            values[value] = clone_value(value)
    copy = ir.Graph(
        [values[v] for v in graph.inputs],
        [],
        nodes=(),
        initializers=[values[v] for v in graph.initializers.values()],
        doc_string=graph.doc_string,
        opset_imports=dict(graph.opset_imports),
        name=graph.name,
        metadata_props=dict(graph.metadata_props),
    )
    copy.meta.update({key: shallow_copy(value) for key, value in graph.meta.items() if key not in _BUILDER_CACHES})
    return copy


def _clone_into(graph: ir.Graph, values: ValueMap) -> ir.Graph:
    copy = clone_head(graph, values)
    for node in graph:
        copy.append(clone_node(node, values))
    copy.outputs.extend(values.get(v, v) for v in graph.outputs)
    return copy


def clone(graph: ir.Graph) -> tuple[ir.Graph, dict[ir.Value, ir.Value]]:
    """Return a copy of the graph and a map from its values to their copies. Tensors are shared."""
    values: dict[ir.Value, ir.Value] = {}
    return _clone_into(graph, values), values


def extract(graph: ir.Graph, values: Sequence[ir.Value]) -> ir.Graph:
    """Return a copy of the graph, with all its inputs, that computes only the given values."""
    needed: set[ir.Value] = set(values)
    nodes: list[ir.Node] = []
    for node in reversed(graph):
        if not needed.isdisjoint(node.outputs):
            nodes.append(node)
            needed.update(reads(node))
    copies: dict[ir.Value, ir.Value] = {}
    copy = clone_head(graph, copies)
    for node in reversed(nodes):
        copy.append(clone_node(node, copies))
    copy.outputs.extend(copies[v] for v in values)
    remove_unused(copy, lambda node: False)
    return copy


def with_graph(model: ir.Model, graph: ir.Graph, functions: Sequence[ir.Function] | None = None) -> ir.Model:
    """Return a copy of `model` with another graph and, if given, other functions."""
    return ir.Model(
        graph,
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        producer_version=model.producer_version,
        domain=model.domain,
        model_version=model.model_version,
        doc_string=model.doc_string,
        functions=[f.clone() for f in model.functions.values()] if functions is None else functions,
        metadata_props=dict(model.metadata_props),
    )
