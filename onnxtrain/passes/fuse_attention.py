"""Makes one op of attention that a model writes out.

    before   MatMul(q, Transpose(k)) ─▶ Mul(scale) ─▶ Add(mask) ─▶ Softmax ─▶ Dropout ─▶ MatMul(·, v)
    after    ScaledDotProductAttentionDropout(q, k, v, mask)

What is recognised stands in `match_attention.py`. Keys and values that are repeated for several heads are read before
they are repeated. Refuses where scores, probabilities or the dropout's mask are read elsewhere too, and where dropout
draws eager PyTorch's numbers (rng="torch"): who asks for these gets eager's order of operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Sizes
from onnxtrain.graph.values import dtype_of, is_float, rank_of
from onnxtrain.ops import builder, view
from onnxtrain.ops.attention.parts import accumulated, unrepeated, with_attribute
from onnxtrain.ops.randomness import trains
from onnxtrain.ops.reshape.dims import transposed, unsqueezed
from onnxtrain.ops.reshape.shape import reshaped
from onnxtrain.passes.changes import Changes, counted
from onnxtrain.passes.match_attention import Mask, NotAttention, Operand, Written, recognize
from onnxtrain.passes.rewriting import nodes_before, substitute


def fuse_attention(graph: ir.Graph, changes: Changes) -> None:
    """Replaces written-out attention in `graph`."""
    op = builder(graph)
    fused = 0
    for node in list(graph):
        if node.op_type not in ("Softmax", "SafeSoftmax"):
            continue
        try:
            written = recognize(node)
            _check(written)
        except NotAttention as no:
            if no.reason is not None:
                changes.refuse(node, no.reason)
            continue
        _fuse(op, written)
        fused += 1
    if fused:
        changes.applied.append(f"made one op of {counted(fused, 'written-out attention')}")


def _check(written: Written) -> None:
    """Raises NotAttention where no op computes this."""
    if len(written.leading) > 2:
        raise NotAttention("its scores have more than two axes of batches and heads")
    batches = [sizes.multiply(1, *each.shape[:-2]) for each in (written.q, written.k, written.v)]
    if len(set(batches)) != 1 or sizes.multiply(1, *written.leading) != batches[0]:
        raise NotAttention("queries, keys and values have different batches or heads")
    if any(not is_float(dtype_of(mask.value)) for mask in written.added):
        raise NotAttention("a mask that is added is not floating")
    if written.dropout is None:
        return
    if not trains(view(written.dropout)):
        raise NotAttention("its dropout's ratio is computed")
    if written.dropout.metadata_props.get("draws") != "any":
        raise NotAttention("its dropout draws eager PyTorch's numbers")


def _fuse(op: Builder, written: Written) -> None:
    old = written.last.outputs[0]
    with nodes_before(op, written.last):
        y = _attention(op, written)
        perm = written.perm or tuple(range(rank_of(old)))
        shape = sizes.dims_of(old)
        natural = [shape[perm.index(axis)] for axis in range(len(perm))]
        y = transposed(op, reshaped(op, y, natural), perm)
    substitute(op.graph, old, y, [written.last, *reversed(written.between)])


def _attention(op: Builder, written: Written) -> ir.Value:
    leading: Sizes = (*written.leading, *[1] * (2 - len(written.leading)))
    q = _by_heads(op, written.q, leading)
    k, v = _keys_and_values(op, written, leading)
    q, scale = with_attribute(op, q, written.scale)
    bias, mask, fill = _masks(op, written, leading)
    attributes: dict[str, Any] = {"scale": scale, "safe": int(written.softmax.op_type == "SafeSoftmax") or None}
    if written.dropout is None:
        operands = [q, k, v, bias, mask, fill]
        while operands[-1] is None:
            operands.pop()
        return op.own.ScaledDotProductAttention(*operands, **attributes)[0]  # type: ignore[no-any-return]
    _, ratio, training = written.dropout.inputs
    outputs = op.own.ScaledDotProductAttentionDropout(q, k, v, bias, mask, fill, ratio, training, **attributes)
    node = outputs[0].producer()
    node.metadata_props.update((key, written.dropout.metadata_props.get(key, "")) for key in ("rng", "draws"))
    return outputs[0]  # type: ignore[no-any-return]


def _by_heads(op: Builder, operand: Operand, leading: Sizes) -> ir.Value:
    """The operand [..., rows, size] as [b, h, rows, size]."""
    value = transposed(op, operand.value, operand.perm)
    return reshaped(op, value, (*leading, *operand.shape[-2:]))


def _keys_and_values(op: Builder, written: Written, leading: Sizes) -> tuple[ir.Value, ir.Value]:
    """K and v, where both are repeated alike for several heads before that."""
    plain = [transposed(op, each.value, each.perm) for each in (written.k, written.v)]
    if all(sizes.dims_of(x)[:-2] == leading for x in plain):
        (k, groups), (v, groups_v) = (unrepeated(op, x) for x in plain)
        if groups == groups_v:
            return k, v
    return _by_heads(op, written.k, leading), _by_heads(op, written.v, leading)


def _masks(op: Builder, written: Written, leading: Sizes) -> tuple[ir.Value | None, ir.Value | None, ir.Value | None]:
    """What is added to the scores, what is added or chosen then, and the number of scores that are not chosen."""
    added = [_added(op, mask, leading) for mask in written.added]
    if written.chosen is None:
        return _sum(op, added[:-1]), added[-1] if added else None, None
    value = written.chosen.value
    seen = _broadcast(op, op.Not(value) if written.chosen.negated else value, written.chosen.rank, leading)
    inner = accumulated(dtype_of(written.q.value))
    fill = None if written.chosen.fill == -float("inf") else op.scalar(written.chosen.fill, inner)
    return _sum(op, added), seen, fill


def _sum(op: Builder, values: Sequence[ir.Value]) -> ir.Value | None:
    if not values:
        return None
    first, *others = values
    for value in others:
        first = op.Add(first, value)
    return first


def _added(op: Builder, mask: Mask, leading: Sizes) -> ir.Value:
    value = mask.value if mask.factor == 1 else op.Mul(mask.value, op.scalar(mask.factor, like=mask.value))
    return _broadcast(op, value, mask.rank, leading)


def _broadcast(op: Builder, mask: ir.Value, rank: int, leading: Sizes) -> ir.Value:
    """A mask of scores with `rank` axes as one of scores with four."""
    if rank != 3 or rank_of(mask) < 3:
        return mask
    first, *rest = sizes.dims_of(mask)
    if first == 1:
        return reshaped(op, mask, rest)
    return unsqueezed(op, mask, 1) if leading[1] == 1 else reshaped(op, mask, (*leading, *rest))
