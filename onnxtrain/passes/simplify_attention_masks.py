"""Drop attention masks that hide nothing, and name those that are causal.

    before   FlashAttention(q, k, v, Where(positions <= rows, 0, -inf))
    after    FlashAttention(q, k, v, is_causal=1)

Exports of transformers compute masks from positions even if there is no padding: BERT's hides nothing, GPT-2's and
Llama's are causal. A kernel with a causal flag reads no mask and skips half of the scores; on a GPU flash attention
takes no other mask. Whether a mask is one of these follows from its arithmetic alone (`element_formulas.py`), for all
sizes.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.values import dtype_of, is_float
from onnxtrain.ops import builder, view
from onnxtrain.ops.attention.masks import causal_mask, causal_visibility, covers_scores, is_causal_mask
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.elementwise.arithmetic import number_of
from onnxtrain.ops.elementwise.selection import WHERE
from onnxtrain.ops.interfaces.element_formulas import Affine, Conditions
from onnxtrain.passes.changes import Changes, counted
from onnxtrain.passes.element_formulas import Formulas
from onnxtrain.passes.rewriting import nodes_before


def simplify_attention_masks(graph: ir.Graph, changes: Changes) -> None:
    """Simplify the input `mask` of each op that has one and an axis of scores."""
    formulas = Formulas()
    dropped = causal = 0
    for node in list(graph):
        n = view(node)
        slot = n.definition.slots.get("mask")
        if slot is None or slot.is_output or n.mask is None or "k" not in n.definition.slots:
            continue
        visible = _visible(n.mask, formulas)
        if visible is not None and visible.is_true:
            for name in ("mask", "fill"):  # `fill` is the score where a mask hides a column
                if name in n.definition.slots and getattr(n, name) is not None:
                    node.replace_input_with(n.definition.slots[name].position, None)
            dropped += 1
        elif covers_scores(n.mask, n.q, n.k) and (
            is_causal_mask(n.mask, n.q, n.k) or (visible is not None and _is_causal(visible))
        ):
            causal += _make_causal(graph, n, slot.position)
    if dropped:
        changes.applied.append(f"dropped {counted(dropped, 'mask')} of attention that hide nothing")
    if causal:
        changes.applied.append(f"found {counted(causal, 'mask')} of attention to be causal")


def _visible(mask: ir.Value, formulas: Formulas) -> Conditions | None:
    """Return where a mask, bool or of 0 and -inf, lets a query see a key; None if that is not known."""
    if is_float(dtype_of(mask)):
        node = mask.producer()
        if node is None or view(node).definition is not WHERE:
            return None
        condition, *branches = node.inputs
        if condition is None or [None if b is None else number_of(b) for b in branches] != [0.0, -math.inf]:
            return None
        mask = condition
    formula = formulas.formula_of(mask)
    return formula if isinstance(formula, Conditions) else None


def _is_causal(visible: Conditions) -> bool:
    """Return whether the condition is: column - row <= 0."""
    if len(visible.terms) != 1:
        return False
    (term,) = visible.terms
    rank = len(term.coefficients)
    return rank >= 2 and term == Affine(0, (0,) * (rank - 2) + (-1, 1))


def _make_causal(graph: ir.Graph, n: NodeView, position: int) -> bool:
    """Set the flag of an op that has one; give any other the causal mask that its kernels know.

    Returns:
        Whether the graph changed.
    """
    if "is_causal" in n.definition.attributes:
        n.node.replace_input_with(position, None)
        n.node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
        return True
    if is_causal_mask(n.mask, n.q, n.k):
        return False
    op = builder(graph)
    rows, columns = sizes.dims_of(n.q)[-2], sizes.dims_of(n.k)[-2]
    dtype = dtype_of(n.mask)
    with nodes_before(op, n.node):
        is_added = is_float(dtype)
        mask = causal_mask(op, rows, columns, dtype) if is_added else causal_visibility(op, rows, columns)
    n.node.replace_input_with(position, mask)
    return True
