"""Dropout with counter-based random masks, reproducible on every device.

onnxruntime's own Dropout samples from a generator inside the session, which cannot be saved: resumed training would use
other masks, and web builds sample other numbers or lack the op. Here element i of a mask is a hash of i, of the seed
fed at each step and of a salt per Dropout. The hash uses int32 multiplication, addition and division, which wrap around
on all runtimes.
"""

from __future__ import annotations

import zlib

import numpy as np
import onnx_ir as ir

from onnxtrain.device.from_onnx.prepare import constant_number
from onnxtrain.errors import ArtifactError
from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import MICROSOFT, ONNX, TensorType, dtype_of, set_type
from onnxtrain.ops.body_parts import reshaped
from onnxtrain.ops.definition import Effects
from onnxtrain.ops.registry import builder, definition_of

SEED = "random_seed"
INT32, INT64 = ir.DataType.INT32, ir.DataType.INT64
# Odd multipliers with well-mixed bits, as int32: from MurmurHash3 and the Weyl sequence.
_STEP, _FIRST, _SECOND = (int(np.int32(np.uint32(n))) for n in (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35))
_MAX_SEED = 2**31 - 1


def replace_dropouts(graph: ir.Graph) -> bool:
    """Replace Dropout and DropoutGrad by multiplications with a mask hashed from the input `random_seed`, in place.

    Returns:
        Whether the graph has a Dropout; if so, `random_seed`, int64[1], is added as its last input.

    Raises:
        ArtifactError: another op samples random numbers.
    """
    drops = [node for node in graph if (node.domain, node.op_type) == (ONNX, "Dropout")]
    _refuse_others(graph, drops)
    if not drops:
        return False
    seed = ir.Value(name=SEED)
    set_type(seed, TensorType(INT64, (1,)))
    graph.inputs.append(seed)
    op = builder(graph)
    # New nodes are appended, and sorted afterwards.
    key = op.Cast(op.Mod(seed, op.constant([_MAX_SEED], INT64)), to=INT32)
    for number, node in enumerate(drops):
        with op.at(node.metadata_props):
            _replace(op, graph, node, key, number)
    traversal.sort(graph)
    traversal.name_uniquely(graph)
    return True


def _refuse_others(graph: ir.Graph, dropouts: list[ir.Node]) -> None:
    for node in graph:
        if node not in dropouts and Effects.RANDOM in definition_of(node).effects:
            raise ArtifactError(
                f"{traversal.describe(node)} samples random numbers, which resumed training could not reproduce.",
                where=traversal.origin(node),
                todo="feed the random numbers as an input of the model",
            )


def _replace(op: Builder, graph: ir.Graph, node: ir.Node, key: ir.Value, number: int) -> None:
    x = node.inputs[0]
    assert x is not None
    ratio = constant_number(node.inputs[1]) if len(node.inputs) > 1 else 0.5
    if ratio is None:
        raise ArtifactError(
            f"{traversal.describe(node)} has a computed ratio; expected a constant.", traversal.origin(node)
        )
    kept = _kept(op, x, key, number, float(ratio))
    scale = 1 / (1 - float(ratio))
    dtype = dtype_of(x)
    factor = op.Mul(op.Cast(kept, to=dtype), op.scalar(scale, dtype))
    y = op.Mul(x, factor)
    mask = node.outputs[1] if len(node.outputs) > 1 else None
    backward = [] if mask is None else [n for n in traversal.users(mask) if (n.domain, n.op_type) == _BACKWARD]
    for gradient in backward:
        dy = gradient.inputs[0]
        with op.at(gradient.metadata_props):
            traversal.replace(graph, gradient.outputs[0], op.Mul(dy, factor))
        graph.remove(gradient, safe=True)
    if mask is not None:
        traversal.replace(graph, mask, kept)
    traversal.replace(graph, node.outputs[0], y)
    graph.remove(node, safe=True)


_BACKWARD = (MICROSOFT, "DropoutGrad")


def _kept(op: Builder, x: ir.Value, key: ir.Value, number: int, ratio: float) -> ir.Value:
    """Return the mask of kept elements: true with probability 1 - ratio."""
    salt = zlib.crc32(f"dropout {number}".encode()) & _MAX_SEED
    start = _hashed(op, _hashed(op, op.Add(op.Mul(key, op.scalar(_STEP, INT32)), op.scalar(salt, INT32))))
    count = op.size(sizes.multiply(1, *sizes.dims_of(x)))
    positions = op.Cast(op.Range(op.scalar(0, INT64), count, op.scalar(1, INT64)), to=INT32)
    hashed = _hashed(op, op.Add(op.Mul(positions, op.scalar(_STEP, INT32)), start))
    limit = min(round((1 - ratio) * 2**32), 2**32 - 1) - 2**31
    return reshaped(op, op.Less(hashed, op.scalar(limit, INT32)), sizes.dims_of(x))


def _hashed(op: Builder, x: ir.Value) -> ir.Value:
    """Apply two rounds of x(2x + 1), whose bits depend on all lower bits, then add the upper bits to the lower ones.

    A division takes the upper bits: ONNX cannot shift signed integers. Over 2^20 elements, lags of 1 to 4096, 12 seeds
    and 5 Dropouts no correlation exceeds 0.003 (independent samples: a standard deviation of 0.001).
    """
    for bits, multiplier in ((16, _FIRST), (15, _SECOND)):
        x = op.Mul(x, op.Add(op.Add(x, x), op.scalar(1, INT32)))
        x = op.Mul(op.Add(x, op.Div(x, op.scalar(1 << bits, INT32))), op.scalar(multiplier, INT32))
    return x
