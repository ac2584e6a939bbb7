"""What an attention adds to its scores, taken apart: which columns it hides, and a table of biases.

    Where(visible, bias[1, h, s, s], lowest)    shows `visible`, and adds the table bias[h, s, s]
    Add(bias[1, h, s, s], mask[b, 1, 1, s])     shows where mask is 0, and adds the table

A mask is made of integers and booleans, so that it can be asked for at the start of a step. A table is all else, as
relative positions are; it is the same for all sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.values import constant_of, dtype_of, is_float, rank_of
from onnxtrain.ops import Effects, definition_of, view
from onnxtrain.ops.attention.flash import FLASH_ATTENTION
from onnxtrain.ops.constructors import TORCH_DTYPES
from onnxtrain.ops.elementwise.arithmetic import ADD, number_of
from onnxtrain.ops.elementwise.copies import CLONE, IDENTITY
from onnxtrain.ops.elementwise.selection import WHERE
from onnxtrain.passes.rowwise import NotRowwise


@dataclass(frozen=True)
class Mask:
    """The mask of an attention.

    Attributes:
        value: bool, true where a row sees a column; or a number that is added; None where there is neither.
        causal: whether a row sees no column after its own, whatever the value is.
        packed: whether the rows are tokens too, packed as the columns are.
        safe: whether a row gives 0 that sees nothing because -inf hides all of its columns.
        fill: what hidden scores become where the mask is bool.
        lowest: the smallest number of the scores' type.
        placed: whether a table is read by the places of tokens, which are those of the kept ones where padding is
            on the right only.
    """

    value: ir.Value | None
    causal: bool
    packed: bool
    safe: bool
    fill: float
    lowest: float
    placed: bool


@dataclass(frozen=True)
class Added:
    """What is added to scores.

    Attributes:
        mask: bool, or a number, made of data; None where there is none.
        fill: what hidden scores become where the mask is bool; None where that is not known.
        table: biases that broadcast to [1, heads, rows, columns].
    """

    mask: ir.Value | None
    fill: float | None
    table: ir.Value | None


def added_to_scores(node: ir.Node) -> Added:
    """What the attention `node` adds to its scores.

    Raises:
        NotRowwise: it is no mask and no table.
    """
    n = view(node)
    bias, filled = getattr(n, "bias", None), getattr(n, "fill", None)
    if filled is not None and not is_made_of_data(filled):
        raise NotRowwise(f"its mask {n.mask.name} is not made of integers and booleans alone")
    fill = -math.inf if filled is None else number_of(filled)
    found = Added(n.mask, fill, None) if is_made_of_data(n.mask) else _taken_apart(n.mask)
    if found is None or (bias is not None and found.table is not None):
        raise NotRowwise(f"its mask {n.mask.name} is not made of integers and booleans alone")
    table = bias if found.table is None else found.table
    if table is not None and rank_of(table) == 4 and sizes.dims_of(table)[0] != 1:
        raise NotRowwise(f"the bias {table.name} that is added to its scores is another for each sequence")
    return Added(found.mask, found.fill, table)


def _taken_apart(value: ir.Value) -> Added | None:
    """A sum or a choice of a table and a mask."""
    node = value.producer()
    while node is not None and definition_of(node) in (CLONE, IDENTITY) and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    if node is None:
        return None
    n = view(node)
    if n.definition is ADD:
        for mask, table in ((n.a, n.b), (n.b, n.a)):
            if is_made_of_data(mask) and not is_made_of_data(table):
                return Added(mask, -math.inf, table)
    if n.definition is WHERE:
        condition, table, lowest = node.inputs
        assert condition is not None
        assert lowest is not None
        if constant_of(lowest) is not None and is_made_of_data(condition):
            return Added(condition, number_of(lowest), table)
    return None


def mask_of(node: ir.Node, packed: bool) -> Mask:
    """The mask of an attention for which `added_to_scores` raises nothing."""
    n, added = view(node), added_to_scores(node)
    lowest = float(torch.finfo(TORCH_DTYPES[dtype_of(n.q)]).min)
    # A number that is not known hides nothing for sure.
    fill = 0.0 if added.fill is None else added.fill
    safe = n.definition is FLASH_ATTENTION or bool(n.safe)
    causal = bool(getattr(n, "is_causal", 0))
    return Mask(added.mask, causal, packed, safe, fill, lowest, added.table is not None)


def is_made_of_data(value: ir.Value | None) -> bool:
    """Whether a value depends on integer and boolean inputs only: not on parameters, not on random numbers."""
    waiting, seen = [value], set[ir.Value | None]()
    while waiting:
        v = waiting.pop()
        if v is None or v in seen or v.const_value is not None:
            continue
        seen.add(v)
        node = v.producer()
        if node is None:
            if is_float(dtype_of(v)):
                return False
            continue
        definition = definition_of(node)
        if definition.effects & ~Effects.HOST_SYNC:
            return False
        waiting += [x for i, x in enumerate(node.inputs) if definition.input_name(i) not in definition.shape_only]
    return True
