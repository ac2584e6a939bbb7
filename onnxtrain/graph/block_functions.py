"""Turn the repeated blocks of a graph into model-local functions, which makes the file readable.

    the 20 nodes of encoder.layer.0, of encoder.layer.1, …   ──>   encoder_layer(x, mask, weights of layer 0), …

The nodes of a block have module paths with the same number in them: `encoder.layer.3.attention`. Its nodes in backward
are a function of their own. Blocks share a function if their nodes are the same; a block whose nodes other nodes read
in between (because a pass merged it with its neighbours) stays as it is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.values import ONNX, dtype_of, rank_of

DOMAIN = "onnxtrain.blocks"

_PATH = re.compile(r"(?:(?P<parent>.*?)\.)?(?P<number>\d+)(?:\.|$)")
_OF_BACKWARD = ("gradient_of", "recomputed")  # the metadata of nodes in backward
_MIN_BLOCKS = 3
_MIN_NODES = 4
_MAX_ELEMENTS = 64  # of a constant in a function


@dataclass(frozen=True)
class _Block:
    """The nodes of one block, or those of its backward.

    Attributes:
        path: the module path of the block.
        title: the name that its function gets.
        nodes: the nodes, in order.
        outputs: the values that others read.
        key: equal for blocks that can share a function.
    """

    path: str
    title: str
    nodes: Sequence[ir.Node]
    outputs: Sequence[ir.Value]
    key: Hashable

    def inputs(self) -> tuple[list[ir.Value], list[ir.Value]]:
        """Return the values that the nodes read, in the order of their first use, and the constants among them.

        The function contains small constants. Replacing another block by a call replaces the values that it returns.
        """
        produced = {value for node in self.nodes for value in node.outputs}
        read = dict.fromkeys(v for node in self.nodes for v in node.inputs if v is not None and v not in produced)
        constants = [value for value in read if _is_small_constant(value)]
        return [value for value in read if value not in constants], constants


def fold_blocks(model: ir.Model) -> None:
    """Replace the nodes of repeated blocks by calls of functions, in place."""
    by_key: dict[Hashable, list[_Block]] = defaultdict(list)
    for block in _blocks(model.graph):
        by_key[block.key].append(block)
    names: set[str] = set()
    for blocks in by_key.values():
        if len(blocks) < _MIN_BLOCKS:
            continue
        name = traversal.unique(blocks[0].title, names)
        model.functions[DOMAIN, name, ""] = _function(name, blocks[0], model.graph)
        for block in blocks:
            _replace(model.graph, block, name)
        model.graph.opset_imports[DOMAIN] = 1
    traversal.sort(model.graph)


def _blocks(graph: ir.Graph) -> list[_Block]:
    """Find the blocks that can be replaced by a call."""
    sizes_of_graph = _size_nodes(graph)
    members: dict[tuple[str, str, str], list[ir.Node]] = defaultdict(list)
    for node in graph:
        match = _PATH.match(node.metadata_props.get("module", ""))
        if match is not None and node not in sizes_of_graph:
            phase = "" if node.metadata_props.keys().isdisjoint(_OF_BACKWARD) else "_gradient"
            members[match["parent"] or "", match["number"], phase].append(node)
    blocks: list[_Block] = []
    order = {node: position for position, node in enumerate(graph)}
    nodes = list(order)
    for (parent, number, phase), own in members.items():
        if len(own) < _MIN_NODES or any(True for node in own for _ in traversal.subgraphs(node)):
            continue
        if _is_convex(nodes[order[own[0]] : order[own[-1]] + 1], set(own)):
            title = re.sub(r"\W", "_", parent) or "block"
            blocks.append(_block(f"{parent}.{number}".lstrip("."), title + phase, own))
    return blocks


def _size_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes that compute sizes from the graph's inputs: they belong to no block."""
    size_nodes: set[ir.Node] = set()
    for node in graph:
        is_size = all(v.dtype == ir.DataType.INT64 and rank_of(v) <= 1 for v in node.outputs)
        producers = (value.producer() for value in node.inputs if value is not None)
        if is_size and (node.op_type == "Shape" or all(p is None or p in size_nodes for p in producers)):
            size_nodes.add(node)
    return size_nodes


def _is_convex(nodes: Sequence[ir.Node], members: Collection[ir.Node]) -> bool:
    """Return whether no other node is between two members: reads the result of one, and computes what another reads.

    Args:
        nodes: the nodes from the first member to the last.
        members: the members.
    """
    between: set[ir.Value] = set()
    for node in nodes:
        read = list(traversal.reads(node))
        if node in members:
            if not between.isdisjoint(read):
                return False
        elif any(value in between or value.producer() in members for value in read):
            between.update(node.outputs)
    return True


def _block(path: str, title: str, nodes: Sequence[ir.Node]) -> _Block:
    members = set(nodes)
    produced = {value: f"{p}.{i}" for p, node in enumerate(nodes) for i, value in enumerate(node.outputs)}
    outputs = [v for v in produced if v.is_graph_output() or any(use.node not in members for use in v.uses())]
    inputs, constants = _Block(path, title, nodes, outputs, None).inputs()
    names: dict[ir.Value | None, Hashable] = {None: None}
    names.update((value, f"result {name}") for value, name in produced.items())
    names.update((value, id(value)) for value in constants)
    names.update((value, f"input {i}") for i, value in enumerate(inputs))
    calls = tuple(
        (
            *(node.op_identifier(), tuple(names[value] for value in node.inputs)),
            tuple((attribute.name, _attribute_key(attribute)) for attribute in node.attributes.values()),
            tuple((value.dtype, sizes.dims_of(value)) for value in node.outputs),
        )
        for node in nodes
    )
    types = tuple((dtype_of(value), rank_of(value)) for value in inputs)
    key = title, calls, types, tuple(produced[v] for v in outputs)
    return _Block(path, title, nodes, outputs, key)


def _is_small_constant(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and value.is_initializer() and tensor.size <= _MAX_ELEMENTS


def _attribute_key(attribute: ir.Attr) -> Hashable:
    if attribute.type != ir.AttributeType.TENSOR:
        return attribute.type, repr(attribute.value)
    tensor = attribute.as_tensor()
    return tensor.dtype, tuple(tensor.shape), tensor.numpy().tobytes()


def _function(name: str, block: _Block, graph: ir.Graph) -> ir.Function:
    """Make a function of the nodes of a block."""
    inputs, constants = block.inputs()
    values = {value: traversal.clone_value(value) for value in inputs}
    nodes = [_constant(value, values) for value in constants]
    nodes += [traversal.clone_node(node, values) for node in block.nodes]
    for node in nodes:
        node.doc_string = None
        if "module" in node.metadata_props:
            node.metadata_props["module"] = _relative(node.metadata_props["module"], block.path)
    for value in values.values():
        value.const_value = None
        value.name = _relative(str(value.name), block.path)
        value.shape = ir.Shape([None] * rank_of(value))  # a symbol is another size in each call
        value.meta.clear()
    domains = {ONNX, *(node.domain for node in nodes)}
    opsets = {domain: version for domain, version in graph.opset_imports.items() if domain in domains}
    parameters, results = [values[v] for v in inputs], [values[v] for v in block.outputs]
    body = ir.Graph(parameters, results, nodes=nodes, name=name, opset_imports=opsets)
    traversal.name_uniquely(body)
    function = ir.Function(DOMAIN, name, "", graph=body, attributes=[])
    function.doc_string = f"the nodes of {block.path} and of other blocks"
    return function


def _constant(value: ir.Value, values: dict[ir.Value, ir.Value]) -> ir.Node:
    """Make a node that returns a constant: functions have no initializers."""
    assert value.const_value is not None
    node = ir.Node(ONNX, "Constant", (), [ir.AttrTensor("value", value.const_value)])
    node.outputs[0].type, node.outputs[0].shape, node.outputs[0].name = value.type, value.shape, value.name
    values[value] = node.outputs[0]
    return node


def _relative(name: str, path: str) -> str:
    """Return a name as it is inside the module at `path`."""
    return name.removeprefix(path).removeprefix(".") if name == path or name.startswith(f"{path}.") else name


def _replace(graph: ir.Graph, block: _Block, name: str) -> None:
    """Replace the nodes of a block by a call of its function."""
    inputs, constants = block.inputs()
    call = ir.Node(DOMAIN, name, inputs, num_outputs=len(block.outputs), name=block.path + _phase(block))
    call.metadata_props["module"] = block.path
    call.doc_string = traversal.origin(call)
    graph.insert_after(block.nodes[-1], call)
    for old, new in zip(block.outputs, call.outputs, strict=True):
        new.type, new.shape, new.name = old.type, old.shape, old.name
        traversal.replace(graph, old, new)
    for node in block.nodes:
        traversal.detach(node)
    graph.remove(block.nodes)
    for value in constants:
        if not traversal.is_used(value) and not value.is_graph_input():
            graph.initializers.pop(str(value.name), None)


def _phase(block: _Block) -> str:
    return ".gradient" if block.title.endswith("_gradient") else ""


def called_by_functions(functions: Mapping[ir.OperatorIdentifier, ir.Function]) -> list[ir.Node]:
    """Return the nodes in the functions of blocks."""
    return [node for (domain, _, _), function in functions.items() if domain == DOMAIN for node in function]
