"""Convert 1-D convolutions of kernel size 1 on transposed inputs to matmuls.

    before   Transpose(Conv(Transpose(x[b, s, c]), w[o, c, 1]))         as LoRA's merged projections are written
    after    Linear(x, Reshape(w))                                      `cancel_transposes` removes the transposes

With groups, channels and weights are split and the results concatenated. Backward gains too: its gradients are matmuls.

Elementwise ops of one tensor may be between the transpose and the convolution, such as an activation or dropout: they
keep the strides, so the rows are contiguous after them as well.

A convolution's result is contiguous. The matmul's is copied where that matters: if it reaches an output of the module,
or a dropout that samples as eager does, in the order of memory.

Refused if the input is not transposed: at four shapes, forward and backward of the convolution took 0.78 to 1.29 times
as long as those of a matmul (2 threads, torch 2.13); of transposed inputs, 1.2 to 2.4 times.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import rank_of
from onnxtrain.ops import builder, view
from onnxtrain.ops.body_parts import reshaped
from onnxtrain.ops.convolution import CONV
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.reshape.dims import TRANSPOSE, transposed
from onnxtrain.ops.reshape.join import split
from onnxtrain.ops.sliding_windows import attribute_per_axis
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.rewriting import nodes_before, substitute

_SWAP = [0, 2, 1]  # [b, c, s] to [b, s, c] and back


def convert_pointwise_convolutions(graph: ir.Graph, changes: Changes) -> None:
    """Replace the pointwise convolutions of `graph` whose input is a transpose."""
    op = builder(graph)
    for node in list(graph):
        n = view(node)
        if n.definition is not CONV or not _is_pointwise(n):
            continue
        if not _is_transposed(n.x):
            changes.refuse(node, "its kernel has size 1, but its input is not transposed: a matmul is not faster")
            continue
        with nodes_before(op, node):
            y = transposed(op, _linear(op, n, transposed(op, n.x, _SWAP)), _SWAP)
            if _must_be_contiguous(node.outputs[0]):
                y = op.own.Clone(y, memory_format="contiguous_format")
        substitute(graph, node.outputs[0], y, [node])
        changes.applied.append(f"converted {node.name} to a matmul")


def _is_transposed(value: ir.Value) -> bool:
    """Return whether a value is a transpose of rows, directly or through elementwise ops."""
    node = value.producer()
    while node is not None:
        n = view(node)
        if n.definition is TRANSPOSE:
            return list(n.perm or ()) == _SWAP
        tensors = [v for v in node.inputs if v is not None and rank_of(v) > 0]
        if len(tensors) != 1 or not _is_elementwise(node):
            return False
        node = tensors[0].producer()
    return False


def _is_elementwise(node: ir.Node) -> bool:
    """Return whether each axis of a node's first output comes from the same axis of its one tensor."""
    axis_map = view(node).definition.axis_map(node)
    if axis_map is None:
        return False
    ranks = [None if v is None else rank_of(v) for v in node.inputs]
    out_ranks = [rank_of(v) for v in node.outputs]
    expected = [[axis if rank else None for rank in ranks] for axis in range(out_ranks[0])]
    return [axis_map.sources(axis, ranks, out_ranks) for axis in range(out_ranks[0])] == expected


def _must_be_contiguous(value: ir.Value) -> bool:
    """Return whether an output of the graph, or an input of an op that samples as eager, may have a value's strides.

    Not if it is transposed to rows first, unless the rows are an output themselves, as the logits of CTC.
    """
    worklist, visited = [value], {value}
    while worklist:
        current = worklist.pop()
        if current.is_graph_output():
            return True
        for node in traversal.users(current):
            n = view(node)
            if n.definition is TRANSPOSE and list(n.perm or ()) == _SWAP:
                if _is_output(node.outputs[0]):
                    return True
                continue
            if node.metadata_props.get("samples") == "eager's":
                return True
            may_keep = [v for v in node.outputs if n.definition.aliases or sizes.dims_of(v) == sizes.dims_of(current)]
            worklist += [v for v in may_keep if v not in visited]
            visited.update(may_keep)
    return False


def _is_output(value: ir.Value) -> bool:
    """Return whether a value, or a view of it, is an output of the graph."""
    views = (node.outputs[0] for node in traversal.users(value) if view(node).definition.aliases)
    return value.is_graph_output() or any(map(_is_output, views))


def _is_pointwise(n: NodeView) -> bool:
    """Return whether a 1-D convolution computes each step of [b, c, s] from that step alone."""
    return (
        rank_of(n.x) == 3
        and sizes.dims_of(n.w)[2] == 1
        and attribute_per_axis(n, "strides", 1, 1) == [1]
        and not any(n.pads or ())
        and all(isinstance(size, int) for size in sizes.dims_of(n.w))
    )


def _linear(op: Builder, n: NodeView, rows: ir.Value) -> ir.Value:
    """Compute the channels [b, s, o] of rows [b, s, c]."""
    channels, inner, _ = (int(size) for size in sizes.dims_of(n.w))
    w = reshaped(op, n.w, (channels, inner))
    result: ir.Value
    if n.group == 1:
        result = op.own.Linear(*(v for v in (rows, w, n.b) if v is not None))
        return result
    each = channels // n.group
    operands = [split(op, rows, [inner] * n.group, 2), split(op, w, [each] * n.group, 0)]
    if n.b is not None:
        operands.append(split(op, n.b, [each] * n.group, 0))
    result = op.Concat(*(op.own.Linear(*part) for part in zip(*operands, strict=True)), axis=2)
    return result
