"""Constant folding: evaluate nodes whose inputs are all constants.

    before   Mul(2.0, 0.5) ──> Add(x, ·)
    after    1.0           ──> Add(x, ·)

The op's own kernel evaluates the node, so that folding cannot change a result. Nodes with side effects, and results
larger than MAX_BYTES (a constant is held for the lifetime of the program), are not folded. Parameters are graph
inputs, not constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.traversal import replace
from onnxtrain.graph.values import dtype_of, rank_of
from onnxtrain.ops import builder, definition_of
from onnxtrain.ops.definition import OpDef
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.passes.changes import Changes, counted

MAX_BYTES = 1 << 20


def fold_constants(graph: ir.Graph, changes: Changes) -> None:
    """Replace nodes of `graph` whose inputs are all constants by their results."""
    op = builder(graph)
    folded = 0
    for node in list(graph):
        definition = definition_of(node)
        inputs = [v for v in node.inputs if v is not None]
        if not inputs or any(v.const_value is None for v in inputs):
            continue
        if definition.effects or any(v.is_graph_output() for v in node.outputs):
            continue
        if any(not isinstance(size, int) for v in node.outputs for size in (v.shape or ())):
            continue
        folded += _fold(op, graph, node, definition, changes)
    if folded:
        changes.applied.append(f"folded {counted(folded, 'constant node')}")


def _fold(op: Builder, graph: ir.Graph, node: ir.Node, definition: OpDef, changes: Changes) -> int:
    bytes_needed = sum(int(sizes.multiply(1, *sizes.dims_of(v))) * dtype_of(v).itemsize for v in node.outputs)
    if bytes_needed > MAX_BYTES:
        changes.refuse(node, f"the constant would take {bytes_needed} bytes, more than {MAX_BYTES}")
        return 0
    for old, result in zip(node.outputs, evaluate(node, definition), strict=True):
        array = result.float().numpy() if result.dtype == torch.bfloat16 else result.numpy()
        replace(graph, old, op.constant(array, dtype_of(old)))
    graph.remove(node, safe=True)
    return 1


def evaluate(node: ir.Node, definition: OpDef) -> list[torch.Tensor]:
    """Run a node on its constant inputs with its own kernel."""
    kernel = definition.kernel(node, "cpu")
    arguments: list[Any] = []
    for index, value in enumerate(node.inputs):
        if value is None or value.const_value is None:
            arguments.append(None)
            continue
        array = value.const_value.numpy()
        if index in kernel.host_inputs:
            arguments.append(array.item() if rank_of(value) == 0 else tuple(array.tolist()))
        else:
            exact = array.astype("float32") if dtype_of(value) == ir.DataType.BFLOAT16 else array.copy()
            arguments.append(torch.from_numpy(np.asarray(exact)).to(TORCH_DTYPES[dtype_of(value)]))
    if definition.inputs and definition.inputs[-1].endswith("..."):
        fixed = len(definition.inputs) - 1
        arguments = [*arguments[:fixed], tuple(arguments[fixed:])]
    arguments += [None] * (len(definition.inputs) - len(arguments))
    result = kernel.lower(definition.view(node), *arguments).evaluate()
    return list(result) if isinstance(result, (tuple, list)) else [result]
