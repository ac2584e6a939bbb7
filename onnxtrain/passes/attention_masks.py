"""Split the terms that an attention adds to its scores into a mask, which hides columns, and a bias table.

    Where(visible, bias[1, h, s, s], lowest)    mask `visible`, table bias[h, s, s]
    Add(bias[1, h, s, s], mask[b, 1, 1, s])     visible where mask is 0, table bias[h, s, s]

A mask depends on integer and boolean inputs only, so that it can be evaluated at the start of a step. A table is
everything else, such as relative position biases; it is the same for all sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.values import constant_of, dtype_of, is_float, rank_of, type_of
from onnxtrain.ops import Effects, definition_of, view
from onnxtrain.ops.attention.flash import FLASH_ATTENTION
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.elementwise.arithmetic import ADD, number_of
from onnxtrain.ops.elementwise.selection import WHERE
from onnxtrain.passes.rowwise import NotRowwise


@dataclass(frozen=True)
class Mask:
    """The mask of an attention.

    Attributes:
        value: boolean (true for visible columns) or additive; None without a mask.
        causal: whether columns after a row's own are hidden too.
        packed: whether the rows are packed tokens, as the columns are.
        safe: whether a row whose columns are all hidden by -inf gives 0 (instead of NaN).
        fill: the value of hidden scores under a boolean mask.
        lowest: the smallest value of the scores' element type.
        indexes_table: whether there is a bias table, indexed by token positions: packing keeps them only if all
            padding is on the right.
    """

    value: ir.Value | None
    causal: bool
    packed: bool
    safe: bool
    fill: float
    lowest: float
    indexes_table: bool


@dataclass(frozen=True)
class MaskAndTable:
    """The mask and the bias table of an attention's scores.

    Attributes:
        mask: boolean or additive, computed from integer and boolean inputs; None without a mask.
        fill: the value of hidden scores under a boolean mask; None if unknown.
        table: biases that broadcast to [1, heads, rows, columns], or None.
    """

    mask: ir.Value | None
    fill: float | None
    table: ir.Value | None


def split_mask(node: ir.Node) -> MaskAndTable:
    """Split what the attention `node` adds to its scores.

    Raises:
        NotRowwise: it is not a combination of a mask and a table.
    """
    n = view(node)
    bias, fill_value = getattr(n, "bias", None), getattr(n, "fill", None)
    if fill_value is not None and not depends_on_data_only(fill_value):
        raise NotRowwise(f"its mask {n.mask.name} does not depend on integer and boolean inputs alone")
    fill = -math.inf if fill_value is None else number_of(fill_value)
    parts = MaskAndTable(n.mask, fill, None) if depends_on_data_only(n.mask) else _split_combination(n.mask)
    if parts is None or (bias is not None and parts.table is not None):
        raise NotRowwise(f"its mask {n.mask.name} does not depend on integer and boolean inputs alone")
    table = bias if parts.table is None else parts.table
    if table is not None and rank_of(table) == 4 and sizes.dims_of(table)[0] != 1:
        raise NotRowwise(f"its bias {table.name} differs between sequences")
    return MaskAndTable(parts.mask, parts.fill, table)


def _split_combination(value: ir.Value) -> MaskAndTable | None:
    """Split an Add or Where of a table and a mask; None for any other value."""
    node = value.producer()
    while node is not None and definition_of(node).is_transparent:
        source = node.inputs[0]
        if source is None or type_of(source) != type_of(value):
            break
        value, node = source, source.producer()
    if node is None:
        return None
    n = view(node)
    if n.definition is ADD:
        for mask, table in ((n.a, n.b), (n.b, n.a)):
            if depends_on_data_only(mask) and not depends_on_data_only(table):
                return MaskAndTable(mask, -math.inf, table)
    if n.definition is WHERE:
        condition, table, lowest = node.inputs
        assert condition is not None
        assert lowest is not None
        if constant_of(lowest) is not None and depends_on_data_only(condition):
            return MaskAndTable(condition, number_of(lowest), table)
    return None


def mask_of(node: ir.Node, packed: bool) -> Mask:
    """Return the mask of an attention for which `split_mask` raises nothing."""
    n, parts = view(node), split_mask(node)
    lowest = float(torch.finfo(TORCH_DTYPES[dtype_of(n.q)]).min)
    # An unknown fill value is not guaranteed to hide anything.
    fill = 0.0 if parts.fill is None else parts.fill
    safe = n.definition is FLASH_ATTENTION or bool(n.safe)
    causal = bool(getattr(n, "is_causal", 0))
    return Mask(parts.mask, causal, packed, safe, fill, lowest, parts.table is not None)


def depends_on_data_only(value: ir.Value | None) -> bool:
    """Return whether a value depends on integer and boolean inputs only: not on parameters or random numbers."""
    worklist, visited = [value], set[ir.Value | None]()
    while worklist:
        v = worklist.pop()
        if v is None or v in visited or v.const_value is not None:
            continue
        visited.add(v)
        node = v.producer()
        if node is None:
            if is_float(dtype_of(v)):
                return False
            continue
        definition = definition_of(node)
        if definition.effects & ~Effects.HOST_SYNC:
            return False
        worklist += [
            x for i, x in enumerate(node.inputs) if definition.input_name(i) not in definition.shape_only_inputs
        ]
    return True
