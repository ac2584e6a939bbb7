"""Masks of attention: additive masks, and masks that are the causal one."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import constant_of, dtype_of
from onnxtrain.ops.elementwise.arithmetic import number_of
from onnxtrain.ops.elementwise.selection import WHERE
from onnxtrain.ops.index.creation import CONSTANT_OF_SHAPE, filled
from onnxtrain.ops.registry import definition_of, view
from onnxtrain.ops.reshape.matrices import TRILU


def causal_mask(op: Builder, rows: Size, columns: Size, dtype: ir.DataType) -> ir.Value:
    """Return the additive mask [rows, columns] with which row r attends to columns 0 to r."""
    return additive_mask(op, causal_visibility(op, rows, columns), dtype)


def causal_visibility(op: Builder, rows: Size, columns: Size) -> ir.Value:
    """Return the bool mask [rows, columns] with which row r attends to columns 0 to r."""
    return op.Trilu(filled(op, [rows, columns], 1, ir.DataType.BOOL), upper=0)


def additive_mask(op: Builder, mask: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Convert a bool mask, true for the columns that are attended to, to 0 and -inf."""
    return op.Where(mask, op.scalar(0.0, dtype), op.scalar(-math.inf, dtype))


def covers_scores(mask: ir.Value, q: ir.Value, k: ir.Value) -> bool:
    """Return whether a mask has a row for each query and a column for each key: it broadcasts over neither."""
    return sizes.dims_of(mask)[-2:] == (sizes.dims_of(q)[-2], sizes.dims_of(k)[-2])


def is_causal_mask(mask: ir.Value | None, q: ir.Value, k: ir.Value) -> bool:
    """Return whether a mask is the causal one, additive or bool: a kernel with a causal flag need not read it."""
    return mask is not None and covers_scores(mask, q, k) and _is_lower_triangle(mask)


def _is_lower_triangle(mask: ir.Value) -> bool:
    """Return whether a mask lets row r see columns 0 to r, where r is a row of the mask itself."""
    if any(size != 1 for size in sizes.dims_of(mask)[:-2]):
        return False
    array = constant_of(mask)
    if array is not None:
        triangle = np.tril(np.ones(array.shape[-2:], bool))
        causal = triangle if array.dtype == bool else np.where(triangle, 0.0, -np.inf)
        return array.size > 0 and bool((array == causal).all())
    node = mask.producer()
    if node is None:
        return False
    n = view(node)
    if n.definition is WHERE:
        branches = [None if v is None else number_of(v) for v in node.inputs[1:]]
        visible = node.inputs[0]
        return visible is not None and branches == [0.0, -math.inf] and _is_lower_triangle(visible)
    if n.definition is not TRILU or len(node.inputs) > 1 or dtype_of(mask) != ir.DataType.BOOL:
        return False
    ones = n.x.producer()
    return not n.upper and ones is not None and definition_of(ones) is CONSTANT_OF_SHAPE and _fill_value(ones) == 1


def _fill_value(constant_of_shape: ir.Node) -> float:
    value = constant_of_shape.attributes.get("value")
    return 0.0 if value is None else float(value.as_tensor().numpy().item())
