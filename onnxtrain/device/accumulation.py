"""Gradient accumulation: `<p>_grad.accumulation.out` is the gradient, or its sum with `<p>_grad.accumulation.buffer`.

An If chooses between both: its branches write each buffer once, where Add and Where would traverse memory four times.
The node that computes a large gradient moves into both branches of its own If and writes the buffer directly. All other
gradients share one If, which copies them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxtrain.graph import traversal
from onnxtrain.graph.values import ONNX, TensorType, set_type, type_of

RESET = "lazy_reset_grad"
GRADIENT = "_grad"
BUFFER = "_grad.accumulation.buffer"
ACCUMULATED = "_grad.accumulation.out"
_LARGE = 2**14  # elements; copying this many costs as much as a separate If


def accumulate(graph: ir.Graph, trainable: Sequence[str], *, portable: bool) -> dict[str, str]:
    """Replace the outputs `<p>_grad` of a finished graph by accumulated ones.

    Args:
        graph: modified in place.
        trainable: the names of the parameters.
        portable: whether nodes stay outside of branches, where some runtimes (WebGPU) run them slowly.

    Returns:
        For each new output, the input whose memory it may be bound to.
    """
    if not trainable:
        return {}
    output_of = {str(v.name): v for v in graph.outputs}
    values = {name: output_of[f"{name}{GRADIENT}"] for name in trainable}
    buffers = {name: _input(graph, f"{name}{BUFFER}", type_of(value)) for name, value in values.items()}
    reset = _input(graph, RESET, TensorType(ir.DataType.BOOL, (1,)))
    outputs = list(graph.outputs)
    graph.outputs.clear()
    moved = {} if portable else {name: nodes for name, value in values.items() if (nodes := _movable(value))}
    sums: dict[ir.Value, ir.Value] = {}
    for name, nodes in moved.items():
        choice = _choice(reset, {values[name]: buffers[name]}, nodes)
        graph.insert_after(nodes[-1], choice)
        for node in reversed(nodes):
            graph.remove(node, safe=True)
        sums[values[name]] = choice.outputs[0]
    copied = {values[name]: buffers[name] for name in trainable if name not in moved}
    if copied:
        choice = _choice(reset, copied, ())
        graph.append(choice)
        sums |= dict(zip(copied, choice.outputs, strict=True))
    for name, value in values.items():
        sums[value].name = f"{name}{ACCUMULATED}"
    graph.outputs.extend(sums.get(v, v) for v in outputs)
    return {f"{name}{ACCUMULATED}": f"{name}{BUFFER}" for name in trainable}


def _input(graph: ir.Graph, name: str, tensor_type: TensorType) -> ir.Value:
    value = ir.Value(name=name)
    set_type(value, tensor_type)
    graph.inputs.append(value)
    return value


def _movable(value: ir.Value) -> list[ir.Node]:
    """Return the producer of a large gradient, after the Transposes that only it reads.

    None if others read the gradient.
    """
    producer = value.producer()
    size = math.prod(s if isinstance(s, int) else 0 for s in type_of(value).shape)
    if producer is None or size <= _LARGE or len(producer.outputs) > 1 or value.uses():
        return []
    feeding = dict.fromkeys(v.producer() for v in producer.inputs if v is not None and len(v.uses()) == 1)
    return [*(n for n in feeding if n is not None and (n.domain, n.op_type) == (ONNX, "Transpose")), producer]


def _choice(reset: ir.Value, buffers: Mapping[ir.Value, ir.Value], moved: Sequence[ir.Node]) -> ir.Node:
    """Make an If that returns the gradients or their sums with the buffers; the `moved` nodes run inside."""
    branches = [
        ir.AttrGraph("then_branch", _branch("replace", buffers, moved, add=False)),
        ir.AttrGraph("else_branch", _branch("add", buffers, moved, add=True)),
    ]
    name = f"accumulate/{next(iter(buffers)).name}" if moved else "accumulate"
    node = ir.Node(ONNX, "If", [reset], branches, num_outputs=len(buffers), name=name)
    for value, output in zip(buffers, node.outputs, strict=True):
        set_type(output, type_of(value))
    return node


def _branch(name: str, buffers: Mapping[ir.Value, ir.Value], moved: Sequence[ir.Node], *, add: bool) -> ir.Graph:
    inner: dict[ir.Value, ir.Value] = {}
    nodes = [traversal.clone_node(node, inner) for node in moved]
    for node in nodes:
        node.name = f"{name}/{node.name}"
        node.outputs[0].name = f"{name}/{node.outputs[0].name}"
    results = []
    for value, buffer in buffers.items():
        result = inner.get(value, value)
        if add or value not in inner:
            last = ir.Node(ONNX, "Add", [buffer, result]) if add else ir.Node(ONNX, "Identity", [result])
            last.name = last.outputs[0].name = f"{name}/{value.name}/{last.op_type}"
            set_type(last.outputs[0], type_of(value))
            nodes.append(last)
            result = last.outputs[0]
        results.append(result)
    graph = moved[0].graph if moved else next(iter(buffers.values())).graph
    assert graph is not None
    return ir.Graph([], results, nodes=nodes, name=name, opset_imports=dict(graph.opset_imports))
