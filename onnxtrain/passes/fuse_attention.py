"""Fuse attention that a model writes out op by op.

    before   MatMul(q, Transpose(k)) ─▶ Mul(scale) ─▶ Add(mask) ─▶ Softmax ─▶ Dropout ─▶ MatMul(·, v)
    after    ScaledDotProductAttentionDropout(q, k, v, mask)

`match_attention.py` recognizes it. For grouped-query attention the fused op reads keys and values before repeat_kv.
Refused if scores, probabilities or the dropout mask have other users, and if dropout reproduces eager's random numbers
(rng="torch"), which keeps eager's order of operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Sizes
from onnxtrain.graph.values import dtype_of, is_float, rank_of
from onnxtrain.ops import builder, definition_of, view
from onnxtrain.ops.attention.heads import strip_repeat
from onnxtrain.ops.attention.scores import scale_as_attribute, score_dtype
from onnxtrain.ops.body_parts import reshaped
from onnxtrain.ops.random.dropout import drops_elements
from onnxtrain.ops.reshape.dims import transposed, unsqueezed
from onnxtrain.ops.softmax.softmax import SAFE_SOFTMAX, SOFTMAX
from onnxtrain.passes.changes import Changes, counted
from onnxtrain.passes.match_attention import AttentionMatch, Mask, NotAttention, Operand, match_attention
from onnxtrain.passes.rewriting import nodes_before, substitute


def fuse_attention(graph: ir.Graph, changes: Changes) -> None:
    """Replace written-out attention in `graph` by fused ops."""
    op = builder(graph)
    fused = 0
    for node in list(graph):
        if definition_of(node) not in (SOFTMAX, SAFE_SOFTMAX):
            continue
        try:
            attention = match_attention(node)
            _check_supported(attention)
        except NotAttention as error:
            if error.reason is not None:
                changes.refuse(node, error.reason)
            continue
        _fuse(op, attention)
        fused += 1
    if fused:
        changes.applied.append(f"fused {counted(fused, 'written-out attention')}")


def _check_supported(attention: AttentionMatch) -> None:
    """Raise NotAttention if no fused op computes this attention."""
    if len(attention.leading) > 2:
        raise NotAttention("its scores have more than two batch and head dimensions")
    batches = [sizes.multiply(1, *each.shape[:-2]) for each in (attention.q, attention.k, attention.v)]
    if len(set(batches)) != 1 or sizes.multiply(1, *attention.leading) != batches[0]:
        raise NotAttention("query, key and value differ in batch or head dimensions")
    if any(not is_float(dtype_of(mask.value)) for mask in attention.added):
        raise NotAttention("an additive mask is not floating-point")
    if attention.dropout is None:
        return
    if not drops_elements(view(attention.dropout)):
        raise NotAttention("its dropout ratio is not a constant")
    if attention.dropout.metadata_props.get("samples") != "any":
        raise NotAttention('its dropout reproduces eager\'s random numbers (rng="torch")')


def _fuse(op: Builder, attention: AttentionMatch) -> None:
    old = attention.last.outputs[0]
    with nodes_before(op, attention.last):
        y = _attention(op, attention)
        perm = attention.perm or tuple(range(rank_of(old)))
        shape = sizes.dims_of(old)
        unpermuted = [shape[perm.index(axis)] for axis in range(len(perm))]
        y = transposed(op, reshaped(op, y, unpermuted), perm)
    substitute(op.graph, old, y, [attention.last, *reversed(attention.between)])


def _attention(op: Builder, attention: AttentionMatch) -> ir.Value:
    leading: Sizes = (*attention.leading, *[1] * (2 - len(attention.leading)))
    q = _by_heads(op, attention.q, leading)
    k, v = _keys_and_values(op, attention, leading)
    q, scale = scale_as_attribute(op, q, attention.scale)
    bias, mask, fill = _masks(op, attention, leading)
    attributes: dict[str, Any] = {"scale": scale, "safe": int(definition_of(attention.softmax) is SAFE_SOFTMAX) or None}
    if attention.dropout is None:
        operands = [q, k, v, bias, mask, fill]
        while operands[-1] is None:
            operands.pop()
        return op.own.ScaledDotProductAttention(*operands, **attributes)[0]
    _, ratio, training = attention.dropout.inputs
    outputs = op.own.ScaledDotProductAttentionDropout(q, k, v, bias, mask, fill, ratio, training, **attributes)
    node = outputs[0].producer()
    node.metadata_props.update((key, attention.dropout.metadata_props.get(key, "")) for key in ("rng", "samples"))
    return outputs[0]


def _by_heads(op: Builder, operand: Operand, leading: Sizes) -> ir.Value:
    """Return the operand [..., rows, size] as [b, h, rows, size]."""
    value = transposed(op, operand.value, operand.perm)
    return reshaped(op, value, (*leading, *operand.shape[-2:]))


def _keys_and_values(op: Builder, attention: AttentionMatch, leading: Sizes) -> tuple[ir.Value, ir.Value]:
    """Return k and v by heads; if repeat_kv repeats both alike, as they are before it."""
    operands = [transposed(op, each.value, each.perm) for each in (attention.k, attention.v)]
    if all(sizes.dims_of(x)[:-2] == leading for x in operands):
        (k, groups), (v, groups_v) = (strip_repeat(op, x) for x in operands)
        if groups == groups_v:
            return k, v
    return _by_heads(op, attention.k, leading), _by_heads(op, attention.v, leading)


def _masks(
    op: Builder, attention: AttentionMatch, leading: Sizes
) -> tuple[ir.Value | None, ir.Value | None, ir.Value | None]:
    """Return the bias, the mask (additive or boolean) and the fill value of scores that a boolean mask hides."""
    added = [_added(op, mask, leading) for mask in attention.added]
    if attention.where is None:
        return _sum(op, added[:-1]), added[-1] if added else None, None
    value = attention.where.value
    visible = _broadcast(op, op.Not(value) if attention.where.negated else value, attention.where.rank, leading)
    inner = score_dtype(dtype_of(attention.q.value))
    fill = None if attention.where.fill == -float("inf") else op.scalar(attention.where.fill, inner)
    return _sum(op, added), visible, fill


def _sum(op: Builder, values: Sequence[ir.Value]) -> ir.Value | None:
    if not values:
        return None
    total, *others = values
    for value in others:
        total = op.Add(total, value)
    return total


def _added(op: Builder, mask: Mask, leading: Sizes) -> ir.Value:
    value = mask.value if mask.factor == 1 else op.Mul(mask.value, op.scalar(mask.factor, like=mask.value))
    return _broadcast(op, value, mask.rank, leading)


def _broadcast(op: Builder, mask: ir.Value, rank: int, leading: Sizes) -> ir.Value:
    """Reshape a mask of rank-`rank` scores to one of rank-4 scores."""
    if rank != 3 or rank_of(mask) < 3:
        return mask
    first, *rest = sizes.dims_of(mask)
    if first == 1:
        return reshaped(op, mask, rest)
    return unsqueezed(op, mask, 1) if leading[1] == 1 else reshaped(op, mask, (*leading, *rest))
