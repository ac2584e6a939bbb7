"""Convert 1-D convolutions of kernel size 1 on transposed inputs to matmuls.

    before   Transpose(Conv(Transpose(x[b, s, c]), w[o, c, 1]))         as LoRA's merged projections are written
    after    Linear(x, Reshape(w))                                      `cancel_transposes` removes the transposes

With groups, channels and weights are split and the results concatenated. Backward gains too: its gradients are matmuls.

Refused if the input is not transposed: the convolution is as fast then.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import sizes
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
        source = n.x.producer()
        if source is None or view(source).definition is not TRANSPOSE or list(view(source).perm or ()) != _SWAP:
            changes.refuse(node, "its kernel has size 1, but its input is not transposed: a matmul is not faster")
            continue
        with nodes_before(op, node):
            y = transposed(op, _linear(op, n, transposed(op, n.x, _SWAP)), _SWAP)
        substitute(graph, node.outputs[0], y, [node])
        changes.applied.append(f"converted {node.name} to a matmul")


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
